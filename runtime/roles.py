"""What a rank does by its role: start what must exist before MPI_Init, join the world, take a place, leave with all.

On an error nothing is closed in order, which would wake other threads to errors of their own: the guard ends all ranks
at once, and what an agent started ends with its sockets.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from runtime import device, plugins, report
from runtime.comm.commands import Answer, Bootstrap, Command
from runtime.comm.mailbox import MailboxClient, MailboxServer
from runtime.comm.network import SOCKET_VARIABLES, address_of
from runtime.comm.world import World
from runtime.config import DataSet, Engines
from runtime.controller import Controller, algorithm_of
from runtime.rank import Guard, Rank, Stop
from runtime.rollout import agent
from runtime.rollout.base import EngineKind
from runtime.rollout.scoring import RewardPool
from runtime.rollout.spawning import Spawner
from runtime.rollout.start import EngineSettings, EngineStart

TOKEN_BYTES = 32
ROLL_CALL_S = 3.0
"""Every rank's mailbox says each second that it is there."""
ORDER_MARGIN_S = 10.0
"""An engine that says why it failed is given so long to say it, before its agent gives it up; the controller waits
longer still (publish.MARGIN_S)."""


def run_controller(rank: Rank, guard: Guard, stop: Stop) -> str:
    """The controller, with this node's agent in a thread beside it; why the run ended early, or ""."""
    config = rank.config
    stack = ExitStack()
    before = _BeforeMpi(rank, stack)
    controller = Controller(config, rank.run_dir, rank.topology, rank.attempt)
    world = _join(rank, guard)
    token = secrets.token_bytes(TOKEN_BYTES)
    host = address_of(rank.interface)
    mailbox = MailboxServer(host, token, config.limits.heartbeat_s)
    stack.callback(mailbox.close)
    bootstrap = Bootstrap(
        endpoint=mailbox.endpoint,
        public_key=mailbox.public_key,
        token=token,
        resume=str(controller.resume_from or ""),
    )
    world.broadcast(bootstrap, Bootstrap, config.limits.start_s)
    own = _connect(rank, bootstrap)
    stack.callback(own.close)
    beside = threading.Thread(target=before.be_agent, args=(own,), name="agent", daemon=True)
    beside.start()
    mailbox.expect((r.rank for r in rank.topology.ranks), config.limits.start_s)
    reason = controller.run(world, mailbox, partial(_why_stop, stop, mailbox))
    beside.join(config.limits.stop_s)
    report.write(
        rank.attempt_dir,
        report.Report(kind=reason or "done", message=_message(reason, rank), role=rank.role),  # pyright: ignore[reportArgumentType]
    )
    world.close(config.limits.stop_s)
    stack.close()
    return reason


def _why_stop(stop: Stop, mailbox: MailboxServer) -> str:
    """The stop order, once it is known what a SIGTERM meant: all peers are there in a preemption.

    Raises:
        PeerLost: one is not, so the scheduler is ending its step.
    """
    if stop() and not stop.is_sure:
        mailbox.roll_call(ROLL_CALL_S)
        stop.is_sure = True
    return stop()


def run_agent(rank: Rank, guard: Guard) -> str:
    stack = ExitStack()
    before = _BeforeMpi(rank, stack)
    world = _join(rank, guard)
    bootstrap = world.broadcast(None, Bootstrap, rank.config.limits.start_s)
    mailbox = _connect(rank, bootstrap)
    stack.callback(mailbox.close)
    before.be_agent(mailbox)
    world.close(rank.config.limits.stop_s)
    stack.close()
    return ""


def run_trainer(rank: Rank, guard: Guard) -> str:
    """A trainer rank: torch is imported here, and nowhere else outside the engines."""
    from runtime.comm.weights.channels import make_sender
    from runtime.trainer import factory, group, roles, worker

    config, limits = rank.config, rank.config.limits
    group.configure_torch(config.trainer.threads or _threads(rank), config.deterministic)
    stack = ExitStack()
    world = _join(rank, guard)
    bootstrap = world.broadcast(None, Bootstrap, limits.start_s)
    mailbox = _connect(rank, bootstrap)
    stack.callback(mailbox.close)
    world.watch = mailbox.check
    host = address_of(rank.interface)
    where = group.device_of(None if rank.site.pretend_gpus else rank.slot.device)
    own = rank.topology.trainers.index(rank.slot.rank)
    group.use(rank.interface)
    if (size := len(rank.topology.trainers)) > 1:
        backend = device.backend(where)
        group.start(world, own, size, backend=backend, interface=rank.interface, timeout_s=limits.start_s)
    algorithm = algorithm_of(config)
    trainer = stack.enter_context(
        factory.ready(
            Path(config.models.policy.path),
            config.trainer,
            where,
            temperature=config.rollout.sampling.temperature,
            bucket_bytes=config.sync.bucket_bytes,
            beside=roles.beside(config.models, algorithm),
        )
    )
    if bootstrap.resume:
        trainer.restore(Path(bootstrap.resume))
    sender = None
    if own == 0:
        sender = make_sender(config.sync, host, where)
    port = _Port(world, rank.topology.controller)
    settings = worker.Settings(device=str(where), timeout_s=limits.rollout_s + limits.train_s)
    worker.serve(port, trainer, algorithm, sender, settings)
    world.close(limits.stop_s)
    stack.close()
    return ""


class _Port:
    """The controller, seen from a trainer rank."""

    def __init__(self, world: World, controller: int) -> None:
        self._world, self._controller = world, controller

    def receive(self, timeout_s: float) -> Command:
        return self._world.receive(self._controller, Command, timeout_s)

    def answer(self, answer: Answer) -> None:
        self._world.send(self._controller, answer, ANSWER_S)


ANSWER_S = 300.0
"""The controller takes answers whenever it waits for them."""


class _BeforeMpi:
    """What an agent starts before MPI_Init, since forking after it is undefined on many fabrics."""

    def __init__(self, rank: Rank, stack: ExitStack) -> None:
        self._rank, config = rank, rank.config
        self._datasets = {d.label: _data_set(d) for d in (*config.data, *config.evaluation.sets)}
        self._places = {d.label: f"data.{i}" for i, d in enumerate(config.data)}
        self._places |= {d.label: f"evaluation.sets.{i}" for i, d in enumerate(config.evaluation.sets)}
        self._spawner = Spawner()
        stack.callback(self._spawner.close)
        workers, timeout_s = config.rollout.reward_workers, config.rollout.reward_timeout_s
        self._rewards = RewardPool.start(self._datasets, workers, timeout_s, self._places)
        stack.callback(self._rewards.close)

    def be_agent(self, mailbox: MailboxClient) -> None:
        rank, config = self._rank, self._rank.config
        starts = _engine_starts(rank)
        settings = agent.Settings(
            node=rank.slot.node,
            rank=rank.slot.rank,
            seed=config.seed,
            datasets=self._datasets,
            places=self._places,
            tokenizer=config.models.policy.path,
            asked={start.model: start.path for start in starts if start.is_frozen},
            max_concurrent=config.rollout.max_concurrent,
            wait_s=config.limits.rollout_s,
            environment_timeout_s=config.rollout.environment_timeout_s,
            still_s=config.limits.heartbeat_s,
            engines=starts,
            engine=EngineSettings(
                host=address_of(rank.interface),
                log_dir=str(rank.attempt_dir),
                token_file=str(_engine_token(rank)),
                dtype=config.trainer.precision,
                float32_output=config.trainer.widens_output,
                threads=_threads(rank),
                deterministic=config.deterministic,
                pause=config.sync.pause,
                call_s=config.limits.rollout_s,
                order_s=config.sync.timeout_s + ORDER_MARGIN_S,
                start_s=config.limits.start_s,
                silence_s=config.limits.heartbeat_s,
                restarts=config.limits.engine_restarts,
                sleeps=config.cluster.mode == "colocated",
            ),
        )
        kinds = {model: _kind_of(engines) for model, engines in config.rollout.engines.items()}
        agent.run(settings, mailbox, self._spawner, kinds, self._rewards)


def _join(rank: Rank, guard: Guard) -> World:
    world = World.start(
        rank.topology,
        hosts_are_nodes=rank.site.scheduler != "local",
        timeout_s=rank.config.limits.start_s,
    )
    guard.abort = world.abort
    return world


def _connect(rank: Rank, bootstrap: Bootstrap) -> MailboxClient:
    return MailboxClient(
        bootstrap.endpoint,
        bootstrap.public_key,
        bootstrap.token,
        rank=rank.slot.rank,
        silence_s=rank.config.limits.heartbeat_s,
    )


def _kind_of(engines: Engines) -> EngineKind:
    places = "rollout.engine", "rollout.engine_options"
    return plugins.build("engine", engines.engine, engines.engine_options, *places)


def _engine_starts(rank: Rank) -> tuple[EngineStart, ...]:
    environment = {**dict.fromkeys(SOCKET_VARIABLES, rank.interface), **os.environ, **rank.site.env}
    platform = device.pretended(environment) if rank.site.pretend_gpus else device.platform()
    return tuple(
        EngineStart(
            id=slot.id,
            model=slot.model,
            kind=slot.kind,
            path=getattr(rank.config.models, slot.model).path,
            url=slot.url,
            token_file=rank.config.rollout.engines[slot.model].token_file,
            num_gpus=0 if rank.site.pretend_gpus else len(slot.gpus),
            num_ranks=rank.config.rollout.engines[slot.model].gpus_per_engine,
            num_nodes=len(slot.nodes),
            node_rank=slot.nodes.index(rank.slot.node),
            env=device.visible(slot.gpus, environment, platform if slot.gpus else "cpu"),
        )
        for slot in rank.topology.parts_of(rank.slot.node)
    )


def _engine_token(rank: Rank) -> Path:
    """A fresh bearer token for this attempt's engines on this node, in a file only we can read."""
    path = rank.run_dir / "secrets" / f"engines-{rank.attempt}-{rank.slot.node}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))
    return path


def _data_set(given: DataSet) -> DataSet:
    """What agents need to know of a data set, also where it is an evaluation set."""
    return DataSet(**{name: getattr(given, name) for name in DataSet.__struct_fields__})


def _threads(rank: Rank) -> int:
    """torch threads of a trainer rank or engine: this machine's cores over all of them that stand on it."""
    nodes = set(range(len(rank.topology.nodes))) if rank.site.scheduler == "local" else {rank.slot.node}
    here = sum(r.role == "trainer" and r.node in nodes for r in rank.topology.ranks)
    here += sum(nodes.intersection(e.nodes) != set() for e in rank.topology.engines if not e.url)
    return max(1, len(os.sched_getaffinity(0)) // max(1, here))


def _message(reason: str, rank: Rank) -> str:
    if not reason:
        return "all steps are done"
    is_users = reason == "preempted" and (rank.site.scheduler == "local" or (rank.run_dir / "cancel").exists())
    return f"{'told to stop' if is_users else f'stopped early: {reason}'}; `resume` goes on with it"
