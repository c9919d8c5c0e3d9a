"""Where a mailbox's thread leaves what has arrived, for a thread that waits or an asyncio task that awaits."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

from runtime.errors import SluiceError

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Arrived items in order, and why none will come any more. One reader at a time."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._failure: SluiceError | None = None
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, item: Item) -> None:
        with self._changed:
            self._items.append(item)
            self._wake()

    def fail(self, failure: SluiceError) -> None:
        """The first failure stays; readers meet it before the items that they did not take."""
        with self._changed:
            self._failure = self._failure or failure
            self._wake()

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self._failure:
            raise self._failure

    def get(self, timeout_s: float) -> Item | None:
        """The next item, or None after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._failure, timeout_s)
            self.check()
            return self._items.popleft() if self._items else None

    async def next(self) -> Item:
        loop = asyncio.get_running_loop()
        while True:
            arrived = asyncio.Event()
            with self._changed:
                self.check()
                if self._items:
                    return self._items.popleft()
                self._waiter = (loop, arrived)
            await arrived.wait()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._waiter:
            loop, arrived = self._waiter
            self._waiter = None
            with suppress(RuntimeError):  # the loop that waited is closed
                loop.call_soon_threadsafe(arrived.set)
