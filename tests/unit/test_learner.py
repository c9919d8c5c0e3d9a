"""The controller's side of trainer ranks: a checkpoint counts when every rank has written its part, and not before."""

import itertools
from pathlib import Path

import pytest

from runtime import learner as module
from runtime.comm.commands import AskSaved, Done, Save, Saved, Train, Trained
from runtime.errors import WaitTimeout
from runtime.learner import Learner
from runtime.types import Batch, Share

RANKS = (1, 2)


class World:
    """Two trainer ranks that answer at once; rank r has written its part after `needs[r]` questions."""

    def __init__(self, needs):
        self.needs, self.said, self.answers = dict(zip(RANKS, needs, strict=True)), [], {}

    def deal(self, messages, timeout_s):
        assert not self.answers, "a rank is asked before it has answered"
        self.said.append(next(iter(messages.values())))
        self.answers = {rank: self.answer(rank, message) for rank, message in messages.items()}

    def answer(self, rank, message):
        if isinstance(message, AskSaved):
            self.needs[rank] -= 1
            return Saved(is_written=self.needs[rank] < 0)
        return Trained(metrics={"loss": 1.0}) if isinstance(message, Train) else Done()

    def poll(self, source, kind, timeout_s):
        return self.answers.pop(source, None)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(module, "ASK_S", 0.0)


def make(needs):
    world = World(needs)
    return world, Learner(world, RANKS, RANKS[:1], idle=lambda: None)


def test_what_was_saved_is_told_once_all_ranks_have_written_it(at_once):
    world, learner = make((1, 3))
    told = []
    learner.tend()
    learner.save(Path("folder"), lambda: told.append(len(world.said)), 1.0)
    assert world.said == [Save(path="folder")] and not told
    for _ in range(9):
        learner.tend()
    assert told == [5] and world.said[1:] == [AskSaved()] * 4, "asked until the slowest is done, then no more"


def test_nothing_is_asked_while_a_batch_is_trained(at_once):
    world, learner = make((0, 0))
    told = []
    learner.save(Path("folder"), lambda: told.append(1), 1.0)
    share = Share(step=0, updates=(), totals=())
    learner.begin(Batch(step=0, shares=(share,), oldest_version=0, metrics={}))
    learner.tend()
    assert not told and isinstance(world.said[-1], Train)
    assert learner.training() == {"loss": 1.0}
    learner.tend()
    assert told == [1]


def test_settling_waits_but_not_for_ever():
    world, learner = make((5, 0))
    told = []
    learner.save(Path("first"), lambda: told.append("first"), 1.0)
    learner.settle(60.0)
    assert told == ["first"]
    learner.settle(0.0)
    world.needs = dict(zip(RANKS, itertools.repeat(10**9)))
    learner.save(Path("second"), lambda: told.append("second"), 1.0)
    with pytest.raises(WaitTimeout, match="write their shards"):
        learner.settle(0.05)
    assert told == ["first"]
