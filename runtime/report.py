"""The exit report of an attempt: why it ended, written by whichever rank knew first."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from runtime.errors import BROKEN, DENIED, FULL, ReportKind, SluiceError, brief


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """attempts/<n>/report.json"""

    kind: ReportKind
    message: str = ""
    rank: int = 0
    role: str = ""
    node: str = ""
    step: int | None = None
    traceback: str = ""
    time: float = 0.0


def kind_of(error: BaseException) -> ReportKind:
    if isinstance(error, SluiceError):
        return error.kind
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    if isinstance(error, OSError) and (error.errno in FULL or (error.filename and error.errno in DENIED)):
        return "config"
    if isinstance(error, OSError) and error.filename and error.errno in BROKEN:
        return "node_failed"
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return kind_of(error.exceptions[0])
    return "bug"


def write(attempt_dir: Path, report: Report) -> bool:
    """False if another rank wrote one before: the first cause counts, what follows from it does not."""
    report = msgspec.structs.replace(report, message=brief(report.message), time=time.time())
    beside = attempt_dir / f".report-{report.rank}-{os.getpid()}"
    try:
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        os.link(beside, attempt_dir / "report.json")
    except FileExistsError:
        return False
    finally:
        beside.unlink(missing_ok=True)
    return True
