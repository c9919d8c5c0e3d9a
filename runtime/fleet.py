"""Agents and their engines, seen from the controller.

Life of an engine here:  down --EngineReady--> fresh --committed(version)--> serving --EngineDown--> down
A fresh engine holds no weights of this run; `publish` gives them to it, alone if the others are up to date. Engines of
other models than the policy are just up or down, and neither pushed to nor leased to.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from runtime.comm.messages import (
    AskJournal,
    EngineBegun,
    EngineDown,
    EngineReady,
    Fault,
    Finished,
    FromAgent,
    Hello,
    Journal,
    PartDown,
    Reply,
    StopAgent,
    ToAgent,
    Work,
)
from runtime.errors import EXIT_CODES, EngineLost, SluiceError, WaitTimeout
from runtime.topology import EngineSlot, Topology
from runtime.types import Completion, Lease

logger = logging.getLogger("fleet")


class Mailbox(Protocol):
    """What the fleet needs of comm.mailbox.MailboxServer."""

    def send(self, rank: int, message: ToAgent) -> None: ...

    def receive(self, timeout_s: float) -> tuple[int, FromAgent] | None: ...


@dataclass(eq=False)
class _Agent:
    rank: int
    leases: dict[int, int] = field(default_factory=dict)
    """Lease number -> samples it runs here."""


@dataclass(eq=False)
class _Engine:
    slot: EngineSlot
    agent: _Agent
    is_up: bool = False
    """It answers."""
    version: int | None = None
    """What it serves; None: no weights of this run."""
    starts: int = 0
    num_ranks: int = 1
    can: tuple[str, ...] = ()
    is_given_up: bool = False
    """It is somebody else's, and of no use as it is."""


class Fleet:
    """All agents. Every method is bounded and raises PeerLost, EngineLost or an agent's own fault."""

    def __init__(
        self, topology: Topology, mailbox: Mailbox, on_engine: Callable[[str, int, str], None] = lambda *_: None
    ) -> None:
        """
        Args:
            on_engine: told of (event kind, engine id, reason), for the event log.
        """
        self._mailbox, self._on_engine = mailbox, on_engine
        self._topology = topology
        self._agents = [_Agent(topology.agent_of(node)) for node in range(len(topology.nodes))]
        self._engines = {slot.id: _Engine(slot, self._agents[slot.nodes[0]]) for slot in topology.engines}
        self._finished: list[Finished] = []
        self._answers: dict[int, Reply | Journal] = {}
        self._requests = 0

    # ---- engines

    def alive(self) -> set[int]:
        """Engines of the policy that answer, fresh ones included."""
        return {i for i, e in self._engines.items() if e.is_up and not e.slot.is_frozen}

    def fresh(self) -> set[int]:
        """Engines that wait for weights."""
        return {i for i in self.alive() if self._engines[i].version is None}

    def answering(self) -> set[int]:
        """Engines of any model that answer."""
        return {i for i, e in self._engines.items() if e.is_up}

    def own(self) -> frozenset[int]:
        """Every engine of any model that the run starts, also those that are down."""
        return frozenset(i for i, e in self._engines.items() if not e.slot.url)

    def starts(self, engine: int) -> int:
        """How often this engine has become ready: tells its processes apart."""
        return self._engines[engine].starts

    def version(self, engine: int) -> int | None:
        """What it serves; None: nothing."""
        return self._engines[engine].version

    def num_ranks(self, engine: int) -> int:
        """Of a weight group that this engine takes: one for each part of its model."""
        return self._engines[engine].num_ranks

    def can(self, engine: int, what: str) -> bool:
        """Whether it said so, see rollout.base.Description."""
        return what in self._engines[engine].can

    def lenders(self, engine: int) -> tuple[int, ...]:
        """World ranks of the trainer ranks that share memory with it, one for each rank that it has."""
        ranks, number = self._topology.lenders(self._engines[engine].slot), self.num_ranks(engine)
        return tuple(ranks[i * len(ranks) // number] for i in range(number))

    def committed(self, engines: Collection[int], version: int) -> None:
        for engine in engines:
            self._engines[engine].version = version

    def emptied(self) -> None:
        """Engines that answer gave their weights up."""
        for engine in self._engines.values():
            engine.version = None

    def lost(self, engines: Collection[int]) -> None:
        """These are being restarted; they come back fresh."""
        for engine in engines:
            self._engines[engine].is_up, self._engines[engine].version = False, None

    def wait_engines(self, timeout_s: float, stop: Callable[[], str] = str) -> None:
        """Until every engine that the run starts answers for the first time, and of each model at least one; or until
        `stop` says why the run must end early.

        Raises:
            EngineLost: naming the engines that did not.
        """
        deadline = time.monotonic() + timeout_s
        while (missing := self._missing()) and not stop():
            if time.monotonic() > deadline:
                raise EngineLost(f"controller waited {timeout_s:.0f} s for engines {self._named(missing)}")
            self._receive(0.5)

    def _missing(self) -> set[int]:
        up, of_model = self.answering(), defaultdict(set)
        for i, engine in self._engines.items():
            of_model[engine.slot.model].add(i)
        return set(self.own() - up).union(*(engines for engines in of_model.values() if not engines & up))

    def _named(self, engines: Collection[int]) -> str:
        """Which they are, and where to look."""
        own, others = sorted(self.own() & set(engines)), sorted(set(engines) - self.own())
        named = [f"{own} to start, see their logs"] if own else []
        named += [f"{e} at {self._engines[e].slot.url} to answer well, see the log of its server" for e in others]
        return "; and ".join(named)

    # ---- leases

    def lease(self, leases: Sequence[Lease]) -> None:
        """Hand leases to the agents with the least to do per engine that answers; where none does, per engine."""
        work: dict[int, list[Lease]] = {}
        policies = [e for e in self._engines.values() if not e.slot.is_frozen]
        holders = Counter(e.agent for e in [e for e in policies if e.is_up] or policies)
        for lease in leases:
            agent = min(holders, key=lambda a: (sum(a.leases.values()) / holders[a], a.rank))
            agent.leases[lease.number] = lease.num_samples
            work.setdefault(agent.rank, []).append(lease)
        for rank, mine in work.items():
            self._mailbox.send(rank, Work(leases=tuple(mine)))

    def poll(self, timeout_s: float) -> list[Finished]:
        """Leases that finished; waits up to `timeout_s` for the first."""
        if not self._finished:
            self._receive(timeout_s)
        while self._receive(0.0):
            pass
        out, self._finished = self._finished, []
        return out

    def journal(self, timeout_s: float) -> dict[int, tuple[tuple[Completion, ...], ...]]:
        """Of every running lease, what it has sampled so far."""
        ranks = {e.agent.rank for e in self._engines.values() if not e.slot.is_frozen}
        requests = [self.ask(rank, lambda r: AskJournal(request=r)) for rank in sorted(ranks)]
        out: dict[int, tuple[tuple[Completion, ...], ...]] = {}
        for answer in self.answers(requests, "journals", timeout_s):
            assert isinstance(answer, Journal)
            out |= answer.journals
        return out

    # ---- requests

    def order(self, engines: Collection[int], make: Callable[[int, tuple[int, ...]], ToAgent]) -> list[int]:
        """Send one request to each agent of these engines; `make` gets its number and the agent's engines."""
        return [self.ask(rank, lambda r, es=es: make(r, es)) for rank, es in self._by_agent(engines).items()]

    def ask(self, rank: int, make: Callable[[int], ToAgent]) -> int:
        self._requests += 1
        self._mailbox.send(rank, make(self._requests))
        return self._requests

    def answers(self, requests: Sequence[int], what: str, timeout_s: float) -> list[Reply | Journal]:
        deadline = time.monotonic() + timeout_s
        while missing := [r for r in requests if r not in self._answers]:
            if time.monotonic() > deadline:
                raise WaitTimeout(f"controller waited {timeout_s:.0f} s for {what}: {len(missing)} agents are silent")
            self._receive(0.2)
        return [self._answers.pop(r) for r in requests]

    def failed(self, requests: Sequence[int]) -> dict[int, str]:
        """Failures by engine that these were answered with so far."""
        replies = [reply for r in requests if isinstance(reply := self._answers.get(r), Reply)]
        return {engine: why for reply in replies for engine, why in reply.failures.items()}

    def tell(self, engines: Collection[int], make: Callable[[tuple[int, ...]], ToAgent]) -> None:
        """Like `order`, where no answer is due."""
        for rank, mine in self._by_agent(engines).items():
            self._mailbox.send(rank, make(mine))

    def _by_agent(self, engines: Collection[int]) -> dict[int, tuple[int, ...]]:
        """World rank of an agent -> those of these engines that are its."""
        mine: dict[int, tuple[int, ...]] = {}
        for engine in sorted(engines):
            rank = self._engines[engine].agent.rank
            mine[rank] = (*mine.get(rank, ()), engine)
        return mine

    def pump(self, timeout_s: float) -> None:
        """Take in what has arrived while the caller waits for something else."""
        self._receive(timeout_s)

    def stop(self) -> None:
        for agent in self._agents:
            self._mailbox.send(agent.rank, StopAgent())

    # ---- what arrives

    def _receive(self, timeout_s: float) -> bool:
        got = self._mailbox.receive(timeout_s)
        if got is None:
            return False
        rank, message = got
        match message:
            case Hello():
                logger.info("agent of node %d is rank %d", message.node, rank)
            case EngineBegun():
                self._pass_on(message)
            case PartDown():
                self._mailbox.send(self._engines[message.engine].agent.rank, message)
            case EngineReady():
                engine = self._engines[message.engine]
                engine.starts += 1
                engine.is_up, engine.version, engine.is_given_up = True, None, False
                engine.num_ranks, engine.can = message.num_ranks, message.can
                self._on_engine("engine_ready", message.engine, "")
            case EngineDown():
                self.lost([message.engine])
                logger.warning("engine %d is down: %s", message.engine, message.reason)
                self._on_engine("engine_down", message.engine, message.reason)
                self._pass_on(message)
                self._engines[message.engine].is_given_up |= message.is_given_up
                self._check_left(message)
            case Finished():
                agent = next(a for a in self._agents if a.rank == rank)
                agent.leases.pop(message.group.lease, None)
                self._finished.append(message)
            case Journal() | Reply():
                self._answers[message.request] = message
            case Fault():
                raise fault_error(message)
        return True

    def _check_left(self, down: EngineDown) -> None:
        """
        Raises:
            EngineLost: all engines of its model are given up.
        """
        model = self._engines[down.engine].slot.model
        if all(e.is_given_up for e in self._engines.values() if e.slot.model == model):
            raise EngineLost(f"no engine of the {model} is left; the last one: {down.reason}")

    def _pass_on(self, message: EngineBegun | EngineDown) -> None:
        """To the agents of the engine's other nodes."""
        for node in self._engines[message.engine].slot.nodes[1:]:
            self._mailbox.send(self._topology.agent_of(node), message)


def fault_error(fault: Fault) -> SluiceError:
    """An agent's fault as an error of the kind it reported."""
    error = SluiceError(f"agent of node {fault.node}: {fault.message}")
    error.add_note(fault.traceback)
    error.kind = fault.kind if fault.kind in EXIT_CODES else "bug"  # pyright: ignore[reportAttributeAccessIssue]
    return error
