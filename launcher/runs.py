"""The run folder: how it is made, found and read.

runs/<name>-<id>/           mode 0700
    config.yaml site.yaml   resolved; they say what the run is
    data.json               digests of the training sets' files
    script.sbatch           of its job, under Slurm
    topology.json           which rank of the newest attempt is what, and where
    status.json             what the supervisor does now
    metrics.jsonl events.jsonl samples/ attempts/<n>/ checkpoints/ hf/    written by the runtime
    supervisor.log job/     of the job that holds the supervisor
    secrets/                mode 0700, files 0600
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shlex
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec

from launcher import processes
from launcher.lines import Metrics
from runtime.config import RunConfig
from runtime.errors import ConfigError
from runtime.load import dump, near_match
from runtime.site import SiteConfig
from runtime.topology import Topology

State = Literal["queued", "starting", "running", "ending", "ended", "failed", "cancelled"]
FINAL: Final = ("ended", "failed", "cancelled")
SCRIPT: Final = "script.sbatch"
JOB_ID: Final = "job/id"
DEFAULT_DIR: Final = Path("runs")
DAMAGED: Final = (OSError, UnicodeDecodeError, RecursionError, msgspec.DecodeError)
"""What reading a JSON file raises that is not as it was written."""
FORGOTTEN_S: Final = 90.0
"""A supervisor speaks every 30 s. One that was silent for longer, and of which nobody else knows, is gone."""
CANCEL_MARK: Final = "cancel"
"""File that says the end was asked for with `cancel`; a resume removes it."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended (attempts/<n>/report.json); further keys are for readers of the file."""

    kind: str
    message: str
    rank: int | None = None
    node: str = ""
    step: int | None = None
    time: float = 0.0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor last said about itself (status.json)."""

    state: State
    attempt: int = -1
    """-1: none yet."""
    pid: int = 0
    """Of the supervisor; 0: not started."""
    pid_started: int = 0
    """Tells the supervisor from a later process with the same pid."""
    host: str = ""
    cancelled: bool = False
    """Somebody asked for the end with `cancel`."""
    fruitless: int = 0
    """Attempts in a row, over all jobs of the run, that brought no new step and were not preempted."""
    updated: float = 0.0


def create(config: RunConfig, site: SiteConfig, where: str = "runs_dir") -> Path:
    """A new run folder, queued. `where`: the place of `runs_dir` in the config.

    Raises:
        ConfigError: it cannot be made.
    """
    run = Path(config.runs_dir) / f"{config.name}-{time.strftime('%y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        run.mkdir(mode=0o700)
        try:
            for folder in ("attempts", "samples", "checkpoints", "job"):
                (run / folder).mkdir()
            (run / "secrets").mkdir(mode=0o700)
            write_config(run, config, site)
            write_status(run, Status(state="queued"))
        except OSError:
            shutil.rmtree(run, ignore_errors=True)
            raise
    except OSError as e:
        raise ConfigError(where, f"cannot make {run}: {e.strerror}", "choose a folder you can write to") from e
    return run


def remove(run: Path) -> None:
    """Delete a run folder in which nothing ran; first what others find it by."""
    (run / "status.json").unlink(missing_ok=True)
    shutil.rmtree(run)


def write_config(run: Path, config: RunConfig, site: SiteConfig) -> None:
    write_atomic(run / "config.yaml", dump(config).encode())
    write_atomic(run / "site.yaml", dump(site).encode())
    write_atomic(run / "data.json", msgspec.json.encode(_digests(config)))


def changed_data(run: Path, config: RunConfig) -> list[str]:
    """Files of training sets that hold something else than when the run was submitted, or last resumed."""
    try:
        before = msgspec.json.decode((run / "data.json").read_bytes(), type=dict[str, str])
    except DAMAGED:
        return []
    return [path for path, now in _digests(config).items() if before.get(path, now) != now]


def _digests(config: RunConfig) -> dict[str, str]:
    found = {}
    for path in {data.path for data in config.data if Path(data.path).is_file()}:
        with Path(path).open("rb") as file:
            found[path] = hashlib.file_digest(file, "blake2b").hexdigest()
    return found


def write_topology(run: Path, topology: Topology) -> None:
    write_atomic(run / "topology.json", msgspec.json.format(msgspec.json.encode(topology), indent=1))


def write_atomic(path: Path, data: bytes) -> None:
    """A reader sees the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.rename(path)
    except OSError as e:
        part.unlink(missing_ok=True)
        e.filename = e.filename or str(path)  # a write does not say it
        raise


@contextmanager
def held(run: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Be the only one that changes a run; its supervisor is, from its start to its end.

    Raises:
        BlockingIOError: somebody else is, and was for so long.
    """
    end = time.monotonic() + patience_s
    with (run / "supervisor.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
            except OSError as e:
                if e.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                    raise
                break  # a file system without locks, as Lustre may be
        yield


def by_step(folder: Path) -> list[Path]:
    """step-000020 or step-000020.jsonl and their like in a folder, by steps; what users put beside them is not ours."""
    return sorted((p for p in folder.glob("step-*") if _step_text(p).isdecimal()), key=step_of)


def step_of(path: Path) -> int:
    return int(_step_text(path))


def _step_text(path: Path) -> str:
    return path.name.removeprefix("step-").removesuffix(".jsonl")


def make_room(run: Path) -> None:
    """On a full disk: remove what no attempt would read, checkpoints that were begun."""
    for folder in by_step(run / "checkpoints"):
        if not (folder / "COMPLETE").exists():
            shutil.rmtree(folder, ignore_errors=True)


def write_status(run: Path, status: Status) -> None:
    status = msgspec.structs.replace(status, updated=time.time())
    write_atomic(run / "status.json", msgspec.json.encode(status))


def read_status(run: Path) -> Status:
    try:
        return msgspec.json.decode((run / "status.json").read_bytes(), type=Status)
    except DAMAGED as e:
        raise ConfigError(str(run / "status.json"), f"cannot be read: {e}", "is this a run folder?") from e


def supervisor_alive(status: Status) -> bool:
    """Whether the supervisor runs, on this machine; on another one, whether it has spoken lately."""
    if is_elsewhere(status):
        return status.state not in FINAL and time.time() - status.updated < FORGOTTEN_S
    return supervisor_here(status)


def is_elsewhere(status: Status) -> bool:
    return status.host not in ("", socket.gethostname())


def supervisor_here(status: Status) -> bool:
    """Whether the supervisor is the process of this machine that has its pid."""
    is_its_pid = bool(status.pid) and not is_elsewhere(status)
    return is_its_pid and processes.started(status.pid) == status.pid_started


def local_state(status: Status, start_limit_s: float = 60.0) -> str:
    """The state of a run without a scheduler: "died" where the supervisor is gone without having said so."""
    if status.state in FINAL or supervisor_alive(status):
        return status.state
    waiting = status.state == "queued" and time.time() - status.updated < start_limit_s
    return "queued" if waiting else "died"


def cancel_asked(run: Path) -> bool:
    """Whether somebody asked for the end with `cancel`."""
    return (run / CANCEL_MARK).exists()


def job_id(run: Path) -> str:
    """Slurm's number of the run's newest job; empty: it has none."""
    try:
        return (run / JOB_ID).read_text(errors="replace").strip() if (run / SCRIPT).exists() else ""
    except FileNotFoundError:
        return ""


def all_runs(runs_dir: Path) -> list[Path]:
    """Run folders, newest first; also those that cannot be read."""
    folders = [p.parent for p in runs_dir.glob("*/status.json")]
    return sorted(folders, key=lambda p: (_made(p), p.name), reverse=True)


def _made(run: Path) -> float:
    try:
        return (run / "config.yaml").stat().st_ctime
    except OSError:  # it lacks its config, or is just being deleted
        return 0.0


def is_readable(run: Path) -> bool:
    """Whether it says what it is and does."""
    try:
        read_status(run)
    except ConfigError:
        return False
    return (run / "config.yaml").is_file()


def called(run: Path) -> str:
    """How a command names the run, with the space before: not at all, or by the folder's name, or by its path."""
    there = all_runs(DEFAULT_DIR.absolute())
    if run.absolute() not in there:
        return f" {shlex.quote(str(run))}"
    newest = next((other for other in there if is_readable(other)), None)
    return "" if run.absolute() == newest else f" {run.name}"


def find(name: str, runs_dir: Path) -> Path:
    """The run a user means: a folder, the beginning of a run's name or id, or "" for the newest.

    Raises:
        ConfigError: none, or several.
    """
    if name and (Path(name) / "status.json").is_file():
        return Path(name).absolute()
    if "/" in name and all_runs((parent := Path(name).absolute()).parent):
        name, runs_dir = parent.name, Path(name).parent
    runs = all_runs(runs_dir.absolute())
    if not runs:
        raise _none_in(runs_dir.absolute(), f"RUN {name}".strip())
    if not name:
        return next((run for run in runs if is_readable(run)), runs[0])
    exact = [run for run in runs if run.name == name] or [run for run in runs if read_name(run) == name]
    found = exact or [run for run in runs if run.name.startswith(name) or run_id(run).startswith(name)]
    if not found:
        of = "" if runs_dir == DEFAULT_DIR else f" --runs {runs_dir}"
        fix = near_match(name, [run.name for run in runs]) + f"`python -m launcher status all{of}` lists them"
        raise ConfigError(f"RUN {name}", f"no such run in {runs_dir}", fix)
    names = {read_name(run) for run in found}
    if len(found) > 1 and not (len(names) == 1 and name in names):
        raise ConfigError(f"RUN {name}", f"fits {', '.join(r.name for r in found[:5])}", "give more of the name")
    return found[0]


def _none_in(folder: Path, where: str) -> ConfigError:
    """Nobody starts runs and then looks for them in a folder without; most often it is the wrong one."""
    problem = f"there are no runs in {folder}" + ("" if folder.is_dir() else ", which does not exist")
    inner = folder / DEFAULT_DIR
    near = f"did you mean --runs {shlex.quote(str(inner))}? " if all_runs(inner) else ""
    return ConfigError(
        where, problem, f"{near}go to the folder that runs were started in, use --runs, or give a run folder"
    )


def run_id(run: Path) -> str:
    """The part of a run folder's name after the run's own name."""
    return "-".join(run.name.split("-")[-3:])


def read_name(run: Path) -> str:
    return "-".join(run.name.split("-")[:-3])


def attempt_dir(run: Path, attempt: int) -> Path:
    return run / "attempts" / str(attempt)


def last_attempt(run: Path) -> int:
    """Number of the newest attempt; -1: none."""
    return max((int(p.name) for p in (run / "attempts").glob("*") if p.name.isdecimal()), default=-1)


def read_report(run: Path, attempt: int) -> Report | None:
    """The exit report of an attempt; None if it has none, or none that can be read."""
    try:
        return msgspec.json.decode((attempt_dir(run, attempt) / "report.json").read_bytes(), type=Report)
    except DAMAGED:
        return None


def write_report(run: Path, attempt: int, report: Report) -> Report:
    """Write the exit report of an attempt; returns it with the time and the last step."""
    report = msgspec.structs.replace(report, time=time.time(), step=last_step(run))
    write_atomic(attempt_dir(run, attempt) / "report.json", msgspec.json.encode(report))
    return report


def metrics(run: Path) -> Metrics:
    return Metrics(run / "metrics.jsonl")


def last_step(run: Path) -> int:
    """Steps done so far."""
    return max((line["step"] for line in metrics(run).new() if "reward" in line), default=0)


def last_line(log: Path) -> str:
    """The last thing that was written to a log, at most 300 characters of it; empty: nothing."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:300] if lines else ""
