"""Runs on the testbed, as its users start and watch them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher import runs, slurm
from launcher.states import States
from tests.cluster import testbed
from tests.tools import kill

ROOT = Path(__file__).parents[2]
TINY = Path(__file__).with_name("tiny.yaml")
LIMIT_S = 360.0


def output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def submit(shared: Path, *words: str, site: tuple[str, ...] = (), config: Path = TINY) -> Path:
    """The run folder of a run that was submitted; `words` as in --set, `site` as in --set-site."""
    changes = [x for word in (f"runs_dir={shared / 'runs'}", *words) for x in ("--set", word)]
    changes += [x for word in site for x in ("--set-site", word)]
    command = [sys.executable, "-m", "launcher", "submit", str(config), "--site", "testbed", "--detach", *changes]
    found = re.search(r"^run folder: (\S+), job \d+$", output(*command), re.MULTILINE)
    assert found
    return Path(found.group(1))


def wait_for(what: str, is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, f"waited {limit_s:.0f} s for {what}\n{story()}"
        time.sleep(0.2)


def story() -> str:
    """What the newest run's supervisor and attempts said, for a test that fails."""
    newest = max(testbed.Cluster().shared.glob("*/*/config.yaml"), key=lambda p: p.stat().st_mtime, default=None)
    if newest is None:
        return "no run"
    run = newest.parent
    ends = [f"{p.parent.name}: {p.read_text()}" for p in sorted(run.glob("attempts/*/report.json"))]
    return "\n".join([str(run), said(run), *ends, (run / "status.json").read_text()])


def wait_step(run: Path, step: int) -> None:
    """Until so many steps are done."""
    wait_for(f"step {step} of {run.name}; supervisor: {said(run)}", lambda: runs.last_step(run) >= step)


def wait_end(run: Path, kind: str, limit_s: float = LIMIT_S) -> None:
    """Until the run has ended for good, as it should."""
    wait_for(f"{run.name} to end", lambda: runs.read_status(run).state in runs.FINAL, limit_s)
    report = runs.read_report(run, runs.last_attempt(run))
    assert report is not None and report.kind == kind, f"{report}\n{said(run)}"


def said(run: Path) -> str:
    log = run / "supervisor.log"
    return log.read_text() if log.exists() else ""


def rank_logs(run: Path, attempt: int = 0) -> dict[int, str]:
    folder = run / "attempts" / str(attempt)
    return {int(p.stem.removeprefix("rank-")): p.read_text() for p in folder.glob("rank-*.log")}


def state(run: Path) -> str:
    """As `status` says it now."""
    return States(slurm.Watch(every_s=0.0)).of(run)


@contextmanager
def hidden(folder: Path, node: str) -> Iterator[None]:
    """The node sees nothing in this folder meanwhile, as one that has lost a file system."""
    inside = ("nsenter", f"--target={output('pgrep', '-f', f'slurmd -D -N {node} ')}", "--mount", "--pid")
    output(*inside, "mount", "-t", "tmpfs", "none", str(folder))
    yield
    output(*inside, "umount", "--lazy", str(folder))  # by way of /proc


def trained_once(run: Path, steps: int) -> None:
    """Nothing lost, nothing doubled, over all attempts."""
    from tests.tools import ledger

    assert ledger.check(run) == []
    lines = [line["step"] for line in kill.metrics(run) if "loss" in line]
    assert lines == list(range(1, steps + 1))
