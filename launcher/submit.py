"""Hands the supervisor to submitit. The only file that knows submitit.

The local executor starts the job as a child in the caller's session, where a closed terminal or Ctrl-C would end it.
So `start` runs this file as a program in a session of its own: the job outlives the shell that submitted it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from launcher import plan
from runtime.errors import ConfigError

START_LIMIT_S: Final = 60.0
NO_LIMIT_MIN: Final = 10 * 365 * 24 * 60
"""submitit's local jobs have a time limit; a run on one's own machine has none."""


def start(run: Path) -> None:
    """Start the supervisor of a run folder; it goes on when the caller ends.

    Raises:
        ConfigError: submitit could not start it.
    """
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


def _submit(run: Path) -> None:
    import submitit

    from launcher import site, supervisor

    executor = submitit.LocalExecutor(folder=run / "job")
    gpus = site.visible_gpus()
    executor.update_parameters(timeout_min=NO_LIMIT_MIN, gpus_per_node=len(gpus), visible_gpus=gpus)
    job = executor.submit(supervisor.main, str(run))
    (run / "job" / "id").write_text(job.job_id)


if __name__ == "__main__":
    _submit(Path(sys.argv[1]))
