"""The commands that start and stop runs: submit, plan, run, resume, cancel."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from launcher import check, plan, processes, progress, runs, script, show, site, supervisor
from launcher import submit as job
from launcher.states import States, report_of
from runtime.config import RunConfig, SiteConfig
from runtime.errors import EXIT_CODES, ConfigError
from runtime.load import Loaded, dump, load_site, read_run

RESUMABLE: Final = ("num_steps", "evaluation", "tracking", "cluster", "staleness", "limits", "checkpoint")
"""Sections a resume may change: they alter no batch that was already trained."""

KILL_LIMIT_S: Final = 30.0
"""For the supervisor to sweep up after a second signal."""


def submit(args: argparse.Namespace) -> int:
    loaded, where = _prepare(args)
    config = loaded.config
    if args.dry_run:
        print(_described(config, where))
        job.try_out(_script(config, where, Path(config.runs_dir) / "RUN"), where)
        return 0
    run = runs.create(config, where)
    _write_script(run, config, where)
    try:
        return _launch(run, config, where, args.detach)
    except job.Refused:
        shutil.rmtree(run)  # nothing ran in it
        raise


def show_plan(args: argparse.Namespace) -> int:
    loaded, where = _prepare(args)
    print(_described(loaded.config, where))
    return 0


def run_here(args: argparse.Namespace) -> int:
    """Supervise in this process: inside a Slurm job, as the templates in sbatch/ do."""
    number = os.environ.get("SLURM_JOB_ID", "")
    if not number:
        raise ConfigError("SLURM_JOB_ID", "is not set: this is no Slurm job", "use `submit`, or sbatch or salloc first")
    loaded, where = _prepare(args)
    config = loaded.config
    if where.scheduler != "slurm":
        raise ConfigError(f"site {where.name}", "has no scheduler", "name a Slurm site with --site")
    mine = [run for run in runs.all_runs(Path(config.runs_dir)) if runs.job_id(run) == number]
    run = next((run for run in mine if runs.read_status(run).state not in runs.FINAL), None)
    if run is None:
        run = runs.create(config, where)
        _write_script(run, config, where)
    print(f"run folder: {run}", flush=True)
    code = supervisor.main(str(run))
    print(show.outcome(run, runs.read_status(run).state))
    return code


def resume(args: argparse.Namespace) -> int:
    run = runs.find(args.run, Path(args.runs))
    state = States().of(run)
    if state not in (*runs.FINAL, "died"):
        raise ConfigError(run.name, f"is {state}", f"`python -m launcher cancel {run.name}` stops it first")
    args.config, args.site = str(run / "config.yaml"), str(run / "site.yaml")
    loaded, where = _prepare(args)
    old = read_run(run / "config.yaml").config
    if not args.accept_changes:
        _refuse_changes(old, loaded.config)
    done = runs.last_step(run)
    if done >= loaded.config.num_steps and _is_done(run):
        fix = f"--set num_steps={done + 50} goes on"
        raise ConfigError(run.name, f"has done all its {done} steps", fix)
    (run / runs.CANCEL_MARK).unlink(missing_ok=True)
    runs.write_config(run, loaded.config, where)
    _write_script(run, loaded.config, where)
    runs.write_status(run, runs.Status(state="queued", attempt=runs.last_attempt(run)))
    return _launch(run, loaded.config, where, args.detach)


def cancel(args: argparse.Namespace) -> int:
    run = runs.find(args.run, Path(args.runs))
    state = States().of(run)
    if state in runs.FINAL:
        print(f"{run.name} is not running: {state}")
        return 0
    limit_s = read_run(run / "config.yaml").config.limits.stop_s
    print(f"{run.name}: asking it to save and end; after {limit_s:.0f} s it is killed", flush=True)
    stop(run, state, limit_s + supervisor.END_LIMIT_S + supervisor.PLOT_LIMIT_S)
    print(f"{run.name}: {States().of(run)}; `python -m launcher resume {run.name}` goes on with it")
    return 0


def stop(run: Path, state: str, limit_s: float) -> None:
    """End a run: ask its supervisor, and kill it if it takes longer than `limit_s`."""
    ask_to_stop(run, state)
    if state != "queued" and not _wait_gone(run, limit_s):
        number = runs.job_id(run)
        if number:
            job.signal(number, "KILL")
        else:
            processes.signal_process(runs.read_status(run).pid, signal.SIGKILL)
        _wait_gone(run, KILL_LIMIT_S)
    status = runs.read_status(run)
    if status.state not in runs.FINAL:
        runs.write_status(run, msgspec.structs.replace(status, state="cancelled", cancelled=True))


def ask_to_stop(run: Path, state: str) -> None:
    """One order to stop: the first lets the run save, the second kills it. A job that only waits is cancelled."""
    (run / runs.CANCEL_MARK).touch()
    status, number = runs.read_status(run), runs.job_id(run)
    if number:
        job.signal(number, "" if state == "queued" else "TERM")
    elif runs.supervisor_alive(status):
        processes.signal_process(status.pid, signal.SIGTERM)


def _wait_gone(run: Path, limit_s: float) -> bool:
    end, states = time.monotonic() + limit_s, States()
    while states.of(run) not in (*runs.FINAL, "died"):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _prepare(args: argparse.Namespace) -> tuple[Loaded, SiteConfig]:
    """Load and check everything that can be checked before anything is started; warnings go to stderr."""
    loaded = read_run(args.config, args.overrides)
    where = load_site(args.site or loaded.config.site, args.site_overrides)
    for warning in check.everything(loaded, where):
        print(f"warning: {warning}", file=sys.stderr)
    return loaded, where


def _described(config: RunConfig, where: SiteConfig) -> str:
    run = Path(config.runs_dir) / "RUN"
    planned = plan.make(config, where, run, 0, site.machine(where))
    return plan.describe(planned, config, where, _script(config, where, run))


def _script(config: RunConfig, where: SiteConfig, run: Path) -> str:
    """The batch script of a run's job; empty where there is no scheduler."""
    return job.render(script.make(config, where, run, sys.executable), run) if where.scheduler == "slurm" else ""


def _write_script(run: Path, config: RunConfig, where: SiteConfig) -> None:
    if text := _script(config, where, run):
        runs.write_atomic(run / runs.SCRIPT, text.encode())


def _launch(run: Path, config: RunConfig, where: SiteConfig, detach: bool) -> int:
    began, states = time.time(), States()
    job.start(run, where)
    print(f"run folder: {run}" + (f", job {number}" if (number := runs.job_id(run)) else ""), flush=True)
    if detach:
        print(f"follow it with: python -m launcher logs -f {run}    or: python -m launcher status {run}")
        return 0
    with progress.open_view(sys.stdout.isatty()) as view:
        view.note("Ctrl-C cancels the run; --detach would leave it running in the background")
        state = _follow(run, config.num_steps, view, states, began)
    job_now = states.job(run)
    report = report_of(run, job_now)
    print(show.outcome(run, state, job_now))
    return EXIT_CODES.get(report.kind, 1) if report and state != "died" else EXIT_CODES["bug"]


def _follow(run: Path, num_steps: int, view: progress.View, states: States, began: float) -> str:
    """Follow; each Ctrl-C passes one order to stop to the supervisor."""
    while True:
        try:
            return progress.follow(run, num_steps, view, states, began)
        except KeyboardInterrupt:
            view.note("stopping: the run saves and ends; Ctrl-C again kills it")
            ask_to_stop(run, states.of(run))
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
