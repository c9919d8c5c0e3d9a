"""The program of one agent: it keeps the node's engines alive and plays leases against them, as the controller says.

Everything is a task in one group. An exception that nobody expected in any of them ends all, goes to the controller as
a Fault, and is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec

from runtime import plugins
from runtime.comm.messages import (
    AskJournal,
    Commit,
    Connect,
    Disconnect,
    EngineBegun,
    EngineDown,
    Fault,
    Finished,
    FromAgent,
    Hello,
    Order,
    PartDown,
    Receive,
    Reply,
    Restart,
    SleepEngines,
    StopAgent,
    Take,
    ToAgent,
    WakeEngines,
    Work,
)
from runtime.comm.messages import Journal as JournalMessage
from runtime.config import DataSet
from runtime.errors import EngineLost, SluiceError
from runtime.rollout.ask import Asking, Served
from runtime.rollout.base import EngineKind, Environment
from runtime.rollout.external import ExternalKeeper
from runtime.rollout.keeper import Keeper
from runtime.rollout.part import Part
from runtime.rollout.pool import Pool
from runtime.rollout.sampler import Journal, Sampler
from runtime.rollout.scoring import RewardPool
from runtime.rollout.start import EngineSettings, EngineStart, Spawner
from runtime.rollout.tokenizer import HfTokenizer
from runtime.rollout.watchdog import Watchdog
from runtime.types import Lease

logger = logging.getLogger("agent")

Kinds = Mapping[str, EngineKind]
"""By model."""


class Mailbox(Protocol):
    """What an agent needs of comm.mailbox.MailboxClient."""

    def send(self, message: FromAgent) -> None: ...

    async def next(self) -> ToAgent: ...


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    node: int
    rank: int
    seed: int
    """The run's."""
    datasets: dict[str, DataSet]
    """By the name that prompts carry, evaluation sets included."""
    places: dict[str, str] = {}
    """Where they stand in the config."""
    tokenizer: str
    """Folder of the policy's tokenizer."""
    asked: dict[str, str] = {}
    """Models that rewards may ask -> folder of their tokenizer."""
    max_concurrent: int
    """Samples that run at the same time."""
    wait_s: float
    """Bound of a sample's wait for any engine: a restart, the batch in training, a push."""
    environment_timeout_s: float = 1800.0
    """Of one sample."""
    still_s: float = 60.0
    """How long an environment or a reward may go without `await`."""
    engines: tuple[EngineStart, ...]
    engine: EngineSettings


def run(settings: Settings, mailbox: Mailbox, spawner: Spawner, kinds: Kinds, rewards: RewardPool) -> None:
    """Be an agent until told to stop, in a thread or a process of its own."""
    asyncio.run(serve(settings, mailbox, spawner, kinds, rewards))


async def serve(settings: Settings, mailbox: Mailbox, spawner: Spawner, kinds: Kinds, rewards: RewardPool) -> None:
    """Be an agent until told to stop.

    Args:
        mailbox, spawner, rewards: made before MPI_Init or just after it; the caller closes them.
        kinds: of the engines of each model.

    Raises:
        SluiceError, Exception: the first thing that went wrong; the controller was sent a Fault.
    """
    try:
        await _Agent(settings, mailbox, spawner, kinds, rewards).run()
    except Exception as e:  # the edge of the agent: nothing is lost, the attempt ends
        first = _first(e)
        fault = first.kind if isinstance(first, SluiceError) else "bug"
        trace = "".join(traceback.format_exception(first))
        message = str(first) or type(first).__name__
        mailbox.send(Fault(node=settings.node, kind=fault, message=message, traceback=trace))
        raise first from first.__cause__


def _first(error: BaseException) -> BaseException:
    """What a task group was ended by."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Agent:
    def __init__(
        self, settings: Settings, mailbox: Mailbox, spawner: Spawner, kinds: Kinds, rewards: RewardPool
    ) -> None:
        self._settings, self._mailbox, self._spawner, self._rewards = settings, mailbox, spawner, rewards
        self._prefills = {start.id for start in settings.engines if start.kind == "prefill"}
        prefills = Pool(settings.wait_s, "a prompt")
        pool = Pool(settings.wait_s, needs=prefills if self._prefills else None)
        pools = {name: Pool(settings.engine.start_s, f"a question to the {name}") for name in settings.asked}
        self._asked = {
            name: Served(pool=pools[name], tokenizer=HfTokenizer(path, quotes=True))
            for name, path in settings.asked.items()
        }
        pools["policy"] = pool
        self._keepers: dict[int, Keeper] = {}
        self._parts: dict[int, Part] = {}
        """Of engines that other agents keep."""
        for start in settings.engines:
            if start.node_rank:
                self._parts[start.id] = Part(start, settings.engine, kinds[start.model], spawner, mailbox.send)
                continue
            make = ExternalKeeper if start.url else Keeper
            kind, its_pool = kinds[start.model], prefills if start.kind == "prefill" else pools[start.model]
            kind = kind.fed_by(prefills) if start.kind == "decode" else kind
            self._keepers[start.id] = make(start, settings.engine, kind, spawner, its_pool, mailbox.send)
        self._sampler = Sampler(
            seed=settings.seed,
            pool=pool,
            permits=asyncio.Semaphore(settings.max_concurrent),
            environments={
                name: _environment(dataset, settings.places.get(name, name))
                for name, dataset in settings.datasets.items()
            },
            names={name: dataset.environment for name, dataset in settings.datasets.items()},
            timeout_s=settings.environment_timeout_s,
            tokenizer=HfTokenizer(settings.tokenizer),
            rewards=rewards,
        )
        self._journals: dict[int, Journal] = {}
        """Of the leases that run, by number."""
        self._leases: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        self._mailbox.send(Hello(node=self._settings.node, rank=self._settings.rank))
        await self._rewards.attach(partial(Asking, self._asked, self._settings.seed))
        try:
            async with asyncio.TaskGroup() as tasks:
                services = [tasks.create_task(Watchdog(self._settings.still_s).tick())]
                services += [tasks.create_task(self._rewards.listen()), tasks.create_task(self._hear_of_exits())]
                services += [tasks.create_task(k.keep()) for k in self._keepers.values()]
                orders: set[asyncio.Task[None]] = set()
                while not isinstance(message := await self._mailbox.next(), StopAgent):
                    if task := self._obey(message, tasks):
                        orders.add(task)
                        task.add_done_callback(orders.discard)
                for task in [*services, *orders, *self._leases.values()]:
                    task.cancel()
        finally:
            endings = (k.end() for k in (*self._keepers.values(), *self._parts.values()))
            for failure in await asyncio.gather(*endings, return_exceptions=True):
                if failure is not None:
                    logger.warning("an engine did not end: %s", failure)

    def _obey(self, message: ToAgent, tasks: asyncio.TaskGroup) -> asyncio.Task[None] | None:
        """Begin what the controller says; the task of an order that takes time."""
        match message:
            case Work():
                for lease in sorted(message.leases, key=lambda lease: lease.number):
                    self._begin(lease, tasks)
            case Restart():
                for engine in message.engines:
                    self._keepers[engine].restart(message.reason)
            case EngineBegun():
                return tasks.create_task(self._parts[message.engine].join(message))
            case EngineDown():
                return tasks.create_task(self._parts[message.engine].end())
            case PartDown():
                self._keepers[message.engine].part_down(message.start, message.reason)
            case AskJournal():
                journals = {n: tuple(tuple(made) for made in journal) for n, journal in self._journals.items()}
                self._mailbox.send(JournalMessage(request=message.request, journals=journals))
            case Connect() | Receive() | Take() | Commit() | Disconnect() | SleepEngines() | WakeEngines():
                return tasks.create_task(self._carry_out(message))
            case _:
                raise AssertionError(f"no agent obeys {message!r}")
        return None

    # ---- leases

    def _begin(self, lease: Lease, tasks: asyncio.TaskGroup) -> None:
        assert lease.number not in self._leases, f"lease {lease.number} runs already"
        journal: Journal = [list(made) for made in lease.journal] or [[] for _ in range(lease.num_samples)]
        self._journals[lease.number] = journal
        self._leases[lease.number] = tasks.create_task(self._play(lease, journal))

    async def _play(self, lease: Lease, journal: Journal) -> None:
        begun = time.monotonic()
        group = await self._sampler.run(lease, journal)
        del self._leases[lease.number], self._journals[lease.number]
        for engine in self._keepers.values():
            engine.progressed()
        seconds = time.monotonic() - begun
        self._mailbox.send(Finished(group=group, purpose=lease.purpose, seconds=seconds))

    # ---- engines

    async def _hear_of_exits(self) -> None:
        while True:
            ended = await self._spawner.exits.get()
            for engine in (*self._keepers.values(), *self._parts.values()):
                engine.exited(ended.name, ended.code)

    async def _carry_out(self, order: Order) -> None:
        """On all its engines side by side, then reply who failed."""
        mismatched: dict[int, str] = {}

        async def commit(engine: int, order: Commit) -> None:
            if how := await self._keepers[engine].commit(order.digests, order.canary):
                mismatched[engine] = how

        match order:
            case Connect():
                failures = await _all(order.ranks, lambda e: self._keepers[e].connect(order.address, order.ranks[e]))
            case Receive():
                failures = await _all(order.engines, lambda e: self._receive(e, order))
            case Take():
                failures = await _all(order.handles, lambda e: self._keepers[e].take(order))
            case Commit():
                # Prefill engines first, since decode engines prove themselves by them.
                failures = await _all(self._prefills.intersection(order.engines), lambda e: commit(e, order))
                failures |= await _all(set(order.engines) - self._prefills, lambda e: commit(e, order))
            case Disconnect():
                failures = await _all(order.engines, lambda e: self._keepers[e].disconnect(order.group))
            case SleepEngines():
                failures = await _all(order.engines, lambda e: self._keepers[e].sleep())
            case WakeEngines():
                failures = await _all(order.engines, lambda e: self._keepers[e].wake(serve=order.serve))
        self._mailbox.send(Reply(request=order.request, failures=failures, mismatched=mismatched))

    async def _receive(self, engine: int, order: Receive) -> None:
        try:
            await self._keepers[engine].receive(order.manifest, order.version, order.source)
        except EngineLost:
            if order.manifest.via == "group":  # its other members shall not wait for one that takes nothing more
                with contextlib.suppress(EngineLost):
                    await self._keepers[engine].disconnect(order.source)
            raise


async def _all(engines: Iterable[int], do: Callable[[int], Coroutine[Any, Any, None]]) -> dict[int, str]:
    """Do it on each engine at the same time; the reasons of those that failed."""

    async def one(engine: int) -> str:
        try:
            await do(engine)
        except EngineLost as e:
            return str(e)
        return ""

    engines = list(engines)
    reasons = await asyncio.gather(*(one(e) for e in engines))
    return {e: reason for e, reason in zip(engines, reasons, strict=True) if reason}


def _environment(dataset: DataSet, place: str) -> Environment:
    places = f"{place}.environment", f"{place}.environment_options"
    return plugins.build("environment", dataset.environment, dataset.environment_options, *places)
