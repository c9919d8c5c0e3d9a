"""Hands the supervisor to a scheduler. The only file that knows submitit.

On a cluster submitit renders the batch script, which stands in the run folder as it is submitted. On one machine its
local executor starts the job as a child in the caller's session, where a closed terminal or Ctrl-C would end it; so
`start` runs this file as a program in a session of its own: the job outlives the shell that submitted it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from launcher import plan, slurm
from launcher.runs import JOB_ID, SCRIPT
from launcher.script import Script
from runtime.config import SiteConfig
from runtime.errors import ConfigError

START_LIMIT_S: Final = 60.0
NO_LIMIT_MIN: Final = 10 * 365 * 24 * 60
"""submitit's local jobs have a time limit; a run on one's own machine has none."""
FIX: Final = "change the site file, or --set-site partition=... and the like; `plan` prints the batch script"


class Refused(ConfigError):
    """Slurm takes no such job."""


def start(run: Path, site: SiteConfig) -> None:
    """Start the supervisor of a run folder, or queue its job; it goes on when the caller ends.

    Raises:
        ConfigError: it could not be started.
    """
    if site.scheduler == "slurm":
        try:
            number = slurm.submit(str(run / SCRIPT))
        except slurm.NoAnswer as e:
            fix = f"look with squeue whether the job was taken; if not, `python -m launcher resume {run.name}`"
            raise ConfigError(f"site {site.name}", f"it is not known whether the job was accepted: {e}", fix) from e
        except slurm.SchedulerDown as e:
            raise Refused(f"site {site.name}", f"the job was not accepted: {e}", FIX) from e
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
        last = (output.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(str(run), f"submitit could not start the job: {last}", f"see {output}")


def try_out(text: str, site: SiteConfig) -> None:
    """Let Slurm look at a batch script without queueing it: partitions, limits, accounts, the site's own rules.

    Raises:
        ConfigError: it would be refused.
    """
    if site.scheduler != "slurm":
        return
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(text)
        file.flush()
        try:
            slurm.submit(file.name, ["--test-only"])
        except slurm.SchedulerDown as e:
            raise Refused(f"site {site.name}", f"Slurm would not run the job now: {e}", FIX) from e


def signal(number: str, name: str) -> None:
    """Send a signal to the supervisor in a job; without a name cancel the job.

    Raises:
        ConfigError: Slurm does not answer, or refuses.
    """
    how = ["--batch", f"--signal={name}"] if name == "TERM" else [f"--signal={name}", "--full"] if name else []
    try:
        slurm.call("scancel", *how, number)
    except slurm.SchedulerDown as e:
        raise ConfigError(f"job {number}", f"cannot be cancelled: {e}", "try again, or ask your site") from e


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

    from launcher import site, supervisor

    executor = submitit.LocalExecutor(folder=run / "job")
    gpus = site.visible_gpus()
    executor.update_parameters(timeout_min=NO_LIMIT_MIN, gpus_per_node=len(gpus), visible_gpus=gpus)
    job = executor.submit(supervisor.main, str(run))
    (run / JOB_ID).write_text(job.job_id)


if __name__ == "__main__":
    _submit(Path(sys.argv[1]))
