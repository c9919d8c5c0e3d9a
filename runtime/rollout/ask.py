"""What a reward asks other models with: `ask(model, messages)`, answered by the engines of `rollout.sets`.

A question that an engine did not answer, because it was lost or put to sleep, goes to the next one that is up. While
there is none the time that the reward may take stands still: how long that may last is bounded by the engines' own
limits, and a judge that is started anew shall not cost the answers that wait for it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from runtime.errors import EngineLost
from runtime.rollout.base import GREEDY, Tokenizer
from runtime.rollout.clock import Clock
from runtime.rollout.pool import Pool
from runtime.rollout.sampler import go_on, seed_of
from runtime.types import Completion, Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that engines serve beside the policy."""

    pool: Pool
    tokenizer: Tokenizer


class Asking:
    """`ask` for one group; see base.Ask."""

    def __init__(self, served: Mapping[str, Served], seed: int, prompt: Prompt, limit: asyncio.Timeout) -> None:
        """
        Args:
            seed: the run's.
            limit: of the reward.
        """
        self._served, self._seed, self._prompt, self._clock = served, seed, prompt, Clock(limit)
        self._asked: Counter[str] = Counter()

    async def __call__(self, model: str, messages: Sequence[Mapping[str, str]], params: SamplingParams = GREEDY) -> str:
        served = self._served.get(model)
        if served is None:
            raise ValueError(f"no set of engines serves a model {model!r}: name it in rollout.sets")
        tokens = served.tokenizer.chat(messages)
        if params.seed is None:
            params = replace(params, seed=self._draw(model, tokens))
        made: Completion | None = None
        while made is None or made.finish == "abort":
            made = await go_on(partial(self._sample, served.pool), tokens, made, params)
        return served.tokenizer.decode(made.tokens.tolist())

    def _draw(self, model: str, tokens: Sequence[int]) -> int:
        """A seed by the question, whatever else is asked at the same time; of equal ones each has its own."""
        question = hashlib.blake2b(str([model, tokens]).encode(), digest_size=8).hexdigest()
        turn = self._asked[question]
        self._asked[question] += 1
        return seed_of(self._seed, f"{self._prompt.id}|{question}", 0, turn)

    async def _sample(self, pool: Pool, tokens: Sequence[int], params: SamplingParams) -> Completion:
        while True:
            with self._clock.still():
                running = await pool.pick(None, 0)
            try:
                with running.busy():
                    return await running.call(running.engine.generate(tokens, params))
            except EngineLost as e:
                running.lose(str(e))
