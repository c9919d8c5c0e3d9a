"""One node's part of an engine that stands on several: its process joins that of the first node, whose agent keeps it.

    first node's agent                  controller                 agents of the other nodes
    start rank 0, EngineBegun --------> EngineBegun ------------>  end what is left of an earlier start, start the part
    the engine is lost <--------------- PartDown <---------------  it ended
    EngineDown -----------------------> EngineDown ------------->  end it

So the loss of any part is the loss of the engine, and no part of an earlier start is left when it answers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from runtime.comm.messages import EngineBegun, PartDown
from runtime.errors import EngineLost
from runtime.rollout.base import EngineKind
from runtime.rollout.endings import how_it_ended
from runtime.rollout.start import GRACE_S, EngineSettings, EngineStart, Spawner


class Part:
    def __init__(
        self,
        start: EngineStart,
        settings: EngineSettings,
        kind: EngineKind,
        spawner: Spawner,
        report: Callable[[PartDown], None],
    ) -> None:
        self._start, self._settings, self._kind = start, settings, kind
        self._spawner, self._report = spawner, report
        self._orders = asyncio.Lock()
        self._starts, self._of = 0, -1
        """Processes started here, and the start of the engine that the last one is of; -1: it was ended on purpose."""

    @property
    def _process(self) -> str:
        return f"engine-{self._start.id}.{self._starts}-node{self._start.node_rank}"

    @property
    def _log(self) -> str:
        return str(Path(self._settings.log_dir) / f"engine-{self._start.id}-node{self._start.node_rank}.log")

    async def join(self, begun: EngineBegun) -> None:
        """Be part of this start of the engine, and of none before."""
        async with self._orders:
            await self._end()
            self._starts, self._of = self._starts + 1, begun.start
            argv = self._kind.command(self._start.launch(self._settings, begun.address))
            try:
                await self._spawner.start(self._process, argv, self._start.env, self._log, self._settings.host)
            except EngineLost as e:
                self._tell(str(e))

    async def end(self) -> None:
        async with self._orders:
            await self._end()

    def exited(self, process: str, code: int) -> None:
        """A process ended; it may be another's."""
        if process == self._process:
            self._tell(f"its part on node {self._start.node_rank} of its own {how_it_ended(code, self._log)}")

    async def _end(self) -> None:
        self._of = -1
        await self._spawner.stop(self._process, GRACE_S)

    def _tell(self, reason: str) -> None:
        if self._of >= 0:
            self._report(PartDown(engine=self._start.id, start=self._of, reason=reason))
            self._of = -1
