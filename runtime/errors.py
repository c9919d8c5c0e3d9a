"""Every error the project raises on purpose, each tied to the exit report it ends an attempt with.

A user error is a ConfigError: it names file, key or line, the value and the fix, and ends with exit code 2 and no
traceback. A fault of a peer, an engine or a node has its own type and is handled in one place, the supervisor. Broken
invariants are plain asserts and end as `bug`.
"""

from __future__ import annotations

from typing import Final, Literal

ReportKind = Literal[
    "done", "preempted", "timeout", "node_failed", "peer_lost", "engine_lost", "config", "out_of_memory", "bug"
]

EXIT_CODES: Final[dict[str, int]] = {
    "done": 0,
    "config": 2,
    "preempted": 10,
    "timeout": 11,
    "node_failed": 12,
    "peer_lost": 13,
    "engine_lost": 14,
    "out_of_memory": 15,
    "bug": 1,
}
"""Exit code of an attempt by its report; 2 is what a user's mistake ends with everywhere."""


TRY_LATER: Final = 75
"""Exit code of a command where nothing is wrong but the scheduler does not answer (EX_TEMPFAIL of sysexits.h)."""

PMI_ADVICE: Final = (
    "MPI and srun speak different PMIs: in the site file write slurm.mpi: pmi2 for MPICH, pmix for OpenMPI, nothing "
    "for Cray MPICH"
)


class SluiceError(Exception):
    """Base of the errors below. `kind` is the exit report an attempt ends with when nothing else handles it."""

    kind: ReportKind = "bug"


class ConfigError(SluiceError, ValueError):
    """The user can fix this. The message holds where (file, key or line), what was found, and what to do."""

    kind: ReportKind = "config"

    def __init__(self, where: str, problem: str, fix: str = "") -> None:
        self.where, self.problem, self.fix = where, problem, fix
        super().__init__(f"{where}: {problem}" + (f"\n  fix: {fix}" if fix else ""))


class TryLater(ConfigError):
    """There is nothing to change: the scheduler does not answer. A command ends with TRY_LATER."""


class PeerLost(SluiceError):
    """A rank stopped answering: the message says who waited for whom, for how long."""

    kind: ReportKind = "peer_lost"


class EngineLost(SluiceError):
    """An engine died, hung or holds wrong weights, and replacing it did not help."""

    kind: ReportKind = "engine_lost"


class WeightMismatch(EngineLost):
    """An engine's checksums differ from the trainer's after a push; the message names engine, version and tensors."""


class WaitTimeout(SluiceError):
    """A bounded wait ran out: the message says who waited for whom, and how long."""

    kind: ReportKind = "peer_lost"
