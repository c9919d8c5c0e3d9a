"""An agent from Hello to StopAgent, and its engines lost and replaced."""

import asyncio
import re

import numpy as np
import pytest

from runtime.comm.messages import (
    AskJournal,
    Commit,
    Connect,
    Disconnect,
    EngineDown,
    EngineReady,
    Fault,
    Hello,
    Journal,
    Receive,
    Restart,
    Work,
)
from runtime.errors import ConfigError, EngineLost, PeerLost
from runtime.rollout.spawning import Exited
from tests.unit.agents import GROUP, MANIFEST, drive, finished, lease, streams
from tests.unit.fakes import CANARY

__all__ = ["drive"]


def test_from_hello_to_stop(drive):
    async def scenario(bench):
        hello = await bench.until(Hello)
        assert (hello.node, hello.rank) == (1, 3)
        bench.mailbox.tell(Work(leases=(lease(2), lease(1, purpose="eval"))))
        for _ in range(2):
            ready = await bench.until(EngineReady)
            assert (ready.model, ready.can) == ("policy", ("seed", "spans", "digests"))
        await asyncio.sleep(0.05)
        assert not any(bench.engine(i).calls for i in (1, 2)), "nothing is sampled before version 0 is committed"
        await bench.publish(0)
        done = {f.group.lease: f for f in await finished(bench, 2)}
        assert {n: f.purpose for n, f in done.items()} == {1: "eval", 2: "train"}
        for f in done.values():
            assert [s.index for s in f.group.samples] == [0, 1, 2, 3]
            assert all(s.reward in (0.0, 1.0) for s in f.group.samples)
            assert f.seconds > 0

    drive(scenario)


def test_nothing_is_sampled_while_weights_change(drive):
    async def scenario(bench):
        await bench.started()
        await bench.ask(Receive, source=GROUP.name, manifest=MANIFEST, version=1, engines=(0, 1))
        bench.mailbox.tell(Work(leases=(lease(1),)))
        await asyncio.sleep(0.05)
        assert not any(bench.engine(i).calls for i in (1, 2))
        await bench.ask(Commit, version=1, digests={}, engines=(0, 1))
        (done,) = await finished(bench, 1)
        assert {s.versions for s in done.group.samples} == {((3, 1),)}
        await bench.ask(Disconnect, group=GROUP.name, engines=(0, 1))
        assert [bench.engine(i).groups for i in (1, 2)] == [[], []]

    drive(scenario)


def test_other_bytes_are_named_and_not_sampled_with(drive):
    async def scenario(bench):
        await bench.until(EngineReady)
        await bench.until(EngineReady)
        bench.engine(2).held["layers.0.up"] = "flipped"
        del bench.engine(2).held["embed"]
        assert await bench.publish(3) == {1: "holds other bytes than were sent in tensor embed, layers.0.up"}
        bench.engine(1).delay_s = 0.05
        bench.mailbox.tell(Work(leases=tuple(lease(n, num_samples=1) for n in range(4))))
        await finished(bench, 4)
        assert len(bench.engine(1).calls) == 4
        assert not bench.engine(2).calls

    drive(scenario)


@pytest.mark.parametrize(
    ("spoil", "how"),
    [
        ({"logprobs": CANARY.logprobs - 0.5}, "keeps what old weights computed: .* up to 0.5 off"),
        ({"logprobs": CANARY.logprobs * 1.2}, "keeps what old weights computed: .* up to 0.6 off"),
        ({"logprobs": CANARY.logprobs * np.nan}, "keeps what .* up to nan off"),
        ({"logprobs": CANARY.logprobs - np.array([0, 0.5, 0, 0])}, "holds other weights than were sent: .* up to 0.5"),
        ({"stale": 2e-4}, "keeps what old weights computed"),
    ],
)
def test_an_engine_that_is_off_the_canary_is_told_and_not_sampled_with(drive, spoil, how):
    async def scenario(bench):
        await bench.until(EngineReady)
        await bench.until(EngineReady)
        for name, value in spoil.items():
            setattr(bench.engine(2), name, value)
        mismatched = await bench.publish(3, digests={})
        assert mismatched.keys() == {1} and re.match(how, mismatched[1]), mismatched
        assert bench.engine(1).scored == [2, 0]
        bench.mailbox.tell(Work(leases=(lease(1),)))
        await finished(bench, 1)
        assert not bench.engine(2).calls

    drive(scenario)


def test_orders_fail_by_engine(drive):
    async def scenario(bench):
        await bench.started()
        bench.engine(2).broken_group = "rank 2 waited 5 s for rank 0"
        reply = await bench.ask(Connect, address=GROUP, ranks={0: 1, 1: 2})
        assert reply.failures == {1: "rank 2 waited 5 s for rank 0"}
        assert not bench.mailbox.seen[EngineDown], "a broken group is no lost engine"

    drive(scenario)


def test_an_engine_that_dies_is_replaced_and_nothing_is_lost_or_doubled(drive):
    """The only engine is killed in mid-generation; the groups are those of an undisturbed agent."""

    async def undisturbed(bench):
        await bench.started((0,))
        bench.mailbox.tell(Work(leases=tuple(lease(n) for n in range(5))))
        expected.update(streams(await finished(bench, 5)))

    async def disturbed(bench):
        await bench.started((0,))
        bench.engine(1).faults = [None] * 6 + ["hangs"] * 20
        bench.mailbox.tell(Work(leases=tuple(lease(n) for n in range(5))))
        done = await finished(bench, 1)
        bench.spawner.exits.put_nowait(Exited("engine-0.1", -9))
        down = await bench.until(EngineDown)
        assert (down.engine, down.reason, down.restarts) == (0, "the engine was killed by signal 9", 1)
        await bench.until(EngineReady)
        assert not bench.engine(2).calls, "it holds no weights yet"
        assert await bench.publish(0, (0,)) == {}
        done += await finished(bench, 4)
        assert streams(done) == expected
        assert bench.spawner.names == ["engine-0.1", "engine-0.2"]

    expected = {}
    drive(undisturbed, num_engines=1)
    drive(disturbed, num_engines=1)


@pytest.mark.parametrize("answer", [False, None], ids=["no answer", "it is not well"])
def test_a_hung_engine_counts_as_lost(drive, answer):
    async def scenario(bench):
        await bench.started()
        bench.engine(1).answers = answer
        bench.engine(1).faults = ["hangs"] * 9
        bench.mailbox.tell(Work(leases=(lease(1),)))
        down = await bench.until(EngineDown)
        assert down.engine == 0
        assert "has not answered for" in down.reason
        await finished(bench, 1)  # by the other engine
        assert (await bench.until(EngineReady)).engine == 0

    drive(scenario)


def test_an_engine_that_fails_at_a_completion_is_restarted(drive):
    async def scenario(bench):
        await bench.started()
        bench.engine(1).faults = ["dies"]
        bench.mailbox.tell(Work(leases=(lease(1),)))
        down = await bench.until(EngineDown)
        assert (down.engine, down.reason) == (0, "connection reset")
        await finished(bench, 1)
        assert "engine-0.1" in bench.spawner.stopped

    drive(scenario)


def test_restart_by_order(drive):
    async def scenario(bench):
        await bench.started()
        bench.mailbox.tell(Restart(engines=(1,), reason="left out of a push"))
        bench.mailbox.tell(Restart(engines=(1,), reason="again"))
        assert (await bench.until(EngineDown)).reason == "left out of a push"
        assert (await bench.until(EngineReady)).engine == 1
        assert bench.spawner.names.count("engine-1.2") == 1
        assert len(bench.mailbox.seen[EngineDown]) == 1

    drive(scenario)


def test_an_engine_that_is_being_started_is_not_restarted(drive):
    async def scenario(bench):
        await bench.started()
        bench.kind.prepare = lambda engine: setattr(engine, "answers", False)
        bench.mailbox.tell(Restart(engines=(1,), reason="left out of a push"))
        await bench.until(EngineDown)
        await asyncio.sleep(0.1)
        bench.mailbox.tell(Restart(engines=(1,), reason="left out of the next push"))
        await asyncio.sleep(0.1)
        bench.engine(3).answers = True
        assert (await bench.until(EngineReady)).engine == 1
        assert bench.spawner.names == ["engine-0.1", "engine-1.1", "engine-1.2"]

    drive(scenario)


def test_restarts_are_bounded_unless_groups_finish(drive):
    async def scenario(bench):
        await bench.started((0,))
        for i in range(2, 6):  # each restart with a group in between
            bench.mailbox.tell(Restart(engines=(0,), reason="a test"))
            assert (await bench.until(EngineDown)).restarts == 1
            await bench.until(EngineReady)
            await bench.publish(0, (0,))
            bench.mailbox.tell(Work(leases=(lease(i),)))
            await finished(bench, 1)
        bench.spawner.refuse = 9
        bench.mailbox.tell(Restart(engines=(0,), reason="a test"))
        fault = await bench.mailbox.until(Fault)
        assert fault.kind == "engine_lost"
        assert "lost 3 times without a finished group" in fault.message
        assert "exited with code 3" in fault.message
        assert "no such model" in fault.message, "the end of its log"
        assert [d.restarts for d in bench.mailbox.seen[EngineDown][-3:]] == [1, 2, 3]
        with pytest.raises(EngineLost):
            await bench.agent

    drive(scenario, stops=False, num_engines=1)


def test_one_that_refuses_its_config_is_not_started_again(drive):
    """Until it was up once: then what it misses is a trouble of its node."""

    async def refused(bench):
        bench.spawner.refuse, bench.spawner.code = 9, 2
        fault = await bench.mailbox.until(Fault)
        assert fault.kind == "config" and "exited with code 2" in fault.message and "no such model" in fault.message
        assert bench.spawner.names == ["engine-0.1"]
        with pytest.raises(ConfigError):
            await bench.agent

    async def was_up(bench):
        await bench.started((0,))
        bench.spawner.refuse, bench.spawner.code = 1, 2
        bench.mailbox.tell(Restart(engines=(0,), reason="a test"))
        await bench.until(EngineReady)
        assert bench.spawner.names == ["engine-0.1", "engine-0.2", "engine-0.3"]

    drive(refused, stops=False, num_engines=1)
    drive(was_up, num_engines=1)


def test_an_engine_that_never_answers_is_bounded(drive):
    async def scenario(bench):
        bench.kind.prepare = lambda engine: setattr(engine, "answers", False)
        fault = await bench.mailbox.until(Fault)
        assert "did not answer within 0.1 s" in fault.message
        with pytest.raises(EngineLost):
            await bench.agent

    drive(scenario, stops=False, num_engines=1, start_s=0.1)


def test_journals(drive):
    """What was sampled goes on in a lease that has it as its journal."""

    async def scenario(bench):
        await bench.started((0,))
        bench.engine(1).faults = [None, None, "hangs", "hangs"]
        bench.mailbox.tell(Work(leases=(lease(1),)))
        await asyncio.sleep(0.1)
        bench.mailbox.tell(AskJournal(request=9))
        journal = await bench.until(Journal)
        assert journal.request == 9
        assert [len(made) for made in journal.journals[1]] == [1, 1, 0, 0]
        bench.mailbox.tell(Work(leases=(lease(2, journal=journal.journals[1]),)))
        (done,) = await finished(bench, 1)
        assert len(bench.engine(1).calls) == 6
        tokens = [s.tokens[3:].tolist() for s in done.group.samples[:2]]
        assert tokens == [made[0].tokens.tolist() for made in journal.journals[1][:2]]
        bench.mailbox.tell(AskJournal(request=10))
        assert (await bench.until(Journal)).journals.keys() == {1}, "what is finished is forgotten"

    drive(scenario, num_engines=1)


def test_leases_run_in_order_and_no_more_than_allowed(drive):
    async def scenario(bench):
        await bench.started((0,))
        bench.engine(1).delay_s = 0.02
        bench.mailbox.tell(Work(leases=tuple(lease(n) for n in (5, 3, 4, 1, 2))))
        order = [f.group.lease for f in await finished(bench, 5)]
        assert order == [1, 2, 3, 4, 5]
        assert [session for _, _, session in bench.engine(1).calls[:8]] == ["math:1"] * 4 + ["math:2"] * 4

    drive(scenario, num_engines=1)


def test_a_bug_ends_the_agent_with_a_fault(drive):
    async def scenario(bench):
        await bench.started()
        bench.mailbox.tell(Work(leases=(lease(1, dataset="unknown"), lease(2))))
        bench.mailbox.tell(Restart(engines=(99,), reason="no such engine"))
        fault = await bench.mailbox.until(Fault)
        assert (fault.node, fault.kind) == (1, "bug")
        assert "99" in fault.message
        assert "agent.py" in fault.traceback
        with pytest.raises(KeyError):
            await bench.agent
        assert set(bench.spawner.stopped) == {"engine-0.1", "engine-1.1"}

    drive(scenario, stops=False)


def test_a_lost_controller_ends_the_agent(drive):
    async def scenario(bench):
        async def gone():
            raise PeerLost("the controller has been silent for 60 s")

        await bench.started()
        bench.mailbox.next = gone
        bench.mailbox.tell(AskJournal(request=1))
        with pytest.raises(PeerLost):
            await asyncio.wait_for(bench.agent, 5)
        assert set(bench.spawner.stopped) == {"engine-0.1", "engine-1.1"}

    drive(scenario, stops=False)
