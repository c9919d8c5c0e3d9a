"""Agents and their engines, seen from the controller.

Life of an engine here:  down --EngineReady--> fresh --committed(version)--> serving --EngineDown--> down
A fresh engine holds no weights of this run; `publish` gives them to it, alone if the others are up to date. Engines of
other models than the policy are just up or down, and neither pushed to nor leased to.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
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
from runtime.topology import Topology
from runtime.types import Completion, Lease

logger = logging.getLogger("fleet")


class Mailbox(Protocol):
    """What the fleet needs of comm.mailbox.MailboxServer."""

    def send(self, rank: int, message: ToAgent) -> None: ...

    def receive(self, timeout_s: float) -> tuple[int, FromAgent] | None: ...


@dataclass
class _Agent:
    rank: int
    engines: tuple[int, ...]
    policies: tuple[int, ...]
    """Those of the policy."""
    leases: dict[int, int] = field(default_factory=dict)
    """Lease number -> samples it runs here."""


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
        self._agents = [
            _Agent(
                rank=topology.agent_of(n),
                engines=tuple(e.id for e in topology.engines_of(n)),
                policies=tuple(e.id for e in topology.engines_of(n) if not e.is_frozen),
            )
            for n in range(len(topology.nodes))
        ]
        self._agent_of = {e: a for a in self._agents for e in a.engines}
        policies = [e for a in self._agents for e in a.policies]
        self._versions: dict[int, int | None] = dict.fromkeys(policies, None)
        self._frozen_up: set[int] = set()
        """Engines of other models that answer."""
        self._starts: dict[int, int] = dict.fromkeys(self._agent_of, 0)
        self._ranks: dict[int, int] = dict.fromkeys(self._agent_of, 1)
        self._slots, self._topology = {e.id: e for e in topology.engines}, topology
        self._can: dict[int, tuple[str, ...]] = dict.fromkeys(self._agent_of, ())
        self._fresh: set[int] = set()
        self._finished: list[Finished] = []
        self._answers: dict[int, Reply | Journal] = {}
        self._requests = 0

    # ---- engines

    def alive(self) -> set[int]:
        """Engines of the policy that answer, fresh ones included."""
        return self._fresh | {e for e, v in self._versions.items() if v is not None}

    def fresh(self) -> set[int]:
        """Engines that wait for weights."""
        return set(self._fresh)

    def answering(self) -> set[int]:
        """Engines of any model that answer."""
        return self.alive() | self._frozen_up

    def own(self) -> frozenset[int]:
        """Every engine of any model that the run starts, also those that are down."""
        return frozenset(e for e, slot in self._slots.items() if not slot.url)

    def starts(self, engine: int) -> int:
        """How often this engine has become ready: tells its processes apart."""
        return self._starts[engine]

    def version(self, engine: int) -> int | None:
        """What it serves; None: nothing."""
        return self._versions[engine]

    def num_ranks(self, engine: int) -> int:
        """Of a weight group that this engine takes: one for each part of its model."""
        return self._ranks[engine]

    def can(self, engine: int, what: str) -> bool:
        """Whether it said so, see rollout.base.Description."""
        return what in self._can[engine]

    def lenders(self, engine: int) -> tuple[int, ...]:
        """World ranks of the trainer ranks that share memory with it, one for each rank that it has."""
        ranks = self._topology.lenders(self._slots[engine])
        number = self._ranks[engine]
        return tuple(ranks[i * len(ranks) // number] for i in range(number))

    def committed(self, engines: Collection[int], version: int) -> None:
        self._versions |= dict.fromkeys(engines, version)
        self._fresh -= set(engines)

    def emptied(self) -> None:
        """Engines that answer gave their weights up."""
        self._fresh = self.alive()
        self._versions = dict.fromkeys(self._versions, None)

    def lost(self, engines: Collection[int]) -> None:
        """These are being restarted; they come back fresh."""
        self._versions |= dict.fromkeys(self._versions.keys() & set(engines), None)
        self._fresh -= set(engines)
        self._frozen_up -= set(engines)

    def wait_engines(self, timeout_s: float) -> None:
        """Until every engine that the run starts answers for the first time, and of each model at least one.

        Raises:
            EngineLost: naming the engines that did not.
        """
        deadline = time.monotonic() + timeout_s
        while missing := self._missing():
            if time.monotonic() > deadline:
                raise EngineLost(
                    f"controller waited {timeout_s:.0f} s for engines {sorted(missing)} to start; see their logs"
                )
            self._receive(0.5)

    def _missing(self) -> set[int]:
        up, of_model = self.answering(), defaultdict(set)
        for engine, slot in self._slots.items():
            of_model[slot.model].add(engine)
        return set(self.own() - up).union(*(engines for engines in of_model.values() if not engines & up))

    # ---- leases

    def lease(self, leases: Sequence[Lease]) -> None:
        """Hand leases to the agents with the least to do per engine that answers; where none does, per engine."""
        work: dict[int, list[Lease]] = {}
        up = self.alive() or self._versions.keys()
        holders = [(a, n) for a in self._agents if (n := len(up & set(a.policies)))]
        for lease in leases:
            agent, _ = min(holders, key=lambda held: (sum(held[0].leases.values()) / held[1], held[0].rank))
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
        requests = [self.ask(a.rank, lambda r: AskJournal(request=r)) for a in self._agents if a.policies]
        out: dict[int, tuple[tuple[Completion, ...], ...]] = {}
        for answer in self.answers(requests, "journals", timeout_s):
            assert isinstance(answer, Journal)
            out |= answer.journals
        return out

    # ---- requests

    def order(self, engines: Collection[int], make: Callable[[int, tuple[int, ...]], ToAgent]) -> list[int]:
        """Send one request to each agent of these engines; `make` gets its number and the agent's engines."""
        mine: dict[int, list[int]] = {}
        for engine in sorted(engines):
            mine.setdefault(self._agent_of[engine].rank, []).append(engine)
        return [self.ask(rank, lambda r, es=es: make(r, tuple(es))) for rank, es in mine.items()]

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

    def tell(self, engines: Collection[int], make: Callable[[tuple[int, ...]], ToAgent]) -> None:
        """Like `order`, where no answer is due."""
        for agent in self._agents:
            if mine := tuple(e for e in agent.engines if e in engines):
                self._mailbox.send(agent.rank, make(mine))

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
                self._mailbox.send(self._agent_of[message.engine].rank, message)
            case EngineReady():
                self._starts[message.engine] += 1
                self._ranks[message.engine] = message.num_ranks
                self._can[message.engine] = message.can
                (self._fresh if message.engine in self._versions else self._frozen_up).add(message.engine)
                self._on_engine("engine_ready", message.engine, "")
            case EngineDown():
                self.lost([message.engine])
                logger.warning("engine %d is down: %s", message.engine, message.reason)
                self._on_engine("engine_down", message.engine, message.reason)
                self._pass_on(message)
            case Finished():
                agent = next(a for a in self._agents if a.rank == rank)
                agent.leases.pop(message.group.lease, None)
                self._finished.append(message)
            case Journal() | Reply():
                self._answers[message.request] = message
            case Fault():
                raise fault_error(message)
        return True

    def _pass_on(self, message: EngineBegun | EngineDown) -> None:
        """To the agents of the engine's other nodes."""
        for node in self._slots[message.engine].nodes[1:]:
            self._mailbox.send(self._topology.agent_of(node), message)


def fault_error(fault: Fault) -> SluiceError:
    """An agent's fault as an error of the kind it reported."""
    error = SluiceError(f"agent of node {fault.node}: {fault.message}")
    error.add_note(fault.traceback)
    error.kind = fault.kind if fault.kind in EXIT_CODES else "bug"  # pyright: ignore[reportAttributeAccessIssue]
    return error
