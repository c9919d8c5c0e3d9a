"""Checkpoints exist whole or not at all; reports keep the first cause."""

import errno
import shutil

import pytest

from runtime.errors import ConfigError, PeerLost, brief
from runtime.metrics import JsonLog, Recorder
from runtime.report import Report, kind_of, write
from runtime.state import Checkpoints, read_state, write_state
from runtime.trainer import seals
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


def test_what_users_do_beside_checkpoints_harms_no_run(tmp_path, monkeypatch):
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    checkpoints = Checkpoints(folder, keep=1)
    save(checkpoints, 1)
    shutil.copytree(folder / "step-000001", folder / "step-000001.bak")
    shutil.copytree(folder / "step-000001", folder / "step-half")
    (folder / "step-half/COMPLETE").unlink()
    (folder / "step-000001.tar").write_bytes(b"")
    (folder / "step-000001").rename(archive)
    (folder / "step-000001").symlink_to(archive)
    assert Checkpoints(folder, keep=1).load() is not None
    kept = {"step-000001.bak", "step-half", "step-000001.tar"}
    save(checkpoints, 2)
    assert {p.name for p in folder.iterdir()} == {"step-000002", *kept} and (archive / "state.bin").exists()

    def busy(path):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:  # somebody reads it over NFS
        patch.setattr(shutil, "rmtree", busy)
        save(checkpoints, 3)
    assert Checkpoints(folder, keep=1).load()[0].parent.name == "step-000003"


def test_logs_of_another_run_are_not_cut(tmp_path):
    """As where a checkpoint was copied into the folder of another run, or a log was deleted."""
    log = tmp_path / "metrics.jsonl"
    for text in ("", '{"step": 1}\n', '{"step": 100}\n'):
        log.write_text(text)
        with pytest.raises(ConfigError, match=r"metrics\.jsonl: is not as it was .* 13 bytes\n.*the whole run folder"):
            JsonLog(log, 13)
        assert log.read_text() == text
    log.write_text('{"step": 10}\n{"step": 11}\n')
    assert JsonLog(log, 13).lines() == [{"step": 10}]


def test_what_shows_steps_beyond_the_checkpoint_goes_with_them_but_for_a_model(tmp_path):
    (tmp_path / "samples").mkdir()
    for step in (9, 10, 11):
        (tmp_path / f"samples/step-{step:06d}.jsonl").touch()
        (tmp_path / f"hf/step-{step:06d}").mkdir(parents=True)
    for name in ("samples/step-000011-mine.jsonl", "reward.png"):
        (tmp_path / name).touch()
    Recorder(tmp_path, {}, step=11, tensorboard=False).close()
    assert (tmp_path / "reward.png").exists()
    Recorder(tmp_path, {}, step=9, tensorboard=False).close()
    assert {p.name for p in tmp_path.glob("samples/*")} == {"step-000009.jsonl", "step-000011-mine.jsonl"}
    assert [p.name.split(".until-")[0] for p in sorted(tmp_path.glob("hf/*"))] == [f"step-{i:06d}" for i in (9, 10, 11)]
    assert [p.name for p in tmp_path.glob("hf/step-*") if p.suffix == ""] == ["step-000009"]
    assert not (tmp_path / "reward.png").exists()


def test_a_damaged_state_says_how_to_go_on(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    folder = checkpoints.latest()
    whole = (folder / "state.bin").read_bytes()
    for at in range(0, len(whole), 7):
        (folder / "state.bin").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ConfigError, match=f"not as it was written\n.*remove {folder} to go back"):
            checkpoints.load()
    (folder / "state.bin").write_bytes(whole)
    assert checkpoints.load()[1] == RunState()


def test_the_newest_is_the_one_of_the_latest_step(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (999_999, 1_000_000):
        save(checkpoints, step)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1000000"] and checkpoints.latest() is not None


def test_files_of_a_checkpoint_are_those_that_were_written(tmp_path):
    folder = tmp_path / "step-000004" / "trainer"
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", "__1_1.distcp", ".metadata"):
        (folder / name).write_bytes(name.encode() * 100)
    for rank in (0, 1):
        seals.write(folder, rank, 2)
    for path in folder.iterdir():
        whole = path.read_bytes()
        for damage in (lambda p: p.unlink(), lambda p: p.write_bytes(b"?" + p.read_bytes()[1:])):
            damage(path)
            for num_ranks in (1, 3):
                with pytest.raises(ConfigError, match=f"{path.name}: .*\n.*remove {tmp_path}/step-000004 to go back"):
                    for rank in range(num_ranks):
                        seals.check(folder, rank, num_ranks)
            path.write_bytes(whole)
    for rank in range(3):
        seals.check(folder, rank, 3)


def test_the_first_report_wins(tmp_path):
    assert write(tmp_path, Report(kind="engine_lost", message="first"))
    assert not write(tmp_path, Report(kind="bug", message="second", rank=1))
    assert '"first"' in (tmp_path / "report.json").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_errors_map_to_reports():
    assert kind_of(ExceptionGroup("x", [PeerLost("y")])) == "peer_lost"
    assert kind_of(KeyError("x")) == "bug"
    assert kind_of(MemoryError()) == "out_of_memory"
    assert kind_of(PermissionError(errno.EACCES, "Permission denied", "samples")) == "config"
    assert kind_of(PermissionError(errno.EACCES, "Permission denied")) == "bug", "not of a file"
    assert kind_of(OSError(errno.ESTALE, "Stale file handle", "train.jsonl")) == "node_failed", "others may have it"
    assert brief("no file \udcff") == "no file \\udcff", "as os.fsdecode makes it; it could not be sent"
