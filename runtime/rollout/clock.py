"""The time that an environment or a reward may take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Clock:
    """The time that is left to one of them."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit, self._waiting, self._left_s = limit, 0, 0.0

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Stands still while any question waits in here."""
        now = asyncio.get_running_loop().time
        if not self._waiting and (end := self._limit.when()) is not None:
            self._left_s = end - now()
            self._limit.reschedule(None)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._limit.reschedule(now() + self._left_s)
