"""An agent whose engines take turns with trainer ranks: asleep, woken, and lost meanwhile."""

import asyncio

from runtime.comm.messages import EngineDown, EngineReady, SleepEngines, WakeEngines, Work
from runtime.errors import EngineLost
from runtime.rollout.spawning import Exited
from tests.unit.agents import drive, finished, lease, streams

__all__ = ["drive"]


async def sleep(bench, engines=(0, 1)):
    return (await bench.ask(SleepEngines, engines=engines)).failures


async def wake(bench, *, serve, engines=(0, 1)):
    return (await bench.ask(WakeEngines, engines=engines, serve=serve)).failures


def kill(bench, start):
    bench.spawner.exits.put_nowait(Exited(bench.spawner.names[start - 1], -9))


def test_engines_are_started_when_they_are_first_woken(drive):
    async def scenario(bench):
        await asyncio.sleep(0.1)
        assert bench.spawner.names == []
        assert await sleep(bench) == {} == await wake(bench, serve=False)
        await asyncio.sleep(0.1)
        assert bench.spawner.names == []
        assert await wake(bench, serve=True) == {}
        await bench.started()

    drive(scenario, sleeps=True)


def test_running_samples_are_cut_short_and_go_on_after_it(drive):
    async def undisturbed(bench):
        await bench.started()
        bench.mailbox.tell(Work(leases=tuple(lease(n) for n in range(4))))
        expected.update(streams(await finished(bench, 4)))

    async def scenario(bench):
        await bench.started()
        for i in (1, 2):
            bench.engine(i).delay_s = 5.0
        bench.mailbox.tell(Work(leases=tuple(lease(n) for n in range(4))))
        await asyncio.sleep(0.1)
        assert await sleep(bench) == {}
        assert bench.engine(1).sleeps and bench.engine(2).sleeps
        calls = sum(len(bench.engine(i).calls) for i in (1, 2))
        await asyncio.sleep(0.1)
        assert sum(len(bench.engine(i).calls) for i in (1, 2)) == calls > 0, "nothing is asked of who sleeps"
        for i in (1, 2):
            bench.engine(i).delay_s = 0.0
        assert await wake(bench, serve=False) == {} == await wake(bench, serve=True)
        assert await bench.publish(1) == {}
        assert streams(await finished(bench, 4)) == expected

    expected = {}
    drive(undisturbed)
    drive(scenario)


def test_an_engine_that_dies_asleep_is_started_when_it_is_to_serve(drive):
    async def scenario(bench):
        await bench.started()
        assert await sleep(bench) == {}
        kill(bench, 2)
        assert "signal 9" in (await bench.until(EngineDown)).reason
        assert await wake(bench, serve=False) == {}
        await asyncio.sleep(0.1)
        assert len(bench.spawner.names) == 2, "its memory is another's"
        assert await wake(bench, serve=True) == {}
        ready = await bench.until(EngineReady)
        assert await bench.publish(1, engines=(0, ready.engine)) == {}

    drive(scenario)


def test_an_engine_that_is_being_started_is_waited_for(drive):
    async def scenario(bench):
        await bench.started()
        bench.kind.prepare = lambda engine: setattr(engine, "answers", False)
        kill(bench, 1)
        await bench.until(EngineDown)
        await asyncio.sleep(0.1)
        falls_asleep = asyncio.create_task(sleep(bench))
        await asyncio.sleep(0.2)
        assert not falls_asleep.done()
        bench.engine(3).answers = True
        assert await falls_asleep == {}
        assert bench.engine(3).sleeps

    drive(scenario)


def test_memory_that_an_engine_does_not_give_is_free_when_the_answer_comes(drive):
    """For trainer ranks take it then."""

    async def refuse():
        raise EngineLost("POST /release_memory_occupation: status 500")

    async def scenario(bench):
        await bench.started()
        bench.engine(2).sleep = refuse
        failures = await sleep(bench)
        assert failures.keys() == {1} and "status 500" in failures[1]
        assert bench.spawner.stopped == bench.spawner.names[1:2]
        assert await wake(bench, serve=False) == {} == await wake(bench, serve=True)
        assert (await bench.until(EngineReady)).engine == 1

    drive(scenario)
