"""What every rank runs: environment -> topology -> the function of its role.

    python -m mpi4py -m runtime.main --run-dir RUN --attempt N        (started by mpiexec or srun, one a rank)

An exception in any task or thread of any rank writes the attempt's report, unless another rank was first, and ends all
ranks. All ranks hear a stop order from their first moment, and only the controller acts on it: the scheduler sends it
to every rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from runtime import device, log
from runtime.errors import EXIT_CODES
from runtime.rank import Guard, Rank, Stop, rank_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args()
    os.umask(0o077)
    device.normalise(os.environ)
    number = rank_of(os.environ)
    guard = Guard(arguments.run_dir / "attempts" / str(arguments.attempt), number)
    guard.watch_threads()
    stop = Stop()
    stop.listen()
    try:
        return EXIT_CODES[_be(Rank(arguments.run_dir, arguments.attempt, number), guard, stop) or "done"]
    except BaseException as e:  # the edge of the rank
        guard.end(e)
        raise


def _be(rank: Rank, guard: Guard, stop: Stop) -> str:
    """Be the rank; why the run ended early, or ""."""
    log.set_up(rank.slot.rank, rank.role)
    guard.role, guard.node = rank.role, rank.topology.nodes[rank.slot.node]
    if rank.slot.role == "agent":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # agents compute little
    rank.check_place()
    from runtime import roles  # after logging is set up; it brings the heavy imports

    if rank.slot.rank == rank.topology.controller:
        return roles.run_controller(rank, guard, stop)
    return (roles.run_trainer if rank.slot.role == "trainer" else roles.run_agent)(rank, guard)


if __name__ == "__main__":
    sys.exit(main())
