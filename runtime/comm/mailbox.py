"""Messages between the controller and the other ranks, over TCP: the controller has a server, each other rank a client.

Every process has one thread that owns its zmq socket, sends a beat each second, and measures the silence of its peers.
Connections are CURVE-encrypted, and the token that the controller hands out over MPI is checked before anything else in
a message is looked at. What a lost connection swallowed is sent again, see `comm.link`. Trainer ranks have a client for
its beats alone. A message's arrays are not copied when it is sent: do not write to them after.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import math
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec
import zmq

from runtime.comm.codec import Frame, decode, encode
from runtime.comm.inbox import Inbox
from runtime.comm.link import DATA, Envelope, Link, cost
from runtime.comm.messages import FromAgent, ToAgent
from runtime.errors import PeerLost, SluiceError, WaitTimeout

BEAT_S: Final = 1.0
MAX_FRAME_BYTES: Final = 1 << 31
CLOSE_S: Final = 2.0
"""What was sent last may take so long to leave when a mailbox closes."""
_TERM_S: Final = 1.0
"""libzmq ends soon after the last message left or its time was up; about once in 400 times, when peers close together,
it never does, a known fault of libzmq."""
_TURN_MESSAGES: Final = 256
"""Read in one turn, so that beats are sent in time under load."""
_CONTROLLER: Final = 0

log = logging.getLogger(__name__)


class _Mailbox:
    """What server and client share: the thread, the token check, the links, the silence."""

    _route_frames: int
    """How many frames zmq puts before a received message to say who sent it."""

    def __init__(self, socket: zmq.Socket, token: bytes, silence_s: float, incoming: Any) -> None:
        assert len(token) >= 32, "a token has 256 bits"
        self._socket = socket
        self._token = token
        self._silence_s = silence_s
        self._beat_s = min(BEAT_S, silence_s / 5)
        self._incoming = incoming
        self._inbox: Inbox[tuple[int, int, Any]] = Inbox()  # (rank, cost, message)
        self._links: dict[int, Link] = {}
        self._routes: dict[int, list[bytes]] = {}
        self._left: set[int] = set()
        self._changed = threading.Condition()  # guards links, routes, left
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._beat_now = False
        self._closing = False
        self.dropped: Counter[str] = Counter()
        """Peer -> messages without the token, or malformed."""
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)

    # ---- on the owner's threads ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises PeerLost when a peer has been silent for too long."""
        self._inbox.check()

    def close(self) -> None:
        """End the thread; what was sent before still leaves, within CLOSE_S."""
        if self._closing:
            return
        self._closing = True
        self._ring()
        self._thread.join(CLOSE_S + _TERM_S)
        if self._thread.is_alive():
            log.warning("zmq did not end within %g s of its limit; it is left behind", _TERM_S)
        else:
            os.close(self._bell)

    def _send(self, rank: int, message: msgspec.Struct) -> None:
        frames = encode(message)
        size = cost(frames)
        if max(map(len, frames)) > MAX_FRAME_BYTES:
            raise ValueError(f"an array of a {type(message).__name__} has more than {MAX_FRAME_BYTES} bytes")
        self.check()
        with self._changed:
            link = self._link(rank)
            if not self._changed.wait_for(lambda: link.has_room(size), self._silence_s):
                raise WaitTimeout(
                    f"a {type(message).__name__} waited {self._silence_s:.0f} s for {_name(rank)} to take "
                    f"{link.window_bytes} bytes of earlier messages"
                )
            link.queue(frames)
        self._ring()

    def _taken(self, item: tuple[int, int, Any]) -> tuple[int, Any]:
        rank, size, message = item
        with self._changed:
            self._beat_now |= self._links[rank].take(size)
        if self._beat_now:
            self._ring()
        return rank, message

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    # ---- on the mailbox's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        next_beat = last_turn = time.monotonic()
        try:
            while not self._closing:
                poller.poll(math.ceil(1000 * max(0.0, next_beat - time.monotonic())))
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                all_read = self._read()
                now = time.monotonic()
                if now - last_turn > 2 * self._beat_s:
                    self._excuse(now - last_turn, now)
                last_turn = now
                beat = self._beat_now or now >= next_beat
                if beat:
                    self._beat_now = False
                    next_beat = now + self._beat_s
                self._write(beat)
                if all_read:
                    self._listen(now)
            self._write(beat=True)
        finally:
            self._inbox.fail(SluiceError("the mailbox is closed"))
            context = self._socket.context
            self._socket.close(linger=int(CLOSE_S * 1000))
            context.term()

    def _read(self) -> bool:
        """Take in what has arrived; False when there may be more."""
        for _ in range(_TURN_MESSAGES):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._receive(parts[: self._route_frames], parts[self._route_frames :])
        return False

    def _receive(self, route: list[bytes], parts: list[bytes]) -> None:
        if not parts or not hmac.compare_digest(parts[0], self._token):
            self._drop("a stranger", "it does not hold the run's token")
            return
        try:
            envelope = Envelope.unpack(parts[1])
        except (IndexError, struct.error) as e:
            self._drop("a member", f"it has no envelope: {e}")
            return
        with self._changed:
            rank = self._member(envelope.rank, route)
            if rank is None:
                return
            link = self._links[rank]
            again = link.hear(envelope, time.monotonic())
            fresh = envelope.kind == DATA and link.accept(envelope.number)
            self._changed.notify_all()
        if again:
            self._hand_over(rank, [again])
        if fresh:
            self._deliver(rank, parts[2:])

    def _deliver(self, rank: int, frames: list[bytes]) -> None:
        size = cost(frames)
        try:
            message = decode(frames, self._incoming)
        except (msgspec.MsgspecError, IndexError) as e:
            # It counts as arrived and is not sent again: who waits for it would wait for its limit.
            self._inbox.fail(SluiceError(f"a message of {_name(rank)} cannot be read: {e}"))
        else:
            self._inbox.put((rank, size, message))

    def _drop(self, peer: str, problem: str) -> None:
        self.dropped[peer] += 1
        if self.dropped[peer] == 1:
            log.warning("dropped a message of %s, %s; further ones are dropped in silence", peer, problem)

    def _write(self, beat: bool) -> None:
        with self._changed:
            batches = {rank: self._links[rank].outgoing(beat) for rank in self._routes}
        for rank, batch in batches.items():
            for frames in batch:
                self._hand_over(rank, frames)

    def _hand_over(self, rank: int, frames: list[Frame]) -> None:
        self._socket.send_multipart([*self._routes[rank], self._token, *frames], zmq.NOBLOCK)

    def _excuse(self, seconds: float, now: float) -> None:
        """This thread stood still (a stopped process, a long hold of the interpreter): no one else was silent."""
        with self._changed:
            for link in self._links.values():
                link.last_heard = min(now, link.last_heard + seconds)

    def _listen(self, now: float) -> None:
        with self._changed:
            members = self._routes.keys() - self._left
            silences = {rank: now - self._links[rank].last_heard for rank in members}
        lost = {rank: silence for rank, silence in silences.items() if silence > self._silence_s}
        if lost:
            names = ", ".join(f"{_name(rank)} for {silence:.1f} s" for rank, silence in sorted(lost.items()))
            self._inbox.fail(PeerLost(f"heard nothing of {names} (limit {self._silence_s:g} s)"))

    # ---- where server and client differ; both are called with the lock held ---------------------------------------

    def _link(self, rank: int) -> Link:
        """The link to a peer."""
        raise NotImplementedError

    def _member(self, rank: int, route: list[bytes]) -> int | None:
        """World rank of the peer that sent a message with this rank in its envelope; None: not for us."""
        raise NotImplementedError


class MailboxServer(_Mailbox):
    """The controller's end.

    Args:
        host: numeric address to listen on.
        token: at least 32 random bytes.
        silence_s: a member silent for longer is lost.
    """

    _route_frames = 1

    def __init__(self, host: str, token: bytes, silence_s: float) -> None:
        if ipaddress.ip_address(host).is_unspecified:
            raise ValueError(f"a mailbox listens on one address, not on {host}")
        socket = _socket(zmq.ROUTER, silence_s)
        public, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_server = True
        socket.bind(f"tcp://{host}:*")
        self.endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.public_key: bytes = public
        super().__init__(socket, token, silence_s, FromAgent)
        self._thread.start()

    def send(self, rank: int, message: ToAgent) -> None:
        """Queue a message for a rank, which may connect later.

        Raises:
            PeerLost: a member is silent.
            WaitTimeout: the rank takes no messages.
        """
        self._send(rank, message)

    def receive(self, timeout_s: float) -> tuple[int, FromAgent] | None:
        """The next message and its sender; None after `timeout_s`.

        Raises:
            PeerLost: a member is silent.
        """
        item = self._inbox.get(timeout_s)
        return item and self._taken(item)

    async def next(self) -> tuple[int, FromAgent]:
        """As `receive`, for asyncio, without a limit of its own: silence ends it."""
        return self._taken(await self._inbox.next())

    def expect(self, ranks: Iterable[int], timeout_s: float) -> None:
        """Wait until all of these have connected."""
        wanted = set(ranks)
        with self._changed:
            if not self._changed.wait_for(lambda: wanted <= self._routes.keys(), timeout_s):
                missing = ", ".join(_name(rank) for rank in sorted(wanted - self._routes.keys()))
                raise WaitTimeout(f"the controller waited {timeout_s:g} s for {missing} to connect to {self.endpoint}")

    def roll_call(self, timeout_s: float) -> None:
        """Wait until every member has been heard of anew; each beats once a second by itself.

        Raises:
            PeerLost: names those that were not.
        """
        called = time.monotonic()

        def missing() -> list[int]:
            return [r for r in self._routes.keys() - self._left if self._links[r].last_heard <= called]

        with self._changed:
            if not self._changed.wait_for(lambda: not missing(), timeout_s):
                names = ", ".join(_name(rank) for rank in sorted(missing()))
                raise PeerLost(f"told to stop, and {timeout_s:g} s later nothing had been heard of {names}")

    def forget(self, rank: int) -> None:
        """A rank leaves when it likes: from now on its silence is no loss."""
        with self._changed:
            self._left.add(rank)

    def _link(self, rank: int) -> Link:
        return self._links.setdefault(rank, Link(rank, time.monotonic()))

    def _member(self, rank: int, route: list[bytes]) -> int | None:
        link = self._link(rank)
        if self._routes.get(rank) != route:
            self._routes[rank] = route
            link.resend()  # what the former connection still held is gone
        return rank


class MailboxClient(_Mailbox):
    """Another rank's end; it connects, and connects again, by itself. A rank has one in the life of a server.

    Args:
        endpoint, public_key: of the server.
        token: the server's.
        rank: world rank of this process.
        silence_s: a controller silent for longer is lost.
    """

    _route_frames = 0

    def __init__(self, endpoint: str, public_key: bytes, token: bytes, *, rank: int, silence_s: float) -> None:
        socket = _socket(zmq.DEALER, silence_s)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = public_key
        socket.connect(endpoint)
        super().__init__(socket, token, silence_s, ToAgent)
        self._rank = rank
        self._links[_CONTROLLER] = Link(rank, time.monotonic())
        self._routes[_CONTROLLER] = []
        self._thread.start()

    def send(self, message: FromAgent) -> None:
        """Queue a message for the controller.

        Raises:
            PeerLost: the controller is silent.
            WaitTimeout: the controller takes no messages.
        """
        self._send(_CONTROLLER, message)

    def receive(self, timeout_s: float) -> ToAgent | None:
        """The next message; None after `timeout_s`.

        Raises:
            PeerLost: the controller is silent.
        """
        item = self._inbox.get(timeout_s)
        return item and self._taken(item)[1]

    async def next(self) -> ToAgent:
        """As `receive`, for asyncio, without a limit of its own: silence ends it."""
        return self._taken(await self._inbox.next())[1]

    def _link(self, rank: int) -> Link:
        return self._links[rank]

    def _member(self, rank: int, route: list[bytes]) -> int | None:
        return _CONTROLLER if rank == self._rank else None


def _socket(kind: int, silence_s: float) -> zmq.Socket:
    socket = zmq.Context().socket(kind)
    # the links bound what is under way; zmq's own limits would drop messages in silence
    socket.sndhwm = socket.rcvhwm = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    # a connection that died without a word is given up and made anew
    socket.heartbeat_ivl = int(1000 * min(BEAT_S, silence_s / 5))
    socket.heartbeat_timeout = int(1000 * silence_s / 2)
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2000
    return socket


def _name(rank: int) -> str:
    return "the controller" if rank == _CONTROLLER else f"rank {rank}"
