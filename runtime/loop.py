"""The life of a run. Sync, one-step-ahead and asynchronous are one loop; `max_versions` is the only difference.

At policy version v a batch is taken from finished groups, trained, and published as version v + 1. Meanwhile agents go
on sampling as far as the staleness bound allows (see `runtime.buffer`). Every wait is POLL_S long, so that a signal is
seen in time, and every boundary between waits is a place where the run can be saved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runtime.buffer import ALL_FAILED, Buffer
from runtime.comm.messages import Finished
from runtime.errors import ConfigError, EngineLost, WaitTimeout
from runtime.evaluate import Evaluation
from runtime.metrics import Recorder
from runtime.samples import rows
from runtime.state import Checkpoints
from runtime.types import Batch, Completion, Group, Lease, RunState

logger = logging.getLogger("loop")

POLL_S = 0.2
TRAIN_POLL_S = 0.005
"""While trainer ranks train: their answer comes another way than what is waited for, so it is asked for often."""
MAX_DROPPED_BATCHES = 10
"""Batches' worth of groups that may be dropped in a row: sampling on for ever would look like work."""


class Fleet(Protocol):
    """Agents and engines, as the loop sees them: runtime.fleet.Fleet."""

    def lease(self, leases: Sequence[Lease]) -> None: ...
    def poll(self, timeout_s: float) -> list[Finished]: ...
    def journal(self, timeout_s: float) -> dict[int, tuple[tuple[Completion, ...], ...]]: ...
    def alive(self) -> set[int]: ...
    def fresh(self) -> set[int]: ...


class Learner(Protocol):
    """Trainer ranks, as the loop sees them: runtime.learner.Learner."""

    def begin(self, batch: Batch) -> None: ...
    def training(self) -> dict[str, float] | None: ...
    def save(self, folder: Path, written: Callable[[], object], timeout_s: float) -> None: ...
    def tend(self) -> None: ...
    def settle(self, timeout_s: float) -> None: ...


class Publisher(Protocol):
    def publish(self, version: int, engines: set[int]) -> frozenset[int]: ...
    def make_room(self) -> None: ...
    @property
    def made_room(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What of the config the loop goes by."""

    num_steps: int
    num_prompts: int
    max_versions: int
    lockstep: bool
    """Nothing runs while weights change or state is saved (deterministic mode)."""
    evaluate_every: int
    save_every: int
    samples_per_step: int
    rollout_s: float
    """Longest time without a finished group."""
    train_s: float
    mismatch: float
    """Stop above this; 0: never."""
    batch: Callable[[Sequence[Group], int], Batch]
    """(groups, step) -> the batch; pure."""


@dataclass(kw_only=True)
class Progress:
    """Where the run stands. `taken` counts batches taken from the buffer, the one in training included."""

    step: int = 0
    version: int = 0
    taken: int = 0
    evaluated: int = -1
    """Step of the last evaluation: a resumed run does not repeat what its log already shows."""
    failed: int = 0
    """Groups dropped since the last step, as all their samples failed."""


@dataclass(kw_only=True)
class Loop:
    """The controller's step loop over the parts it conducts."""

    rules: Rules
    progress: Progress
    fleet: Fleet
    learner: Learner
    publisher: Publisher
    buffer: Buffer
    evaluation: Evaluation
    recorder: Recorder
    checkpoints: Checkpoints
    text: Callable[[Sequence[int]], str]
    """Token ids -> text, for samples/."""
    stop: Callable[[], str]
    """Why the run must end early; empty: go on."""
    finished: int = 0
    """Groups that agents finished in this attempt."""
    dropped: int = 0
    """Groups dropped since one was kept."""

    def run(self) -> str:
        """Train until `num_steps`, or until `stop` says why not; that reason is returned, "" when done."""
        rules, at = self.rules, self.progress
        self.publish(self.fleet.alive())
        while at.step < rules.num_steps and not self.stop():
            if rules.evaluate_every and at.step % rules.evaluate_every == 0:
                self.evaluate()
                if self.stop():
                    break
            started = time.monotonic()
            groups = self.gather()
            if groups is None:
                break
            at.taken += 1
            gathered = time.monotonic()
            metrics = self.train(groups)
            trained = time.monotonic()
            self.recorder.trained(groups, at.step, at.version)
            at.step, at.version = at.step + 1, at.version + 1
            self.publish(self.fleet.alive())
            self.record(groups, metrics, (started, gathered, trained, time.monotonic()))
            self.check_mismatch(metrics.get("mismatch", 0.0))
            if rules.save_every and at.step % rules.save_every == 0:
                self.save()
                if self.publisher.made_room:
                    self.publish(self.fleet.alive())
        if at.step == rules.num_steps and self.evaluation:
            self.evaluate()
        self.save()
        self.learner.settle(rules.train_s)
        is_done = at.step == rules.num_steps and (not self.evaluation or at.evaluated == at.step)
        return "" if is_done else self.stop()

    # ---- sampling

    def gather(self) -> list[Group] | None:
        """A batch of groups; None: told to stop while waiting, and what is under way is saved as it is."""
        self.phase("rollout")
        last = time.monotonic()
        while not self.stop():
            before = self.finished
            self.feed(POLL_S)
            if groups := self.buffer.take(self.rules.num_prompts, self.progress.step):
                return groups
            last = self.check_progress(self.finished != before, last)
        return None

    def feed(self, wait_s: float) -> bool:
        """Lease what the bound allows, collect what is finished; True while anything runs or may start."""
        at, rules = self.progress, self.rules
        batches = min(at.version + rules.max_versions + 1, rules.num_steps) - at.taken
        allowed = batches * rules.num_prompts
        if (room := allowed - self.buffer.open()) > 0:
            first_new = self.buffer.next_lease
            leases = self.buffer.leases(room, at.version)
            self.recorder.leased(leases, at.step, first_new)
            self.fleet.lease(leases)
        self.absorb(wait_s)
        return self.buffer.running() > 0 or self.buffer.open() < allowed

    def absorb(self, timeout_s: float) -> None:
        self.learner.tend()
        for finished in self.fleet.poll(timeout_s):
            self.finished += 1
            group = finished.group
            if finished.purpose == "eval":
                self.evaluation.add(group)
            elif (reason := self.buffer.add(group)) is not None:
                self.recorder.group(group, reason)
                self.progress.failed += reason.startswith(ALL_FAILED)
                self.count_dropped(reason and f"{reason} (prompt {group.prompt.id})")

    def count_dropped(self, reason: str) -> None:
        """
        Raises:
            ConfigError: too many groups in a row were of no use.
        """
        self.dropped = self.dropped + 1 if reason else 0
        if self.dropped.bit_count() == 1:  # the first, the second, the fourth, ...: said early, never a flood
            logger.warning("%d groups in a row dropped, this one for: %s", self.dropped, reason)
        if self.dropped >= MAX_DROPPED_BATCHES * self.rules.num_prompts:
            raise ConfigError(
                "rollout",
                f"{self.dropped} groups in a row were dropped, the last one for: {reason}",
                "mend what the reason names; for equal rewards change the task, or rollout.filters",
            )

    def check_progress(self, moved: bool, last: float) -> float:
        """When something last moved, and the bound on it; gives fresh engines their weights.

        Raises:
            WaitTimeout: no group finished for too long.
        """
        if fresh := self.fleet.fresh():
            self.publish(fresh)
            return time.monotonic()
        if moved:
            return time.monotonic()
        if time.monotonic() - last > self.rules.rollout_s:
            raise WaitTimeout(
                f"controller waited {self.rules.rollout_s:.0f} s for agents to finish a group: "
                f"{self.buffer.running()} running, engines up: {sorted(self.fleet.alive())}"
            )
        return last

    # ---- training and publishing

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        batch = self.rules.batch(groups, self.progress.step)
        self.publisher.make_room()
        self.phase("train")
        self.learner.begin(batch)
        deadline = time.monotonic() + self.rules.train_s
        while (metrics := self.learner.training()) is None:
            if self.rules.max_versions:
                self.feed(TRAIN_POLL_S)
            else:
                self.absorb(TRAIN_POLL_S)
            self.stop()  # raises where the order means that a peer is gone
            if time.monotonic() > deadline:
                raise WaitTimeout(f"controller waited {self.rules.train_s:.0f} s for trainer ranks to train a batch")
        if self.rules.lockstep:
            self.drain()
        return batch.metrics | metrics

    def drain(self) -> None:
        """Let everything that was leased at this version finish with its weights.

        Raises:
            EngineLost: an engine came back empty, and the trainer ranks no longer have this version: the attempt
                starts again from its checkpoint, which gives the same bits as if nothing had happened.
        """
        last = time.monotonic()
        before = self.finished
        while self.feed(POLL_S):
            if fresh := self.fleet.fresh():
                raise EngineLost(f"engines {sorted(fresh)} were lost while version {self.progress.version} was ending")
            last = self.check_progress(self.finished != before, last)
            before = self.finished

    def publish(self, engines: set[int]) -> None:
        self.phase("push")
        serving = self.publisher.publish(self.progress.version, engines)
        self.recorder.event("pushed", version=self.progress.version, engines=sorted(serving))

    # ---- looking

    def evaluate(self) -> None:
        """Once a step; what a stop order cuts short counts for nothing."""
        if self.progress.evaluated == self.progress.step:
            return
        self.phase("evaluate")
        started = last = time.monotonic()
        self.fleet.lease(self.evaluation.leases(self.progress.version))
        missing = self.evaluation.missing()
        while missing and not self.stop():
            self.absorb(POLL_S)
            last = self.check_progress(self.evaluation.missing() < missing, last)
            missing = self.evaluation.missing()
        if not missing:
            seconds = time.monotonic() - started
            self.recorder.metrics(self.progress.step, self.evaluation.metrics() | {"eval_s": round(seconds, 3)})
            self.progress.evaluated = self.progress.step

    def record(self, groups: Sequence[Group], metrics: dict[str, float], times: Sequence[float]) -> None:
        """One line of metrics, and some samples as text."""
        at = self.progress
        started, gathered, trained, pushed = times
        samples = [s for g in groups for s in g.samples]
        tokens = sum(int(s.loss_mask.sum()) for s in samples)
        step_s = max(pushed - started, 1e-9)
        lag = sum(at.version - 1 - g.oldest_version for g in groups) / len(groups)
        self.recorder.metrics(
            at.step,
            {
                "version": at.version,
                **metrics,
                "lag": lag,
                "samples": len(samples),
                "dropped_groups": at.failed,
                "tokens": tokens,
                "samples_per_s": round(len(samples) / step_s, 3),
                "tokens_per_s": round(tokens / step_s, 3),
                "step_s": round(step_s, 3),
                "rollout_s": round(gathered - started, 3),
                "train_s": round(trained - gathered, 3),
                "push_s": round(pushed - trained, 3),
            },
        )
        at.failed = 0
        told = rows(groups, self.rules.samples_per_step, self.text)
        self.recorder.samples(at.step, [{"step": at.step, "version": at.version - 1, **row} for row in told])

    def check_mismatch(self, found: float) -> None:
        """
        Raises:
            ConfigError: engines and trainer disagree on what was sampled, so that the gradient is of something else.
        """
        limit = self.rules.mismatch
        if limit and not found <= limit:  # NaN is too far
            raise ConfigError(
                "limits.mismatch",
                f"is {limit:g}, but in step {self.progress.step} log-probs of engines and trainer were {found:.3g} off",
                "compare their precision, attention and sampling options; or correct for it, see docs/algorithms.md",
            )

    # ---- saving

    def save(self) -> None:
        """Shards are copied, then the controller's state is written; the marker comes when the shards are too, at the
        latest before the next save and at the end."""
        self.phase("save")
        self.learner.settle(self.rules.train_s)
        self.publisher.make_room()
        at = self.progress
        journals = {} if self.rules.lockstep else self.fleet.journal(self.rules.train_s)
        self.absorb(0.0)
        self.checkpoints.begin(
            at.step,
            lambda folder: self.learner.save(folder, self.checkpoints.commit, self.rules.train_s),
            lambda: self.state(journals),
        )

    def state(self, journals: dict[int, tuple[tuple[Completion, ...], ...]]) -> RunState:
        """What goes on after the checkpoint; the event is in it, so that a resumed run's log shows it."""
        ready, running, next_lease = self.buffer.snapshot(journals)
        at = self.progress
        self.recorder.event("saved", step=at.step, version=at.version)
        return RunState(
            step=at.step,
            version=at.version,
            taken=at.step,
            evaluated=at.evaluated,
            failed=at.failed,
            next_lease=next_lease,
            data=self.buffer.source_state,
            ready=ready,
            running=running,
            offsets=self.recorder.offsets,
        )

    def phase(self, name: str) -> None:
        self.recorder.event("phase", phase=name, step=self.progress.step)
