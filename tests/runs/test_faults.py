"""Whole runs that are broken on purpose: every fault ends in a report, fast, or is survived with nothing lost."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.tools import kill, ledger

CONFIG = Path(__file__).with_name("tiny.yaml")
END_LIMIT_S = 5.0


def report_of(run: Path, attempt: int = -1) -> dict:
    folders = sorted((run / "attempts").iterdir(), key=lambda p: int(p.name))
    return json.loads((folders[attempt] / "report.json").read_text())


def wait_end(run: Path) -> str:
    kill.wait(f"{run.name} to end", lambda: kill.status(run)["state"] in ("ended", "failed", "cancelled"), 240)
    return kill.status(run)["state"]


def attempt_end(run: Path) -> float:
    """When the first attempt's world was gone, by the supervisor's log."""
    line = next(x for x in (run / "supervisor.log").read_text().splitlines() if "attempt 0 ended" in x)
    stamp, millis = line[:23].split(",")
    return time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S")) + int(millis) / 1000


def nothing_left(run: Path) -> None:
    kill.wait(f"the processes of {run.name} to end", lambda: not kill.processes_of(run), 10)


def sets(prefix: str, values: dict) -> list[str]:
    return [f"{prefix}.{key}={value}" for key, value in values.items()]


ALGORITHM_FAULTS = {
    ("controller", "raise"): ("bug", "RuntimeError: broken in the controller"),
    ("trainer", "thread"): ("bug", "ZeroDivisionError"),
    ("trainer", "memory"): ("out_of_memory", "no room for the logits"),
    ("trainer", "leave"): ("bug", "SystemExit: 4"),
    ("trainer", "exit"): ("bug", "exit code 3"),
}


@pytest.mark.parametrize("fault", ALGORITHM_FAULTS, ids="-".join)
def test_an_exception_anywhere_ends_the_attempt_with_a_report(runs_dir, tmp_path, fault):
    where, how = fault
    options = {"where": where, "how": how, "calls": 2, "stamp": tmp_path / "stamp"}
    overrides = ["algorithm.name=tests.plugins.faulty_algorithm", *sets("algorithm.options", options)]
    run = kill.start(CONFIG, runs_dir, overrides)
    assert wait_end(run) == "failed"
    report = report_of(run)
    kind, message = ALGORITHM_FAULTS[fault]
    assert report["kind"] == kind and message in report["message"], report
    assert attempt_end(run) - float((tmp_path / "stamp").read_text()) < END_LIMIT_S
    nothing_left(run)


def test_an_exception_in_an_agents_task_ends_the_attempt_with_a_report(runs_dir, tmp_path):
    options = {"fault": "client", "stamp": tmp_path / "stamp"}
    overrides = [
        "rollout.engine=tests.plugins.faulty_engine",
        "rollout.engine_options={max_length: 64}",
        *sets("rollout.engine_options", options),
    ]
    run = kill.start(CONFIG, runs_dir, overrides)
    assert wait_end(run) == "failed"
    report = report_of(run)
    assert report["kind"] == "bug" and "nobody expects this" in report["message"], report
    assert attempt_end(run) - float((tmp_path / "stamp").read_text()) < END_LIMIT_S
    nothing_left(run)


def test_a_byte_that_flips_in_transit_ends_the_run_and_names_the_tensor(runs_dir, tmp_path):
    options = {"fault": "flip", "stamp": tmp_path / "stamp"}
    overrides = ["limits.attempts=0", "rollout.engine=tests.plugins.faulty_engine"]
    run = kill.start(CONFIG, runs_dir, [*overrides, *sets("rollout.engine_options", options)])
    assert wait_end(run) == "failed"
    report = report_of(run)
    assert report["kind"] == "engine_lost", report
    assert "engine 0 holds other bytes than were sent in tensor model." in report["message"], report
    assert kill.metrics(run) == [], "no step was trained on weights that were not the trainer's"


def engine_pids(run: Path) -> list[int]:
    return [p for p in kill.processes_of(run) if b"runtime.rollout.embedded" in Path(f"/proc/{p}/cmdline").read_bytes()]


def test_an_engine_killed_in_mid_generation_is_replaced_and_nothing_is_lost(runs_dir):
    run = kill.start(CONFIG, runs_dir)
    kill.wait_phase(run, kill.Moment(phase="rollout", step=2))
    os.kill(engine_pids(run)[0], signal.SIGKILL)
    kill.wait_done(run)
    assert ledger.check(run) == []
    kinds = [e["kind"] for e in kill.events(run)]
    down = kinds.index("engine_down")
    ready = kinds.index("engine_ready", down)
    push = next(e for e in kill.events(run)[ready:] if e["kind"] == "pushed")
    assert push["version"] == 2 and push["engines"] == [0], "it gets the current version, before anything is trained"
    assert kill.status(run)["attempt"] == 0
    assert [m["step"] for m in kill.metrics(run)] == [1, 2, 3, 4, 5]


def test_one_of_two_engines_killed_in_a_push_is_replaced_and_the_other_goes_on(runs_dir):
    run = kill.start(CONFIG, runs_dir, [f"site={CONFIG.with_name('two_slots.yaml')}"])
    kill.wait_phase(run, kill.Moment(phase="push", step=2))
    os.kill(engine_pids(run)[0], signal.SIGKILL)
    kill.wait_done(run)
    assert ledger.check(run) == []
    lost = {e["engine"] for e in kill.events(run) if e["kind"] == "engine_down"}
    assert len(lost) == 1, "the engine that was not killed keeps its place"
    assert [m["step"] for m in kill.metrics(run)] == [1, 2, 3, 4, 5]


def test_a_run_whose_every_sample_fails_ends_and_says_why(runs_dir):
    run = kill.start(CONFIG, runs_dir, ["rollout.engine_options.max_length=12"])
    assert wait_end(run) == "failed"
    report = report_of(run)
    assert report["kind"] == "config", report
    assert "80 groups in a row were dropped" in report["message"] and "refused 13 tokens" in report["message"], report


def test_a_rank_is_killed_the_next_attempt_is_told_to_stop_and_a_resume_finishes_the_run(runs_dir):
    run = kill.start(CONFIG, runs_dir, ["staleness.max_versions=2", "num_steps=8"])
    kill.wait_phase(run, kill.Moment(phase="rollout", step=3))
    kill.wait("a checkpoint", lambda: any(run.glob("checkpoints/*/COMPLETE")), 60)
    ranks = [p for p in kill.processes_of(run) if b"\0runtime.main\0" in Path(f"/proc/{p}/cmdline").read_bytes()]
    ranks = [p for p in ranks if b"PMI_RANK=1\0" in Path(f"/proc/{p}/environ").read_bytes()]
    os.kill(min(ranks), signal.SIGKILL)
    kill.wait("the next attempt", lambda: kill.status(run)["attempt"] == 1, 60)
    assert report_of(run, 0)["kind"] == "peer_lost"
    kill.wait_phase(run, kill.Moment(phase="train"))
    os.kill(kill.status(run)["pid"], signal.SIGTERM)
    assert wait_end(run) == "ended"
    assert report_of(run, 1)["kind"] == "preempted"
    trained = [m["step"] for m in kill.metrics(run)]
    assert 2 < trained[-1] < 8, "it went on from a checkpoint, and saved"
    kill.resume(run)
    kill.wait_done(run)
    assert [m["step"] for m in kill.metrics(run)] == [1, 2, 3, 4, 5, 6, 7, 8], "no step was trained twice"
    assert ledger.check(run) == []
