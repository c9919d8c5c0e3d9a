"""The controller: puts the parts of a run together, from its config and newest checkpoint, and conducts them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime import batching, plugins
from runtime.buffer import Buffer, Filter, equal_rewards
from runtime.comm.mailbox import MailboxServer
from runtime.comm.world import World
from runtime.config import RunConfig, Sync
from runtime.data import DataSource
from runtime.evaluate import Evaluation, params_of
from runtime.fleet import Fleet
from runtime.learner import Learner
from runtime.loop import Loop, Progress, Rules
from runtime.metrics import Recorder
from runtime.publish import MARGIN_S, Publisher
from runtime.rollout.tokenizer import HfTokenizer
from runtime.state import Checkpoints
from runtime.topology import Topology, leaders
from runtime.trainer.base import Algorithm
from runtime.turns import Turns
from runtime.types import Batch, Group, Prompt, RunState

logger = logging.getLogger("controller")

CANARY_TOKENS = 64


class Controller:
    """One attempt, from the controller's side."""

    def __init__(self, config: RunConfig, run_dir: Path, topology: Topology, attempt: int) -> None:
        self._config, self._run_dir, self._topology, self._attempt = config, run_dir, topology, attempt
        self._leaders = leaders(topology.trainers, config.trainer.parallel)
        self._text = HfTokenizer(config.models.policy.path)
        self._canary = canary_of(DataSource(config.data, 0).next(1)[0], self._text)
        self._checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint.keep)
        found = self._checkpoints.load()
        self.resume_from: Path | None = found[0] if found else None
        self.state: RunState = found[1] if found else RunState()

    def run(self, world: World, mailbox: MailboxServer, stop: Callable[[], str]) -> str:
        """The whole attempt; why it ended early, or "" when the run is done."""
        config, state = self._config, self.state
        recorder = Recorder(self._run_dir, state.offsets, step=state.step, tensorboard=config.tracking.tensorboard)
        recorder.event("attempt", number=self._attempt, step=state.step)
        fleet = Fleet(self._topology, mailbox, lambda kind, e, why: recorder.event(kind, engine=e, reason=why))
        world.watch = lambda: fleet.pump(0.0)

        def idle() -> None:
            fleet.pump(0.005)
            stop()  # raises where the order means that a peer is gone: trainer ranks may wait for it for ever

        learner = Learner(world, self._topology.trainers, self._leaders, idle=idle)
        turns = None
        if config.cluster.mode == "colocated":
            turns = Turns(fleet, learner, start_s=config.limits.start_s, order_s=config.sync.timeout_s + MARGIN_S)
            turns.to_engines()
        fleet.wait_engines(config.limits.start_s, stop)
        publisher = Publisher(fleet, learner, config.sync, folder_of(config.sync, self._run_dir), self._canary, turns)
        buffer = self._buffer(recorder)
        loop = Loop(
            rules=_rules(config, self._batch()),
            progress=Progress(
                step=state.step,
                version=state.version,
                taken=state.taken,
                evaluated=state.evaluated,
                failed=state.failed,
            ),
            fleet=fleet,
            learner=learner,
            publisher=publisher,
            buffer=buffer,
            evaluation=Evaluation(config.evaluation.sets),
            recorder=recorder,
            checkpoints=self._checkpoints,
            text=self._text.decode,
            stop=stop,
        )
        reason = stop() or loop.run()  # before it there is nothing to save
        if not reason and config.checkpoint.export:
            learner.export(self._run_dir / "hf" / f"step-{loop.progress.step:06d}", config.limits.train_s)
        ready, running, _ = buffer.snapshot({})
        recorder.event(
            "end", report=reason or "done", ready=[g.lease for g in ready], running=[x.number for x in running]
        )
        publisher.close()
        fleet.stop()
        learner.stop(config.limits.start_s)
        recorder.close()
        return reason

    def _buffer(self, recorder: Recorder) -> Buffer:
        config, state = self._config, self.state
        source = DataSource(config.data, config.seed)
        if state.data:
            source.restore(state.data)
        filters: list[Filter] = [equal_rewards] if config.rollout.filters.drop_equal_rewards else []
        buffer = Buffer(
            source,
            num_samples=config.rollout.num_samples,
            params=params_of(config.rollout.sampling),
            max_versions=config.staleness.max_versions,
            in_order=config.deterministic,
            filters=filters,
        )
        dropped = buffer.restore(state.ready, state.running, state.next_lease, state.version)
        for number, prompt in dropped.items():
            reason = f"the run has no data set {prompt.dataset} any more"
            recorder.event("dropped", lease=number, prompt_id=prompt.id, reason=reason)
        if dropped:
            logger.warning("%d leases of earlier attempts dropped, as their data sets are not in the run", len(dropped))
        return buffer

    def _batch(self) -> Callable[[Sequence[Group], int], Batch]:
        algorithm = algorithm_of(self._config)
        trainer = self._config.trainer
        num_dp = len(self._leaders)
        numbers = {name: number for number, name in enumerate(self._config.models.teachers)}
        teachers = {data.label: numbers[data.teacher] for data in self._config.data if data.teacher in numbers}

        def make(groups: Sequence[Group], step: int) -> Batch:
            batch = batching.make_batch(
                groups, step, algorithm, num_dp=num_dp, num_updates=trainer.num_updates, max_tokens=trainer.max_tokens
            )
            if not teachers:
                return batch
            return batching.with_teachers(batch, {g.lease: teachers[g.prompt.dataset] for g in groups})

        return make


def folder_of(sync: Sync, run_dir: Path) -> Path:
    """Of versions that are pushed through one: the run's own."""
    return Path(sync.folder) / run_dir.name if sync.folder else run_dir / "weights"


def canary_of(prompt: Prompt, tokenizer: HfTokenizer) -> tuple[int, ...]:
    """What engines and trainer are compared by after each push: the beginning of a prompt, as the policy sees it."""
    return (prompt.tokens or tuple(tokenizer.chat(prompt.messages)))[:CANARY_TOKENS]


def algorithm_of(config: RunConfig) -> Algorithm:
    choice = config.algorithm
    return plugins.build("algorithm", choice.name, choice.options, "algorithm.name", "algorithm.options")


def _rules(config: RunConfig, batch: Callable[[Sequence[Group], int], Batch]) -> Rules:
    return Rules(
        num_steps=config.num_steps,
        num_prompts=config.rollout.num_prompts,
        max_versions=config.staleness.max_versions,
        lockstep=config.deterministic,
        evaluate_every=config.evaluation.interval if config.evaluation.sets else 0,
        save_every=config.checkpoint.interval,
        samples_per_step=config.tracking.samples_per_step,
        rollout_s=config.limits.rollout_s,
        train_s=config.limits.train_s,
        mismatch=config.limits.mismatch,
        batch=batch,
    )
