"""How the process of an engine ended, in words, and what it said last."""

from __future__ import annotations

import signal
from pathlib import Path

from runtime.errors import brief

LOG_LINES = 5


def how_it_ended(code: int, log: str) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    return how if code == -signal.SIGKILL else how + end_of(log)


def end_of(log: str) -> str:
    """The last lines of a log: why an engine ended, or does not answer."""
    path = Path(log)
    lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:] if path.is_file() else []
    return f"; the end of {log}:\n" + brief("\n".join(lines)) if lines else ""
