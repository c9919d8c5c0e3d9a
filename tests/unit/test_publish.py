"""Which part of a push goes where, and when, where an engine is several ranks."""

import math
from pathlib import Path

import msgspec
import pytest

from runtime import publish
from runtime.comm import commands as c
from runtime.comm import messages as m
from runtime.config import Sync
from runtime.fleet import Fleet
from runtime.publish import Publisher
from runtime.topology import EngineSlot, RankSlot, Topology
from runtime.types import GroupAddress, Manifest

RANKS = {0: 2, 1: 4, 2: 1}
"""By engine; the first two stand on one node."""
GPUS = {0: (0, 1), 1: (2, 3, 4, 5), 2: (0,)}
TRAINERS = {10: (0, 0), 11: (0, 1), 12: (0, 2), 13: (0, 3), 14: (0, 4), 15: (0, 5), 20: (1, 0), 21: (1, 1)}
"""World rank -> node and GPU."""
TOPOLOGY = Topology(
    nodes=("a", "b"),
    ranks=(
        *(RankSlot(rank=n, node=n, local_rank=0, role="agent", device=None) for n in (0, 1)),
        *(RankSlot(rank=r, node=n, local_rank=1, role="trainer", device=gpu) for r, (n, gpu) in TRAINERS.items()),
    ),
    engines=tuple(EngineSlot(id=e, model="policy", nodes=(e // 2,), gpus=GPUS[e]) for e in RANKS),
)


class Mailbox:
    """Agents that do all they are told."""

    def __init__(self, can=(), story=None):
        self.connects, self.commits, self.story, self.failures = [], [], story, {}
        self._answers = [
            (0, m.EngineReady(engine=e, model="policy", can=can, num_ranks=ranks)) for e, ranks in RANKS.items()
        ]

    def send(self, rank, message):
        match message:
            case m.Restart():
                self.story.append(("restart", message.engines))
                return
            case m.Connect():
                self.connects.append((rank, message))
            case m.Commit():
                self.commits.append(message.digests)
            case m.Take():
                self.story.append(("take", message.handles, message.is_first, message.is_last))
        failures = self.failures.pop(len(self.story), {}) if isinstance(message, m.Take) else {}
        self._answers.append((rank, m.Reply(request=message.request, failures=failures)))

    def receive(self, timeout_s):
        return self._answers.pop(0) if self._answers else None


class Learner:
    def __init__(self, story=None):
        self.story, self.lent = story, 0

    def lend(self, command, readers, timeout_s):
        self.lent = 1 if command.is_first else self.lent + 1
        self.story.append(("lend", self.lent, dict(readers)))
        return {rank: c.Lent(handle=f"{rank}.{self.lent}" if rank in readers else "") for rank in TRAINERS}

    def take_back(self, timeout_s):
        self.story.append(("take back",))

    def open_group(self, name, world_size, timeout_s):
        return GroupAddress(name=name, host="h", port=1, world_size=world_size, backend="nccl")

    def join_group(self, name, timeout_s):
        return ()

    def close_group(self, name, timeout_s):
        pass

    def manifest(self, timeout_s):
        return Manifest(names=("a", "b", "c"), dtypes=("uint8",) * 3, shapes=((1,),) * 3, bucket_bytes=1)

    def push(self, command, timeout_s):
        return c.Pushed(digests={"a": "sum"} if command.digests else {})


def test_an_engine_of_several_ranks_has_as_many_in_a_weight_group():
    mailbox = Mailbox()
    fleet = Fleet(TOPOLOGY, mailbox)
    fleet.wait_engines(1.0)
    publisher = Publisher(fleet, Learner(), Sync(), Path("none"))
    assert publisher.publish(3, RANKS) == {0, 1, 2}
    assert [(rank, joined.ranks, joined.address.world_size) for rank, joined in mailbox.connects] == [
        (0, {0: 1}, 8),
        (0, {1: 3}, 8),
        (1, {2: 7}, 8),
    ]


@pytest.mark.parametrize(
    ("verify", "can", "digests"), [(True, ("digests",), {"a": "sum"}), (True, (), {}), (False, ("digests",), {})]
)
@pytest.mark.parametrize("channel", ["broadcast", "disk"])
def test_digests_are_asked_of_the_trainer_where_an_engine_compares_them(channel, verify, can, digests):
    mailbox = Mailbox(can)
    fleet = Fleet(TOPOLOGY, mailbox)
    fleet.wait_engines(1.0)
    Publisher(fleet, Learner(), Sync(channel=channel, verify=verify), Path("none")).publish(3, RANKS)
    assert mailbox.commits == [digests] * 2


def test_an_engine_that_is_lost_once_it_has_verified_does_not_count_as_serving():
    class Losing(Mailbox):
        def send(self, rank, message):
            super().send(rank, message)
            if isinstance(message, m.Commit) and 0 in message.engines:
                self._answers.append((rank, m.EngineDown(engine=0, reason="killed", restarts=1)))

    fleet = Fleet(TOPOLOGY, Losing())
    fleet.wait_engines(1.0)
    assert Publisher(fleet, Learner(), Sync(), Path("none")).publish(3, RANKS) == {1, 2} == fleet.alive()


def test_of_a_broken_push_those_that_somebody_else_runs_are_blamed_first(monkeypatch):
    """Their refusal breaks the group for the others too, and one of the run's own would be started anew for nothing."""

    class Refusing(Mailbox):
        def send(self, rank, message):
            super().send(rank, message)
            if isinstance(message, m.Receive) and len(self.connects) == 3:
                failures = dict.fromkeys(message.engines, "status 400")
                self._answers[-1] = (rank, m.Reply(request=message.request, failures=failures))

    monkeypatch.setattr(publish, "WORD_S", 0.0)
    engines = (*TOPOLOGY.engines[:2], msgspec.structs.replace(TOPOLOGY.engines[2], url="http://elsewhere:7"))
    mailbox = Refusing(story=[])
    fleet = Fleet(msgspec.structs.replace(TOPOLOGY, engines=engines), mailbox)
    fleet.wait_engines(1.0)
    assert Publisher(fleet, Learner(), Sync(), Path("none")).publish(3, RANKS) == {0, 1}
    assert mailbox.story == [("restart", (2,))]


class Meeting(Mailbox, Learner):
    """Agents and trainer rank 0 beside them: engines that join wait until all have come, or the group is closed."""

    comes_after = {0: 1, 1: 3}
    """How often the trainer rank has looked when an engine comes."""

    def __init__(self, refuses_after=0):
        """
        Args:
            refuses_after: of engine 2, in looks likewise; 0: it never answers.
        """
        Mailbox.__init__(self, story=[])
        self.looked, self.refuses_after, self.waiting = 0, refuses_after, {}

    def send(self, rank, message):
        if isinstance(message, m.Connect):
            self.connects.append((rank, message))
            self.waiting |= dict.fromkeys(message.ranks, (rank, message))
        else:
            super().send(rank, message)

    def end(self, engine, *, reason=""):
        rank, message = self.waiting.pop(engine)
        failures = {engine: reason} if reason else {}
        self._answers.append((rank, m.Reply(request=message.request, failures=failures)))

    def open_group(self, name, world_size, timeout_s):
        self.looked = 0
        return super().open_group(name, world_size, timeout_s)

    def join_group(self, name, timeout_s):
        self.looked += 1
        self.story.append("look")
        if 2 in self.waiting and self.looked == self.refuses_after:
            self.end(2, reason="status 400")
        ranks = self.ranks
        to_come = {e for e in ranks if self.looked < self.comes_after.get(e, math.inf)}
        if not to_come:
            for engine in list(self.waiting):
                self.end(engine)
        return tuple(r for e in to_come for r in range(ranks[e], ranks[e] + RANKS[e]))

    @property
    def ranks(self):
        """Of the newest group, the first of each engine."""
        newest = self.connects[-1][1].address
        return {e: r for _, told in self.connects if told.address == newest for e, r in told.ranks.items()}

    def close_group(self, name, timeout_s):
        self.story.append("close")
        for engine in list(self.waiting):
            self.end(engine, reason="the store is gone")


@pytest.mark.parametrize("refuses", [1, 4])
def test_one_that_refuses_to_join_is_left_out_as_soon_as_the_others_have_come(monkeypatch, refuses):
    """They come after three looks, and to close the group before would leave them at a closed door."""
    mailbox = Meeting(refuses)
    fleet = Fleet(TOPOLOGY, mailbox)
    fleet.wait_engines(1.0)
    monkeypatch.setattr(publish, "WORD_S", 600.0)  # nobody is waited for to find out whose fault it was
    assert Publisher(fleet, mailbox, Sync(), Path("none")).publish(3, RANKS) == {0, 1}
    looks = max(3, refuses)
    assert mailbox.story == [*["look"] * looks, "close", ("restart", (2,)), *["look"] * 3]
    assert mailbox.ranks == {0: 1, 1: 3}


def test_one_that_neither_joins_nor_refuses_is_left_out_when_its_time_is_over():
    mailbox = Meeting()
    fleet = Fleet(TOPOLOGY, mailbox)
    fleet.wait_engines(1.0)
    assert Publisher(fleet, mailbox, Sync(timeout_s=0.05), Path("none")).publish(3, RANKS) == {0, 1}
    restarts = [told for told in mailbox.story if told[0] == "restart"]
    assert restarts == [("restart", (2,))], "those that waited for it are well"


def test_handles_go_to_the_engine_rank_on_the_device_and_the_next_bucket_is_put_together_meanwhile():
    story = []
    mailbox = Mailbox(("handles",), story)
    fleet = Fleet(TOPOLOGY, mailbox)
    fleet.wait_engines(1.0)
    publisher = Publisher(fleet, Learner(story), Sync(channel="ipc"), Path("none"))
    mailbox.failures[6] = {1: "it does not fit"}  # at the second bucket
    assert publisher.publish(3, RANKS) == {0, 2}
    readers = dict.fromkeys((10, 11, 12, 13, 14, 15, 20), 1)

    def take(bucket, engines):
        mine = {0: (10, 11), 1: (12, 13, 14, 15), 2: (20,)}
        handles = {e: tuple(f"{rank}.{bucket}" for rank in mine[e]) for e in engines}
        return ("take", handles, bucket == 1, bucket == 3)

    assert story == [
        ("lend", 1, readers),
        *(take(1, (0, 1)), take(1, (2,))),
        ("lend", 2, readers),
        *(take(2, (0, 1)), take(2, (2,))),
        ("lend", 3, readers),
        *(take(3, (0,)), take(3, (2,))),
        ("take back",),
        ("restart", (1,)),
    ]
