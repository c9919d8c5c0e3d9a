"""The commands that start and stop runs: submit, plan, run, resume, cancel."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from launcher import machine, plan, processes, progress, runs, script, show, supervisor
from launcher import submit as submission
from launcher.checks import allocation, files
from launcher.checks.run import check_run
from launcher.refusals import Refused
from launcher.states import States, report_of
from runtime.config import RunConfig
from runtime.errors import EXIT_CODES, Collector, ConfigError, TryLater
from runtime.load import Loaded, LoadedSite, dump, read_run, read_site
from runtime.site import SiteConfig

RESUMABLE: Final = ("num_steps", "evaluation", "tracking", "cluster", "staleness", "limits", "checkpoint")
"""Sections a resume may change: they alter no batch that was already trained."""

LOCK_LIMIT_S: Final = 5.0
"""For a supervisor that has said its last to be gone."""

KILL_LIMIT_S: Final = 30.0
"""For the supervisor to sweep up after a second signal."""


class Withdrawn(KeyboardInterrupt):
    """Ctrl-C ended a submission before it was known to have started anything."""


def submit(args: argparse.Namespace) -> int:
    loaded, site = _prepare(args)
    config, where = loaded.config, site.config
    if args.dry_run:
        print(_described(config, where))
    said = _try_out(loaded, site)
    if args.dry_run:
        if said:
            print(f"\nSlurm would run the job: {said}")
        print("\nchecked, nothing was started")
        return 0
    run = runs.create(config, where, loaded.where("runs_dir"))
    try:
        _write_script(run, config, where)
        return _launch(run, loaded, site, args.detach)
    except (Refused, Withdrawn):
        runs.remove(run)  # nothing ran in it
        raise


def show_plan(args: argparse.Namespace) -> int:
    loaded, site = _prepare(args)
    print(_described(loaded.config, site.config))
    return 0


def run_here(args: argparse.Namespace) -> int:
    """Supervise in this process: inside a Slurm job, as the templates in sbatch/ do."""
    number = os.environ.get("SLURM_JOB_ID", "")
    if not number:
        raise ConfigError("SLURM_JOB_ID", "is not set: this is no Slurm job", "use `submit`, or sbatch or salloc first")
    loaded, site = _prepare(args)
    config, where = loaded.config, site.config
    if where.scheduler != "slurm":
        raise ConfigError(f"site {where.name}", "has no scheduler", "name a Slurm site with --site")
    for warning in allocation.check(loaded, site, os.environ):
        print(f"warning: {warning}", file=sys.stderr)
    mine = [run for run in runs.all_runs(Path(config.runs_dir)) if runs.job_id(run) == number]
    run = next((run for run in mine if runs.read_status(run).state not in runs.FINAL), None)
    if run is None:
        run = runs.create(config, where, loaded.where("runs_dir"))
        _write_script(run, config, where)
    print(f"run folder: {run}", flush=True)
    code = supervisor.main(str(run))
    print(show.outcome(run, runs.read_status(run).state))
    return code


def resume(args: argparse.Namespace) -> int:
    run = runs.find(args.run, Path(args.runs))
    try:
        with runs.held(run, LOCK_LIMIT_S):
            loaded, site, before = _renew(run, args)
    except BlockingIOError:
        fix = f"`python -m launcher status{runs.called(run)}` tells more"
        raise ConfigError(run.name, "is under way, or another resume is starting it", fix) from None
    try:
        return _launch(run, loaded, site, args.detach)
    except (Refused, TryLater):
        runs.write_status(run, before)
        raise


def _renew(run: Path, args: argparse.Namespace) -> tuple[Loaded, LoadedSite, runs.Status]:
    """Let a run that ended be as one that waits for its start, with what `resume` was told; and what its status was."""
    state = States().of(run)
    if state not in (*runs.FINAL, "died"):
        going = "it will start by itself" if state == "queued" else "it is under way"
        stops = f"`python -m launcher cancel{runs.called(run)}` stops it"
        raise ConfigError(
            run.name, f"is {progress.told_as(run, state)}", f"{going}; to change something, {stops} first"
        )
    args.config, args.site = str(run / "config.yaml"), str(run / "site.yaml")
    loaded, site = _prepare(args)
    last = runs.attempt_dir(run, runs.last_attempt(run)) / "config.yaml"  # the run's own may have been edited since
    attempted = read_run(last if last.exists() else run / "config.yaml").config
    if not args.accept_changes:
        _refuse_changes(attempted, loaded.config)
        for path in runs.changed_data(run, loaded.config):
            fix = "put it back as it was; --accept-changes goes on with it as it is"
            raise ConfigError("resume", f"{path} is not what the run was trained on so far", fix)
    done, wanted = runs.last_step(run), loaded.config.num_steps
    if done > wanted or (done == wanted and _is_done(run)):
        steps = f"all its {done} steps" if done == wanted else f"{done} steps, and num_steps is {wanted}"
        raise ConfigError(run.name, f"has done {steps}", f"--set num_steps={done + 50} goes on")
    if show.is_lost(run, attempted.checkpoint.interval):
        problem = f"has {done} recorded steps, but no complete checkpoint to go on from"
        raise ConfigError(run.name, problem, show.anew(run))
    _try_out(loaded, site)
    if runs.last_attempt(run) >= 0 and not show.has_checkpoint(run):
        print(f"{run.name}: it starts from the beginning, as no checkpoint was made yet")
    (run / runs.CANCEL_MARK).unlink(missing_ok=True)
    runs.write_config(run, loaded.config, site.config)
    _write_script(run, loaded.config, site.config)
    before = runs.read_status(run)
    runs.write_status(run, runs.Status(state="queued", attempt=runs.last_attempt(run)))
    return loaded, site, before


def cancel(args: argparse.Namespace) -> int:
    run = runs.find(args.run, Path(args.runs))
    state = States().of(run)
    if state in runs.FINAL:
        print(f"{run.name} is not running: {state}")
        return 0
    status = runs.read_status(run)
    if state != "died" and not runs.job_id(run) and runs.is_elsewhere(status):
        there = f"cancel it there: python -m launcher cancel {shlex.quote(str(run))}"
        raise ConfigError(run.name, f"is {state} on {status.host}", there)
    limit_s = read_run(run / "config.yaml").config.limits.stop_s
    if state == "queued":
        is_local = progress.told_as(run, state) != state
        print(f"{run.name}: {'ending it as it starts' if is_local else 'taking it out of the queue'}", flush=True)
    elif runs.cancel_asked(run) and state != "died":
        print(f"{run.name}: it was asked to end before, so now it is killed", flush=True)
    else:
        print(f"{run.name}: asking it to save and end; after {limit_s:.0f} s it is killed", flush=True)
    stop(run, state, limit_s + supervisor.END_LIMIT_S + supervisor.PLOT_LIMIT_S)
    states = States()
    state, report = states.of(run), report_of(run, states.job(run), "cancelled")
    print(f"{run.name}: {state}; {show.advice(run, report.kind if report else 'preempted')}")
    return 0


def stop(run: Path, state: str, limit_s: float) -> None:
    """End a run: ask its supervisor, and kill it if it takes longer than `limit_s`."""
    ask_to_stop(run, state)
    if state != "queued" and not _wait_gone(run, limit_s):
        number = runs.job_id(run)
        if number:
            submission.signal(number, "KILL")
        elif runs.supervisor_here(status := runs.read_status(run)):
            processes.signal_process(status.pid, signal.SIGKILL)
        _wait_gone(run, KILL_LIMIT_S)
    status, attempt = runs.read_status(run), runs.last_attempt(run)
    if status.state not in runs.FINAL:
        runs.write_status(run, msgspec.structs.replace(status, state="cancelled", cancelled=True))
        if attempt >= 0 and runs.read_report(run, attempt) is None:
            killed = runs.Report(kind="preempted", message="cancelled; it was killed before it could save")
            runs.write_report(run, attempt, killed)


def ask_to_stop(run: Path, state: str) -> None:
    """One order to stop: the first lets the run save, the second kills it. A job that only waits is cancelled."""
    (run / runs.CANCEL_MARK).touch()
    status, number = runs.read_status(run), runs.job_id(run)
    if number:
        submission.signal(number, "" if state == "queued" else "TERM")
    elif runs.supervisor_here(status):
        processes.signal_process(status.pid, signal.SIGTERM)


def _wait_gone(run: Path, limit_s: float) -> bool:
    end, states = time.monotonic() + limit_s, States()
    while states.of(run) not in (*runs.FINAL, "died"):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _prepare(args: argparse.Namespace) -> tuple[Loaded, LoadedSite]:
    """Load and check everything that can be checked before anything is started; warnings go to stderr."""
    told, loaded, site = Collector(), None, None
    with told.going_on():
        loaded = read_run(args.config, args.overrides)
    with told.going_on():
        if args.site:
            site = read_site(args.site, args.site_overrides)
        elif loaded:
            site = _site_of(loaded, args.site_overrides)
    told.tell()
    assert loaded and site
    for warning in check_run(loaded, site.config):
        print(f"warning: {warning}", file=sys.stderr)
    return loaded, site


def _site_of(loaded: Loaded, overrides: Sequence[str]) -> LoadedSite:
    """That a config names."""
    name = loaded.config.site
    try:
        return read_site(name, overrides)
    except ConfigError as e:
        if e.where not in ("site", name):
            raise
        problem = e.problem if e.where == "site" else f"{name} {e.problem}"
        raise ConfigError(loaded.where("site"), problem, e.fix) from None


def _described(config: RunConfig, where: SiteConfig) -> str:
    run = Path(config.runs_dir) / "RUN"
    planned = plan.make(config, where, run, 0, machine.here(where))
    rows = {data.path: files.num_rows(data.path) for data in (*config.data, *config.evaluation.sets)}
    return plan.describe(planned, config, where, _script(config, where, run), rows)


def _script(config: RunConfig, where: SiteConfig, run: Path) -> str:
    """The batch script of a run's job; empty where there is no scheduler."""
    return submission.render(script.make(config, where, run, sys.executable), run) if where.scheduler == "slurm" else ""


def _try_out(loaded: Loaded, site: LoadedSite) -> str:
    """What Slurm says of the job; empty without one. A job that could never run is queued for ever by some Slurms.

    Raises:
        ConfigError: it could not run.
    """
    if site.config.scheduler != "slurm":
        return ""
    said = submission.try_out(_script(loaded.config, site.config, Path(loaded.config.runs_dir) / "RUN"), loaded, site)
    if said.startswith(submission.NOT_YET):
        print(f"warning: Slurm would run the job {said}", file=sys.stderr)
    return said


def _write_script(run: Path, config: RunConfig, where: SiteConfig) -> None:
    if text := _script(config, where, run):
        runs.write_atomic(run / runs.SCRIPT, text.encode())


@contextmanager
def _held_interrupts() -> Iterator[list[str]]:
    """A first Ctrl-C is kept until the block ends, a second one is not; yields those that came."""
    came: list[str] = []

    def hold(*_: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append("Ctrl-C")
        print(
            "interrupted: waiting for the answer, to cancel what was started; Ctrl-C again waits no longer", flush=True
        )

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _launch(run: Path, loaded: Loaded, site: LoadedSite, detach: bool) -> int:
    began, states, before = time.time(), States(), runs.job_id(run)
    try:
        with _held_interrupts() as interrupts:
            submission.start(run, loaded, site)
    except KeyboardInterrupt:
        interrupts = ["twice"]
        _withdraw(run, site.config, before)
    print(f"run folder: {run}" + (f", job {number}" if (number := runs.job_id(run)) else ""), flush=True)
    if interrupts:
        stop(run, states.of(run), loaded.config.limits.stop_s)
    elif detach:
        named = runs.called(run)
        print(f"follow it with: python -m launcher logs -f{named}    or: python -m launcher status{named}")
        return 0
    else:
        with progress.open_view(sys.stdout.isatty()) as view:
            view.note("Ctrl-C cancels the run; --detach would leave it running in the background")
            _follow(run, loaded.config.num_steps, view, states, began)
    state, job_now = states.of(run), states.job(run)
    report = report_of(run, job_now, state)
    print(show.outcome(run, state, job_now))
    return EXIT_CODES.get(report.kind, 1) if report and state != "died" else EXIT_CODES["bug"]


def _withdraw(run: Path, where: SiteConfig, before: str) -> None:
    """After a submission that nobody waited for: note the job that came of it. `before`: the run's last one.

    Raises:
        Withdrawn: nothing is known of one.
    """
    (run / runs.CANCEL_MARK).touch()  # a job that comes later ends at once
    number = submission.find(run, before) if where.scheduler == "slurm" else ""
    if number:
        (run / runs.JOB_ID).write_text(number)
    elif where.scheduler == "slurm":
        runs.write_status(run, msgspec.structs.replace(runs.read_status(run), state="cancelled", cancelled=True))
        raise Withdrawn("nothing was queued, as far as Slurm says")


def _follow(run: Path, num_steps: int, view: progress.View, states: States, began: float) -> None:
    """Follow; each Ctrl-C passes one order to stop to the supervisor."""
    told = 0
    while True:
        try:
            progress.follow(run, num_steps, view, states, began)
            return
        except KeyboardInterrupt:
            told += 1
            view.note("killing the run" if told > 1 else "stopping: the run saves and ends; Ctrl-C again kills it")
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
