"""The commands that start and stop runs: submit, plan, resume, cancel."""

from __future__ import annotations

import argparse
import difflib
import signal
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from launcher import check, plan, processes, progress, runs, show, supervisor
from launcher import site as machine
from launcher import submit as job
from runtime.config import RunConfig, SiteConfig
from runtime.errors import EXIT_CODES, ConfigError
from runtime.load import Loaded, dump, load_site, read_run

RESUMABLE: Final = ("num_steps", "evaluation", "tracking", "cluster", "staleness", "limits", "checkpoint")
"""Sections a resume may change: they alter no batch that was already trained."""

KILL_LIMIT_S: Final = 30.0
"""For the supervisor to sweep up after a second signal."""


def submit(args: argparse.Namespace) -> int:
    loaded, site = _prepare(args.config, args.overrides, args.site)
    planned = plan.make(loaded.config, site, Path(loaded.config.runs_dir) / "RUN", 0, machine.machine())
    if args.dry_run:
        print(plan.describe(planned, loaded.config, site))
        return 0
    run = runs.create(loaded.config, site, planned.topology)
    return _launch(run, loaded.config, args.detach)


def show_plan(args: argparse.Namespace) -> int:
    loaded, site = _prepare(args.config, args.overrides, args.site)
    run = Path(loaded.config.runs_dir) / "RUN"
    print(plan.describe(plan.make(loaded.config, site, run, 0, machine.machine()), loaded.config, site))
    return 0


def resume(args: argparse.Namespace) -> int:
    run = runs.find(args.run, Path(args.runs))
    if runs.state(run) not in (*runs.FINAL, "died"):
        raise ConfigError(run.name, f"is {runs.state(run)}", f"`python -m launcher cancel {run.name}` stops it first")
    loaded, site = _prepare(str(run / "config.yaml"), args.overrides, str(run / "site.yaml"))
    old = read_run(run / "config.yaml").config
    if not args.accept_changes:
        _refuse_changes(old, loaded.config)
    done = runs.last_step(run)
    if done >= loaded.config.num_steps and _is_done(run):
        fix = f"--set num_steps={done + 50} goes on"
        raise ConfigError(run.name, f"has done all its {done} steps", fix)
    planned = plan.make(loaded.config, site, run, runs.last_attempt(run) + 1, machine.machine())
    (run / runs.CANCEL_MARK).unlink(missing_ok=True)
    runs.write_config(run, loaded.config, site, planned.topology)
    runs.write_status(run, runs.Status(state="queued", attempt=runs.last_attempt(run)))
    return _launch(run, loaded.config, args.detach)


def cancel(args: argparse.Namespace) -> int:
    run = runs.find(args.run, Path(args.runs))
    state = runs.state(run)
    if state in runs.FINAL:
        print(f"{run.name} is not running: {state}")
        return 0
    limit_s = read_run(run / "config.yaml").config.limits.stop_s
    print(f"{run.name}: asking it to save and end; after {limit_s:.0f} s it is killed", flush=True)
    stop(run, limit_s + supervisor.END_LIMIT_S + supervisor.PLOT_LIMIT_S)
    print(f"{run.name}: {runs.state(run)}; `python -m launcher resume {run.name}` goes on with it")
    return 0


def stop(run: Path, limit_s: float) -> None:
    """End a run: ask its supervisor, and kill it if it takes longer than `limit_s`."""
    ask_to_stop(run)
    if not _wait_gone(run, limit_s):
        processes.signal_process(runs.read_status(run).pid, signal.SIGKILL)
        _wait_gone(run, KILL_LIMIT_S)
    status = runs.read_status(run)
    if status.state not in runs.FINAL:
        runs.write_status(run, msgspec.structs.replace(status, state="cancelled", cancelled=True))


def ask_to_stop(run: Path) -> None:
    """One order to stop: the first lets the run save, the second kills it."""
    (run / runs.CANCEL_MARK).touch()
    status = runs.read_status(run)
    if runs.supervisor_alive(status):
        processes.signal_process(status.pid, signal.SIGTERM)


def _wait_gone(run: Path, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while runs.state(run) not in (*runs.FINAL, "died"):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _prepare(path: str, overrides: list[str], site_name: str | None) -> tuple[Loaded, SiteConfig]:
    """Load and check everything that can be checked before anything is started; warnings go to stderr."""
    loaded = read_run(path, overrides)
    site = load_site(site_name or loaded.config.site)
    for warning in check.everything(loaded, site):
        print(f"warning: {warning}", file=sys.stderr)
    return loaded, site


def _launch(run: Path, config: RunConfig, detach: bool) -> int:
    began = time.time()
    job.start(run)
    print(f"run folder: {run}", flush=True)
    if detach:
        print(f"follow it with: python -m launcher logs -f {run}    or: python -m launcher status {run}")
        return 0
    with progress.open_view(sys.stdout.isatty()) as view:
        view.note("Ctrl-C cancels the run; --detach would leave it running in the background")
        state = _follow(run, config.num_steps, view, began)
    report = runs.read_report(run, runs.last_attempt(run))
    print(show.outcome(run, state))
    return EXIT_CODES.get(report.kind, 1) if report and state != "died" else EXIT_CODES["bug"]


def _follow(run: Path, num_steps: int, view: progress.View, began: float) -> str:
    """Follow; each Ctrl-C passes one order to stop to the supervisor."""
    while True:
        try:
            return progress.follow(run, num_steps, view, began)
        except KeyboardInterrupt:
            view.note("stopping: the run saves and ends; Ctrl-C again kills it")
            ask_to_stop(run)
            began = time.time()


def _is_done(run: Path) -> bool:
    report = runs.read_report(run, runs.last_attempt(run))
    return report is not None and report.kind == "done"


def _refuse_changes(old: RunConfig, new: RunConfig) -> None:
    free = {name: getattr(new, name) for name in RESUMABLE}
    before, after = dump(msgspec.structs.replace(old, **free)), dump(new)
    if before != after:
        lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), "run", "resume", lineterm="", n=1))
        fix = f"only {', '.join(RESUMABLE)} may change; --accept-changes allows more, start a new run otherwise"
        raise ConfigError("resume", "the changes alter what was trained so far:\n" + "\n".join(lines), fix)
