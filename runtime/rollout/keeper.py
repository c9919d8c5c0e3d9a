"""Keeps one engine slot alive: starts its process, watches it, starts it again, and carries out the orders it gets.

start --answers--> EngineReady: fresh --Commit--> in the pool --Receive--> out of it --Commit--> in the pool
  ^                                                                                                  |
  +---------- EngineDown: exited, silent, failed at a completion, or told to restart <---------------+

An engine of another model than the policy is in the pool as soon as it answers: nothing is pushed to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from runtime.comm.messages import EngineBegun, EngineDown, EngineReady, Take
from runtime.errors import EXIT_CODES, ConfigError, EngineLost
from runtime.rollout.base import Engine, EngineKind
from runtime.rollout.endings import end_of, how_it_ended
from runtime.rollout.pool import Pool, Running
from runtime.rollout.proof import off_canary, off_prefill, other_bytes
from runtime.rollout.start import GRACE_S, EngineSettings, EngineStart, Spawner
from runtime.types import Canary, GroupAddress, Manifest

POLL_S = 0.1
PROBE_S = 5.0
"""Between probes of a silent engine; also the bound of one."""
EXIT_S = 0.5
"""For word of an exit after a call failed: it says more than a broken connection."""
ABORT_S = 0.02
"""For answers of aborted requests to arrive."""


class Keeper:
    def __init__(
        self,
        start: EngineStart,
        settings: EngineSettings,
        kind: EngineKind,
        spawner: Spawner,
        pool: Pool,
        report: Callable[[EngineBegun | EngineReady | EngineDown], None],
    ) -> None:
        self._start, self._settings, self._kind = start, settings, kind
        self._spawner, self._pool, self._report = spawner, pool, report
        self._starts = 0
        self._restarts = 0
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why this start is lost; its Running waits for it too, so that calls under way end with it."""
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How the process of this start ended."""
        self._has_answered = self._is_refused = False
        """It was up once; and the first process of it said that something is to be changed."""
        self._running: Running | None = None
        """The engine that answers; None while it is started."""
        self._can: tuple[str, ...] = ()
        self._orders = asyncio.Lock()
        """Orders to one engine are carried out one after the other."""
        self._may_run = asyncio.Event()
        """Clear while another has its memory: an engine that is lost then is not started again before."""
        if start.url or not settings.sleeps:
            self._may_run.set()
        self._is_starting = False

    @property
    def process(self) -> str:
        """Name of the process of this start."""
        return f"engine-{self._start.id}.{self._starts}"

    @property
    def log(self) -> str:
        return str(Path(self._settings.log_dir) / f"engine-{self._start.id}.log")

    async def keep(self) -> None:
        """Until cancelled.

        Raises:
            EngineLost: it was restarted as often as allowed, and lost again.
            ConfigError: it ended as programs do of which something is to be changed (exit code 2, also SGLang's for
                options that it does not know) before it ever answered.
        """
        while True:
            await self._may_run.wait()
            self._is_starting = True
            try:
                running = await self._bring_up()
                self._is_starting = False
                reason = await self._watch(running)
            except EngineLost as e:
                reason = str(e)
            self._is_starting = False
            await self._take_down(reason)

    # ---- what happens to it

    def exited(self, process: str, code: int) -> None:
        """A process ended; that of an earlier start, or said again, is no news."""
        if process == self.process and not self._ended.done():
            reason = f"the engine {how_it_ended(code, self.log)}"
            self._is_refused = code == EXIT_CODES["config"] and not self._has_answered
            self._ended.set_result(reason)
            self._lose(reason)

    def part_down(self, start: int, reason: str) -> None:
        """A part of this start, on another node, ended."""
        if start == self._starts:
            self._lose(reason)

    def restart(self, reason: str) -> None:
        """End it and start it again, unless that is under way."""
        if self._running is not None:
            self._lose(reason)

    def progressed(self) -> None:
        """A group was finished: restarts count anew."""
        self._restarts = 0

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)

    async def end(self) -> None:
        """End its process, for good."""
        self._pool.withdraw(self._start.id)
        await self._spawner.stop(self.process, GRACE_S)
        if self._running is not None:
            await self._running.engine.close()

    # ---- its life

    async def _bring_up(self) -> Running:
        s, start = self._settings, self._start
        self._starts += 1
        self._lost = asyncio.get_running_loop().create_future()
        self._ended = asyncio.get_running_loop().create_future()
        engine = await self._open()
        running = Running(start.id, engine, self._lost)
        try:
            async with asyncio.timeout(s.start_s):
                while not await self._answers(running):
                    await running.loss(POLL_S)
                description = await running.call(engine.describe())
            self._running, self._has_answered = running, True
        except TimeoutError:
            raise EngineLost(f"engine {start.id} did not answer within {s.start_s:g} s{end_of(self.log)}") from None
        finally:
            if self._running is None:
                await engine.close()
        self._can = description.can
        ready = EngineReady(engine=start.id, model=start.model, can=description.can, num_ranks=description.num_ranks)
        self._report(ready)
        if start.is_frozen:
            self._pool.admit(running)
        return running

    async def _open(self) -> Engine:
        """Start its server; a client of it."""
        s, start = self._settings, self._start
        argv = self._kind.command(start.launch(s))
        started = await self._spawner.start(self.process, argv, start.env, self.log, s.host)
        host = f"[{s.host}]" if ":" in s.host else s.host
        if start.num_nodes > 1:
            self._report(EngineBegun(engine=start.id, start=self._starts, address=f"{host}:{started.peer_port}"))
        token = Path(s.token_file).read_text().strip()
        return self._kind.client(url=f"http://{host}:{started.port}", token=token, timeout_s=s.call_s)

    async def _watch(self, running: Running) -> str:
        """Until it is lost; why. Traffic shows that it lives; when there is none it is probed."""
        while True:
            if reason := await running.loss(PROBE_S):
                return reason
            if running.silent_s < PROBE_S or self._orders.locked():
                continue
            if not await self._answers(running) and running.silent_s > self._settings.silence_s:
                return f"the engine has not answered for {running.silent_s:.0f} s"

    async def _answers(self, running: Running) -> bool:
        """One probe.

        Raises:
            EngineLost: it was lost meanwhile.
        """
        try:
            async with asyncio.timeout(PROBE_S):
                await running.call(_well(running.engine))
                return True
        except TimeoutError:
            return False
        except EngineLost:
            if running.is_lost:
                raise
            return False

    async def _take_down(self, reason: str) -> None:
        id, running, self._running = self._start.id, self._running, None
        self._lose(reason)
        self._pool.withdraw(id)
        await asyncio.wait([self._ended], timeout=EXIT_S)
        reason = self._ended.result() if self._ended.done() else reason
        if self._is_refused:
            raise ConfigError(f"engine {id}", reason, "change what it names: it would end so each time")
        self._restarts += 1
        self._tell(reason)
        await self._spawner.stop(self.process, GRACE_S)
        if running is not None:
            await running.engine.close()

    def _tell(self, reason: str) -> None:
        """Report its loss, and raise it if it was once too many."""
        id, times = self._start.id, self._restarts
        self._report(EngineDown(engine=id, reason=reason, restarts=times))
        if times > self._settings.restarts:
            lost = f"engine {id} was lost {times} times without a finished group in between"
            raise EngineLost(f"{lost}; the last time: {reason}")

    # ---- orders; each raises EngineLost

    async def connect(self, address: GroupAddress, rank: int) -> None:
        await self._order(lambda running: running.engine.connect(address, rank))

    async def disconnect(self, group: str) -> None:
        await self._order(lambda running: running.engine.disconnect(group))

    async def receive(self, manifest: Manifest, version: int, source: str) -> None:
        """Take the engine out of the pool, pause it, let it take the weights."""

        async def work(running: Running) -> None:
            self._pool.withdraw(running.id)
            await running.engine.pause(self._settings.pause)
            await running.engine.receive(manifest, version, source)

        await self._order(work)

    async def take(self, order: Take) -> None:
        """Like `receive`, bucket by bucket."""

        async def work(running: Running) -> None:
            if order.is_first:
                self._pool.withdraw(running.id)
                await running.engine.pause(self._settings.pause)
            handles = order.handles[running.id]
            await running.engine.take(handles, order.version, is_first=order.is_first, is_last=order.is_last)

        await self._order(work)

    async def commit(self, digests: Mapping[str, str], canary: Canary | None) -> str:
        """Let the engine go on, and take new requests if its weights are those that were sent; else how they differ."""
        differ = ""

        async def work(running: Running) -> None:
            nonlocal differ
            if digests and "digests" in self._can:
                differ = other_bytes(digests, await running.engine.checksums())
            if not differ:
                await running.engine.resume()
            if canary is not None and not differ:
                proof = off_prefill if self._start.kind == "decode" else off_canary
                differ = await proof(running.engine, canary, self._settings.dtype)
            if not differ:
                self._pool.admit(running)

        await self._order(work)
        return differ

    async def sleep(self) -> None:
        """Take the engine out of the pool and let it give its memory back. One that is being started is waited for, and
        one that does not give it is ended; one that is down, or ended so, stays down until `wake`."""
        self._may_run.clear()
        while self._is_starting:
            await asyncio.sleep(POLL_S)

        async def work(running: Running) -> None:
            self._pool.withdraw(running.id)
            while running.load:
                await running.engine.pause("abort")
                await asyncio.sleep(ABORT_S)
                if running.load:  # what was on its way to it when it was paused waits there
                    await running.engine.resume()
            await running.engine.pause("abort")
            await running.engine.sleep()

        if (running := self._running) is not None:
            try:
                return await self._order(work)
            except EngineLost as e:
                running.lose(str(e))
                await self._is_gone()
                raise
        if self._starts:
            await self._is_gone()

    async def _is_gone(self) -> None:
        """Its process, and so its memory."""
        await asyncio.wait([self._ended], timeout=GRACE_S + EXIT_S + PROBE_S)

    async def wake(self, *, serve: bool) -> None:
        """Let the engine have its memory again; see Engine.wake. One that is down is started when it is to serve."""
        if serve:
            self._may_run.set()
        elif self._start.is_frozen:  # no weights will come, and trainer ranks have their memory still
            return
        if self._running is not None:
            await self._order(self._wake_frozen if self._start.is_frozen else lambda r: r.engine.wake(serve=serve))

    async def _wake_frozen(self, running: Running) -> None:
        """It goes on at once; where it does not it is lost, as no push will follow that would find out."""
        try:
            await running.engine.wake(serve=False)
            await running.engine.wake(serve=True)
            await running.engine.resume()
        except EngineLost as e:
            running.lose(str(e))
            raise
        self._pool.admit(running)

    async def _order(self, work: Callable[[Running], Coroutine[Any, Any, None]]) -> None:
        async with self._orders:
            running = self._running
            if running is None:
                raise EngineLost(f"engine {self._start.id} is being started")
            try:
                async with asyncio.timeout(self._settings.order_s):
                    await running.call(work(running))
            except TimeoutError:
                reason = f"the engine did not carry out an order within {self._settings.order_s:g} s"
                running.lose(reason)
                raise EngineLost(reason) from None


async def _well(engine: Engine) -> None:
    """
    Raises:
        EngineLost: it does not answer, or says that it is not well: neither shows that it lives.
    """
    if not await engine.health():
        raise EngineLost("it is not well")
