"""Notices that an environment or a reward keeps the agent's event loop to itself.

Code that computes for ever, or waits without `await`, stops all else in its agent, time limits included: those are kept
by the same loop. A thread looks on and ends the attempt, naming who was running and where.

Code that never lets go of the interpreter (a regular expression that backtracks without an end, say) stops that thread
too. Then the controller misses the agent, and the agent's log shows where it is, written by a thread of faulthandler's.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from runtime.errors import ConfigError, SluiceError, WaitTimeout

logger = logging.getLogger("agent")

BEAT_S: Final = 1.0
STDERR: Final = 2
_PLUGIN: Final = "plugin: "
"""Begins the names of tasks that somebody's code runs in."""


@contextmanager
def running(what: str) -> Iterator[None]:
    """The current task, and those it begins, are in the hands of this environment or reward.

    Raises:
        RuntimeError: it was cancelled, though nobody gave it up; a CancelledError would end the task, unnoticed.
    """
    task = asyncio.current_task()
    assert task is not None, "plugins run in tasks"
    before = task.get_name()
    task.set_name(_PLUGIN + what)
    try:
        yield
    except asyncio.CancelledError as e:
        if task.cancelling():
            raise
        raise RuntimeError("it awaited something that was cancelled") from e
    finally:
        task.set_name(before)


def inherit_names(loop: asyncio.AbstractEventLoop, coroutine: Any, **given: Any) -> Any:
    """A task factory: what somebody's code begins bears its name."""
    task = asyncio.Task(coroutine, loop=loop, **given)
    parent = asyncio.current_task(loop)
    if parent is not None and parent.get_name().startswith(_PLUGIN):
        task.set_name(parent.get_name())
    return task


class Watchdog:
    """Watches the loop that `tick` runs in. What it finds is raised in a thread, which ends all ranks."""

    def __init__(self, limit_s: float) -> None:
        """
        Args:
            limit_s: how long the loop may stand still. While the process as a whole does, no time is counted.
        """
        self._limit_s, self._beat_s = limit_s, min(BEAT_S, limit_s / 5)
        self._ticks, self._over = 0, threading.Event()

    async def tick(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(inherit_names)
        look = (loop, threading.get_ident())
        threading.Thread(target=self._look_on, args=look, name="watchdog", daemon=True).start()
        try:
            while True:
                self._ticks += 1
                faulthandler.dump_traceback_later(self._limit_s / 2, file=STDERR)
                await asyncio.sleep(self._beat_s)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._over.set()

    def _look_on(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        seen, still = 0, 0
        while not self._over.wait(self._beat_s):
            still = still + 1 if self._ticks == seen else 0
            seen = self._ticks
            if still * self._beat_s >= self._limit_s:
                raise self._found(loop, thread)

    def _found(self, loop: asyncio.AbstractEventLoop, thread: int) -> SluiceError:
        stack = traceback.extract_stack(sys._current_frames()[thread])
        logger.error("the agent's event loop stands still:\n%s", "".join(traceback.format_list(stack)))
        task = asyncio.current_task(loop)
        place = f"{stack[-1].filename}:{stack[-1].lineno} ({stack[-1].name})"
        if task is None or not task.get_name().startswith(_PLUGIN):
            return WaitTimeout(f"the agent's event loop stood still for {self._limit_s:g} s, at {place}")
        return ConfigError(
            task.get_name().removeprefix(_PLUGIN),
            f"did not `await` for {self._limit_s:g} s, and so held up all else in its agent; it is at {place}",
            "await what takes long, or move it to a thread with asyncio.to_thread; a loop may never end",
        )
