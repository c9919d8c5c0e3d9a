"""Process groups beside torch's default one: they come and go while a run lives, and engines of other makers join them.

The other end may be SGLang, which makes its group with torch's private helper. To meet it, store keys carry the same
prefixes: the group's name (SGLang), the name again and a slash (torch), the backend's first device (torch).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final, TypeVar

from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work
from torch.distributed import DistBackendError

from runtime import device
from runtime.comm.network import address_towards
from runtime.errors import PeerLost, WaitTimeout
from runtime.types import GroupAddress

T = TypeVar("T")

BLOCKING_WAIT: Final = "TORCH_NCCL_BLOCKING_WAIT"
MOMENT_S: Final = 0.2
"""Longest that one question who is absent takes."""
NAP_S: Final = 0.005
"""Between looks into the store."""


def listen_store(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """A store that listens on this address alone, and the port that the kernel chose for it, without a race."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def reach_store(address: GroupAddress, rank: int, timeout_s: float) -> TCPStore:
    """The store that rank 0 of a group listens with."""
    limit, start = timedelta(seconds=timeout_s), time.monotonic()
    try:
        return TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as e:
        raise WaitTimeout(
            f"rank {rank} of weight group {address.name} waited {time.monotonic() - start:.1f} s for rank 0 at "
            f"{address.host}:{address.port}: {_first_line(e)}"
        ) from e


class Group:
    """A process group: rank 0 sends, the others receive. `close` ends its threads and sockets."""

    def __init__(self, name: str, backend: Any, timeout_s: float) -> None:
        """Use `make_group`."""
        self._name, self._timeout_s = name, timeout_s
        self._backend = backend  # a torch Backend, whose stub lacks its methods
        self._have_met = backend.name() != "nccl"

    def broadcast(self, tensor: Tensor) -> Work:
        """Begin to send this from rank 0, or to receive into it elsewhere; pass the result to `wait`. Raises PeerLost:
        members of nccl first meet here."""
        backend, options = self._backend, BroadcastOptions()
        assert backend is not None, f"weight group {self._name} is closed"
        options.rootRank = options.rootTensor = 0

        def meet() -> Work:
            device.select(tensor.device)  # it is said to each thread
            work = backend.broadcast([tensor], options)
            if self._backend is None:  # too late: nobody else would end it
                backend.abort()
            return work

        try:
            if self._have_met:
                return backend.broadcast([tensor], options)
            work = _within(self._timeout_s, meet)
        except DistBackendError as e:
            raise PeerLost(f"weight group {self._name} broke: {_said(e)}") from e
        except TimeoutError:
            late = f"not all of its members met within {self._timeout_s:g} s"
            raise PeerLost(f"weight group {self._name} broke: {late}") from None
        self._have_met = True
        return work

    def wait(self, *works: Work) -> None:
        """Raises PeerLost when a member is gone or late."""
        try:
            for work in works:
                work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as e:
            raise PeerLost(
                f"weight group {self._name} broke: a member left, or took over {self._timeout_s:g} s for a bucket: "
                f"{_said(e)}"
            ) from e

    def close(self) -> None:
        if self._backend is not None and self._backend.name() == "nccl":
            self._backend.abort()  # its destructor would wait for peers
        self._backend = None


def _within(limit_s: float, do: Callable[[], T]) -> T:
    """What it gives. NCCL waits without an end for a member that never comes, and nothing ends it meanwhile: its thread
    is left to itself then.

    Raises:
        TimeoutError: it took longer.
    """
    given: Future[T] = Future()

    def work() -> None:
        try:
            given.set_result(do())
        except RuntimeError as e:  # torch has no others
            given.set_exception(e)

    threading.Thread(target=work, name="meet", daemon=True).start()
    return given.result(limit_s)


def make_group(address: GroupAddress, rank: int, store: TCPStore, timeout_s: float) -> Group:
    """Become a member; returns when all members have come (nccl: at the first broadcast).

    Raises:
        WaitTimeout: names the ranks that did not come.
    """
    start = time.monotonic()
    prefixed = PrefixStore(address.name, store)
    prefixed = PrefixStore(f"{address.name}/", prefixed)
    prefixed = PrefixStore(f"{device.FIRST_DEVICE[address.backend]}/", prefixed)
    try:
        backend = _BACKENDS[address.backend](prefixed, rank, address, timedelta(seconds=timeout_s))
    except RuntimeError as e:
        raise WaitTimeout(
            f"rank {rank} of weight group {address.name} waited {time.monotonic() - start:.1f} s for "
            f"{_missing(address, store) or 'all to connect'}: {_first_line(e)}"
        ) from e
    return Group(address.name, backend, timeout_s)


def _gloo(store: Store, rank: int, address: GroupAddress, timeout: timedelta) -> Any:
    # The default device is found by host name, which on many clusters is another network's, or loopback.
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  # the stub lacks it
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(address.host))]
    options._timeout = timeout
    options._threads = 4  # with torch's 2 the wire stands still where large tensors and small ones alternate
    return ProcessGroupGloo(store, rank, address.world_size, options)


def _nccl(store: Store, rank: int, address: GroupAddress, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL  # not in CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    # A group reads this when it is made. Without it a thread of torch's ends the whole process a minute after a member
    # was lost; with it, whoever waits is told, as with gloo. Other groups must not read it: it makes them slow.
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        return ProcessGroupNCCL(store, rank, address.world_size, options)
    finally:
        del os.environ[BLOCKING_WAIT]
        if before is not None:
            os.environ[BLOCKING_WAIT] = before


_BACKENDS: Final = {"gloo": _gloo, "nccl": _nccl}


def absent(address: GroupAddress, store: TCPStore) -> tuple[int, ...]:
    """Ranks but 0 that have not come to its store, when they were waited for a moment; of nccl it does not show."""
    deadline = time.monotonic() + MOMENT_S
    while missing := () if address.backend == "nccl" else tuple(r for r in _not_there(address, store) if r):
        if time.monotonic() > deadline:
            break
        time.sleep(NAP_S)
    return missing


def _not_there(address: GroupAddress, store: TCPStore) -> list[int]:
    """Gloo members leave a key that ends in their rank; who left none did not come."""
    came = {key.rsplit("/", 1)[1] for key in store.list_keys() if "/" in key}
    return [rank for rank in range(address.world_size) if str(rank) not in came]


def _missing(address: GroupAddress, store: TCPStore) -> str:
    try:
        return ", ".join(f"rank {rank}" for rank in _not_there(address, store))
    except RuntimeError:
        return f"the store at {address.host}:{address.port}"


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def _said(error: RuntimeError) -> str:
    """The first line, and what NCCL gives as its reason in a later one."""
    first, _, rest = str(error).partition("\n")
    reason = rest.partition("Last error:\n")[2].partition("\n")[0]
    return f"{first} {reason}".rstrip()
