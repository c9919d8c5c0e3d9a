"""What every rank runs: environment -> topology -> the function of its role.

    python -m mpi4py -m runtime.main --run-dir RUN --attempt N        (started by mpiexec or srun, one a rank)

An exception in any task or thread of any rank writes the attempt's report, unless another rank was first, and ends all
ranks. Only the controller acts on SIGTERM: the scheduler sends it to every rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from runtime import log
from runtime.errors import EXIT_CODES
from runtime.rank import Guard, Rank


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args()
    os.umask(0o077)
    rank = Rank(arguments.run_dir, arguments.attempt, os.environ)
    log.set_up(rank.slot.rank, rank.role)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, _ignore)
    guard = Guard(rank)
    guard.watch_threads()
    from runtime import roles  # after logging is set up; it brings the heavy imports

    run = roles.run_trainer if rank.slot.role == "trainer" else roles.run_agent
    if rank.slot.rank == rank.topology.controller:
        run = roles.run_controller
    try:
        reason = run(rank, guard)
    except Exception as e:  # the edge of the rank
        guard.end(type(e), e, e.__traceback__)
        raise
    return EXIT_CODES[reason or "done"]


if __name__ == "__main__":
    sys.exit(main())
