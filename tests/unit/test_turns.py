"""Colocated mode: trainer ranks and engines take turns, whatever engine dies whenever, asleep, waking or serving.

Loop, fleet, learner, publisher and turns are the real ones; agent, engines and trainer rank are played here, and refuse
whatever would need memory that they do not have then.
"""

from collections import deque
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import learner
from runtime.comm import commands as c
from runtime.comm import messages as m
from runtime.config import Sync
from runtime.fleet import Fleet
from runtime.learner import Learner
from runtime.publish import Publisher
from runtime.topology import EngineSlot, RankSlot, Topology
from runtime.turns import Turns
from runtime.types import GroupAddress, Manifest
from tests.tools import ledger
from tests.unit.test_buffer import finished
from tests.unit.test_loop import end, lines, make_loop

MANIFEST = Manifest(names=("u", "v", "w"), dtypes=("float32",) * 3, shapes=((1,),) * 3, bucket_bytes=4)
DOWN = "is being started"


@dataclass
class Engine:
    """All of it is False or None while it is down."""

    is_up: bool = False
    weights: bool = False
    """Has memory for them."""
    cache: bool = False
    taken: int = 0
    """Buckets, from memory of the trainer rank."""
    received: int | None = None
    serves: int | None = None

    @property
    def sleeps(self):
        return not (self.weights or self.cache)


class Node:
    """Mailbox and world of the controller: one agent with two engines, and one trainer rank, on one GPU."""

    def __init__(self, rng, deaths, can=()):
        self.rng, self.deaths, self.can = rng, deaths, can
        self.engines = {0: Engine(), 1: Engine()}
        self.are_held = True
        self.group = set()
        self.trainer_is_awake = True
        self.inbox, self.answers, self.leases = deque(), deque(), []
        self.died_asleep = 0
        self.pushed = None
        self.lent = 0
        """Buckets of the push under way whose memory was shared."""

    # ---- the agent

    def send(self, rank, message):
        self.maybe_dies()
        match message:
            case m.SleepEngines():
                self.are_held = True
                self.carry_out(message, self.sleep)
            case m.WakeEngines():
                self.are_held = self.are_held and not message.serve
                self.carry_out(message, self.wake)
                self.start()
            case m.Connect():
                self.group = set(message.ranks)
                self.carry_out(message, lambda *_: None)
            case m.Receive():
                self.carry_out(message, self.receive_all)
            case m.Take():
                self.carry_out(message, self.take)
            case m.Commit():
                self.carry_out(message, self.commit)
            case m.Disconnect():
                self.carry_out(message, lambda *_: None)
            case m.Restart():
                for id in message.engines:
                    self.die(id, "told to")
            case m.Work():
                self.leases += message.leases
            case m.AskJournal():
                self.inbox.append(m.Journal(request=message.request, journals={x.number: () for x in self.leases}))
            case _:
                raise AssertionError(message)

    def carry_out(self, order, do):
        match order:
            case m.Connect():
                engines = order.ranks
            case m.Take():
                engines = order.handles
            case _:
                engines = order.engines
        failures = {}
        for id in engines:
            if self.engines[id].is_up:
                do(self.engines[id], order)
            elif not isinstance(order, m.SleepEngines | m.WakeEngines):
                failures[id] = DOWN
        self.inbox.append(m.Reply(request=order.request, failures=failures))

    def sleep(self, engine, order):
        engine.weights = engine.cache = False
        engine.received = engine.serves = None

    def wake(self, engine, order):
        engine.weights = True
        assert not self.trainer_is_awake or not order.serve, "there is memory for the cache of one and no trainer rank"
        engine.cache = engine.cache or order.serve

    def receive_all(self, engine, order):
        assert engine.weights and not engine.cache and self.trainer_is_awake
        engine.received = order.version

    def take(self, engine, order):
        assert engine.weights and not engine.cache and self.trainer_is_awake
        assert set(order.handles.values()) == {(str(self.lent),)}
        assert order.is_first == (self.lent == 1) and order.is_last == (self.lent == len(MANIFEST.names))
        engine.taken = 1 if order.is_first else engine.taken + 1
        engine.received = order.version if engine.taken == len(MANIFEST.names) else None

    def commit(self, engine, order):
        assert engine.received == order.version and engine.cache and not self.trainer_is_awake
        engine.serves = order.version

    def start(self):
        for id, engine in self.engines.items():
            if not engine.is_up and not self.are_held:
                assert not self.trainer_is_awake, "an engine starts only where there is memory for it"
                self.engines[id] = Engine(is_up=True, weights=True, cache=True)
                self.inbox.append(m.EngineReady(engine=id, model="policy", can=self.can))

    def die(self, id, reason):
        if self.engines[id].is_up:
            self.died_asleep += self.engines[id].sleeps
            self.engines[id] = Engine()
            self.inbox.append(m.EngineDown(engine=id, reason=reason, restarts=1))

    def maybe_dies(self):
        if self.rng.random() < self.deaths:
            self.die(int(self.rng.integers(2)), "killed")

    def receive(self, timeout_s):
        self.maybe_dies()
        if not self.inbox:
            self.start()
            serving = [e.serves for e in self.engines.values() if e.serves is not None]
            if serving and self.leases:
                lease = self.leases.pop(int(self.rng.integers(len(self.leases))))
                assert lease.version <= max(serving)
                group = finished(lease, (1.0, 0.0))
                self.inbox.append(m.Finished(group=group, purpose=lease.purpose, seconds=0.0))
        return (0, self.inbox.popleft()) if self.inbox else None

    # ---- the trainer rank

    def deal(self, messages, timeout_s):
        self.answers.append(self.obey(messages[1]))

    def poll(self, source, kind, timeout_s):
        return self.answers.popleft() if self.answers else None

    def obey(self, command):
        match command:
            case c.Wake():
                assert all(engine.sleeps for engine in self.engines.values())
                self.trainer_is_awake = True
            case c.AskSaved():
                return c.Saved(is_written=True)
            case c.Describe():
                return c.Described(manifest=MANIFEST)
            case c.OpenGroup():
                address = GroupAddress(name=command.name, host="", port=1, world_size=3, backend="gloo")
                return c.Opened(address=address)
            case c.JoinGroup() | c.Push() if any(not self.engines[id].is_up for id in self.group):
                return c.Failed(reason="PeerLost")
            case c.JoinGroup():
                return c.Joined()
            case c.Push():
                assert self.trainer_is_awake
                return c.Pushed(digests={})
            case c.Lend():
                assert self.trainer_is_awake and command.readers
                self.lent = 1 if command.is_first else self.lent + 1
                return c.Lent(handle=str(self.lent))
            case c.TakeBack():
                self.lent = 0
            case c.Sleep():
                assert not self.lent
                self.trainer_is_awake = False
            case c.Train():
                assert self.trainer_is_awake and all(engine.sleeps for engine in self.engines.values())
                return c.Trained(metrics={"loss": 0.0})
            case c.Save():
                assert self.trainer_is_awake
        return c.Done()


TOPOLOGY = Topology(
    nodes=("here",),
    ranks=(
        RankSlot(rank=0, node=0, local_rank=0, role="agent", device=None),
        RankSlot(rank=1, node=0, local_rank=1, role="trainer", device=0),
    ),
    engines=tuple(EngineSlot(id=i, model="policy", nodes=(0,), gpus=(0,)) for i in (0, 1)),
)


def colocated(run_dir, rng, channel, deaths, **options):
    """A loop over such a node."""
    node = Node(rng, deaths, can=("handles",) if channel == "ipc" else ())
    loop = make_loop(run_dir, rng, max_versions=0, **options)
    loop.fleet = Fleet(TOPOLOGY, node, lambda kind, e, why: loop.recorder.event(kind, engine=e, reason=why))
    loop.learner = Learner(node, [1], [], idle=lambda: loop.fleet.pump(0.0))
    turns = Turns(loop.fleet, loop.learner, start_s=5.0, order_s=5.0)
    loop.publisher = Publisher(loop.fleet, loop.learner, Sync(channel=channel), run_dir / "weights", turns=turns)
    turns.to_engines()
    loop.fleet.wait_engines(5.0)
    return loop, node


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    channel=st.sampled_from(["broadcast", "disk", "ipc"]),
    deaths=st.sampled_from([0.0, 0.02, 0.1]),
    lockstep=st.booleans(),
    save_every=st.sampled_from([0, 1, 2]),
)
def test_a_run_ends_whole_whatever_engine_dies_whenever(tmp_path_factory, seed, channel, deaths, lockstep, save_every):
    run_dir = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(seed)
    loop, node = colocated(run_dir, rng, channel, deaths, lockstep=lockstep, save_every=save_every)
    with mock.patch.object(learner, "ASK_S", 0.0):
        assert loop.run() == ""
    assert node.trainer_is_awake, "for the export"
    end(loop)
    assert ledger.check(run_dir) == []
    trained = [x for x in lines(run_dir, "metrics.jsonl") if "reward" in x]
    assert [x["step"] for x in trained] == list(range(1, 7))
    assert max(x["lag"] for x in trained) == 0


@pytest.mark.parametrize("which", [{0}, {0, 1}])
def test_engines_that_die_while_they_sleep_are_started_in_their_turn(tmp_path, which):
    loop, node = colocated(tmp_path / "run", np.random.default_rng(0), "disk", 0.0)
    begin = loop.learner.begin

    def begin_and_kill(batch):
        begin(batch)
        if loop.progress.step == 2:
            for id in which:
                node.die(id, "killed in its sleep")

    loop.learner.begin = begin_and_kill
    assert loop.run() == ""
    assert node.died_asleep == len(which)
    events = lines(tmp_path / "run", "events.jsonl")
    pushed = [(e["version"], set(e["engines"])) for e in events if e["kind"] == "pushed"]
    assert next(engines for version, engines in pushed if version == 3) == {0, 1} - which
    assert pushed[-1][1] == {0, 1}


def test_an_engine_that_does_not_sleep_is_restarted(tmp_path):
    loop, node = colocated(tmp_path / "run", np.random.default_rng(0), "disk", 0.0)
    send, told = node.send, []

    def stuck_once(rank, message):
        told.append(message)
        if isinstance(message, m.SleepEngines) and not any(isinstance(t, m.Restart) for t in told):
            node.are_held = True
            node.sleep(node.engines[0], message)
            node.inbox.append(m.Reply(request=message.request, failures={1: "no answer within 5 s"}))
        else:
            send(rank, message)

    node.send = stuck_once
    assert loop.run() == ""
    assert [t.engines for t in told if isinstance(t, m.Restart)] == [(1,)]
