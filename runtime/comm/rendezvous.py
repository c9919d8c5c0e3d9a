"""Process groups beside torch's default one: they come and go while a run lives, and engines of other makers join them.

The other end may be SGLang, which makes its group with torch's private helper. To meet it, store keys carry the same
prefixes: the group's name (SGLang), the name again and a slash (torch), the backend's first device (torch).
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any, Final

from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from runtime.comm.network import address_towards
from runtime.device import FIRST_DEVICE
from runtime.errors import PeerLost, WaitTimeout
from runtime.types import GroupAddress


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

    def broadcast(self, tensor: Tensor) -> Work:
        """Begin to send this from rank 0, or to receive into it elsewhere; pass the result to `wait`."""
        assert self._backend is not None, f"weight group {self._name} is closed"
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._backend.broadcast([tensor], options)

    def wait(self, *works: Work) -> None:
        """Raises PeerLost when a member is gone or late."""
        try:
            for work in works:
                work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as e:
            raise PeerLost(
                f"weight group {self._name} broke: a member left, or took over {self._timeout_s:g} s for a bucket: "
                f"{_first_line(e)}"
            ) from e

    def close(self) -> None:
        if self._backend is not None and self._backend.name() == "nccl":
            self._backend.abort()  # its destructor would wait for peers
        self._backend = None


def make_group(address: GroupAddress, rank: int, store: TCPStore, timeout_s: float) -> Group:
    """Become a member; returns when all members have come (nccl: at the first broadcast).

    Raises:
        WaitTimeout: names the ranks that did not come.
    """
    start = time.monotonic()
    prefixed = PrefixStore(address.name, store)
    prefixed = PrefixStore(f"{address.name}/", prefixed)
    prefixed = PrefixStore(f"{FIRST_DEVICE[address.backend]}/", prefixed)
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
    return ProcessGroupGloo(store, rank, address.world_size, options)


def _nccl(store: Store, rank: int, address: GroupAddress, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL  # not in CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, address.world_size, options)


_BACKENDS: Final = {"gloo": _gloo, "nccl": _nccl}


def _missing(address: GroupAddress, store: TCPStore) -> str:
    """Gloo members leave a key that ends in their rank; who left none did not come."""
    try:
        came = {key.rsplit("/", 1)[1] for key in store.list_keys() if "/" in key}
    except RuntimeError:
        return f"the store at {address.host}:{address.port}"
    missing = [rank for rank in range(address.world_size) if str(rank) not in came]
    return ", ".join(f"rank {rank}" for rank in missing)


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
