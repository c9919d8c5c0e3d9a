"""Publishing a policy version: from the trainer ranks to engines, over a weight group, checked and stamped.

    controller            agents                         engines               trainer ranks
    open a group  ------------------------------------------------------------> listen
    Connect ------------> connect -------------------->  join  <=============== join
    Receive ------------> pause, receive ------------->  take buckets <======== push (bucket after bucket)
    Commit(digests) ----> checksums, resume ---------->  stamped with the version

The group is kept as long as its members stay the same. A member that fails is named, restarted by its agent, and left
out; when it is back it gets the version alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from runtime.comm.messages import Commit, Connect, Disconnect, Receive, Reply, Restart
from runtime.config import Sync
from runtime.errors import WeightMismatch
from runtime.fleet import Fleet
from runtime.learner import GroupBroken, Learner
from runtime.types import GroupAddress, Manifest

logger = logging.getLogger("publish")

MARGIN_S = 30.0
"""How much longer the controller waits than the members of a group, so that their message, which says more, wins."""


WORD_S = 5.0
"""How long word of a dead engine may take to arrive after its weight group broke."""


class Publisher:
    """Owns the weight group."""

    def __init__(self, fleet: Fleet, learner: Learner, sync: Sync) -> None:
        self._fleet, self._learner, self._sync = fleet, learner, sync
        self._group: GroupAddress | None = None
        self._members: dict[int, int] = {}
        """Engine id -> which start of it is in the group; one that was started again is not."""
        self._listening = False
        """Trainer rank 0 is in the group."""
        self._groups_made = 0
        self._manifest: Manifest | None = None

    def publish(self, version: int, engines: Collection[int]) -> frozenset[int]:
        """Give `version` to these engines; those that now serve it are returned, the others are being restarted.

        Raises:
            WeightMismatch: an engine holds other bytes than were sent; the message names the tensors.
            PeerLost, WaitTimeout: an agent or trainer rank is gone.
        """
        todo = frozenset(engines)
        while todo and (failures := self._push(version, todo)):
            # The rest of a broken group may hold half of the weights: it gets all of them again, over a new group.
            self._restart(failures)
            todo = todo - failures.keys()
        self._fleet.committed(todo, version)
        return todo

    def close(self) -> None:
        self._close_group()

    def _push(self, version: int, engines: frozenset[int]) -> dict[int, str]:
        """One try; failures by engine."""
        if failures := self._form(engines):
            return failures
        assert self._group is not None
        name, manifest = self._group.name, self._described()
        requests = self._fleet.order(
            engines,
            lambda r, es: Receive(request=r, group=name, manifest=manifest, version=version, engines=es),
        )
        digests, broken = {}, ""
        try:
            digests = self._learner.push(name, version, self._sync.timeout_s + MARGIN_S)
        except GroupBroken as e:
            broken = str(e)
            self._hang_up()
        if failures := self._blame(engines, self._failures(requests, "engines to receive weights"), broken):
            return failures
        wanted = digests if self._sync.verify else {}
        requests = self._fleet.order(
            engines, lambda r, es: Commit(request=r, version=version, digests=wanted, engines=es)
        )
        return self._failures(requests, "engines to verify weights")

    def _described(self) -> Manifest:
        if self._manifest is None:
            self._manifest = self._learner.manifest(self._sync.timeout_s)
        return self._manifest

    def _form(self, engines: frozenset[int]) -> dict[int, str]:
        """A group of trainer rank 0 and exactly these engines; failures by engine."""
        members = {engine: self._fleet.starts(engine) for engine in engines}
        if self._group is not None and self._members == members:
            return {}
        self._close_group()
        self._groups_made += 1
        timeout_s = self._sync.timeout_s
        group = self._learner.open_group(f"weights-{self._groups_made}", 1 + len(engines), timeout_s)
        ranks = {engine: 1 + i for i, engine in enumerate(sorted(engines))}
        requests = self._fleet.order(
            engines, lambda r, es: Connect(request=r, address=group, ranks={e: ranks[e] for e in es})
        )
        self._group, self._members, self._listening = group, members, True
        broken = ""
        try:
            self._learner.join_group(group.name, timeout_s + MARGIN_S)
        except GroupBroken as e:
            broken = str(e)
            self._hang_up()
        return self._blame(engines, self._failures(requests, f"engines to join {group.name}"), broken)

    def _close_group(self) -> None:
        if self._group is None:
            return
        alive = self._fleet.alive()
        members = {e for e, start in self._members.items() if e in alive and self._fleet.starts(e) == start}
        name = self._group.name
        self._hang_up()
        self._group, self._members = None, {}
        requests = self._fleet.order(members, lambda r, es: Disconnect(request=r, group=name, engines=es))
        self._failures(requests, f"engines to leave {name}")

    def _hang_up(self) -> None:
        """Close the trainer's end: members that still wait for the rest of a broken push fail at once."""
        if self._group is not None and self._listening:
            self._listening = False
            self._learner.close_group(self._group.name, self._sync.timeout_s)

    def _failures(self, requests: list[int], what: str) -> dict[int, str]:
        failures: dict[int, str] = {}
        for reply in self._fleet.answers(requests, what, self._sync.timeout_s + MARGIN_S):
            assert isinstance(reply, Reply)
            failures |= reply.failures
            for engine, tensors in reply.mismatched.items():
                shown = ", ".join(tensors[:5]) + (f" and {len(tensors) - 5} more" if len(tensors) > 5 else "")
                raise WeightMismatch(f"engine {engine} holds other bytes than were sent in tensor {shown}")
        return failures

    def _blame(self, engines: frozenset[int], failures: dict[int, str], broken: str) -> dict[int, str]:
        """When one member goes, all others fail with it: blame those known to be down, waiting briefly for word."""
        if not failures and not broken:
            return {}
        deadline = time.monotonic() + WORD_S
        while not (down := engines - self._fleet.alive()) and time.monotonic() < deadline:
            self._fleet.pump(0.2)
        reasons = dict.fromkeys(engines, broken) | failures
        return {e: reasons[e] for e in down or failures or engines}

    def _restart(self, failures: dict[int, str]) -> None:
        for engine, reason in failures.items():
            logger.warning("engine %d left out of the push: %s", engine, reason)
        self._close_group()
        up = {e for e in failures if e in self._fleet.alive()}
        if up:
            reason = next(failures[e] for e in sorted(up))
            self._fleet.tell(up, lambda es: Restart(engines=es, reason=reason))
            self._fleet.lost(up)
