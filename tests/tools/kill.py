"""Kills whole runs with SIGKILL at chosen moments, resumes them, and compares what they leave with an undisturbed run.

    run = start(config, runs_dir)
    phase = kill_at(run, Moment(phase="push", step=7))      # "push", as the event log shows
    resume(run)
    wait_done(run)
    assert not differences(run, undisturbed)

Only processes of that run are killed: those below its supervisor, and those that carry the run folder's unique name in
their command line or environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
PHASES: Final = ("rollout", "train", "push", "save", "write")
"""Those of the event log, and `write`: a checkpoint has been taken, later phases go on, its marker is not written."""
COMMAND_LIMIT_S: Final = 120.0
RUN_LIMIT_S: Final = 600.0
GONE_LIMIT_S: Final = 10.0
POLL_S: Final = 0.05
PHASE_POLL_S: Final = 0.002
"""A phase may be that short."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When to kill: `after_s` from the start; or `after_s` into the first `phase` that is at `step` or later."""

    after_s: float = 0.0
    phase: str = ""
    step: int = 0


# ---- starting and waiting


def launcher(*arguments: str) -> str:
    command = [sys.executable, "-m", "launcher", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    assert result.returncode == 0, f"{' '.join(command)} ended with {result.returncode}: {result.stderr}"
    return result.stdout


def start(config: Path, runs_dir: Path, overrides: Sequence[str] = ()) -> Path:
    """The run folder of a run that goes on by itself."""
    changes = [word for change in (f"runs_dir={runs_dir}", *overrides) for word in ("--set", change)]
    printed = launcher("submit", str(config), "--detach", *changes)
    match = re.search(r"^run folder: (.+)$", printed, re.MULTILINE)
    assert match, printed
    run = ROOT / match.group(1)
    wait_supervised(run)
    return run


def resume(run: Path) -> None:
    launcher("resume", str(run), "--detach")
    wait_supervised(run)


def wait_supervised(run: Path) -> None:
    """Until the run's supervisor has said who it is: the launcher takes a run without one for not yet started."""
    wait(f"the supervisor of {run.name}", lambda: status(run)["pid"] != 0, COMMAND_LIMIT_S)


def wait(what: str, is_so: Callable[[], bool], limit_s: float, poll_s: float = POLL_S) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, f"waited {limit_s:.0f} s for {what}"
        time.sleep(poll_s)


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())


def wait_done(run: Path) -> None:
    """Until the run has ended as it should."""
    wait(f"{run.name} to end", lambda: status(run)["state"] in ("ended", "failed", "cancelled"), RUN_LIMIT_S)
    assert report(run).get("kind") == "done", f"{run}: {report(run)}"


def report(run: Path) -> dict[str, Any]:
    """Of the newest attempt; empty: it wrote none."""
    path = run / "attempts" / str(status(run)["attempt"]) / "report.json"
    return json.loads(path.read_text()) if path.exists() else {}


# ---- killing


def kill_at(run: Path, moment: Moment) -> str:
    """Kill the run at a moment of its newest start.

    Returns:
        The phase it was in, by its event log; `write` where that was neither `save` nor without a checkpoint begun.
    """
    known = wait_phase(run, moment) if moment.phase else set()
    time.sleep(moment.after_s)
    send_kill(known)
    kill(run)
    last = phases(run)[-1]["phase"] if phases(run) else ""
    return "write" if is_writing(run) and last != "save" else last


def wait_phase(run: Path, moment: Moment) -> set[int]:
    """Until the newest attempt, once it runs, is in that phase.

    Returns:
        The run's processes as its attempt began: looking for them takes longer than a short phase.
    """
    read, known = -1, set()

    def is_there() -> bool:
        nonlocal read, known
        now = status(run)
        size = (run / "events.jsonl").stat().st_size if now["state"] == "running" else read
        if size == read:
            return False
        read = size
        known = known or processes_of(run)
        lines = phases(run, of_attempt=now["attempt"])[-1:]
        met = is_writing(run) if moment.phase == "write" else any(e["phase"] == moment.phase for e in lines)
        return met and any(e["step"] >= moment.step for e in lines)

    wait(f"{moment} of {run.name}", is_there, RUN_LIMIT_S, PHASE_POLL_S)
    return known


def is_writing(run: Path) -> bool:
    """Whether a checkpoint has its state and not yet its marker."""
    states = (run / "checkpoints").glob("step-*/state.bin")
    return any(not state.with_name("COMPLETE").exists() for state in states)


def events(run: Path) -> list[dict[str, Any]]:
    """Whole lines; the last one may be cut off by a kill."""
    path = run / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def phases(run: Path, of_attempt: int | None = None) -> list[dict[str, Any]]:
    """The phase events, all of them or only those that one attempt wrote."""
    found, attempt = [], -1
    for event in events(run):
        attempt = event["number"] if event["kind"] == "attempt" else attempt
        if event["kind"] == "phase" and of_attempt in (None, attempt):
            found.append(event)
    return found


def kill(run: Path) -> None:
    """SIGKILL to all of the run's processes, until none is left."""
    end = time.monotonic() + GONE_LIMIT_S
    while pids := processes_of(run):
        assert time.monotonic() < end, f"processes of {run.name} outlive SIGKILL: {sorted(pids)}"
        send_kill(pids)
        time.sleep(POLL_S)


def send_kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it died with its parent
            os.kill(pid, signal.SIGKILL)


def processes_of(run: Path) -> set[int]:
    """Pids of all that belongs to the run: its supervisor, what is below it, and what names its folder."""
    parents, named = {}, set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            carried = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or is somebody else's
        if state != "Z":
            parents[int(entry.name)] = int(parent)
            if run.name.encode() in carried:
                named.add(int(entry.name))
    supervisor = status(run)["pid"]
    found = named | ({supervisor} & set(parents))
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found - ancestors(os.getpid(), parents)


def ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    """This process and all above it."""
    found = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found


# ---- comparing


def phase_lengths(run: Path) -> dict[str, float]:
    """Median seconds of each phase, from the event log and the kept checkpoints of an undisturbed run."""
    lengths = defaultdict(list)
    lines = [e for e in events(run) if e["kind"] in ("phase", "end")]
    for now, after in pairwise(lines):
        lengths[now["phase"]].append(after["time"] - now["time"])
    for marker in (run / "checkpoints").glob("step-*/COMPLETE"):
        lengths["write"].append(marker.stat().st_mtime - marker.with_name("state.bin").stat().st_mtime)
    return {phase: statistics.median(values) for phase, values in lengths.items()}


def is_time(key: str) -> bool:
    return key == "time" or key.endswith("_s")


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not is_time(key)} for line in lines]


def trained(run: Path) -> list[tuple[Any, ...]]:
    keys = ("kind", "step", "version", "lease", "prompt_id", "index", "segment", "digest")
    return [tuple(e[key] for key in keys) for e in events(run) if e["kind"] in ("trained", "excluded")]


def weights(run: Path) -> dict[str, str]:
    """Tensor name -> what it is and a digest of its bytes, over the safetensors files of the export."""
    found = {}
    for path in sorted((run / "hf").rglob("*.safetensors")):
        blob = path.read_bytes()
        start = 8 + int.from_bytes(blob[:8], "little")
        for name, about in json.loads(blob[8:start]).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                digest = hashlib.sha256(blob[start + first : start + last]).hexdigest()
                found[name] = f"{about['dtype']} {about['shape']} {digest}"
    assert found, f"{run} has no exported weights"
    return found


def differences(run: Path, other: Path) -> list[str]:
    """What of two runs is not equal bit for bit, times aside: trained samples, metrics, final weights."""
    found = []
    for what, read in (("trained sample", trained), ("line of metrics", metrics)):
        ours, theirs = read(run), read(other)
        if len(ours) != len(theirs):
            found.append(f"{what}s: {len(ours)} and {len(theirs)}")
        pairs = enumerate(zip(ours, theirs, strict=False))
        found += [f"{what} {n}: {a} and {b}" for n, (a, b) in pairs if a != b][:3]
    ours, theirs = weights(run), weights(other)
    return found + [f"weight {n}" for n in sorted({*ours, *theirs}) if ours.get(n) != theirs.get(n)]
