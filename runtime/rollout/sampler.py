"""Runs leases: plays an environment `num_samples` times against the engines, has the answers rewarded, makes the Group.

A lease may come with a journal of completions that an earlier attempt made; the environment runs again and `generate`
answers from there first. Every completion made is added, so that the journal can be asked for at any time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from runtime.comm.codec import decode, encode
from runtime.errors import EngineLost, WaitTimeout, brief
from runtime.rollout import watchdog
from runtime.rollout.base import Environment, Tokenizer
from runtime.rollout.clock import Clock
from runtime.rollout.pool import Pool
from runtime.rollout.scoring import RewardPool
from runtime.types import Completion, Group, Lease, Prompt, Sample, SamplingParams

logger = logging.getLogger("agent")

MAX_TRACEBACKS = 20
"""Of environments, in one agent's log."""
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
    names: Mapping[str, str] = field(default_factory=dict)
    """Of the environments, by data set."""
    timeout_s: float = 1800.0
    """Of an environment, for one sample."""
    told: set[str] = field(default_factory=set)
    """Failures of environments whose traceback is in the log."""

    async def run(self, lease: Lease, journal: Journal) -> Group:
        """The lease's group.

        Args:
            journal: `num_samples` lists; read first, then added to.

        Raises:
            WaitTimeout: no engine was ready in time.
        """
        leased = _Leased(self, lease, journal)
        async with asyncio.TaskGroup() as tasks:
            played = [tasks.create_task(self._play(leased, index)) for index in range(lease.num_samples)]
        samples = await self._rewarded(lease.prompt, [sample for task in played for sample in task.result()])
        return Group(lease=lease.number, prompt=lease.prompt, samples=tuple(samples), version=lease.version)

    async def _play(self, leased: _Leased, index: int) -> list[Sample]:
        prompt = leased.lease.prompt
        name = f"the environment {self.names.get(prompt.dataset, '')}".rstrip()
        async with self.permits:
            limit = asyncio.timeout(self.timeout_s)
            try:
                with watchdog.running(f"{name}, prompt {prompt.id}"):
                    async with limit:
                        environment, generate = self.environments[prompt.dataset], leased.generate(index, Clock(limit))
                        samples = await environment.run(prompt, index, generate, self.tokenizer)
                problem = _problem(samples, prompt, index)
            except WaitTimeout:
                raise
            except (Exception, SystemExit) as e:  # whatever a user's environment raises fails its sample only
                problem = f" raised {type(e).__name__}: {e}"
                if limit.expired():
                    problem = f" took longer than {self.timeout_s:g} s (rollout.environment_timeout_s)"
                self._tell(f"{name}{problem}", e)
                return [_failed(prompt, index, f"{name}{problem}")]
        return [_failed(prompt, index, f"{name} returned {problem}")] if problem else samples

    def _tell(self, problem: str, error: BaseException | None = None) -> None:
        if brief(problem) not in self.told and len(self.told) < MAX_TRACEBACKS:
            self.told.add(brief(problem))
            logger.warning("%s; this sample fails", problem, exc_info=error)

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
                if verdict.reason != brief(verdict.reason):
                    self._tell(verdict.reason)
                out.append(replace(sample, status="failed", reason=brief(verdict.reason), trainable=False))
            else:
                out.append(replace(sample, reward=verdict.reward))
        return out


class _Leased:
    """One lease under way: makes the `generate` of each of its samples."""

    def __init__(self, sampler: Sampler, lease: Lease, journal: Journal) -> None:
        self._sampler, self.lease, self._journal = sampler, lease, journal
        self._home: int | None = None

    def generate(self, index: int, clock: Clock) -> _Generate:
        return _Generate(self, index, self._journal[index], clock)

    def seed(self, index: int, turn: int) -> int:
        return seed_of(self._sampler.seed, self.lease.prompt.id, index, turn)

    async def sample(self, clock: Clock, tokens: Sequence[int], params: SamplingParams) -> Completion:
        """By any engine. When it is lost the next one starts over: nothing of the lost one's answer is used.

        How often that may happen is bounded by the restarts of engines.
        """
        while True:
            with clock.still():
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

    def __init__(self, leased: _Leased, index: int, journal: list[Completion], clock: Clock) -> None:
        self._leased, self._index, self._journal = leased, index, journal
        self._draw = partial(leased.sample, clock)
        self._turn = 0

    async def __call__(self, tokens: Sequence[int]) -> Completion:
        turn, self._turn = self._turn, self._turn + 1
        params = replace(self._leased.lease.params, seed=self._leased.seed(self._index, turn))
        made = self._journal[turn] if turn < len(self._journal) else None
        while made is None or made.finish == "abort":
            made = await go_on(self._draw, tokens, made, params)
            self._journal[turn:] = [made]
        return made


ARRAYS = {"tokens": np.int32, "loss_mask": np.bool_, "logprobs": np.float32}
"""Of a sample, each [T]."""


def _problem(samples: Any, prompt: Prompt, index: int) -> str:
    """What is wrong with an environment's answer; empty if nothing."""
    if not samples:
        return "no sample"
    if not isinstance(samples, list | tuple) or not all(isinstance(s, Sample) for s in samples):
        return f"no list of samples, but {samples!r:.80}"
    for s in samples:
        for name, dtype in ARRAYS.items():
            array: Any = getattr(s, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                told = f"{array.dtype} array" if isinstance(array, np.ndarray) else type(array).__name__
                return f"a sample whose {name} are no flat {np.dtype(dtype)} array, but a {told}"
        if not len(s.tokens) == len(s.loss_mask) == len(s.logprobs):
            lengths = f"{len(s.tokens)} tokens, {len(s.loss_mask)} mask bits, {len(s.logprobs)} log-probs"
            return f"a sample with {lengths}"
        if (s.prompt_id, s.index) != (prompt.id, index):
            return f"a sample {s.index} of prompt {s.prompt_id}, where {index} of {prompt.id} was asked for"
        try:
            decode(encode(s), Sample)
        except (msgspec.MsgspecError, NotImplementedError, OverflowError, TypeError, ValueError) as e:
            return f"a sample that cannot be sent: {e}"
    if (segments := [s.segment for s in samples]) != list(range(len(samples))):
        return f"segments {segments}, which are numbered 0, 1, 2, ..."
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
        reason=brief(reason),
        trainable=False,
    )
