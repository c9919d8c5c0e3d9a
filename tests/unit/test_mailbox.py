"""The mailbox over real sockets: order, loss, strangers, silence, and connections that are cut in mid-message."""

import asyncio
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zmq

from runtime.comm import link as link_module
from runtime.comm import mailbox as mailbox_module
from runtime.comm.codec import encode
from runtime.comm.link import AGAIN, BEAT, DATA, Envelope, Link
from runtime.comm.mailbox import MailboxClient, MailboxServer
from runtime.comm.messages import Fault, Hello, Journal, Reply, Restart, StopAgent
from runtime.errors import PeerLost, SluiceError, WaitTimeout
from runtime.types import Completion

TOKEN = secrets.token_bytes(32)
SILENCE_S = 8.0
HOST = "127.0.0.1"


@pytest.fixture
def server():
    server = MailboxServer(HOST, TOKEN, SILENCE_S)
    yield server
    server.close()


@pytest.fixture
def connect(server):
    """Makes clients that are closed after the test."""
    clients = []

    def make(rank=1, *, endpoint="", token=TOKEN, silence_s=SILENCE_S):
        client = MailboxClient(endpoint or server.endpoint, server.public_key, token, rank=rank, silence_s=silence_s)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


def completion(tokens):
    return Completion(tokens=tokens, logprobs=np.zeros(0, np.float32), versions=(), finish="stop")


def journal(number, tokens):
    return Journal(request=number, journals={0: ((completion(tokens),),)})


class Proxy:
    """Forwards TCP to a port, until `cut` ends all its connections wherever they are."""

    def __init__(self, endpoint):
        self._target = (HOST, int(endpoint.rsplit(":", 1)[1]))
        self._listener = socket.create_server((HOST, 0))
        self.endpoint = f"tcp://{HOST}:{self._listener.getsockname()[1]}"
        self.forwarded = 0
        self._open = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(a, b), daemon=True).start()

    def _forward(self, source, target):
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)
                self.forwarded += len(data)

    def cut(self):
        while self._open:
            s = self._open.pop()
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def close(self):
        self._listener.close()
        self.cut()


def test_messages_arrive_both_ways_in_order(server, connect):
    client = connect(3)
    client.send(Hello(node=1, rank=3))
    assert server.receive(5) == (3, Hello(node=1, rank=3))
    num = 10_000
    for i in range(num):
        client.send(Reply(request=i))
        server.send(3, Restart(engines=(i,), reason=""))
    assert [server.receive(5) for _ in range(num)] == [(3, Reply(request=i)) for i in range(num)]
    assert [client.receive(5).engines[0] for _ in range(num)] == list(range(num))
    assert server.receive(0.05) is None and client.receive(0.05) is None


def test_messages_wait_for_a_rank_that_connects_late(server, connect):
    server.send(5, Restart(engines=(1,), reason=""))
    server.send(5, Restart(engines=(2,), reason=""))
    client = connect(5)
    assert [client.receive(5).engines for _ in range(2)] == [(1,), (2,)]


def test_big_arrays_arrive_whole(server, connect):
    client = connect()
    tokens = np.random.default_rng(0).integers(0, 2**31, 8_000_000, np.int32)
    client.send(journal(1, tokens))
    client.send(journal(2, tokens[:0]))
    _, first = server.receive(20)
    _, second = server.receive(20)
    assert np.array_equal(first.journals[0][0][0].tokens, tokens)
    assert second.journals[0][0][0].tokens.shape == (0,)


def test_zmq_that_does_not_end_holds_up_nobody(monkeypatch, caplog):
    monkeypatch.setattr(mailbox_module, "CLOSE_S", 0.1)
    monkeypatch.setattr(mailbox_module, "_TERM_S", 0.1)
    monkeypatch.setattr(zmq.Context, "term", lambda self: time.sleep(3))
    server = MailboxServer(HOST, TOKEN, SILENCE_S)
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 2 and "left behind" in caplog.text


def test_another_process_is_a_peer_and_does_not_mistake_its_own_stop_for_silence():
    server = MailboxServer(HOST, TOKEN, 30.0)
    code = (
        "import sys, os; from runtime.comm.mailbox import MailboxClient; from runtime.comm.messages import Reply\n"
        "endpoint, key, token = sys.argv[1], bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])\n"
        "client = MailboxClient(endpoint, key, token, rank=4, silence_s=3)\n"
        "for m in iter(lambda: client.receive(10), None):\n"
        "    if type(m).__name__ == 'StopAgent': break\n"
        "    client.send(Reply(request=m.engines[0]))\n"
        "client.close()\n"
        "assert not [x for x in ('torch', 'mpi4py') if x in sys.modules]\n"
    )
    args = [server.endpoint, server.public_key.hex(), TOKEN.hex()]
    process = subprocess.Popen([sys.executable, "-c", code, *args])
    server.expect([4], 20)
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    for i in range(100):
        server.send(4, Restart(engines=(i,), reason=""))
    assert [server.receive(10)[1].request for _ in range(100)] == list(range(100))
    server.forget(4)
    server.send(4, StopAgent())
    assert process.wait(20) == 0
    server.close()


def test_a_wrong_token_is_dropped_and_counted(server, connect, caplog):
    stranger = connect(2, token=secrets.token_bytes(32))
    for _ in range(3):
        stranger.send(Hello(node=0, rank=2))
    assert server.receive(1.0) is None
    assert server.dropped["a stranger"] >= 3
    assert len([r for r in caplog.records if "token" in r.message]) == 1
    with pytest.raises(WaitTimeout, match=r"waited 0.1 s for rank 2 to connect"):
        server.expect([2], 0.1)
    friend = connect(2)
    friend.send(Hello(node=0, rank=2))
    assert server.receive(5) == (2, Hello(node=0, rank=2))


def raw_client(server, *, encrypted=True):
    s = zmq.Context.instance().socket(zmq.DEALER)
    s.linger = 0
    if encrypted:
        s.curve_publickey, s.curve_secretkey = zmq.curve_keypair()
        s.curve_serverkey = server.public_key
    s.connect(server.endpoint)
    return s


def test_messages_without_an_envelope_are_dropped_and_the_next_is_read(server):
    with raw_client(server) as s:
        s.send_multipart([b""])
        s.send_multipart([TOKEN])
        s.send_multipart([TOKEN, b"short"])
        s.send_multipart([TOKEN, Envelope(DATA, 7, 1, 0).pack(), *encode(Hello(node=0, rank=7))])
        assert server.receive(5) == (7, Hello(node=0, rank=7))
        assert server.dropped == {"a stranger": 1, "a member": 2}


LISTED = Journal(request=1, journals={0: ((completion([7, 8]),),)})
"""Its tokens are no array."""


@pytest.mark.parametrize("frames", [[b"\xc1 no message"], [], encode(Restart(engines=(), reason="")), encode(LISTED)])
def test_a_message_of_a_member_that_cannot_be_read_is_a_fault(server, frames):
    """Nobody would send it again, and who waits for it would wait for its limit."""
    with raw_client(server) as s:
        s.send_multipart([TOKEN, Envelope(DATA, 7, 1, 0).pack(), *frames])
        with pytest.raises(SluiceError, match="a message of rank 7 cannot be read: ") as caught:
            server.receive(5)
        assert caught.value.kind == "bug"


def test_nothing_is_read_without_encryption(server):
    with raw_client(server, encrypted=False) as s:
        s.send_multipart([TOKEN, Envelope(DATA, 7, 1, 0).pack(), *encode(Hello(node=0, rank=7))])
        assert server.receive(0.5) is None


def test_it_listens_on_one_address_only(server):
    port = int(server.endpoint.rsplit(":", 1)[1])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 1)
    with pytest.raises(ValueError, match=r"0\.0\.0\.0"):
        MailboxServer("0.0.0.0", TOKEN, SILENCE_S)


def test_silence_of_a_member_is_a_lost_peer():
    server = MailboxServer(HOST, TOKEN, 1.0)
    clients = [MailboxClient(server.endpoint, server.public_key, TOKEN, rank=r, silence_s=1.0) for r in (1, 2, 3)]
    server.expect([1, 2, 3], 5)
    time.sleep(1.5)
    server.check()  # beats alone keep a peer alive
    server.forget(3)
    clients[2].close()
    clients[1].close()
    start = time.monotonic()
    with pytest.raises(PeerLost, match=r"nothing of rank 2 for 1\.\d s \(limit 1 s\)"):
        server.receive(10)
    assert time.monotonic() - start < 2.5
    with pytest.raises(PeerLost):
        server.send(1, StopAgent())
    server.close()
    with pytest.raises(PeerLost, match="the controller"):
        clients[0].receive(10)
    with pytest.raises(PeerLost, match="the controller"):
        asyncio.run(clients[0].next())
    clients[0].close()


def test_an_asyncio_reader_gets_what_came_before_and_during_its_loop(server, connect):
    client = connect(1)
    server.send(1, Restart(engines=(0,), reason=""))
    client.send(Hello(node=0, rank=1))
    assert server.receive(5)

    async def read(count):
        return [(await client.next()).engines[0] for _ in range(count)]

    assert asyncio.run(read(1)) == [0]

    async def exchange():
        reader = asyncio.create_task(read(50))
        for i in range(50):
            await asyncio.sleep(0.001)
            server.send(1, Restart(engines=(i,), reason=""))
        return await asyncio.wait_for(reader, 5)

    assert asyncio.run(exchange()) == list(range(50))

    async def gives_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.next(), 0.05)

    asyncio.run(gives_up())
    server.send(1, Restart(engines=(99,), reason=""))  # the reader's loop is closed now
    assert client.receive(5).engines == (99,)


@pytest.mark.parametrize("tokens", [10, 100_000])
def test_cut_connections_neither_lose_nor_double(server, connect, tokens):
    proxy = Proxy(server.endpoint)
    client = connect(6, endpoint=proxy.endpoint)
    payload = np.arange(tokens, dtype=np.int32)
    num, cuts = (2000, 4) if tokens < 100 else (100, 4)
    stop = threading.Event()

    def cutter():
        for _ in range(cuts):
            begin = proxy.forwarded
            while proxy.forwarded < begin + 150_000 and not stop.wait(0.002):
                pass
            proxy.cut()
            stop.wait(0.3)

    threads = [threading.Thread(target=cutter)]
    threads.append(threading.Thread(target=lambda: [client.send(journal(i, payload)) for i in range(num)]))
    threads.append(
        threading.Thread(
            target=lambda: [server.send(6, Restart(engines=tuple(range(i, i + 50)), reason="")) for i in range(num)]
        )
    )
    for t in threads:
        t.start()
    up = [server.receive(20)[1].request for _ in range(num)]
    down = [client.receive(20).engines[0] for _ in range(num)]
    stop.set()
    for t in threads:
        t.join()
    assert up == list(range(num))
    assert down == list(range(num))
    assert server.receive(0.2) is None and client.receive(0.2) is None
    proxy.close()


def test_a_sender_waits_for_a_reader_that_is_behind_and_gives_up(connect, server, monkeypatch):
    monkeypatch.setattr(link_module, "WINDOW_BYTES", 100_000)
    client = connect(1, silence_s=1.0)
    tokens = np.zeros(10_000, np.int32)
    with pytest.raises(WaitTimeout, match=r"a Journal waited 1 s for the controller to take \d+ bytes"):
        for i in range(10):
            client.send(journal(i, tokens))
    assert [server.receive(5)[1].request for _ in range(2)] == [0, 1]
    client.send(journal(2, tokens))
    assert server.receive(5)[1].request == 2


def test_an_idle_mailbox_uses_no_cpu_and_closes_at_once(server, connect):
    clients = [connect(r) for r in range(1, 5)]
    server.expect(range(1, 5), 5)
    before = time.process_time()
    time.sleep(2.0)
    assert time.process_time() - before < 0.1
    clients[0].send(Fault(node=0, kind="bug", message="last words", traceback=""))
    start = time.monotonic()
    clients[0].close()
    assert time.monotonic() - start < 1.0
    assert server.receive(5)[1].message == "last words"
    with pytest.raises(SluiceError):
        clients[0].receive(1)


def test_mailboxes_leave_no_descriptors_behind():
    def once():
        server = MailboxServer(HOST, TOKEN, SILENCE_S)
        client = MailboxClient(server.endpoint, server.public_key, TOKEN, rank=1, silence_s=SILENCE_S)
        server.expect([1], 5)
        client.close()
        server.close()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    counts = [once() for _ in range(8)]
    assert counts[-1] == counts[1]


def test_a_link_asks_again_only_for_what_it_knows_to_be_lost():
    a, b = Link(1, 0.0), Link(1, 0.0)
    for text in (b"1", b"2", b"3"):
        a.queue([text])
    first, second, third, beat = (Envelope.unpack(m[0]) for m in a.outgoing(beat=True))
    assert b.hear(first, 0.0) is None and b.accept(first.number)
    assert not b.accept(first.number), "a double"
    assert not b.accept(third.number), "its forerunner is missing"
    again = Envelope.unpack(b.hear(beat, 1.0))
    assert (again.kind, again.number) == (AGAIN, 1)
    assert b.hear(beat, 1.1) is None, "asked just now"
    a.hear(again, 0.0)
    numbers = [Envelope.unpack(m[0]).number for m in a.outgoing(beat=False)]
    assert numbers == [second.number, third.number]
    assert all(map(b.accept, numbers))
    assert b.hear(Envelope(BEAT, 1, 3, 0), 9.0) is None
    for _ in range(3):
        b.take(10)
    a.hear(Envelope.unpack(b.outgoing(beat=True)[0][0]), 0.0)
    assert a.window_bytes == 0
