"""An engine that somebody else runs: it is spoken to like any other, but neither started nor ended here.

One that does not answer is waited for without an end: its agent's work goes to the other engines, and when it answers,
be it after a restart of its own, it is taken like one that was just started.

One that answers and is lost again and again is given up, as each of its losses costs the others a push: it refuses the
token or the weights, or another run pushes to it. When its server is gone for a moment it is tried anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from runtime.comm.messages import EngineDown
from runtime.errors import EngineLost, Unauthorized
from runtime.rollout import keeper
from runtime.rollout.base import Engine
from runtime.rollout.pool import Running
from runtime.types import Canary

logger = logging.getLogger("agent")

POLL_S = 1.0
REFUSALS = 3
"""Of the token, one after the other: a single one may be a slip of what stands before the server."""


class ExternalKeeper(keeper.Keeper):
    _pushes = 0
    """That it took since it was lost last."""
    _refusals = 0
    _is_given_up = False

    async def _bring_up(self) -> Running:
        self._pushes = 0
        await asyncio.sleep(POLL_S * self._restarts)
        try:
            running = await super()._bring_up()
        except Unauthorized:
            self._refusals += 1
            if self._refusals == REFUSALS:
                self._restarts = self._settings.restarts  # no other try would help
            raise
        self._refusals = 0
        return running

    async def _open(self) -> Engine:
        """Wait until the server answers; a client of it."""
        start = self._start
        if self._is_given_up:
            await self._outlast()
        engine = self._kind.client(url=start.url, token=_token(start.token_file), timeout_s=self._settings.call_s)
        if await self._is_there(engine, takes_over=not start.is_frozen):
            return engine
        what = f"engine {start.id} at {start.url} does not answer well ({await _told(engine)})"
        logger.warning("%s: the run goes on without it until it does", what)
        try:
            while not await self._is_there(engine, takes_over=not start.is_frozen):
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            await engine.close()
            raise
        return engine

    async def _outlast(self) -> None:
        """Until its server does not answer."""
        engine = self._kind.client(url=self._start.url, token="", timeout_s=self._settings.call_s)
        try:
            while await self._is_there(engine, takes_over=False):
                await asyncio.sleep(POLL_S)
        finally:
            await engine.close()
        self._is_given_up, self._restarts, self._refusals = False, 0, 0

    async def _is_there(self, engine: Engine, *, takes_over: bool) -> bool:
        try:
            async with asyncio.timeout(keeper.PROBE_S):
                if takes_over:
                    await engine.take_over()
                return await engine.health()
        except (EngineLost, TimeoutError):
            return False

    def progressed(self) -> None:
        """What others finished says nothing about an engine that is pushed to."""
        if self._start.is_frozen:
            super().progressed()

    async def commit(self, digests: Mapping[str, str], canary: Canary | None) -> str:
        differ = await super().commit(digests, canary)
        if differ and self._running is not None and (await self._running.engine.describe()).version < 0:
            raise EngineLost(f"{self._start.url} holds other weights than it was just sent: another run pushes to it")
        self._pushes += not differ
        if self._pushes > 1:  # it was of use from one to the next
            self._restarts = 0
        return differ

    def _tell(self, reason: str) -> None:
        self._is_given_up = self._restarts > self._settings.restarts
        if self._is_given_up:
            reason = f"{reason}; engine {self._start.id} at {self._start.url} is left out until its server is restarted"
        id, times = self._start.id, self._restarts
        self._report(EngineDown(engine=id, reason=reason, restarts=times, is_given_up=self._is_given_up))


async def _told(engine: Engine) -> str:
    """What one that is not well says."""
    try:
        async with asyncio.timeout(keeper.PROBE_S):
            await engine.describe()
    except (EngineLost, TimeoutError) as e:
        return str(e) or "nothing"
    return "that it is not well"


def _token(file: str) -> str:
    """
    Raises:
        EngineLost: the file is gone, or holds something else by now.
    """
    try:
        words = Path(file).read_text().split() if file else [""]
    except (OSError, UnicodeDecodeError) as e:
        raise EngineLost(f"the token file {file} cannot be read: {e}") from e
    if len(words) != 1:
        raise EngineLost(f"the token file {file} holds {len(words)} words, not one")
    return words[0]
