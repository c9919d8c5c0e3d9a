"""What makes a mailbox lose and double nothing: numbered messages that are kept until the other side has taken them.

TCP and zmq deliver in order while one connection lives, and lose what is under way when it ends. So each side numbers
its messages, keeps them until they are taken, drops what it has already got, and says in every beat how far it has
sent. As a beat overtakes nothing, a receiver that hears of more than it got knows that something is lost, and asks for
it again; a slow large message is never sent twice for being slow.

A Link is one side's state of one peer; it does no input or output, and its owner guards it with a lock.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from runtime.comm.codec import Frame

DATA: Final = 0
BEAT: Final = 1
AGAIN: Final = 2

WINDOW_BYTES: Final = 256 * 1024 * 1024
"""Sent and not yet taken, to one peer; a single larger message may go alone."""
AGAIN_S: Final = 0.5
"""Beats that waited for a connection arrive together; only the first asks for what is lost."""
_OVERHEAD_BYTES: Final = 256
"""What a message counts for beside its frames."""


class Envelope(NamedTuple):
    """Goes before the frames of every message."""

    kind: int
    """DATA; BEAT, a sign of life; AGAIN, a beat that asks for all messages after `number` again."""
    rank: int
    """Of the peer that is not the controller."""
    number: int
    """DATA: of this message, from 1. BEAT: of the last message sent. AGAIN: of the last message received."""
    taken: int
    """Number of the last message that the receiver's owner has taken."""

    def pack(self) -> bytes:
        return _LAYOUT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Envelope:
        """Raises struct.error where the length is wrong."""
        return cls(*_LAYOUT.unpack(data))


_LAYOUT = struct.Struct("!BIQQ")


def cost(frames: Sequence[Frame]) -> int:
    """What a message takes of the window."""
    return _OVERHEAD_BYTES + sum(map(len, frames))


class _Kept(NamedTuple):
    number: int
    cost: int
    frames: list[Frame]


class Link:
    def __init__(self, rank: int, now: float) -> None:
        self._rank = rank
        self._queued: deque[_Kept] = deque()
        self._kept: deque[_Kept] = deque()
        self._numbered = 0
        self._sent = 0
        self._received = 0
        self._taken = 0
        self._asked = -AGAIN_S
        self._untaken_bytes = 0
        self.window_bytes = 0
        self.last_heard = now

    # ---- outgoing ------------------------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        return not self.window_bytes or self.window_bytes + size <= WINDOW_BYTES

    def queue(self, frames: list[Frame]) -> None:
        self._numbered += 1
        self._queued.append(_Kept(self._numbered, cost(frames), frames))
        self.window_bytes += self._queued[-1].cost

    def outgoing(self, beat: bool) -> list[list[Frame]]:
        """What to hand to the socket now, in order, a beat last; messages are kept until taken."""
        fresh = list(self._queued)
        self._queued.clear()
        self._kept += fresh
        if fresh:
            self._sent = fresh[-1].number
        beats = [[self._envelope(BEAT, self._sent)]] if beat else []
        return [[self._envelope(DATA, k.number), *k.frames] for k in fresh] + beats

    def resend(self, after: int = 0) -> None:
        """Put messages that were sent and not taken back in the queue, those after this number."""
        lost = [k for k in self._kept if k.number > after]
        self._kept = deque(k for k in self._kept if k.number <= after)
        self._queued.extendleft(reversed(lost))

    # ---- incoming ------------------------------------------------------------------------------------------------

    def hear(self, envelope: Envelope, now: float) -> Frame | None:
        """Note a beat, or the head of a message; an AGAIN to send when something is lost."""
        self.last_heard = now
        while self._kept and self._kept[0].number <= envelope.taken:
            self.window_bytes -= self._kept.popleft().cost
        if envelope.kind == AGAIN:
            self.resend(envelope.number)
        if envelope.kind == BEAT and envelope.number > self._received and now - self._asked >= AGAIN_S:
            self._asked = now
            return self._envelope(AGAIN, self._received)
        return None

    def accept(self, number: int) -> bool:
        """Whether this message is the next one; else it is a double, or a later one whose forerunner is lost."""
        if number != self._received + 1:
            return False
        self._received = number
        return True

    def take(self, size: int) -> bool:
        """The owner took a message of this cost; whether the sender should hear of it before the next beat."""
        self._taken += 1
        self._untaken_bytes += size
        return self._untaken_bytes > WINDOW_BYTES // 4

    def _envelope(self, kind: int, number: int) -> Frame:
        self._untaken_bytes = 0
        return Envelope(kind, self._rank, number, self._taken).pack()
