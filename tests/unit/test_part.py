"""An engine that stands on two nodes: who is told what, and that no part outlives the engine."""

import asyncio

import pytest

from runtime.comm.messages import EngineBegun, EngineDown, EngineReady, PartDown
from runtime.errors import EngineLost
from runtime.fleet import Fleet
from runtime.rollout import keeper
from runtime.rollout.keeper import Keeper
from runtime.rollout.part import Part
from runtime.rollout.pool import Pool
from runtime.rollout.start import EngineStart
from runtime.topology import EngineSlot, RankSlot, Topology
from tests.unit.fakes import FakeKind, FakeSpawner, engine_settings
from tests.unit.test_fleet import Mailbox


class Kind(FakeKind):
    def command(self, launch):
        return ["engine", f"{launch.node_rank}/{launch.num_nodes}", launch.address]


class Spawner(FakeSpawner):
    async def start(self, name, argv, env, log, host):
        self.argv = argv
        if self.refuse:
            raise EngineLost("cannot start engine")
        return await super().start(name, argv, env, log, host)


def made(folder, what, node_rank, told, *between):
    start = EngineStart(id=7, model="policy", path="m", num_ranks=2, num_nodes=2, node_rank=node_rank, env={})
    spawner = Spawner()
    return what(start, engine_settings(folder), Kind(), spawner, *between, told.append), spawner


def test_a_part_is_of_one_start_of_the_engine_and_says_when_it_ends(tmp_path):
    async def scenario():
        told = []
        part, spawner = made(tmp_path, Part, 1, told)
        await part.join(EngineBegun(engine=7, start=1, address="there:1"))
        assert (spawner.names, spawner.argv) == (["engine-7.1-node1"], ["engine", "1/2", "there:1"])
        for _ in range(2):
            part.exited("engine-7.1-node1", -9)
        assert [(d.engine, d.start) for d in told] == [(7, 1)] and "was killed by signal 9" in told.pop().reason
        await part.join(EngineBegun(engine=7, start=4, address="there:2"))
        part.exited("engine-7.1-node1", -15)
        part.exited("engine-3.2-node1", -9)
        assert spawner.argv[2] == "there:2"
        await part.join(EngineBegun(engine=7, start=5, address="there:3"))
        assert "engine-7.2-node1" in spawner.stopped and not told, "what was ended on purpose is no news"
        part.exited("engine-7.2-node1", -15)
        await part.end()
        part.exited("engine-7.3-node1", -15)
        assert "engine-7.3-node1" in spawner.stopped and not told
        spawner.refuse = 1
        await part.join(EngineBegun(engine=7, start=6, address="there:4"))
        assert told == [PartDown(engine=7, start=6, reason="cannot start engine")]

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_the_loss_of_a_part_is_the_loss_of_this_start_of_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "PROBE_S", 0.05)
    monkeypatch.setattr(keeper, "EXIT_S", 0.02)

    async def scenario():
        told = []
        kept, spawner = made(tmp_path, Keeper, 0, told, Pool(5.0))
        keeping = asyncio.create_task(kept.keep())

        async def until(number):
            while len(told) < number:
                await asyncio.sleep(0.01)

        await until(2)
        assert [type(t) for t in told] == [EngineBegun, EngineReady] and told[0].start == 1
        kept.part_down(1, "its part is gone")
        await until(5)
        assert told[2] == EngineDown(engine=7, reason="its part is gone", restarts=1)
        assert [type(t) for t in told[3:]] == [EngineBegun, EngineReady] and told[3].start == 2
        assert spawner.stopped == ["engine-7.1"]
        kept.part_down(1, "word of it comes again")
        await asyncio.sleep(0.2)
        assert len(told) == 5
        keeping.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize("nodes", [(1, 0, 2), (1,)])
def test_the_controller_passes_word_on_between_the_nodes_of_an_engine(nodes):
    ranks = tuple(RankSlot(rank=10 * n, node=n, local_rank=0, role="agent", device=None) for n in range(3))
    engine = EngineSlot(id=0, model="policy", nodes=nodes, gpus=())
    mailbox = Mailbox()
    fleet = Fleet(Topology(nodes=("a", "b", "c"), ranks=ranks, engines=(engine,)), mailbox)
    begun, down = (
        EngineBegun(engine=0, start=1, address="b:1"),
        EngineDown(engine=0, reason="its part is gone", restarts=1),
    )
    part = PartDown(engine=0, start=1, reason="killed")
    for message in (begun, down, part):
        mailbox.inbox.append((10, message))
        fleet.pump(0.0)
    passed_on = [(10 * node, message) for message in (begun, down) for node in nodes[1:]]
    assert mailbox.sent == [*passed_on, (10, part)]
