"""Who gets which rank of a weight group, where an engine is several ranks of it."""

from pathlib import Path

from runtime.comm import messages as m
from runtime.config import Sync
from runtime.fleet import Fleet
from runtime.publish import Publisher
from runtime.topology import EngineSlot, RankSlot, Topology
from runtime.types import GroupAddress, Manifest

RANKS = {0: 2, 1: 4, 2: 1}
"""By engine; the first two stand on one node."""
TOPOLOGY = Topology(
    nodes=("a", "b"),
    ranks=tuple(RankSlot(rank=n, node=n, local_rank=0, role="agent", device=None) for n in (0, 1)),
    engines=tuple(EngineSlot(id=e, model="policy", nodes=(e // 2,), gpus=()) for e in RANKS),
)


class Mailbox:
    """Agents that do all they are told."""

    def __init__(self):
        self.connects = []
        self._answers = [
            (0, m.EngineReady(engine=e, model="policy", can=(), num_ranks=ranks)) for e, ranks in RANKS.items()
        ]

    def send(self, rank, message):
        if isinstance(message, m.Connect):
            self.connects.append((rank, message))
        self._answers.append((rank, m.Reply(request=message.request)))

    def receive(self, timeout_s):
        return self._answers.pop(0) if self._answers else None


class Learner:
    def open_group(self, name, world_size, timeout_s):
        return GroupAddress(name=name, host="h", port=1, world_size=world_size, backend="nccl")

    def join_group(self, name, timeout_s):
        pass

    def manifest(self, timeout_s):
        return Manifest(names=(), dtypes=(), shapes=(), bucket_bytes=1)

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
