"""The kill harness, on process trees and run folders made by hand."""

import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.tools import kill
from tests.tools.kill import Moment

TREE = """
import subprocess, sys, time
child = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder; its unique name is what its processes carry."""
    folder = tmp_path / f"kills-{os.getpid()}-{time.monotonic_ns()}"
    (folder / "hf/step-000002").mkdir(parents=True)
    events = [
        {"kind": "attempt", "number": 0},
        *({"kind": "phase", "phase": p, "step": 0, "time": t} for p, t in (("push", 1.0), ("rollout", 1.5))),
        {
            "kind": "trained",
            "step": 0,
            "version": 0,
            "lease": 0,
            "prompt_id": "p",
            "index": 0,
            "segment": 0,
            "digest": "a",
        },
    ]
    write_lines(folder / "events.jsonl", events)
    write_lines(folder / "metrics.jsonl", [{"step": 1, "loss": 0.5, "time": 3.0, "train_s": 1.0, "tokens_per_s": 9.0}])
    write_weights(folder, 1.0)
    write_status(folder, pid=0)
    return folder


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_status(run: Path, **changes: object) -> None:
    (run / "status.json").write_text(json.dumps({"state": "running", "attempt": 0, "pid": 0, **changes}))


def write_weights(run: Path, value: float) -> None:
    head = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {}}).encode()
    (run / "hf/step-000002/model.safetensors").write_bytes(
        struct.pack("<Q", len(head)) + head + struct.pack("<f", value)
    )


def test_the_whole_tree_is_killed_and_nothing_else(run: Path) -> None:
    """Also a child in another session, its child, and a process that only carries the run's name."""
    supervisor = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE)
    orphan = subprocess.Popen(["sleep", "60"], env={**os.environ, "RUN": str(run)})
    stranger = subprocess.Popen(["sleep", "60"])
    assert supervisor.stdout is not None
    supervisor.stdout.readline()
    write_status(run, pid=supervisor.pid)
    kill.wait("the tree to stand", lambda: len(kill.processes_of(run)) == 4, 10.0)
    assert kill.kill_at(run, Moment()) == "rollout"
    assert supervisor.wait(5) == orphan.wait(5) == -9
    assert kill.processes_of(run) == set()
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_phase_of_the_newest_attempt_is_waited_for(run: Path) -> None:
    """Neither one that an earlier attempt wrote, nor an earlier step."""
    write_status(run, attempt=1)
    later = [
        {"kind": "phase", "phase": "rollout", "step": 9},
        {"kind": "attempt", "number": 1},
        {"kind": "phase", "phase": "rollout", "step": 2},
        {"kind": "phase", "phase": "train", "step": 3},
        {"kind": "phase", "phase": "rollout", "step": 3},
    ]
    written = []

    def write() -> None:
        for line in later:
            time.sleep(0.1)
            written.append(line)
            with (run / "events.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    writer = threading.Thread(target=write)
    writer.start()
    kill.wait_phase(run, Moment(phase="rollout", step=3))
    assert written == later
    writer.join()


def test_a_line_cut_off_by_the_kill_is_left_out(run: Path) -> None:
    whole = kill.events(run)
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind": "pha')
    assert kill.events(run) == whole


def test_phases_have_lengths(run: Path) -> None:
    assert kill.phase_lengths(run) == {"push": 0.5}


def test_times_alone_make_no_difference(run: Path, tmp_path: Path) -> None:
    other = copy(run, tmp_path / "other")
    write_lines(other / "metrics.jsonl", [{"step": 1, "loss": 0.5, "time": 4.0, "train_s": 2.0, "tokens_per_s": 8.0}])
    assert kill.differences(run, other) == []


def test_every_other_difference_is_found(run: Path, tmp_path: Path) -> None:
    other = copy(run, tmp_path / "loss")
    write_lines(other / "metrics.jsonl", [{"step": 1, "loss": 0.5000000001}])
    assert kill.differences(run, other)
    other = copy(run, tmp_path / "missing")
    (other / "metrics.jsonl").write_text("")
    assert kill.differences(run, other)
    other = copy(run, tmp_path / "sample")
    (other / "events.jsonl").write_text((run / "events.jsonl").read_text().replace('"a"', '"b"'))
    assert kill.differences(run, other)
    other = copy(run, tmp_path / "weights")
    write_weights(other, 1.0000001)
    assert kill.differences(run, other)


def copy(run: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", str(run), str(to)], check=True)
    return to
