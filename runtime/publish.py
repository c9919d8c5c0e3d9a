"""Publishing a policy version: from the trainer ranks to engines, over a weight group, checked and stamped.

    controller            agents                         engines               trainer ranks
    open a group  ------------------------------------------------------------> listen
    Connect ------------> connect -------------------->  join  <=============== join
    Receive ------------> pause, receive ------------->  take buckets <======== push (bucket after bucket)
    Commit(proof) ------> checksums, resume, canary -->  stamped with the version

The group is kept as long as its members stay the same. A member that fails is named, restarted by its agent, and left
out; when it is back it gets the version alone. Through a folder there is no group: the trainer ranks write the version
first, and engines load it while they are paused. Nor is there one where engines map the trainer ranks' memory:

    Lend (a bucket) --------------------------------------------------------> every trainer rank shares its memory
    Take (its handles) -> pause, take ---------------->  copy the bucket      the next one is put together
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from runtime.comm.buckets import buckets
from runtime.comm.commands import Lend, Push, Pushed
from runtime.comm.messages import Commit, Connect, Disconnect, Receive, Reply, Restart, Take
from runtime.config import Sync
from runtime.errors import WeightMismatch
from runtime.fleet import Fleet
from runtime.learner import GroupBroken, Learner
from runtime.turns import Turns
from runtime.types import GroupAddress, Manifest

logger = logging.getLogger("publish")

MARGIN_S = 30.0
"""How much longer the controller waits than the members of a group, so that their message, which says more, wins."""


WORD_S = 5.0
"""How long word of a dead engine may take to arrive after its weight group broke."""


class Publisher:
    """Owns the weight group."""

    def __init__(
        self,
        fleet: Fleet,
        learner: Learner,
        sync: Sync,
        folder: Path,
        canary: tuple[int, ...] = (),
        turns: Turns | None = None,
    ) -> None:
        """
        Args:
            folder: for versions, where the channel puts them into one.
            canary: tokens of a prompt, of which an engine must make after each push what the trainer makes of it.
            turns: in colocated mode.
        """
        self._fleet, self._learner, self._sync = fleet, learner, sync
        self._proof = canary if sync.verify else ()
        self._turns = turns
        self._folder, self._pushes = folder, 0
        self._stored = ""
        """Folder of the version that engines took last."""
        self._kept = -1
        """Version that the trainer can push a delta from; -1: none."""
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
            WeightMismatch: an engine holds other weights than were sent; the message says how that shows.
            PeerLost, WaitTimeout: an agent or trainer rank is gone.
        """
        if self._turns is not None:
            self._turns.to_trainer()
            self._turns.for_push()
            engines = self._fleet.alive()  # all of them gave up their weights
        starts = {engine: self._fleet.starts(engine) for engine in engines}
        todo, pushed = self._push(version, frozenset(engines))
        if self._turns is not None:
            self._turns.to_engines()
        todo = self._left(todo, starts)
        if failures := self._commit(version, todo, pushed):
            self._restart(failures)
        todo = self._left(todo - failures.keys(), starts)
        self._fleet.committed(todo, version)
        return todo

    def make_room(self) -> None:
        """Let trainer ranks have their memory, where engines share it."""
        if self._turns is not None:
            self._turns.to_trainer()

    @property
    def made_room(self) -> bool:
        """Engines sleep, until the next `publish`."""
        return self._turns is not None and self._turns.is_trainers

    def close(self) -> None:
        self._close_group()
        self._forget(self._stored)

    # ---- a push

    def _push(self, version: int, engines: frozenset[int]) -> tuple[frozenset[int], Pushed]:
        """Until it goes well for those that are left; they are returned."""
        via = self._via(engines)
        push_once = {"group": self._over_group, "folder": self._through_folder, "handles": self._by_handles}[via]
        pushed, base = Pushed(digests={}), self._base(engines)
        while engines:
            pushed, failures = push_once(version, base, engines)
            if not failures:
                break
            if base >= 0:  # those that are up may only have refused the delta
                logger.warning(
                    "all of version %d is pushed, as a delta failed: %s", version, "; ".join(failures.values())
                )
                failures = {e: reason for e, reason in failures.items() if e not in self._fleet.alive()}
            self._restart(failures)
            engines = engines - failures.keys()
            if via != "group" and base < 0:  # the others have taken it
                break
            # The rest of a broken group may hold half of the weights: it gets all of them again, over a new group.
            base = -1
        return engines, pushed

    def _via(self, engines: Collection[int]) -> Literal["group", "folder", "handles"]:
        """How a push travels; `ipc` as its engines want it."""
        by_handles = self._sync.channel == "ipc" and all(self._fleet.can(e, "handles") for e in engines)
        return "handles" if by_handles else self._sync.via

    def _base(self, engines: frozenset[int]) -> int:
        """What a delta may start from: the version that the trainer has kept, if all of them serve it; -1: none."""
        is_held = {self._fleet.version(engine) for engine in engines} == {self._kept}
        return self._kept if self._sync.channel == "delta" and is_held else -1

    def _command(self, source: str, version: int, base: int, engines: Collection[int]) -> Push:
        self._kept = -1  # until it is known that this push went well
        compared = self._sync.verify and any(self._fleet.can(engine, "digests") for engine in engines)
        return Push(source=source, version=version, base=base, digests=compared, canary=self._proof)

    def _described(self) -> Manifest:
        if self._manifest is None:
            self._manifest = self._learner.manifest(self._sync.timeout_s)
        return self._manifest

    def _left(self, engines: frozenset[int], starts: Mapping[int, int]) -> frozenset[int]:
        """Those that were not lost meanwhile; one that is back already is another."""
        return frozenset(e for e in engines & self._fleet.alive() if self._fleet.starts(e) == starts[e])

    def _commit(self, version: int, engines: frozenset[int], pushed: Pushed) -> dict[int, str]:
        requests = self._fleet.order(
            engines,
            lambda r, es: Commit(request=r, version=version, digests=pushed.digests, canary=pushed.canary, engines=es),
        )
        return self._failures(requests, "engines to verify weights")

    # ---- the ways of a push: each is one try, and gives failures by engine

    def _over_group(self, version: int, base: int, engines: frozenset[int]) -> tuple[Pushed, dict[int, str]]:
        pushed, broken = Pushed(digests={}), ""
        if failures := self._form(engines):
            return pushed, failures
        assert self._group is not None
        push = self._command(self._group.name, version, base, engines)
        requests = self._receive(push, engines)
        try:
            pushed = self._learner.push(push, self._sync.timeout_s + MARGIN_S)
        except GroupBroken as e:
            broken = str(e)
            self._hang_up()
        failures = self._blame(engines, self._failures(requests, "engines to receive weights"), broken)
        self._kept = -1 if failures else version
        return pushed, failures

    def _through_folder(self, version: int, base: int, engines: frozenset[int]) -> tuple[Pushed, dict[int, str]]:
        self._pushes += 1
        push = self._command(str(self._folder / f"{version:06d}-{self._pushes}"), version, base, engines)
        pushed = self._learner.push(push, self._sync.timeout_s + MARGIN_S)
        self._kept = version
        failures = self._failures(self._receive(push, engines), "engines to load weights")
        self._forget(self._stored)
        self._stored = push.source
        if self._sync.channel == "ipc":  # it takes memory
            self._forget(push.source)
        return pushed, failures

    def _forget(self, source: str) -> None:
        """Of a folder that no engine needs any more."""
        if source:
            self._learner.close_group(source, self._sync.timeout_s)
            self._stored = ""

    def _receive(self, push: Push, engines: frozenset[int]) -> list[int]:
        manifest = msgspec.structs.replace(self._described().since(push.base), via=self._sync.via)
        return self._fleet.order(
            engines,
            lambda r, es: Receive(request=r, source=push.source, manifest=manifest, version=push.version, engines=es),
        )

    def _by_handles(self, version: int, base: int, engines: frozenset[int]) -> tuple[Pushed, dict[int, str]]:
        """While engines take a bucket, trainer ranks put the next one together."""
        lenders = {engine: self._fleet.lenders(engine) for engine in engines}
        readers = Counter(rank for ranks in lenders.values() for rank in ranks)
        begin = Lend(is_first=True, canary=self._proof)
        number, limit_s = len(buckets(self._described())), self._sync.timeout_s + MARGIN_S
        lent = self._learner.lend(begin, readers, limit_s)
        pushed = Pushed(digests={}, canary=next(iter(lent.values())).canary)
        failures: dict[int, str] = {}
        for i in range(number):
            handles = {e: tuple(lent[rank].handle for rank in lenders[e]) for e in engines - failures.keys()}
            requests = self._take(version, handles, is_first=i == 0, is_last=i == number - 1)
            if i < number - 1:
                lent = self._learner.lend(Lend(is_first=False), readers, limit_s)
            failures |= self._failures(requests, "engines to take a bucket")
            if not engines - failures.keys():
                break
        self._learner.take_back(limit_s)
        return pushed, failures

    def _take(
        self, version: int, handles: Mapping[int, tuple[str, ...]], *, is_first: bool, is_last: bool
    ) -> list[int]:
        def make(request: int, engines: tuple[int, ...]) -> Take:
            mine = {engine: handles[engine] for engine in engines}
            return Take(request=request, version=version, handles=mine, is_first=is_first, is_last=is_last)

        return self._fleet.order(handles.keys(), make)

    # ---- the weight group

    def _form(self, engines: frozenset[int]) -> dict[int, str]:
        """A group of trainer rank 0 and exactly these engines; failures by engine."""
        members = {engine: self._fleet.starts(engine) for engine in engines}
        if self._group is not None and self._members == members:
            return {}
        self._close_group()
        self._groups_made += 1
        timeout_s = self._sync.timeout_s
        ranks, size = {}, 1
        for engine in sorted(engines):
            ranks[engine] = size
            size += self._fleet.num_ranks(engine)
        # An engine that somebody else runs may still be in a group of an attempt that was killed.
        name = f"weights-{secrets.token_hex(4)}-{self._groups_made}"
        group = self._learner.open_group(name, size, timeout_s)

        def connect(request: int, engines: tuple[int, ...]) -> Connect:
            return Connect(request=request, address=group, ranks={engine: ranks[engine] for engine in engines})

        requests = [r for engine in ranks for r in self._fleet.order([engine], connect)]  # each is answered for itself
        self._group, self._members, self._listening = group, members, True
        return self._join(group.name, ranks, requests)

    def _join(self, name: str, ranks: Mapping[int, int], requests: list[int]) -> dict[int, str]:
        """Until all have come, or who is missing has failed: the others wait no longer for it; failures by engine.

        Args:
            ranks: the first of each engine.
        """
        timeout_s, broken = self._sync.timeout_s, ""
        deadline = time.monotonic() + timeout_s
        try:
            while missing := self._learner.join_group(name, timeout_s + MARGIN_S):
                self._fleet.pump(0.0)
                failed = self._fleet.failed(requests)
                late = {e for e, r in ranks.items() if any(r <= m < r + self._fleet.num_ranks(e) for m in missing)}
                if late <= failed.keys() or time.monotonic() > deadline:
                    self._hang_up()
                    self._failures(requests, f"engines to leave {name}")
                    return {e: failed.get(e, f"it did not join {name} within {timeout_s:g} s") for e in late}
        except GroupBroken as e:
            broken = str(e)
            self._hang_up()
        return self._blame(frozenset(ranks), self._failures(requests, f"engines to join {name}"), broken)

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

    # ---- who failed

    def _failures(self, requests: list[int], what: str) -> dict[int, str]:
        failures: dict[int, str] = {}
        for reply in self._fleet.answers(requests, what, self._sync.timeout_s + MARGIN_S):
            assert isinstance(reply, Reply)
            failures |= reply.failures
            for engine, how in reply.mismatched.items():
                raise WeightMismatch(f"engine {engine} {how}")
        return failures

    def _blame(self, engines: frozenset[int], failures: dict[int, str], broken: str) -> dict[int, str]:
        """When one member goes, all others fail with it: blame those known to be down, waiting briefly for word; else
        those that somebody else runs, as the others will show it in the next try if it was theirs."""
        if not failures and not broken:
            return {}
        deadline = time.monotonic() + WORD_S
        while not (down := engines - self._fleet.alive()) and time.monotonic() < deadline:
            self._fleet.pump(0.2)
        reasons = dict.fromkeys(engines, broken) | failures
        return {e: reasons[e] for e in down or failures.keys() - self._fleet.own() or failures or engines}

    def _restart(self, failures: dict[int, str]) -> None:
        for engine, reason in failures.items():
            logger.warning("engine %d left out of the push: %s", engine, reason)
        self._close_group()
        up = {e for e in failures if e in self._fleet.alive()}
        if up:
            reason = next(failures[e] for e in sorted(up))
            self._fleet.tell(up, lambda es: Restart(engines=es, reason=reason))
            self._fleet.lost(up)
