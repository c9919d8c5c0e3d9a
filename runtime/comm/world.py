"""The MPI world: start-up messages, the command stream to trainer ranks, and dealing batches.

The only importer of mpi4py. One thread owns a World. No call of it blocks inside MPI where a peer may be late, because
a blocking MPI call burns a core: everything is nonblocking and tested between short naps, with a bound that names who
waited for whom.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Final, Literal, get_args

import mpi4py
import msgspec
import numpy as np

from runtime.comm import framing
from runtime.comm.codec import decode, encode
from runtime.errors import PMI_ADVICE, ConfigError, PeerLost, WaitTimeout
from runtime.topology import Topology

# MPI must not start at import: engines' spawner forks before, and forking after it is undefined on many fabrics.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

PIECE_BYTES: Final = 256 * 1024 * 1024
"""Largest MPI message; OpenMPI 4 fails over 2 GiB."""
MAX_MESSAGE_BYTES: Final = 1 << 40
"""A longer stream than this is a corrupt header."""

_SHORTEST_NAP_S: Final = 50e-6
_LONGEST_NAP_S: Final = 5e-3
_NAP_SHARE: Final = 1 / 8
"""A nap's share of the wait so far. Naps that double make two ranks that answer each other lull each other to sleep."""
_HOST_BYTES: Final = 256
_HEADER_TAG: Final = 1
_BODY_TAG: Final = 2
_NO_TAG: Final = 3

_LINGER_S: Final = 10.0
_LINGER_NAP_S: Final = 1e-3

GroupName = Literal["world", "agents", "trainers"]
Transfer = Generator[bool, None, Any]
"""Yields whenever it has to wait, True if it got on since; returns what it received."""


class World:
    """All ranks of an attempt.

    Attributes:
        rank, size: of this process in the world.
        watch: called between naps of every wait; it may raise to end the wait (a lost peer, a signal).
    """

    def __init__(self, topology: Topology, groups: Mapping[GroupName, MPI.Comm], piece_bytes: int) -> None:
        """Use `start`."""
        self._topology = topology
        self._groups = groups
        self._comm = groups["world"]
        self._piece_bytes = piece_bytes
        self._owner = threading.get_ident()
        self._broken: list[Transfer] = []
        self._inside = threading.Lock()
        """Held by the thread that is inside MPI."""
        self._said = threading.Event()
        self._is_closed = False
        threading.Thread(target=self._linger, name="mpi", daemon=True).start()
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self.watch: Callable[[], None] = _nothing

    @classmethod
    def start(
        cls, topology: Topology, *, hosts_are_nodes: bool, timeout_s: float, piece_bytes: int = PIECE_BYTES
    ) -> World:
        """Initialise MPI and check that the ranks stand where the topology says.

        Args:
            hosts_are_nodes: False where all nodes of the topology share this machine.
            timeout_s: for the last rank to arrive.
            piece_bytes: largest MPI message.

        Raises:
            ConfigError: world size, ranks on this host or local rank are not the topology's.
            WaitTimeout: not all ranks arrived.
        """
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
        for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
            comm.Set_errhandler(MPI.ERRORS_RETURN)  # an exception says more than an abort; the rest inherits it
        _check_size(topology)
        _arrive(timeout_s)  # after it what follows does not wait for anybody
        world = MPI.COMM_WORLD.Dup()
        _check_place(topology, world, hosts_are_nodes)
        role = topology.ranks[world.rank].role
        split = world.Split(0 if role == "agent" else 1, world.rank)
        return cls(topology, {"world": world, "agents" if role == "agent" else "trainers": split}, piece_bytes)

    # ---- messages ------------------------------------------------------------------------------------------------

    def deal(self, messages: Mapping[int, msgspec.Struct], timeout_s: float) -> None:
        """Send one message to each of these ranks, all at the same time; returns when MPI has let go of the buffers."""
        self._finish({rank: self._outgoing(rank, m) for rank, m in messages.items()}, "to take a message", timeout_s)
        self._said.set()

    def gather(self, ranks: Iterable[int], kind: Any, timeout_s: float) -> dict[int, Any]:
        """The next message of each of these ranks.

        Args:
            kind: the type, or union of types, the messages may have.

        Raises:
            WaitTimeout: names the ranks that did not send theirs.
            PeerLost: MPI failed, as it may when a peer dies.
            msgspec.ValidationError, ValueError: a message that is not of that kind.
        """
        return self._finish({rank: self._incoming(rank, kind) for rank in ranks}, f"for {_words(kind)}", timeout_s)

    def send(self, dest: int, message: msgspec.Struct, timeout_s: float) -> None:
        self.deal({dest: message}, timeout_s)

    def receive(self, source: int, kind: Any, timeout_s: float) -> Any:
        return self.gather([source], kind, timeout_s)[source]

    def poll(self, source: int, kind: Any, timeout_s: float) -> Any | None:
        """The next message of a rank if it has begun to arrive (the rest is waited for), else None."""
        with self._inside:
            has_begun = self._comm.Iprobe(source, _HEADER_TAG)
        return self.receive(source, kind, timeout_s) if has_begun else None

    def broadcast(self, message: msgspec.Struct | None, kind: Any, timeout_s: float) -> Any:
        """Rank 0's message, on every rank; the others give None."""
        return self._broadcast(range(self.size), message, kind, timeout_s)

    def trainers_broadcast(self, message: msgspec.Struct | None, kind: Any, timeout_s: float) -> Any:
        """The first trainer rank's message, on every trainer rank; the others give None."""
        return self._broadcast(self._topology.trainers, message, kind, timeout_s)

    # ---- life ----------------------------------------------------------------------------------------------------

    def barrier(self, group: GroupName, timeout_s: float) -> None:
        """Wait for all ranks of a group this rank is in."""
        with self._inside:
            request = self._groups[group].Ibarrier()
        self._finish({-1: _until(request)}, f"until all of {group} reach a barrier", timeout_s)

    def close(self, timeout_s: float) -> None:
        """Leave together with all other ranks, and end MPI in this process."""
        self.barrier("world", timeout_s)
        self._is_closed = True
        with self._inside:
            self._end()

    def _end(self) -> None:
        for comm in self._groups.values():
            comm.Free()
        MPI.Finalize()

    def abort(self, code: int) -> None:
        """End every rank of the world at once; does not return."""
        MPI.COMM_WORLD.Abort(code)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _linger(self) -> None:
        """Move on what was said last. A send may be done while MPI still holds the bytes, and libraries send them only
        while the rank is inside MPI; its owner may be elsewhere, waiting for what those bytes bring about."""
        while not self._is_closed:
            self._said.wait()
            self._said.clear()
            end = time.monotonic() + _LINGER_S
            while time.monotonic() < end and not self._is_closed:
                with self._inside:
                    if not self._is_closed:
                        self._comm.Iprobe(MPI.ANY_SOURCE, _NO_TAG)
                time.sleep(_LINGER_NAP_S)

    def _broadcast(self, ranks: Iterable[int], message: msgspec.Struct | None, kind: Any, timeout_s: float) -> Any:
        first, *others = ranks
        if self.rank != first:
            return self.receive(first, kind, timeout_s)
        assert message is not None, f"rank {first} must give the message it broadcasts"
        self.deal(dict.fromkeys(others, message), timeout_s)
        return message

    def _outgoing(self, dest: int, message: msgspec.Struct) -> Transfer:
        frames = encode(message)
        header = np.array([len(frames), framing.stream_bytes(frames)], np.int64)
        yield from _until(self._comm.Isend(header, dest, _HEADER_TAG))
        for piece in framing.pieces(frames, self._piece_bytes):
            yield from _until(self._comm.Isend([piece, MPI.BYTE], dest, _BODY_TAG))

    def _incoming(self, source: int, kind: Any) -> Transfer:
        while not self._comm.Iprobe(source, _HEADER_TAG):
            yield False
        header = np.empty(2, np.int64)
        self._comm.Recv(header, source, _HEADER_TAG)
        yield True
        num_frames, total = header.tolist()
        if not 0 < 8 * num_frames <= total <= MAX_MESSAGE_BYTES:
            raise ValueError(f"rank {source} sent a header of {num_frames} frames in {total} bytes")
        stream = np.empty(total, np.uint8)
        done = 0
        status = MPI.Status()
        while done < total:
            part = stream[done : done + self._piece_bytes]
            yield from _until(self._comm.Irecv([part, MPI.BYTE], source, _BODY_TAG), status)
            done += status.Get_count(MPI.BYTE)
        return decode(framing.split(stream.data, num_frames), kind)

    def _finish(self, transfers: dict[int, Transfer], what: str, timeout_s: float) -> dict[int, Any]:
        """Turn by turn until all are done; results in the order given."""
        assert threading.get_ident() == self._owner, "only the thread that started the world may use it"
        try:
            with self._inside:
                return self._until_done(transfers, what, timeout_s)
        except MPI.Exception as e:  # what MPI says of a peer that died, if it says anything
            raise PeerLost(f"rank {self.rank} waited {what}, and MPI failed: {' '.join(str(e).split())[:300]}") from e

    def _until_done(self, transfers: dict[int, Transfer], what: str, timeout_s: float) -> dict[int, Any]:
        results = dict.fromkeys(transfers)
        start = last_moved = time.monotonic()
        while True:
            moved = False
            for rank in list(transfers):
                try:
                    moved |= next(transfers[rank])
                except StopIteration as end:
                    results[rank] = end.value
                    del transfers[rank]
                    moved = True
            if not transfers:
                return results
            now = time.monotonic()
            if now - start > timeout_s:
                self._broken += transfers.values()  # MPI may still use their buffers
                whom = "" if -1 in transfers else f" on {_ranks(transfers)}"
                raise WaitTimeout(f"rank {self.rank} waited {now - start:.1f} s{whom} {what}")
            self.watch()
            last_moved = now if moved else last_moved
            time.sleep(min(max((now - last_moved) * _NAP_SHARE, _SHORTEST_NAP_S), _LONGEST_NAP_S))


def _nothing() -> None:
    pass


def _until(request: MPI.Request, status: MPI.Status | None = None) -> Transfer:
    """Yields while an MPI request is under way, once more when it took a while."""
    waited = False
    while not request.Test(status):
        yield False
        waited = True
    if waited:
        yield True


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


def _words(kind: Any) -> str:
    return " or ".join(k.__name__ for k in get_args(kind) or (kind,))


def _library() -> str:
    first = MPI.Get_library_version().splitlines()[0]
    return " ".join(first.split()).strip("\0 ")


def _check_size(topology: Topology) -> None:
    world = MPI.COMM_WORLD
    if world.size != topology.world_size:
        raise ConfigError(
            "MPI world",
            f"{world.size} ranks, but the topology has {topology.world_size} (seen by rank {world.rank}, {_library()})",
            f"start as many ranks as `plan` prints; many worlds of size 1 mean that {PMI_ADVICE}",
        )


def _arrive(timeout_s: float) -> None:
    world = MPI.COMM_WORLD
    request = world.Ibarrier()
    limit = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > limit:
            raise WaitTimeout(f"rank {world.rank} waited {timeout_s:.1f} s for all {world.size} ranks to start")
        time.sleep(_LONGEST_NAP_S)


def _check_place(topology: Topology, world: MPI.Comm, hosts_are_nodes: bool) -> None:
    # Host names, not MPI's own idea of who shares memory: MPICH under Slurm may take every rank for alone on its node.
    slot = topology.ranks[world.rank]
    names = np.zeros((world.size, _HOST_BYTES), np.uint8)
    own = np.frombuffer(socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0"), np.uint8)
    world.Allgather(own, names)
    here = [rank for rank in range(world.size) if np.array_equal(names[rank], own)]
    found = (len(here), here.index(world.rank))
    if hosts_are_nodes:
        expected = (sum(r.node == slot.node for r in topology.ranks), slot.local_rank)
    else:
        expected = (topology.world_size, world.rank)
    if found != expected:
        raise ConfigError(
            "MPI world",
            f"rank {slot.rank} is {found[1]} of {found[0]} ranks on host {socket.gethostname()}, but the topology "
            f"makes it {expected[1]} of {expected[0]} on node {topology.nodes[slot.node]} ({_library()})",
            "start ranks in the order `plan` prints, node by node; check the srun flags --ntasks and --distribution",
        )
