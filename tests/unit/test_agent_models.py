"""An agent with engines of another model, which rewards ask, and with engines that somebody else runs."""

import asyncio

from runtime.comm.messages import EngineDown, EngineReady, SleepEngines, WakeEngines, Work
from runtime.errors import EngineLost
from runtime.rollout import external
from runtime.rollout.spawning import Exited
from tests.unit.agents import drive, finished, lease

__all__ = ["drive"]

JUDGE = ("judge", "")
ADDRESS = "http://elsewhere:7"


async def ready(bench, engines):
    """Until these answer; the policy's get weights."""
    models = {}
    while models.keys() != set(engines):
        told = await bench.until(EngineReady)
        models[told.engine] = told.model
    policies = tuple(sorted(e for e, model in models.items() if model == "policy"))
    assert await bench.publish(0, policies) == {}
    return models


def judge_of(bench):
    """The engine of the judge: the one that no weights were pushed to."""
    (engine,) = [e for e in bench.kind.engines.values() if e.version == -1]
    return engine


def judged(number, **fields):
    return lease(number, dataset="judged", **fields)


def rewards(done):
    return {f.group.lease: [s.reward for s in f.group.samples] for f in done}


def test_a_judge_is_asked_as_soon_as_it_answers_and_nothing_is_pushed_to_it(drive):
    async def scenario(bench):
        assert await ready(bench, (0, 1)) == {0: "policy", 1: "judge"}
        bench.mailbox.tell(Work(leases=(judged(1), lease(2))))
        done = await finished(bench, 2)
        assert all(reward > 0 for reward in rewards(done)[1])
        judge = judge_of(bench)
        assert len(judge.calls) == 4 and len({params.seed for _, params, _ in judge.calls}) == 4
        assert {params.temperature for _, params, _ in judge.calls} == {0.0}
        assert not judge.groups and not judge.scored

    drive(scenario, num_engines=1, others=[JUDGE])


def test_a_judge_that_is_killed_is_asked_again_when_it_is_back(drive):
    async def undisturbed(bench):
        await ready(bench, (0, 1))
        bench.mailbox.tell(Work(leases=(judged(1), judged(2))))
        expected.update(rewards(await finished(bench, 2)))

    async def scenario(bench):
        await ready(bench, (0, 1))
        judge_of(bench).faults = [None, None, *["hangs"] * 6]
        bench.mailbox.tell(Work(leases=(judged(1), judged(2))))
        await asyncio.sleep(0.2)
        bench.spawner.exits.put_nowait(Exited("engine-1.1", -9))
        down = await bench.until(EngineDown)
        assert (down.engine, down.reason) == (1, "the engine was killed by signal 9")
        assert (await bench.until(EngineReady)).engine == 1
        assert rewards(await finished(bench, 2)) == expected

    expected = {}
    drive(undisturbed, num_engines=1, others=[JUDGE])
    drive(scenario, num_engines=1, others=[JUDGE])


def test_a_judge_sleeps_until_engines_have_all_their_memory_and_needs_no_push_then(drive):
    async def scenario(bench):
        await ready(bench, (0, 1))
        judge = judge_of(bench)
        assert (await bench.ask(SleepEngines, engines=(0, 1))).failures == {}
        assert judge.sleeps
        assert (await bench.ask(WakeEngines, engines=(0, 1), serve=False)).failures == {}
        bench.mailbox.tell(Work(leases=(judged(1),)))
        await bench.publish(1, (0,))
        await asyncio.sleep(0.1)
        assert judge.sleeps and not judge.calls
        assert (await bench.ask(WakeEngines, engines=(0, 1), serve=True)).failures == {}
        (done,) = await finished(bench, 1)
        assert all(s.reward for s in done.group.samples)

    drive(scenario, num_engines=1, others=[JUDGE])


def test_a_judge_that_does_not_wake_is_started_anew(drive):
    async def stuck(*, serve):
        raise EngineLost("out of memory")

    async def scenario(bench):
        await ready(bench, (0, 1))
        judge = judge_of(bench)
        judge.wake = stuck
        assert (await bench.ask(SleepEngines, engines=(1,))).failures == {}
        assert (await bench.ask(WakeEngines, engines=(1,), serve=True)).failures == {1: "out of memory"}
        assert (await bench.until(EngineDown)).reason == "out of memory"
        assert (await bench.until(EngineReady)).engine == 1
        bench.mailbox.tell(Work(leases=(judged(1),)))
        await finished(bench, 1)
        assert not judge.calls

    drive(scenario, num_engines=1, others=[JUDGE])


def test_a_judge_that_somebody_else_runs_takes_no_turns(drive):
    async def scenario(bench):
        assert (await bench.until(EngineReady)).model == "judge"
        assert not bench.engine(7).taken_over, "others may be asking it"

    drive(scenario, num_engines=0, others=[("judge", ADDRESS)], sleeps=True)


def test_a_question_without_an_engine_fails_its_group_alone(drive):
    async def scenario(bench):
        await ready(bench, (0,))
        bench.mailbox.tell(Work(leases=(judged(1), lease(2))))
        groups = {f.group.lease: f.group for f in await finished(bench, 2)}
        assert all(s.reward is not None for s in groups[2].samples)
        (reason,) = {s.reason for s in groups[1].samples}
        assert "a question to the judge waited 0.2 s for any engine" in reason

    drive(scenario, num_engines=1, start_s=0.2)


def test_an_engine_that_somebody_else_runs_is_taken_whenever_it_answers(drive, monkeypatch):
    async def scenario(bench):
        bench.kind.prepare = lambda engine: setattr(engine, "answers", False)
        await asyncio.sleep(0.3)
        assert bench.spawner.names == [] and not bench.mailbox.seen[EngineReady]
        bench.engine(7).answers = True
        await ready(bench, (0,))
        bench.mailbox.tell(Work(leases=(lease(1),)))
        await finished(bench, 1)
        taken = bench.engine(7).taken_over
        assert taken > 0, "of what an agent before may have left"
        bench.engine(7).faults = ["dies"]
        bench.mailbox.tell(Work(leases=(lease(2),)))
        down = await bench.until(EngineDown)
        assert (down.engine, down.reason) == (0, "connection reset")
        await asyncio.sleep(0.3)
        bench.engine(7).answers = True
        await ready(bench, (0,))
        await finished(bench, 1)
        assert bench.spawner.names == []

    monkeypatch.setattr(external, "POLL_S", 0.02)
    drive(scenario, num_engines=0, others=[("policy", ADDRESS)], start_s=0.2)
