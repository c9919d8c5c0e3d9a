"""Engines as the controller sees them: whom it waits for, whom it pushes to, and who gets leases."""

import pytest

from runtime.comm import messages as m
from runtime.errors import EngineLost
from runtime.fleet import Fleet
from runtime.topology import EngineSlot, RankSlot, Topology
from runtime.types import Lease, Prompt, SamplingParams


def slot(id, model="policy", node=0, url=""):
    return EngineSlot(id=id, model=model, nodes=(node,), gpus=(), url=url)


class Mailbox:
    def __init__(self):
        self.inbox, self.sent = [], []

    def send(self, rank, message):
        self.sent.append((rank, message))

    def receive(self, timeout_s):
        return self.inbox.pop(0) if self.inbox else None


class Bench:
    def __init__(self, *engines):
        ranks = tuple(RankSlot(rank=n, node=n, local_rank=0, role="agent", device=None) for n in (0, 1))
        self.mailbox, self.events = Mailbox(), []
        topology = Topology(nodes=("a", "b"), ranks=ranks, engines=engines)
        self.fleet = Fleet(topology, self.mailbox, lambda kind, engine, why: self.events.append((kind, engine)))
        self.models = {e.id: (e.model, e.nodes[0]) for e in engines}

    def ready(self, *engines):
        for e in engines:
            model, node = self.models[e]
            self.mailbox.inbox.append((node, m.EngineReady(engine=e, model=model, can=())))
        self.pump()

    def down(self, engine, **more):
        node = self.models[engine][1]
        self.mailbox.inbox.append((node, m.EngineDown(engine=engine, reason="killed", restarts=1, **more)))
        self.pump()

    def pump(self):
        while self.mailbox.inbox:
            self.fleet.pump(0.0)

    def missing(self):
        try:
            self.fleet.wait_engines(-1.0)
        except EngineLost as e:
            return str(e)
        return ""

    def lease(self, *numbers):
        """The rank that each lease goes to."""
        self.mailbox.sent.clear()
        prompt = Prompt(id="p", dataset="d")
        params = SamplingParams()
        self.fleet.lease([Lease(number=n, prompt=prompt, version=0, num_samples=4, params=params) for n in numbers])
        return {x.number: rank for rank, work in self.mailbox.sent for x in work.leases}


def test_engines_of_other_models_are_waited_for_and_neither_pushed_to_nor_leased_to():
    bench = Bench(slot(0), slot(1, "judge"), slot(2, "judge", node=1), slot(3, node=1))
    fleet = bench.fleet
    bench.ready(0, 1, 3)
    assert "engines [2] to start" in bench.missing()
    bench.ready(2)
    assert bench.missing() == ""
    assert fleet.alive() == fleet.fresh() == {0, 3} and fleet.answering() == fleet.own() == {0, 1, 2, 3}
    fleet.committed({0, 3}, 5)
    assert fleet.fresh() == set() and fleet.alive() == {0, 3}
    bench.down(1)
    assert fleet.answering() == {0, 2, 3} and fleet.version(0) == 5
    bench.ready(1)
    assert fleet.fresh() == set(), "it waits for no weights"
    assert bench.events[-2:] == [("engine_down", 1), ("engine_ready", 1)]
    fleet.emptied()
    assert fleet.fresh() == {0, 3}
    fleet.lost({2, 3})
    assert fleet.answering() == {0, 1}
    assert bench.lease(1, 2, 3) == {1: 0, 2: 0, 3: 0}, "judges do not sample"


def test_of_engines_that_somebody_else_runs_one_of_each_model_will_do():
    bench = Bench(slot(0), *(slot(i, "judge", url=f"http://j:{i}") for i in (1, 2)), slot(3, node=1, url="http://p:3"))
    bench.ready(0)
    assert "1 at http://j:1 to answer well, see the log of its server; and 2 at http://j:2" in bench.missing()
    bench.ready(2)
    assert bench.missing() == ""
    assert bench.fleet.own() == {0}, "only these take turns"
    bench.down(1, is_given_up=True)
    bench.ready(1)
    bench.down(2, is_given_up=True)
    with pytest.raises(EngineLost, match="no engine of the judge is left; the last one: killed"):
        bench.down(1, is_given_up=True)


def test_leases_go_to_who_has_an_engine_that_answers():
    bench = Bench(slot(0), slot(1, node=1), slot(2, node=1))
    bench.ready(0, 1, 2)
    assert list(bench.lease(*range(6)).values()).count(1) == 4, "two engines take twice as much"
    bench.down(1)
    assert set(bench.lease(*range(6, 9)).values()) == {0}, "until each has as much per engine as the other"
    bench.down(2)
    assert set(bench.lease(*range(9, 30)).values()) == {0}
    bench.down(0)
    assert set(bench.lease(30, 31, 32, 33, 34, 35).values()) == {1}, "they wait where there is most room"
    with pytest.raises(EngineLost):
        bench.fleet.wait_engines(-1.0)
    bench.fleet.wait_engines(-1.0, lambda: "preempted")
