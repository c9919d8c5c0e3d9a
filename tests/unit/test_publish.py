"""Which part of a push goes where, and when, where an engine is several ranks."""

from pathlib import Path

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
        self.connects, self.story, self.failures = [], story, {}
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
        return {rank: m.Lent(handle=f"{rank}.{self.lent}" if rank in readers else "") for rank in TRAINERS}

    def take_back(self, timeout_s):
        self.story.append(("take back",))

    def open_group(self, name, world_size, timeout_s):
        return GroupAddress(name=name, host="h", port=1, world_size=world_size, backend="nccl")

    def join_group(self, name, timeout_s):
        pass

    def manifest(self, timeout_s):
        return Manifest(names=("a", "b", "c"), dtypes=("uint8",) * 3, shapes=((1,),) * 3, bucket_bytes=1)

    def push(self, command, timeout_s):
        return m.Pushed(digests={})


def test_an_engine_of_several_ranks_has_as_many_in_a_weight_group():
    mailbox = Mailbox()
    fleet = Fleet(TOPOLOGY, mailbox)
    fleet.wait_engines(1.0)
    publisher = Publisher(fleet, Learner(), Sync(), Path("none"))
    assert publisher.publish(3, RANKS) == {0, 1, 2}
    assert [(rank, c.ranks, c.address.world_size) for rank, c in mailbox.connects] == [
        (0, {0: 1, 1: 3}, 8),
        (1, {2: 7}, 8),
    ]


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
