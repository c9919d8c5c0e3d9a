"""The logs command: the logs of one attempt, printed or followed."""

from __future__ import annotations

import argparse
import time
from collections import deque
from pathlib import Path
from typing import Final

from launcher import runs
from launcher.states import States
from runtime.errors import ConfigError

POLL_S: Final = 0.3


def logs(args: argparse.Namespace) -> int:
    run = runs.find(args.run, Path(args.runs))
    last = runs.last_attempt(run)
    attempt = last if args.attempt is None else args.attempt
    if args.attempt is not None and not runs.attempt_dir(run, attempt).is_dir():
        have = f"it has attempts 0 to {last}" if last >= 0 else "it has none yet"
        raise ConfigError(f"--attempt {attempt}", f"{run.name} has no such attempt", have)
    pattern = _pattern(args)
    files = _files(run, attempt, pattern)
    if not files and not args.follow:
        if last < 0:
            fix = f"`python -m launcher status{runs.called(run)}` says what it waits for, `logs -f` waits with it"
            raise ConfigError(run.name, "has no logs: it has not begun", fix)
        have = ", ".join(f.name for f in _files(run, attempt, "*.log")) or "none"
        raise ConfigError(f"{run.name}, attempt {attempt}", f"no log {pattern}", f"logs there: {have}")
    for file in files:
        print(f"==> {file.relative_to(run)} <==")
        with file.open(errors="replace") as lines:
            for line in deque(lines, maxlen=args.n):
                print(line.rstrip("\n"))
    if args.follow:
        _follow(run, None if args.attempt is None else attempt, pattern, {f: f.stat().st_size for f in files})
    return 0


def _pattern(args: argparse.Namespace) -> str:
    if args.rank is not None:
        return f"rank-{args.rank}.log"
    return "*.log" if args.engine is None else f"engine-{args.engine}*.log"


def _files(run: Path, attempt: int, pattern: str) -> list[Path]:
    """Logs of an attempt; the supervisor's goes with all of them."""
    found = sorted(runs.attempt_dir(run, attempt).glob(pattern))
    return found + [f for f in [run / "supervisor.log"] if pattern == "*.log" and f.exists()]


def _follow(run: Path, attempt: int | None, pattern: str, offsets: dict[Path, int]) -> None:
    """Print what is added, each line with its file's name, until the run ends. `attempt` None: also of new attempts."""
    states = States()
    if not offsets:
        print(f"waiting for the first logs of {run.name}, which is {states.of(run)}", flush=True)
    while True:
        state = states.of(run)
        for file in _files(run, runs.last_attempt(run) if attempt is None else attempt, pattern):
            with file.open("rb") as log:
                log.seek(offsets.get(file, 0))
                data = log.read()
            whole = data.rfind(b"\n") + 1
            offsets[file] = offsets.get(file, 0) + whole
            for line in data[:whole].decode(errors="replace").splitlines():
                print(f"{file.stem:<10} | {line}", flush=True)
        if state in (*runs.FINAL, "died"):
            return
        time.sleep(POLL_S)
