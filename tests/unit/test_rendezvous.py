"""Who has come to a weight group, and what one over NCCL is told. That class is not in CPU builds of torch: one of ours
stands for it."""

from __future__ import annotations

import os
import queue
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed

from runtime.comm.rendezvous import BLOCKING_WAIT, Group, absent, listen_store, make_group, reach_store
from runtime.errors import PeerLost, WaitTimeout
from runtime.types import GroupAddress

SAID = """NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Mismatched NCCL version detected : rank 1 version 23007 rank 0 version 22907
Exception raised from create"""
"""As torch words it where another member has another version."""


class OfNccl:
    made: list[OfNccl] = []

    class Options:
        _timeout = timedelta()

    def __init__(self, store, rank, size, options):
        self.waits, self.timeout = os.environ.get(BLOCKING_WAIT), options._timeout
        self.others_come, self.error, self.threads, self.num_aborts = threading.Event(), "", [], 0
        self.made.append(self)

    def name(self):
        return "nccl"

    def broadcast(self, tensors, options):
        self.threads.append(threading.current_thread().name)
        assert self.others_come.wait(20.0)
        if self.error:
            raise distributed.DistBackendError(self.error)

    def abort(self):
        self.num_aborts += 1


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", OfNccl, raising=False)
    monkeypatch.setattr(OfNccl, "made", [])
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)

    def one(timeout_s: float) -> tuple[Group, OfNccl]:
        store, port = listen_store("127.0.0.1", 5.0)
        address = GroupAddress(name="g", host="127.0.0.1", port=port, world_size=2, backend="nccl")
        assert absent(address, store) == (), "who has come is known when they meet"
        return make_group(address, 0, store, timeout_s), OfNccl.made[-1]

    return one


@pytest.mark.parametrize("before", [None, "0"])
def test_a_lost_member_is_told_to_who_waits_and_ends_no_process(make, monkeypatch, before) -> None:
    if before is not None:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    group, made = make(5.0)
    assert made.waits == "1" and made.timeout == timedelta(seconds=5)
    assert os.environ.get(BLOCKING_WAIT) == before, "it is not for other groups"
    made.error = SAID
    made.others_come.set()
    with pytest.raises(PeerLost, match=r"^weight group g broke: NCCL error .*2\.29\.7 Mismatched .* 22907$"):
        group.broadcast(torch.zeros(1))
    group.close()
    assert made.num_aborts == 1


def test_a_member_that_dies_before_they_meet_is_not_waited_for_without_end(make) -> None:
    """NCCL itself has no limit there. If it goes on after all, nobody wants what it made."""
    group, made = make(0.2)
    start = time.monotonic()
    with pytest.raises(PeerLost, match=r"weight group g broke: not all of its members met within 0\.2 s"):
        group.broadcast(torch.zeros(1))
    group.close()
    assert time.monotonic() - start < 5.0 and made.num_aborts == 1
    made.others_come.set()
    while made.num_aborts < 2:
        assert time.monotonic() - start < 10.0
        time.sleep(0.01)


def test_once_they_have_met_no_thread_is_started(make) -> None:
    group, made = make(5.0)
    made.others_come.set()
    group.broadcast(torch.zeros(1))
    group.broadcast(torch.zeros(1))
    assert made.threads == ["meet", threading.current_thread().name] and made.num_aborts == 0


def test_who_waits_for_one_that_does_not_come_is_let_go_when_the_store_is_closed() -> None:
    store, port = listen_store("127.0.0.1", 20.0)
    address = GroupAddress(name="shut", host="127.0.0.1", port=port, world_size=3, backend="gloo")
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def member() -> None:
        try:
            make_group(address, 1, reach_store(address, 1, 20.0), 20.0)
        except WaitTimeout as e:
            said.put(str(e))

    threading.Thread(target=member, daemon=True).start()
    start = time.monotonic()
    while (missing := absent(address, store)) != (2,):
        assert missing == (1, 2) and time.monotonic() - start < 5.0
    del store
    assert said.get(timeout=5.0).startswith("rank 1 of weight group shut waited ")
