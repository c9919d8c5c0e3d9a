"""The bridge between the event loop, which speaks HTTP, and the decoder's thread."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from runtime.rollout.embedded.decoder import Decoder, Request

T = TypeVar("T")


class DecoderDied(Exception):
    """The decoder's thread ended with an error; the process ends too and is replaced."""


class Worker:
    """Runs the decoder. When it dies, everything that waits for it fails at once, and `died` is set."""

    def __init__(self, decoder: Decoder, threads: int) -> None:
        self.decoder = decoder
        self.died = asyncio.Event()
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._waiters: set[asyncio.Future[Any]] = set()
        self._error: DecoderDied | None = None
        threading.Thread(target=self._run, name="decoder", daemon=True).start()

    async def generate(self, request: Request) -> Request:
        """The request, finished. Cancelling this aborts it."""
        future: asyncio.Future[Request] = self._loop.create_future()

        def tell(done: Request) -> None:
            self._loop.call_soon_threadsafe(_resolve, future, done)

        request.done = tell
        self.decoder.submit(request)
        try:
            return await self._wait(future)
        except asyncio.CancelledError:
            self.decoder.call(lambda: self.decoder.abort(request.id, "the client went away"))
            raise

    async def call(self, function: Callable[[], T]) -> T:
        """The result of a function that runs between two tokens."""
        return await self._wait(asyncio.wrap_future(self.decoder.call(function)))

    async def _wait(self, future: asyncio.Future[T]) -> T:
        if self._error is not None:
            raise self._error
        self._waiters.add(future)
        try:
            return await future
        finally:
            self._waiters.discard(future)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            self.decoder.run()
        except BaseException as e:  # the edge of the thread: the server answers 500 and exits
            traceback.print_exc()
            self._loop.call_soon_threadsafe(self._fail, f"{type(e).__name__}: {e}")

    def _fail(self, reason: str) -> None:
        self._error = DecoderDied(reason)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._error)
        self.died.set()


def _resolve(future: asyncio.Future[Request], request: Request) -> None:
    if not future.done():
        future.set_result(request)


async def in_thread(function: Callable[[], T]) -> T:
    """The result of a function that blocks, run in a daemon thread: one that hangs does not keep the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            loop.call_soon_threadsafe(settle, function(), None)
        except Exception as e:  # the edge of the thread: raised again where the result is awaited
            loop.call_soon_threadsafe(settle, None, e)

    threading.Thread(target=run, daemon=True).start()
    return await future
