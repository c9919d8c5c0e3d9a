"""An engine that somebody else runs: it is spoken to like any other, but neither started nor ended here.

One that does not answer is waited for without an end: its agent's work goes to the other engines, and when it answers,
be it after a restart of its own, it is taken like one that was just started.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from runtime.errors import EngineLost
from runtime.rollout import keeper
from runtime.rollout.base import Engine

logger = logging.getLogger("agent")

POLL_S = 1.0


class ExternalKeeper(keeper.Keeper):
    async def _open(self) -> Engine:
        """Wait until the server answers; a client of it."""
        start = self._start
        token = Path(start.token_file).read_text().strip() if start.token_file else ""
        engine = self._kind.client(url=start.url, token=token, timeout_s=self._settings.call_s)
        if await self._is_there(engine):
            return engine
        logger.warning("engine %d at %s does not answer: the run goes on without it until it does", start.id, start.url)
        try:
            while not await self._is_there(engine):
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            await engine.close()
            raise
        return engine

    async def _is_there(self, engine: Engine) -> bool:
        try:
            async with asyncio.timeout(keeper.PROBE_S):
                if not self._start.is_frozen:
                    await engine.take_over()
                return await engine.health()
        except (EngineLost, TimeoutError):
            return False
