"""Where a trainer rank computes, and torch.distributed's default group: the trainer ranks of one attempt."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from runtime import device
from runtime.comm.network import SOCKET_VARIABLES, address_of
from runtime.comm.rendezvous import listen_store, reach_store
from runtime.types import GroupAddress


def configure_torch(threads: int, deterministic: bool) -> None:
    """Thread count and determinism of this process; before any tensor is made."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch insists, on NVIDIA


class World(Protocol):
    """What this needs of comm.world.World."""

    def trainers_broadcast(self, message: msgspec.Struct | None, kind: Any, timeout_s: float) -> Any: ...


def device_of(index: int | None) -> torch.device:
    """The device that the topology gives a trainer rank; None: the CPU."""
    return torch.device(device.torch_device(index))


def use(interface: str) -> None:
    """For all groups of this process."""
    for name in SOCKET_VARIABLES:
        os.environ.setdefault(name, interface)


def start(world: World, rank: int, size: int, *, backend: str, interface: str, timeout_s: float) -> None:
    """Form the group; its store listens on a port that the kernel chose and MPI made known.

    Args:
        rank, size: among the trainer ranks.
        interface: network interface peers use.
    """
    address, store = None, None
    if rank == 0:
        host = address_of(interface)
        store, port = listen_store(host, timeout_s)
        address = GroupAddress(name="trainers", host=host, port=port, world_size=size, backend=backend)
    address = world.trainers_broadcast(address, GroupAddress, timeout_s)
    store = store or reach_store(address, rank, timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
