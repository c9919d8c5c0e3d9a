"""Every error the project raises on purpose, each tied to the exit report it ends an attempt with.

A user error is a ConfigError: it names file, key or line, the value and the fix, and ends with exit code 2 and no
traceback. A fault of a peer, an engine or a node has its own type and is handled in one place, the supervisor. Broken
invariants are plain asserts and end as `bug`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Of an OSError: the disk, or what a user may have of it."""

DENIED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Of an OSError: a file that we may not read or write."""

BROKEN: Final = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.EREMOTEIO)
"""Of an OSError with a file: this node has lost the file system. NFS, Lustre and others say it so."""

PMI_ADVICE: Final = (
    "MPI and srun speak different PMIs: in the site file write slurm.mpi: pmi2 for MPICH, pmix for OpenMPI, nothing "
    "for Cray MPICH"
)


REASON_CHARS: Final = 1000


def brief(reason: str) -> str:
    """A reason as it is kept and shown, since one stands beside each sample; the log has it as it came."""
    reason = reason.encode(errors="backslashreplace").decode()  # halves of surrogate pairs cannot be sent
    left_out = len(reason) - REASON_CHARS
    return reason if left_out <= 0 else f"{reason[:REASON_CHARS]}... ({left_out} more characters are in the log)"


class SluiceError(Exception):
    """Base of the errors below. `kind` is the exit report an attempt ends with when nothing else handles it."""

    kind: ReportKind = "bug"


class ConfigError(SluiceError, ValueError):
    """The user can fix this. The message holds where (file, key or line), what was found, and what to do."""

    kind: ReportKind = "config"

    def __init__(self, where: str, problem: str, fix: str = "") -> None:
        self.where, self.problem, self.fix = where, problem, fix
        super().__init__(f"{where}: {problem}" + (f"\n  fix: {fix}" if fix else ""))


class Mistakes(ConfigError):
    """Several that do not follow from each other: a line each."""

    def __init__(self, found: Sequence[ConfigError]) -> None:
        self.found = tuple(found)
        lines = (f"{e.where}: {' '.join(e.problem.split())}" + (f"; fix: {e.fix}" if e.fix else "") for e in found)
        super().__init__(f"{len(self.found)} mistakes", "\n  ".join(lines))
        self.args = (f"{self.where}\n  {self.problem}",)


class Collector:
    """Takes in what is wrong while one goes on, so that a config need not be mended mistake by mistake."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """A ConfigError in it is taken in."""
        try:
            yield
        except Mistakes as e:
            self.found += e.found
        except ConfigError as e:
            self.found.append(e)

    def tell(self) -> None:
        """
        Raises:
            ConfigError: what was taken in; as it came, if it is only one.
        """
        different = list({str(e): e for e in self.found}.values())
        if different:
            raise different[0] if len(different) == 1 else Mistakes(different)


class TryLater(ConfigError):
    """There is nothing to change: the scheduler does not answer. A command ends with TRY_LATER."""


class PeerLost(SluiceError):
    """A rank stopped answering: the message says who waited for whom, for how long."""

    kind: ReportKind = "peer_lost"


class EngineLost(SluiceError):
    """An engine died, hung or holds wrong weights, and replacing it did not help."""

    kind: ReportKind = "engine_lost"


class OutOfMemory(SluiceError):
    """A device has no room for what comes next."""

    kind: ReportKind = "out_of_memory"


class Unauthorized(EngineLost):
    """An engine wants another token."""


class WeightMismatch(EngineLost):
    """An engine's checksums differ from the trainer's after a push; the message names engine, version and tensors."""


class WaitTimeout(SluiceError):
    """A bounded wait ran out: the message says who waited for whom, and how long."""

    kind: ReportKind = "peer_lost"
