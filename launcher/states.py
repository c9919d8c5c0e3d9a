"""What state runs are in: what their supervisors last said, and where they run under Slurm, what Slurm says.

    queued -> starting -> running -> ending -> ended | failed | cancelled        died: gone without a word

The supervisor's word counts while it is fresh. Slurm knows better what happened to a job whose supervisor cannot speak:
still queued, queued again, cancelled by somebody, killed at its walltime, lost with its node. What was killed after
an order to stop counts as cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from launcher import runs, slurm
from launcher.runs import FINAL, FORGOTTEN_S, Report, State, Status
from runtime.errors import ConfigError

UNREADABLE: Final = "unreadable"

_OVER: Final[dict[str, tuple[State, str]]] = {
    "CANCELLED": ("cancelled", "preempted"),
    "TIMEOUT": ("ended", "timeout"),
    "DEADLINE": ("ended", "timeout"),
    "PREEMPTED": ("ended", "preempted"),
    "NODE_FAIL": ("failed", "node_failed"),
    "BOOT_FAIL": ("failed", "node_failed"),
    "OUT_OF_MEMORY": ("failed", "out_of_memory"),
}
"""Slurm's word for a job that is over -> the run's state, and the kind of report it would have written."""


class States:
    """Asks Slurm about all runs at once, and not more than every 30 s."""

    def __init__(self, watch: slurm.Watch | None = None) -> None:
        self._watch = watch or slurm.Watch()

    def of(self, run: Path) -> str:
        """
        Raises:
            ConfigError: its folder does not say.
        """
        state = self.all([run])[run]
        if state == UNREADABLE:
            runs.read_status(run)  # it knows best what is wrong
            raise ConfigError(str(run), "has no config.yaml", "is this a run folder?")
        return state

    def all(self, folders: Iterable[Path]) -> dict[Path, str]:
        """The state of each, by its folder; "unreadable" where it does not say one."""
        folders = list(folders)
        statuses = {run: runs.read_status(run) for run in folders if runs.is_readable(run)}
        numbers = {run: number for run in statuses if (number := runs.job_id(run))}
        open_jobs = {number for run, number in numbers.items() if statuses[run].state not in FINAL}
        jobs = self._watch.jobs(open_jobs) if open_jobs else {}
        found = {
            run: self._under_slurm(status, numbers[run], jobs) if run in numbers else runs.local_state(status)
            for run, status in statuses.items()
        }
        asked = {run for run, state in found.items() if state == "died" and runs.cancel_asked(run)}
        return {run: "cancelled" if run in asked else found.get(run, UNREADABLE) for run in folders}

    def job(self, run: Path) -> slurm.Job | None:
        """What Slurm says of the job of a run; None: nothing, or it need not be asked: the run said how it ended."""
        number = runs.job_id(run)
        if not number or runs.read_status(run).state in FINAL:
            return None
        return (self._watch.jobs({number}) or {}).get(number)

    @property
    def trouble(self) -> str:
        """Why Slurm does not answer; empty: it does, or was not asked."""
        return self._watch.trouble

    def _under_slurm(self, status: Status, number: str, jobs: dict[str, slurm.Job] | None) -> str:
        if status.state in FINAL or jobs is None or status.updated > self._watch.asked_at:
            return status.state
        job = jobs.get(number)
        if job is None:
            return status.state if time.time() - status.updated < FORGOTTEN_S else "died"
        match job.phase:
            case "queued" | "ending" as phase:
                return phase
            case "running":
                return "starting" if status.state == "queued" else status.state
            case "over":
                return _OVER[job.state][0] if job.state in _OVER else "failed" if status.state == "queued" else "died"


def report_of(run: Path, job: slurm.Job | None, state: str = "") -> Report | None:
    """How the newest attempt ended: its own report, or what Slurm says where it left none. `state`: the run's."""
    attempt, number = runs.last_attempt(run), runs.job_id(run)
    report = runs.read_report(run, attempt)
    if state == "failed" and job is not None and runs.read_status(run).state == "queued":
        return _unstarted(run, number, job)
    if report is None and job is not None and job.state in _OVER:
        said = f"Slurm says of job {number}: {job.state}"
        return Report(kind=_OVER[job.state][1], message=said)
    if report is None and state == "cancelled":
        said = "cancelled before anything ran" if attempt < 0 else "cancelled; it was killed before it could save"
        return Report(kind="preempted", message=said)
    return report


def _unstarted(run: Path, number: str, job: slurm.Job) -> Report:
    """Of a job that is over and whose supervisor never spoke."""
    said = f"job {number} ended ({job.state}) before its supervisor began"
    log = run / "job" / f"{number}.log"
    if log.exists():
        return Report(kind="config", message=f"{said}; {log} ends with: {runs.last_line(log) or 'nothing'}")
    if job.state in _OVER:
        return Report(kind=_OVER[job.state][1], message=said)
    problem = f"{said} and left no {log.name}: the compute nodes cannot see {run.parent} (runs_dir)"
    return Report(kind="config", message=f"{problem}; choose a folder that all nodes share")
