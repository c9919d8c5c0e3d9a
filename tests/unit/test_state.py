"""Checkpoints exist whole or not at all; reports keep the first cause."""

import pytest

from runtime.errors import PeerLost, SluiceError
from runtime.report import Report, kind_of, write
from runtime.state import Checkpoints, read_state, write_state
from runtime.types import Lease, Prompt, RunState, SamplingParams
from tests.unit.test_buffer import finished

LEASE = Lease(number=4, prompt=Prompt(id="x", dataset="d"), version=2, num_samples=2, params=SamplingParams())


def shards(folder):
    (folder / "0.bin").write_bytes(b"weights")


def save(checkpoints, step, save_shards=shards, state=RunState):
    checkpoints.begin(step, save_shards, state)
    checkpoints.commit()


def test_state_round_trips(tmp_path):
    state = RunState(step=3, version=3, ready=(finished(LEASE),), running=(LEASE,), offsets={"metrics.jsonl": 10})
    write_state(tmp_path / "state.bin", state)
    again = read_state(tmp_path / "state.bin")
    assert again.ready[0].samples[0].tokens.tolist() == [0, 1, 2, 3]
    assert again.running == (LEASE,) and again.offsets == state.offsets


def test_only_marked_checkpoints_count_and_old_ones_go(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.load() is None
    for step in (1, 2, 3):
        save(checkpoints, step, state=lambda step=step: RunState(step=step))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    (tmp_path / "step-000003" / "COMPLETE").unlink()
    folder, state = checkpoints.load()
    assert state.step == 2 and (folder / "0.bin").read_bytes() == b"weights"
    assert not (tmp_path / "step-000003").exists(), "a half-written checkpoint is removed"


def test_a_save_that_fails_leaves_no_checkpoint(tmp_path):
    def broken(folder):
        shards(folder)
        raise OSError("disk full")

    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(OSError):
        save(checkpoints, 1, broken)
    assert checkpoints.latest() is None
    save(checkpoints, 1)
    assert checkpoints.latest().name == "step-000001"


def test_until_shards_are_written_the_earlier_checkpoint_counts(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1, state=lambda: RunState(step=1))
    checkpoints.begin(2, shards, lambda: RunState(step=2))
    assert checkpoints.latest().name == "step-000001", "the old one is kept until the new one is whole"
    assert Checkpoints(tmp_path, keep=1).load()[1].step == 1
    assert not (tmp_path / "step-000002").exists()


def test_a_damaged_state_says_how_to_go_on(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    folder = checkpoints.latest()
    (folder / "state.bin").write_bytes(b"\1\0\0\0\0\0\0\0\xff\0\0\0\0\0\0\0")
    with pytest.raises(SluiceError, match="remove"):
        checkpoints.load()


def test_the_first_report_wins(tmp_path):
    assert write(tmp_path, Report(kind="engine_lost", message="first"))
    assert not write(tmp_path, Report(kind="bug", message="second", rank=1))
    assert '"first"' in (tmp_path / "report.json").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_errors_map_to_reports():
    assert kind_of(ExceptionGroup("x", [PeerLost("y")])) == "peer_lost"
    assert kind_of(KeyError("x")) == "bug"
    assert kind_of(MemoryError()) == "out_of_memory"
