"""Runs leases: plays an environment `num_samples` times against the engines, has the answers rewarded, makes the Group.

A lease may come with a journal of completions that an earlier attempt made; the environment runs again and `generate`
answers from there first. Every completion made is added, so that the journal can be asked for at any time.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from runtime.errors import EngineLost, WaitTimeout
from runtime.rollout.base import Environment, Tokenizer
from runtime.rollout.pool import Pool
from runtime.rollout.scoring import RewardPool
from runtime.types import Completion, Group, Lease, Prompt, Sample, SamplingParams

Journal = list[list[Completion]]
"""Per sample, the completions made so far; one with finish "abort" is the start of the one that is being made."""


def seed_of(run_seed: int, prompt_id: str, index: int, turn: int) -> int:
    """63 bits for one `generate` call: a pure function, so that a replayed call draws the same."""
    text = f"{run_seed}|{prompt_id}|{index}|{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def join(first: Completion, then: Completion) -> Completion:
    """One completion of two, where `then` went on after the tokens of `first`."""
    start = len(first.tokens)
    spans = [(at, version) for at, version in first.versions if at < start]  # an abort may come before any token
    for at, version in then.versions:
        if not spans or spans[-1][1] != version:
            spans.append((start + at, version))
    return Completion(
        tokens=np.concatenate([first.tokens, then.tokens]),
        logprobs=np.concatenate([first.logprobs, then.logprobs]),
        versions=tuple(spans),
        finish=then.finish,
    )


Draw = Callable[[Sequence[int], SamplingParams], Awaitable[Completion]]
"""A completion by any engine."""


async def go_on(draw: Draw, tokens: Sequence[int], made: Completion | None, params: SamplingParams) -> Completion:
    """`made`, or nothing, and what comes after it. The seed stays: engines draw by (seed, position)."""
    if made is None:
        return await draw(tokens, params)
    left = params.max_new_tokens - len(made.tokens)
    if left == 0:
        return replace(made, finish="length")
    prefix = [*tokens, *made.tokens.tolist()]
    return join(made, await draw(prefix, replace(params, max_new_tokens=left)))


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """What all leases of an agent share."""

    seed: int
    """The run's."""
    pool: Pool
    permits: asyncio.Semaphore
    """One for each sample that may run at the same time."""
    environments: Mapping[str, Environment]
    """By data set."""
    tokenizer: Tokenizer
    rewards: RewardPool

    async def run(self, lease: Lease, journal: Journal) -> Group:
        """The lease's group.

        Args:
            journal: `num_samples` lists; read first, then added to.

        Raises:
            WaitTimeout: no engine was ready in time.
        """
        turns = _Turns(self, lease, journal)
        async with asyncio.TaskGroup() as tasks:
            played = [tasks.create_task(self._play(turns, index)) for index in range(lease.num_samples)]
        samples = await self._rewarded(lease.prompt, [sample for task in played for sample in task.result()])
        return Group(lease=lease.number, prompt=lease.prompt, samples=tuple(samples), version=lease.version)

    async def _play(self, turns: _Turns, index: int) -> list[Sample]:
        prompt = turns.lease.prompt
        async with self.permits:
            try:
                environment = self.environments[prompt.dataset]
                samples = await environment.run(prompt, index, turns.of(index), self.tokenizer)
            except WaitTimeout:
                raise
            except Exception as e:  # whatever a user's environment raises fails its sample only
                return [_failed(prompt, index, f"the environment raised {type(e).__name__}: {e}")]
        problem = _problem(samples)
        return [_failed(prompt, index, problem)] if problem else samples

    async def _rewarded(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Sample]:
        """An answer is rewarded for its last segment; its other segments carry the same reward."""
        last = {s.index: s for s in samples if s.status != "failed"}
        texts = [self.tokenizer.decode(s.tokens[s.loss_mask].tolist()) for s in last.values()]
        verdicts = await self.rewards.score(list(last.values()), texts, prompt) if last else []
        of = dict(zip(last, verdicts, strict=True))
        out: list[Sample] = []
        for sample in samples:
            verdict = of.get(sample.index)
            if verdict is None:
                out.append(sample)
            elif verdict.reward is None:
                out.append(replace(sample, status="failed", reason=verdict.reason, trainable=False))
            else:
                out.append(replace(sample, reward=verdict.reward))
        return out


class _Turns:
    """Makes the `generate` of each sample of one lease."""

    def __init__(self, sampler: Sampler, lease: Lease, journal: Journal) -> None:
        self._sampler, self.lease, self._journal = sampler, lease, journal
        self._home: int | None = None

    def of(self, index: int) -> _Generate:
        return _Generate(self, index, self._journal[index])

    def seed(self, index: int, turn: int) -> int:
        return seed_of(self._sampler.seed, self.lease.prompt.id, index, turn)

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Completion:
        """By any engine. When it is lost the next one starts over: nothing of the lost one's answer is used.

        How often that may happen is bounded by the restarts of engines.
        """
        while True:
            running = await self._sampler.pool.pick(self._home, self.lease.num_samples)
            self._home = running.id
            try:
                with running.busy():
                    made = await running.call(running.engine.generate(tokens, params, self.lease.prompt.id))
                if all(version >= 0 for _, version in made.versions):
                    return made
                running.lose("it answered with other weights than were pushed: somebody started it anew")
            except EngineLost as e:
                running.lose(str(e))


class _Generate:
    """`generate` of one sample, for one call after the other."""

    def __init__(self, turns: _Turns, index: int, journal: list[Completion]) -> None:
        self._turns, self._index, self._journal = turns, index, journal
        self._turn = 0

    async def __call__(self, tokens: Sequence[int]) -> Completion:
        turn, self._turn = self._turn, self._turn + 1
        params = replace(self._turns.lease.params, seed=self._turns.seed(self._index, turn))
        made = self._journal[turn] if turn < len(self._journal) else None
        while made is None or made.finish == "abort":
            made = await go_on(self._turns.sample, tokens, made, params)
            self._journal[turn:] = [made]
        return made


def _problem(samples: Sequence[Sample]) -> str:
    """What is wrong with an environment's answer; empty if nothing."""
    if not samples:
        return "the environment returned no sample"
    for s in samples:
        if not len(s.tokens) == len(s.loss_mask) == len(s.logprobs):
            lengths = f"{len(s.tokens)} tokens, {len(s.loss_mask)} mask bits, {len(s.logprobs)} log-probs"
            return f"the environment returned a sample with {lengths}"
    return ""


def _failed(prompt: Prompt, index: int, reason: str) -> Sample:
    """Stands for an answer that there is not: it counts in the group's size, not in its statistics."""
    return Sample(
        prompt_id=prompt.id,
        index=index,
        tokens=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, bool),
        logprobs=np.zeros(0, np.float32),
        versions=(),
        status="failed",
        reason=reason,
        trainable=False,
    )
