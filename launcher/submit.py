"""Hands the supervisor to a scheduler. The only file that knows submitit.

On a cluster submitit renders the batch script, which stands in the run folder as it is submitted. On one machine its
local executor starts the job as a child in the caller's session, where a closed terminal or Ctrl-C would end it; so
`start` runs this file as a program in a session of its own: the job outlives the shell that submitted it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from launcher import plan, runs, slurm
from launcher.refusals import refused
from launcher.runs import JOB_ID, SCRIPT, job_id
from launcher.script import Script
from runtime.errors import ConfigError, TryLater
from runtime.load import Loaded, LoadedSite

START_LIMIT_S: Final = 60.0
AWAY_FIX: Final = (
    "try again later; `scontrol ping` says when the controller is back. Where it never answers, submit from a login "
    "node, or let SLURM_CONF name the cluster's slurm.conf"
)
NOT_YET: Final = "once nodes that are down or drained are back"
NO_LIMIT_MIN: Final = 10 * 365 * 24 * 60
"""submitit's local jobs have a time limit; a run on one's own machine has none."""


def start(run: Path, loaded: Loaded, site: LoadedSite) -> None:
    """Start the supervisor of a run folder, or queue its job; it goes on when the caller ends.

    Raises:
        ConfigError: it could not be started; Refused, if Slurm takes no such job.
    """
    if site.config.scheduler == "slurm":
        before = job_id(run)
        try:
            number = slurm.submit(str(run / SCRIPT))
        except slurm.NoAnswer as e:
            if not (number := find(run, before)):
                again = f"python -m launcher resume {shlex.quote(str(run))}"
                fix = f"look with squeue whether the job was taken; if not, `{again}`"
                problem = f"it is not known whether the job was accepted: {e}"
                raise TryLater(f"site {site.config.name}", problem, fix) from e
        except slurm.Away as e:
            raise TryLater(f"site {site.config.name}", f"nothing was queued: {e}", AWAY_FIX) from e
        except slurm.SchedulerDown as e:
            raise refused(str(e), loaded, site) from e
        (run / JOB_ID).write_text(number)
        return
    env = plan.clean_env(os.environ, {"PYTHONPATH": str(plan.PROJECT)})
    output = run / "job" / "submit.log"
    with output.open("ab") as log:
        code = subprocess.run(
            [sys.executable, "-m", "launcher.submit", str(run)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=START_LIMIT_S,
            check=False,
        ).returncode
    if code != 0:
        last = runs.last_line(output) or "it said nothing"
        raise ConfigError(str(run), f"submitit could not start the job: {last}", f"see {output}")


def find(run: Path, but: str) -> str:
    """The job of a run whose number sbatch had no time to say, other than `but`; empty: none is known."""
    if (number := job_id(run)) != but:
        return number  # it runs already, and its supervisor says so
    try:
        return slurm.number_of(str(run / SCRIPT), but=but)
    except slurm.SchedulerDown:
        return ""


def try_out(text: str, loaded: Loaded, site: LoadedSite) -> str:
    """Let Slurm look at a batch script without queueing it: partitions, limits, accounts, the site's own rules.

    Returns:
        What it said.

    Raises:
        Refused: it would not run the job, and not because nodes are down.
        TryLater: it does not answer.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(text)
        file.flush()
        try:
            return slurm.try_out(file.name)
        except (slurm.Away, slurm.NoAnswer) as e:
            raise TryLater(f"site {site.config.name}", f"nothing was queued: {e}", AWAY_FIX) from e
        except slurm.SchedulerDown as e:
            said = str(e)
    if "node configuration" in said and slurm.nodes_are_away(site.config.slurm.partition):
        return f"{NOT_YET} ({said})"
    raise refused(said, loaded, site)


def signal(number: str, name: str) -> None:
    """Send a signal to the supervisor in a job; without a name cancel the job.

    Raises:
        ConfigError: Slurm refuses; TryLater, if it does not answer.
    """
    how = ["--batch", f"--signal={name}"] if name == "TERM" else [f"--signal={name}", "--full"] if name else []
    try:
        slurm.call("scancel", *how, number)
    except slurm.SchedulerDown as e:
        kind = TryLater if isinstance(e, slurm.Away | slurm.NoAnswer) else ConfigError
        raise kind(f"job {number}", f"cannot be cancelled: {e}", "try again, or ask your site") from e


def render(script: Script, folder: Path) -> str:
    """The exact text of a batch script."""
    import submitit

    class Executor(submitit.SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            """A script can be rendered, and looked at, where there is no Slurm."""
            return 1

    executor = Executor(folder=folder)
    executor.update_parameters(
        job_name=script.job_name,
        time=0,  # the options say it, in Slurm's own words
        wckey=None,
        setup=list(script.setup),
        use_srun=False,
        stderr_to_stdout=True,
        additional_parameters=script.options,
    )
    return executor._make_submission_file_text(script.command, "")


def _submit(run: Path) -> None:
    import submitit

    from launcher import machine, supervisor

    executor = submitit.LocalExecutor(folder=run / "job")
    gpus = machine.visible_gpus()
    executor.update_parameters(timeout_min=NO_LIMIT_MIN, gpus_per_node=len(gpus), visible_gpus=gpus)
    job = executor.submit(supervisor.main, str(run))
    (run / JOB_ID).write_text(job.job_id)


if __name__ == "__main__":
    _submit(Path(sys.argv[1]))
