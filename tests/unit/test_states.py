"""What Slurm says of a run against what its supervisor said."""

import time
from pathlib import Path

import msgspec
import pytest

from launcher import runs, slurm
from launcher.runs import Status
from launcher.states import States, report_of

LATER = time.time() + 1e6


class FakeWatch:
    """Slurm's answer, given."""

    def __init__(self, state: str | None, asked_at: float = 0.0, known: bool = True) -> None:
        self.state, self.asked_at, self.known = state, asked_at, known
        self.trouble = "slurmctld is down" if state is None else ""

    def jobs(self, ids):
        if self.state is None:
            return None
        return {number: slurm.Job(state=self.state) for number in ids} if self.known else {}


def seen(run: Path, said: str, watch: FakeWatch, ago_s: float = 0.0) -> str:
    status = Status(state=said, attempt=0, host="n1", updated=time.time() - ago_s)
    runs.write_atomic(run / "status.json", msgspec.json.encode(status))
    return States(watch).of(run)


@pytest.mark.parametrize(
    ("said", "slurms", "state"),
    [
        ("queued", "PENDING", "queued"),
        ("queued", "CONFIGURING", "starting"),
        ("running", "RUNNING", "running"),
        ("running", "COMPLETING", "ending"),
        ("running", "PENDING", "queued"),  # requeued by somebody
        ("running", "REQUEUED", "queued"),
        ("running", "CANCELLED", "cancelled"),
        ("running", "TIMEOUT", "ended"),
        ("running", "PREEMPTED", "ended"),
        ("running", "NODE_FAIL", "failed"),
        ("running", "OUT_OF_MEMORY", "failed"),
        ("running", "FAILED", "died"),
        ("running", "COMPLETED", "died"),
        ("ended", "FAILED", "ended"),  # what a supervisor said last is the truth
        ("cancelled", "COMPLETED", "cancelled"),
        ("running", None, "running"),  # Slurm does not answer
    ],
)
def test_states(run, said, slurms, state):
    assert seen(run, said, FakeWatch(slurms, asked_at=LATER)) == state


def test_a_supervisor_that_spoke_after_slurm_was_asked_knows_better(run):
    assert seen(run, "running", FakeWatch("PENDING", asked_at=1.0)) == "running"


def test_a_job_that_slurm_forgot_is_gone_once_its_supervisor_is_silent(run):
    forgot = FakeWatch("", asked_at=LATER, known=False)
    assert seen(run, "running", forgot, ago_s=10.0) == "running"
    assert seen(run, "running", forgot, ago_s=1000.0) == "died"


def test_slurms_word_stands_in_for_a_report(run):
    (run / "attempts/0").mkdir()
    said = report_of(run, slurm.Job(state="NODE_FAIL"))
    assert said is not None and said.kind == "node_failed" and "job 7" in said.message
    assert report_of(run, slurm.Job(state="RUNNING")) is None


@pytest.mark.parametrize(("log", "said"), [("", "cannot see"), ("python: not found\n", "ends with: python: not found")])
def test_a_job_that_never_spoke_is_explained(run, log, said):
    if log:
        (run / "job/7.log").write_text(log)
    assert seen(run, "queued", FakeWatch("FAILED", asked_at=LATER)) == "failed"
    report = report_of(run, slurm.Job(state="FAILED"), "failed")
    assert report is not None and report.kind == "config" and said in report.message and "job 7" in report.message


def test_a_job_that_ends_by_an_order_before_it_could_speak_is_cancelled(run):
    (run / runs.CANCEL_MARK).touch()
    assert seen(run, "starting", FakeWatch("FAILED", asked_at=LATER)) == "cancelled"
    report = report_of(run, slurm.Job(state="FAILED"), "cancelled")
    assert report is not None and report.kind == "preempted"
