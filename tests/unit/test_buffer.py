"""The buffer's bound, order and accounting."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.buffer import Buffer, equal_rewards
from runtime.config import DataSet
from runtime.data import DataSource
from runtime.types import Group, Lease, Sample, SamplingParams


@pytest.fixture(scope="module")
def source_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}", "answer": str(2 * i)}) + "\n" for i in range(7)))
    return path


def finished(lease: Lease, rewards=(1.0, 0.0)) -> Group:
    samples = tuple(
        Sample(
            prompt_id=lease.prompt.id,
            index=i,
            tokens=np.arange(4, dtype=np.int32),
            loss_mask=np.array([0, 0, 1, 1], bool),
            logprobs=np.zeros(4, np.float32),
            versions=((2, lease.version),),
            reward=r,
        )
        for i, r in enumerate(rewards)
    )
    return Group(lease=lease.number, prompt=lease.prompt, samples=samples, version=lease.version)


def make(path, *, max_versions=0, in_order=False, filters=()):
    source = DataSource([DataSet(path=str(path))], seed=3)
    return Buffer(
        source,
        num_samples=2,
        params=SamplingParams(),
        max_versions=max_versions,
        in_order=in_order,
        filters=filters,
    )


def test_takes_the_oldest_leases_first(source_file):
    buffer = make(source_file)
    a, b, c = buffer.leases(3, 0)
    for lease in (c, a):
        assert buffer.add(finished(lease)) == ""
    assert [g.lease for g in buffer.take(2, 0)] == [a.number, c.number]
    assert buffer.take(1, 0) is None
    assert buffer.running() == 1 and b.number == 1


def test_in_order_waits_for_the_oldest(source_file):
    buffer = make(source_file, in_order=True)
    a, b, c = buffer.leases(3, 0)
    buffer.add(finished(c))
    buffer.add(finished(b))
    assert buffer.take(2, 0) is None
    buffer.add(finished(a))
    assert [g.lease for g in buffer.take(2, 0)] == [0, 1]


def test_filters_say_why_and_make_room(source_file):
    buffer = make(source_file, filters=[equal_rewards])
    a, b, c = buffer.leases(3, 0)
    assert buffer.add(finished(a, (1.0, 1.0))) == "equal rewards"
    assert buffer.add(finished(b, (None, None))) == "all samples failed: no reason was given"
    assert buffer.add(finished(c, (None, 0.5))) == "equal rewards"
    assert buffer.open() == 0
    assert buffer.add(finished(a)) is None, "a group that nobody waits for is not taken"


def test_a_younger_group_overtakes_only_while_the_older_can_still_be_in_time(source_file):
    buffer = make(source_file, max_versions=1)
    (old,) = buffer.leases(1, 0)
    (young,) = buffer.leases(1, 1)
    buffer.add(finished(young))
    assert buffer.take(1, 1) is None, "the older one is due now"
    assert [g.lease for g in buffer.take(1, 0)] == [young.number], "a step earlier it could wait"
    buffer.add(finished(old))
    assert [g.lease for g in buffer.take(1, 5)] == [old.number], "overdue: taken"


def test_restored_leases_come_first_with_their_journals(source_file):
    buffer = make(source_file)
    a, b = buffer.leases(2, 0)
    buffer.add(finished(a))
    ready, running, next_lease = buffer.snapshot({b.number: (((),),)})
    again = make(source_file, max_versions=1)
    again.restore(ready, running, next_lease, 1)
    again_b, c = again.leases(2, 1)
    assert again_b.number == b.number and again_b.journal == (((),),) and again_b.version == 0
    assert c.number == 2
    assert [g.lease for g in again.take(1, 1)] == [a.number]


def test_what_is_older_than_a_lowered_bound_is_leased_anew(source_file):
    buffer = make(source_file, max_versions=3)
    a, b, c = (*buffer.leases(2, 0), *buffer.leases(1, 2))
    buffer.add(finished(a))
    ready, running, next_lease = buffer.snapshot({b.number: (((),),)})
    again = make(source_file, max_versions=1)
    again.restore(ready, running, next_lease, 3)
    leased = again.leases(3, 3)
    assert [(x.number, x.prompt, x.version) for x in leased] == [
        (a.number, a.prompt, 3),
        (b.number, b.prompt, 3),
        (c.number, c.prompt, 2),
    ]
    assert leased[1].journal == () and again.open() == 3


def test_what_is_left_of_a_data_set_that_the_run_has_no_more_is_dropped(source_file):
    buffer = make(source_file, max_versions=1)
    a, b = buffer.leases(2, 0)
    other = source_file.with_name("other.jsonl")
    other.write_text(source_file.read_text())
    kept = [msgspec.structs.replace(x, prompt=msgspec.structs.replace(x.prompt, dataset="other")) for x in (a, b)]
    c, d = (msgspec.structs.replace(x, number=x.number + 2) for x in kept)
    again = make(other, max_versions=1)
    assert again.restore([finished(a), finished(c)], [b, d], 4, 0) == {a.number: a.prompt, b.number: b.prompt}
    assert [x.number for x in again.leases(2, 0)] == [d.number, 4] and again.open() == 3
    assert [g.lease for g in again.take(1, 0)] == [c.number]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), max_versions=st.integers(0, 3), batch=st.integers(1, 4))
def test_any_order_of_finishing_trains_each_lease_once(source_file, seed, max_versions, batch):
    """Whatever finishes when: no lease is lost or doubled, and no group is older than the bound when taken."""
    rng = np.random.default_rng(seed)
    buffer = make(source_file, max_versions=max_versions, filters=[equal_rewards])
    running: list[Lease] = []
    version, taken, trained, dropped, steps = 0, 0, [], [], 6
    while version < steps:
        room = (version + max_versions + 1 - taken) * batch - buffer.open()
        running += buffer.leases(room, version) if room > 0 else []
        if running and rng.random() < 0.7:
            lease = running.pop(rng.integers(len(running)))
            group = finished(lease, (1.0, float(rng.random() < 0.2)))
            (dropped if buffer.add(group) else trained).append(lease.number)
        if groups := buffer.take(batch, version):
            assert all(version - g.version <= max_versions for g in groups)
            taken += 1
            version += 1
    left = [g.lease for g in buffer.snapshot({})[0]] + [x.number for x in running]
    assert sorted(trained + dropped + [x.number for x in running]) == list(range(buffer.snapshot({})[2]))
    assert len(left) == buffer.open()
