"""The engines of an agent that may sample now, and the calls made to them.

An engine is in the pool from a commit of weights to the next push or its loss. A call to an engine that is lost while
it runs ends at once with EngineLost, whatever the connection does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from runtime.errors import EngineLost, WaitTimeout
from runtime.rollout.base import Engine

T = TypeVar("T")


class Running:
    """One engine process from its start to its loss."""

    def __init__(self, id: int, engine: Engine, lost: asyncio.Future[str]) -> None:
        """
        Args:
            lost: gets the reason of its loss, maybe before the engine answers for the first time.
        """
        self.id, self.engine, self._lost = id, engine, lost
        self.load = 0
        """Completions being made."""
        self._heard = time.monotonic()

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    @property
    def silent_s(self) -> float:
        """Since a call to it ended well."""
        return time.monotonic() - self._heard

    def lose(self, reason: str) -> None:
        """It died, hangs or is to be restarted; the first reason counts."""
        if not self._lost.done():
            self._lost.set_result(reason)

    async def loss(self, timeout_s: float) -> str | None:
        """Why it was lost; None if it is not, after so long."""
        await asyncio.wait([self._lost], timeout=timeout_s)
        return self._lost.result() if self._lost.done() else None

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """What the engine answers.

        Raises:
            EngineLost: the call failed, or the engine was lost meanwhile.
        """
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # a call given up may still fail: no news
        try:
            await asyncio.wait([task, self._lost], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineLost(f"engine {self.id}: {self._lost.result()}")
            answer = task.result()
            self._heard = time.monotonic()
            return answer
        finally:
            task.cancel()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1


class Pool:
    """Which engine takes the next completion."""

    def __init__(self, wait_s: float, who: str = "a sample", needs: Pool | None = None) -> None:
        """
        Args:
            wait_s: bound on the wait for any engine, long enough for a restart and a push.
            who: waits.
            needs: engines of which these need one too, whichever it is.
        """
        self._wait_s, self._who, self._needs = wait_s, who, needs
        self._members: dict[int, Running] = {}
        self._some = asyncio.Event()

    def admit(self, running: Running) -> None:
        """It holds the current weights. Nothing happens if it was lost meanwhile."""
        if not running.is_lost:
            self._members[running.id] = running
            self._some.set()

    @property
    def is_empty(self) -> bool:
        return self._drop_lost()

    def withdraw(self, id: int) -> None:
        """Nothing new goes to this engine; what it is at goes on."""
        self._members.pop(id, None)
        if not self._members:
            self._some.clear()

    def _lacks(self) -> Pool | None:
        """What has no engine that is needed now: this, or what it needs."""
        return self if self._drop_lost() else self._needs and self._needs._lacks()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._some.wait()
        except TimeoutError:
            what = "for any engine of its agent to be ready"
            raise WaitTimeout(f"{self._who} waited {self._wait_s:g} s {what}") from None

    def _drop_lost(self) -> bool:
        """Withdraw what was lost before its keeper heard of it; True if nothing is left."""
        for running in [r for r in self._members.values() if r.is_lost]:
            self.withdraw(running.id)
        return not self._members

    async def pick(self, home: int | None, slack: int) -> Running:
        """The engine with the least to do, or `home` while that has at most `slack` more: it knows the prompt.

        Raises:
            WaitTimeout: no engine came into the pool in time.
        """
        while (lacks := self._lacks()) is not None:
            await lacks._wait()
        lightest = min(self._members.values(), key=lambda r: (r.load, r.id))
        at_home = self._members.get(home) if home is not None else None
        return at_home if at_home is not None and at_home.load <= lightest.load + slack else lightest
