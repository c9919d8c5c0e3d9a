"""Environments and rewards that the tests name by dotted path: one module is both kinds of plugin."""

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from runtime.rollout.environments.single_turn import SingleTurn
from runtime.types import Sample


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    play: str

    def __post_init__(self):
        if self.play == "none":
            raise LookupError("there is no such play")


def build(options):
    plays = {"plain": plain, "judge": Judge(), "asks": Asks(), "of_text": lambda text: 1.0, "waiting": waiting}
    plays |= {"two_turns": TwoTurns(), "raises": Raises(), "ragged": Ragged(), "not_async": NotAsync()}
    if options.play == "file":
        return Path("no/such/file").open()
    if options.play == "leave":
        sys.exit(0)
    return plays[options.play]


def plain(text, answer):
    """What a reward may do wrong, by what the text says."""
    word = text.split()[0] if text.split() else ""
    if word == "raise":
        raise ValueError(f"cannot judge {text!r}")
    if word == "hang":
        time.sleep(60)
    if word == "exit":
        os._exit(7)
    if word == "fork":
        os.fork()  # and the child goes on as if it were the worker
    if word == "nan":
        return float("nan")
    if word == "huge":
        return -1.7e308
    return float(text == answer)


async def waiting(text, answer):
    return 1.0


class Judge:
    async def score(self, samples, texts, prompt, ask):
        await asyncio.sleep(60 if prompt.answer == "hang" else 0)
        if prompt.answer == "raise":
            raise RuntimeError("the judge is out")
        if prompt.answer == "cancel":
            raise asyncio.CancelledError
        return [None if t == "" else float(len(t)) for t in texts]


class Asks:
    """Asks the judge about each text at the same time; the reward is the length of its reply."""

    async def score(self, samples, texts, prompt, ask):
        messages = [[{"role": "user", "content": f"Is {text!r} right?"}] for text in texts]
        return [float(len(reply)) for reply in await asyncio.gather(*(ask("judge", m) for m in messages))]


class TwoTurns:
    """Two segments: the second goes on from a summary of the first."""

    async def run(self, prompt, index, generate, tokenizer):
        first = await generate(list(prompt.tokens))
        second = await generate([1, *first.tokens[-2:].tolist()])
        return [self._sample(prompt, index, i, made) for i, made in enumerate([first, second])]

    def _sample(self, prompt, index, segment, made):
        return Sample(
            prompt_id=prompt.id,
            index=index,
            segment=segment,
            tokens=made.tokens,
            loss_mask=np.ones(len(made.tokens), bool),
            logprobs=made.logprobs,
            versions=made.versions,
        )


class NotAsync:
    def run(self, prompt, index, generate, tokenizer):
        return []


class Raises(SingleTurn):
    async def run(self, prompt, index, generate, tokenizer):
        if index == 1:
            raise OSError("the sandbox is gone")
        return await super().run(prompt, index, generate, tokenizer)


class Ragged(SingleTurn):
    async def run(self, prompt, index, generate, tokenizer):
        (sample,) = await super().run(prompt, index, generate, tokenizer)
        return [] if index == 0 else [msgspec.structs.replace(sample, logprobs=sample.logprobs[1:])]


class Cancelled(SingleTurn):
    async def run(self, prompt, index, generate, tokenizer):
        waiting = asyncio.get_running_loop().create_future()
        waiting.cancel()
        return await waiting
