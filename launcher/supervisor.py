"""Runs inside the job: starts the world, watches it, reads its exit report and decides what follows.

It holds no GPU and loads neither MPI nor torch, so nothing that breaks the world breaks it.

    start attempt n -> watch -> report -> done, config, bug, ...                   end
         ^                        |  +-> preempted, timeout: under Slurm           queued again
         +--- n + 1 <-------------+  peer_lost, engine_lost, node_failed: unless `limits.attempts` attempts
                                     in a row brought no new step
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from launcher import job as jobs
from launcher import plan, processes, runs, srun, verdict
from launcher.job import Job, Order, Outlook
from launcher.runs import Report, State, Status
from launcher.slurm import SchedulerDown
from launcher.verdict import Evidence
from runtime.config import Limits
from runtime.errors import EXIT_CODES, FULL, ConfigError
from runtime.load import load_run, load_site

FAULTS: Final = tuple(kind for kind in EXIT_CODES if kind not in ("done", "preempted", "timeout"))
ECHOES: Final = ("bug", "peer_lost", "engine_lost")
"""What ranks report that see others end by an order which those could not hear yet, or were killed after."""
FAULT_END_S: Final = 3.0
"""From a fault's report to the end of all ranks: some may wait in MPI for one that is gone, and for ever."""
ORDERLY_END_S: Final = 30.0
"""The same for a report of an orderly end."""
START_MARGIN_S: Final = 30.0
"""Beside limits.start_s, which ranks keep themselves once they can: MPI_Init may hang."""
POLL_S: Final = 0.1
FULL_BYTES: Final = 1 << 20
"""Left on a disk that counts as full."""
SPEAK_S: Final = 30.0
"""status.json is written so often, so that its readers know that the supervisor lives (see launcher.states)."""
PLOT_LIMIT_S: Final = 60.0
END_GRACE_S: Final = 3.0
"""For engines and other children to end by themselves after the world ended."""
END_LIMIT_S: Final = 20.0

T = TypeVar("T")
log = logging.getLogger("supervisor")


def main(run_dir: str, failed: str = "") -> int:
    """Supervise a run to its end; the exit code of its last report.

    Args:
        failed: line of the batch script that failed before, with the key of the site that holds it.
    """
    os.umask(0o077)
    run = Path(run_dir)
    open_log(run)
    with ExitStack() as stack:
        try:
            stack.enter_context(runs.held(run))
        except BlockingIOError:
            log.error("another supervisor has this run; this one ends")
            return EXIT_CODES["config"]
        try:
            return EXIT_CODES[(_refuse(run, failed) if failed else _supervise(run)).kind]
        except Exception:
            log.exception("the supervisor failed")
            runs.write_status(run, msgspec.structs.replace(runs.read_status(run), state="failed"))
            raise


def open_log(run: Path) -> None:
    """Let the supervisor's words go to supervisor.log."""
    handler = logging.FileHandler(run / "supervisor.log")
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, handlers=[handler])


def _supervise(run: Path) -> Report:
    config, where = load_run(run / "config.yaml"), load_site(str(run / "site.yaml"))
    return Supervisor(run, jobs.of(run, config, where), config.limits).run()


def _refuse(run: Path, failed: str) -> Report:
    """End a run whose job could not be set up."""
    number, job = runs.last_attempt(run) + 1, os.environ.get("SLURM_JOB_ID", "")
    runs.attempt_dir(run, number).mkdir(parents=True)
    output = run / "job" / f"{job}.log"
    last = runs.last_line(output)
    message = f"{run / 'site.yaml'}: {failed}: failed in job {job}, see {output}" + (
        f"; its last line: {last}" if last else ""
    )
    report = Report(kind="config", message=f"{message}; a line that may fail ends in `|| true`")
    runs.write_report(run, number, report)
    runs.write_status(run, msgspec.structs.replace(runs.read_status(run), state="failed", attempt=number))
    log.error("%s", report.message)
    return report


class Supervisor:
    """One job's supervision of one run. Uses signal handlers, so it belongs to the main thread."""

    def __init__(self, run: Path, job: Job, limits: Limits) -> None:
        self._run, self._job, self._limits = run, job, limits
        self._orders: list[Order] = []
        """Received as signals: the first asks the world to save and end, the second kills it."""
        self._status = Status(
            state="starting", pid=os.getpid(), pid_started=processes.started(os.getpid()), host=socket.gethostname()
        )

    def run(self) -> Report:
        """Attempts until one needs no restart; nothing of them is left afterwards."""
        processes.adopt_orphans()
        self._listen()
        if self._job.number:
            runs.write_atomic(self._run / runs.JOB_ID, self._job.number.encode())
            self._account_for(runs.last_attempt(self._run))
        if runs.cancel_asked(self._run):
            self._say("cancelled", runs.last_attempt(self._run))
            return Report(kind="preempted", message="cancelled before it began")
        best, fruitless = runs.last_step(self._run), runs.read_status(self._run).fruitless
        while True:
            report = self._attempt(runs.last_attempt(self._run) + 1)
            step = runs.last_step(self._run)
            fruitless = 0 if step > best else fruitless + (report.kind != "preempted")
            self._status = msgspec.structs.replace(self._status, fruitless=fruitless)
            best = max(best, step)
            outlook = self._job.outlook(report, "stop" in self._orders)
            if outlook.reason:
                log.info("%s", outlook.reason)
            if outlook.next != "end" and fruitless > self._limits.attempts:
                log.error("gave up: %d attempts in a row brought no new step (limits.attempts)", fruitless)
                outlook = Outlook(next="end")
            if outlook.next != "restart":
                return self._end(report, outlook)
            log.info("restarting from the last checkpoint")

    def _account_for(self, number: int) -> None:
        """Give the last attempt a report where the job that it ran in was ended before it could have one."""
        if number >= 0 and runs.read_report(self._run, number) is None:
            report = self._write(
                runs.attempt_dir(self._run, number), verdict.unspoken(runs.attempt_dir(self._run, number))
            )
            log.info("attempt %d ended: %s: %s", number, report.kind, report.message)

    def _listen(self) -> None:
        orders: dict[signal.Signals, Order] = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), "stop")
        if self._job.number:
            orders[signal.SIGUSR1] = "timeout"  # sbatch --signal, before the walltime ends
        for number, order in orders.items():
            signal.signal(number, lambda _number, _frame, order=order: self._orders.append(order))
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # submitit's time-limit signal; the local site has no limit

    def _end(self, report: Report, outlook: Outlook) -> Report:
        if outlook.next == "queued":
            self._say("queued")  # before it is true: a requeue ends this process
            if self._job.again():
                return report
        self._say("ending")
        self._plot()
        cancelled = outlook.cancelled or runs.cancel_asked(self._run)
        self._say("cancelled" if cancelled and report.kind != "done" else final_state(report))
        return report

    def _attempt(self, number: int) -> Report:
        folder = runs.attempt_dir(self._run, number)
        folder.mkdir(parents=True)
        shutil.copy(self._run / "config.yaml", folder / "config.yaml")
        self._say("starting", number)
        report = self._live(folder)
        killed, left = processes.end_descendants(END_GRACE_S, END_LIMIT_S)
        if killed:
            log.warning("processes of attempt %d that had to be killed: %s", number, "; ".join(killed))
        processes.remove_stale_shared_memory()
        processes.remove_stale_topologies()
        if left:
            log.error("processes that SIGKILL did not end within %g s: %s", END_LIMIT_S, "; ".join(left))
        report = report or runs.read_report(self._run, number)
        assert report is not None
        log.info("attempt %d ended: %s: %s", number, report.kind, (report.message.splitlines() or [""])[0])
        return report

    def _live(self, folder: Path) -> Report | None:
        """Start a world and watch it to its end; a report is written if it left none."""
        oom_kills = processes.out_of_memory_kills()
        try:
            planned = self._job.plan(int(folder.name))
            runs.write_topology(self._run, planned.topology)
            (folder / srun.HOST_FILE).write_text(srun.host_file(planned.topology))
            log.info("attempt %s: %s", folder.name, " ".join(planned.command))
            with (folder / planned.log).open("wb") as output:
                child = subprocess.Popen(
                    planned.command,
                    env=planned.env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=processes.die_with_parent,
                )
        except (OSError, ConfigError, SchedulerDown) as e:
            return self._write(folder, Report(kind="config", message=f"the world cannot be started: {e}"))
        end = self._watch(child, int(folder.name))
        found = runs.read_report(self._run, int(folder.name))
        is_echo = found is not None and found.kind in ECHOES
        if found is not None and not (is_echo and (end.early or end.overdue_s or verdict.said_in_init(folder))):
            return found
        if found is not None:
            log.info("what ranks reported as they were ended: %s: %s", found.kind, found.message)
        if found is None and shutil.disk_usage(self._run).free < FULL_BYTES:
            message = f"{self._run}: the disk is full; make room, then `resume` goes on from the last checkpoint"
            return self._write(folder, Report(kind="config", message=message))
        oom_killed = processes.out_of_memory_kills() > oom_kills
        order = self._orders[0] if self._orders else ""
        seen = msgspec.structs.replace(end, code=child.returncode, log=planned.log, order=order, oom_killed=oom_killed)
        return self._write(folder, verdict.judge(folder, seen))

    def _watch(self, child: subprocess.Popen[bytes], number: int) -> Evidence:
        """Wait for the world's end, passing orders on; kill it where it does not begin or end in time."""
        events = self._run / "events.jsonl"
        size_before = _size(events)
        told_at = reported_at = 0.0  # when an order was passed on, and when a report was there; 0: not yet
        spoke_at, early = time.monotonic(), False
        deadline = spoke_at + self._limits.start_s + START_MARGIN_S
        while child.poll() is None:
            now = time.monotonic()
            if self._status.state == "starting" and _size(events) != size_before:
                self._say("running")
            if self._status.state == "starting" and now > deadline:
                log.warning("killing the world: it did not begin within limits.start_s")
                self._job.kill(child)
                return Evidence(stuck_s=now - deadline + self._limits.start_s)
            if self._status.state == "starting" and verdict.launch_failed(runs.attempt_dir(self._run, number)):
                log.warning("killing the world: some of its ranks cannot begin")
                self._job.kill(child)
                return Evidence(early=early)
            if now - spoke_at > SPEAK_S:
                spoke_at = now
                self._say(self._status.state)
            if self._orders and not told_at:
                told_at, early = now, self._status.state == "starting"
                log.info("%s: the world is told to save and end", self._orders[0])
                self._say("ending")
                self._job.tell(child, self._orders[0])
            report = runs.read_report(self._run, number)
            if report is not None:
                reported_at = reported_at or now
                if now - reported_at > (FAULT_END_S if report.kind in FAULTS else ORDERLY_END_S):
                    log.warning("killing what is left of the world %.0f s after its report", now - reported_at)
                    self._job.kill(child)
                    return Evidence(early=early)
            if told_at and (now - told_at > self._limits.stop_s or self._orders.count("stop") > 1):
                log.warning("killing the world %.0f s after it was told to stop", now - told_at)
                self._job.kill(child)
                twice = now - told_at <= self._limits.stop_s
                return Evidence(overdue_s=max(now - told_at, POLL_S), twice=twice, early=early)
            time.sleep(POLL_S)
        return Evidence(early=early)

    def _write(self, folder: Path, report: Report) -> Report:
        return self._surely(lambda: runs.write_report(self._run, int(folder.name), report))

    def _surely(self, write: Callable[[], T]) -> T:
        """Where the disk is full, make room and write again; called while no world lives."""
        try:
            return write()
        except OSError as e:
            if e.errno not in FULL:
                raise
            log.warning("%s; checkpoints that were begun are removed", e)
            runs.make_room(self._run)
            return write()

    def _say(self, state: State, attempt: int | None = None) -> None:
        number = self._status.attempt if attempt is None else attempt
        cancelled = runs.cancel_asked(self._run)
        self._status = msgspec.structs.replace(self._status, state=state, attempt=number, cancelled=cancelled)
        try:
            runs.write_status(self._run, self._status)
        except OSError as e:
            if e.errno not in FULL:
                raise
            if state not in (*runs.FINAL, "queued"):  # the world lives, and writes: this is said again
                log.warning("%s", e)
                return
            self._surely(lambda: runs.write_status(self._run, self._status))

    def _plot(self) -> None:
        """Draw reward.png if there is a step to show; a run is no worse for lack of it."""
        if not runs.last_step(self._run):
            return
        command = [sys.executable, "-m", "runtime.plot", str(self._run)]
        env = plan.clean_env(os.environ, {"PYTHONPATH": str(plan.PROJECT), "OMP_NUM_THREADS": "1"})
        try:
            subprocess.run(command, env=env, capture_output=True, text=True, timeout=PLOT_LIMIT_S, check=True)
        except subprocess.CalledProcessError as e:
            log.warning("no reward.png: %s", (e.stderr.strip().splitlines() or ["it gave no reason"])[-1])
        except (subprocess.TimeoutExpired, OSError) as e:
            log.warning("no reward.png: %s", e)


def final_state(report: Report) -> State:
    """Preempted and timed-out runs ended as they should; `resume` goes on with them."""
    return "ended" if report.kind in ("done", "preempted", "timeout") else "failed"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
