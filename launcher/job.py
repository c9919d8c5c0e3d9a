"""What a supervisor does differently under each scheduler: its nodes, its world, how it passes orders on, what follows.

mpiexec passes SIGTERM on to every rank; its death ends them.
srun passes SIGUSR1 and SIGUSR2 on to every rank; SIGTERM makes it kill the whole step.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from launcher import machine, plan, runs, slurm
from launcher.plan import JobPlan
from launcher.runs import Report
from runtime import topology
from runtime.config import RunConfig
from runtime.site import SiteConfig

RESTARTED: Final = ("peer_lost", "engine_lost", "node_failed")
"""Reports after which the same nodes are tried again."""
INTERRUPTED: Final = ("preempted", "timeout")

GPU_LISTS: Final = ("_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
KILL_LIMIT_S: Final = 15.0
"""For srun to see the end of a step it was told to kill."""
PROBE_LIMIT_S: Final = 30.0
"""For a node to start a process."""
PROBES: Final = 16
"""At a time: each is a step, and one controller serves many."""

Order = Literal["stop", "timeout"]
Next = Literal["end", "restart", "queued"]
"""queued: the run goes on in a further job, which Slurm has been given."""

log = logging.getLogger("supervisor")


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What follows an attempt, and why if the scheduler had a say."""

    next: Next
    cancelled: bool = False
    """Somebody cancelled the job."""
    reason: str = ""


class Job(Protocol):
    number: str
    """The scheduler's; empty: there is none."""

    def plan(self, attempt: int) -> JobPlan:
        """What the next attempt starts; its environment is whole."""
        ...

    def tell(self, world: subprocess.Popen[bytes], order: Order) -> None:
        """Let every rank hear a stop order."""
        ...

    def kill(self, world: subprocess.Popen[bytes]) -> None:
        """End every rank; returns when that is done."""
        ...

    def outlook(self, report: Report, stopped: bool) -> Outlook:
        """What follows an attempt that ended so. `stopped`: this process was told to stop."""
        ...

    def again(self) -> bool:
        """Get a further job for the run; False: that is not possible."""
        ...


class LocalJob:
    """On one machine."""

    number = ""

    def __init__(self, run: Path, config: RunConfig, where: SiteConfig, environment: Mapping[str, str]) -> None:
        self._run, self._config, self._site, self._environment = run, config, where, environment

    def plan(self, attempt: int) -> JobPlan:
        made = plan.make(self._config, self._site, self._run, attempt, machine.here(self._site))
        return msgspec.structs.replace(made, env=plan.clean_env(self._environment, made.env))

    def tell(self, world: subprocess.Popen[bytes], order: Order) -> None:
        world.terminate()

    def kill(self, world: subprocess.Popen[bytes]) -> None:
        world.kill()
        world.wait()

    def outlook(self, report: Report, stopped: bool) -> Outlook:
        return Outlook(next="restart" if report.kind in RESTARTED and not stopped else "end")

    def again(self) -> bool:
        return False


class SlurmJob:
    """Inside a Slurm job, on its first node."""

    def __init__(self, run: Path, config: RunConfig, where: SiteConfig, environment: Mapping[str, str]) -> None:
        self._run, self._config, self._site, self._environment = run, config, where, environment
        self.number = environment["SLURM_JOB_ID"]
        self._nodes = environment["SLURM_JOB_NODELIST"]
        self._restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
        self._lost: set[str] = set()
        """Nodes of the job that were found dead, also where Slurm does not know it yet."""
        self._is_short = False
        """Too few are left."""

    def plan(self, attempt: int) -> JobPlan:
        nodes = self._nodes_left(self._ask())
        made = plan.make(self._config, self._site, self._run, attempt, machine.here(self._site), nodes)
        return msgspec.structs.replace(made, env=self._env(made.env))

    def _env(self, added: Mapping[str, str]) -> dict[str, str]:
        """Of a step. The batch script's list of GPUs is that of its own node; Slurm gives every rank one."""
        inherited = {name: value for name, value in self._environment.items() if not name.endswith(GPU_LISTS)}
        return plan.clean_env(inherited, added) | {"SLURM_JOB_ID": self.number}

    def _nodes_left(self, job: slurm.Job | None) -> list[str]:
        """By Slurm's list, which shrinks when it finds a node lost; the environment's where Slurm does not answer."""
        listed = job.nodes if job and job.nodes not in ("", "(null)") else self._nodes
        return [node for node in slurm.hostnames(listed) if node not in self._lost]

    def tell(self, world: subprocess.Popen[bytes], order: Order) -> None:
        world.send_signal(signal.SIGUSR2 if order == "timeout" else signal.SIGUSR1)

    def kill(self, world: subprocess.Popen[bytes]) -> None:
        world.terminate()
        try:
            world.wait(KILL_LIMIT_S)
        except subprocess.TimeoutExpired:
            world.kill()
            world.wait()

    def outlook(self, report: Report, stopped: bool) -> Outlook:
        """A restart inside the grace of a preemption would only be killed, so Slurm is asked first."""
        if runs.cancel_asked(self._run) or report.kind not in (*RESTARTED, *INTERRUPTED):
            return Outlook(next="end")
        job = self._ask()
        if job is not None and self._is_cancelled(job):
            return Outlook(next="end", cancelled=True, reason=f"job {self.number} was cancelled")
        leaving = job is not None and (job.is_preempted or job.phase != "running")
        why = f"job {self.number} is " + ("losing its nodes" if leaving else f"ending: {report.kind}")
        if report.kind in RESTARTED and not leaving:
            self._lost |= dead(self._nodes_left(job), self._env({}), (self._run / "config.yaml", sys.executable))
            left, needed = len(self._nodes_left(job)), topology.num_nodes(self._config.cluster)
            gone = f"job {self.number} lost {', '.join(sorted(self._lost))}" if self._lost else ""
            if left >= needed:
                return Outlook(next="restart", reason=gone)
            self._is_short = True
            why = f"{gone or f'job {self.number} lost a node'}, and {needed} nodes are needed: {left} left"
        return Outlook(next="queued" if self._site.slurm.requeue else "end", reason=why)

    def again(self) -> bool:
        """Requeue this job, also within the grace of a preemption: a job that ends there by itself counts as failed.

        One that lost nodes is followed by a new job. Slurm 22.05 starts a requeued one at the moment it finds the dead
        node down, and without its GPUs.
        """
        job = self._ask()
        if job is not None and self._is_requeued(job):
            return True
        try:
            if not self._is_short:
                slurm.call("scontrol", "requeue", self.number)
                return True
            slurm.call("scontrol", "update", f"JobId={self.number}", "Requeue=0")  # or Slurm would, for the dead node
        except slurm.SchedulerDown as e:
            log.warning("requeueing is refused, so a new job follows: %s", e)
        try:
            number = slurm.submit(str(self._run / runs.SCRIPT), [f"--dependency=afterany:{self.number}"])
        except slurm.SchedulerDown as e:
            log.error("the run cannot go on by itself: %s", e)
            return False
        runs.write_atomic(self._run / runs.JOB_ID, number.encode())
        log.info("job %s follows", number)
        return True

    def _ask(self) -> slurm.Job | None:
        try:
            return slurm.job(self.number)
        except slurm.SchedulerDown as e:
            log.warning("%s", e)
            return None

    def _is_requeued(self, job: slurm.Job) -> bool:
        """By somebody else, or by a preemption whose grace is over: Slurm counts it at once."""
        return int(job.fields.get("Restarts", "0")) > self._restarts

    def _is_cancelled(self, job: slurm.Job) -> bool:
        """While a cancelled job's processes end, Slurm calls it COMPLETING, as it does others."""
        if job.state == "CANCELLED":
            return True
        other = job.is_preempted or job.reason == "TimeLimit" or self._is_requeued(job)
        return job.phase == "ending" and not other


def dead(nodes: Sequence[str], env: Mapping[str, str], files: Sequence[str | Path]) -> set[str]:
    """Those of a job's nodes that start no process, which Slurm itself may take minutes to notice, or that have lost
    the file system with these files.

    Args:
        env: names the job in SLURM_JOB_ID.
    """
    looks = ["sh", "-c", 'for file; do head -c 1 "$file" || exit; done >/dev/null', "sh", *map(str, files)]

    def starts(node: str) -> bool:
        where = ["--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mem=0", "--gres=none", "--overlap"]
        try:
            slurm.call("srun", *where, "--input=none", *looks, limit_s=PROBE_LIMIT_S, env=env)
        except slurm.SchedulerDown as e:
            log.warning("node %s is of no use: %s", node, e)
            return False
        return True

    with ThreadPoolExecutor(PROBES) as pool:
        found = {node for node, does in zip(nodes, pool.map(starts, nodes), strict=True) if not does}
    return found if len(found) < len(nodes) else set()  # the supervisor's own node lives: these probes say nothing


def of(run: Path, config: RunConfig, where: SiteConfig) -> Job:
    """The job this process runs in."""
    kind = SlurmJob if where.scheduler == "slurm" else LocalJob
    return kind(run, config, where, dict(os.environ))
