"""One question, one answer: the chat template of the prompt, then sampled until the answer ends."""

from __future__ import annotations

import msgspec
import numpy as np

from runtime.rollout.base import Environment, Generate, Tokenizer
from runtime.types import Prompt, Sample


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class SingleTurn:
    async def run(self, prompt: Prompt, index: int, generate: Generate, tokenizer: Tokenizer) -> list[Sample]:
        prefix = list(prompt.tokens) or tokenizer.chat(prompt.messages)
        completion = await generate(prefix)
        start = len(prefix)
        return [
            Sample(
                prompt_id=prompt.id,
                index=index,
                tokens=np.concatenate([np.asarray(prefix, np.int32), completion.tokens]),
                loss_mask=np.arange(start + len(completion.tokens)) >= start,
                logprobs=np.concatenate([np.zeros(start, np.float32), completion.logprobs]),
                versions=tuple((start + at, version) for at, version in completion.versions),
                status="truncated" if completion.finish == "length" else "done",
            )
        ]


def build(options: Config) -> Environment:
    return SingleTurn()
