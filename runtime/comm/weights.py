"""The weight channel `broadcast`: the trainer's rank 0 sends all weights to engines over a process group of their own.

A bucket is one broadcast of uint8, the bytes of its tensors one after the other, as SGLang's load format
`flattened_bucket` wants it. While a bucket is on the wire the next one is gathered and digested. Weights are cut into
buckets by `comm.buckets`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from runtime.comm.buckets import buckets, tensor_bytes
from runtime.comm.rendezvous import Group, listen_store, make_group, reach_store
from runtime.types import GroupAddress, Manifest


def flat_bytes(tensor: Tensor) -> Tensor:
    """[n] uint8: the tensor's bytes, row-major; a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest(tensor: Tensor) -> str:
    """Checksum of a tensor's dtype, shape and exact bytes, wherever it lives."""
    h = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    h.update(flat_bytes(tensor).cpu().numpy().data)
    return h.hexdigest()


class BroadcastSender:
    """Trainer rank 0's side; it may hold several groups, told apart by name.

    Args:
        host: numeric address the group's store listens on.
        backend: gloo or nccl.
        device: where buckets are put together; the backend sends from there.
        timeout_s: for members to join, and for one bucket.
    """

    def __init__(self, host: str, backend: str, *, device: str, timeout_s: float) -> None:
        self._host, self._backend, self._device, self._timeout_s = host, backend, device, timeout_s
        self._listening: dict[str, tuple[GroupAddress, TCPStore]] = {}
        self._groups: dict[str, Group] = {}

    def open(self, name: str, world_size: int) -> GroupAddress:
        """Listen for the members of a new group; `join` waits for them."""
        store, port = listen_store(self._host, self._timeout_s)
        address = GroupAddress(name=name, host=self._host, port=port, world_size=world_size, backend=self._backend)
        self._listening[name] = (address, store)
        return address

    def join(self, name: str) -> None:
        """Wait until the group is complete.

        Raises:
            WaitTimeout: names the ranks that did not come.
        """
        address, store = self._listening[name]
        self._groups[name] = make_group(address, 0, store, self._timeout_s)

    def push(self, name: str, manifest: Manifest, weights: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
        """Send all weights to a group.

        Args:
            weights: (name, tensor), in the manifest's order, with its dtypes and shapes.

        Returns:
            Name -> digest.

        Raises:
            PeerLost: a member left, or took too long over a bucket.
        """
        group = self._groups[name]
        digests: dict[str, str] = {}
        on_the_wire = None
        for cut in buckets(manifest):
            tensors = list(islice(weights, cut.stop - cut.start))
            _check(tensors, manifest, cut)
            flat = torch.cat([flat_bytes(tensor).to(self._device) for _, tensor in tensors])
            digests |= {key: digest(tensor) for key, tensor in tensors}
            if on_the_wire is not None:
                group.wait(on_the_wire)
            on_the_wire = group.broadcast(flat)
        if on_the_wire is not None:
            group.wait(on_the_wire)
        return digests

    def close(self, name: str) -> None:
        """Leave a group, or stop listening for it; nothing happens when there is none of that name."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        self._listening.pop(name, None)


class BroadcastReceiver:
    """An engine's side; it may be in several groups.

    Args:
        device: where buckets are received.
        timeout_s: for members to join, and for one bucket.
    """

    def __init__(self, *, device: str, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._groups: dict[str, Group] = {}

    def join(self, address: GroupAddress, rank: int) -> None:
        """Become a member; returns when the group is complete.

        Raises:
            WaitTimeout: names the ranks that did not come.
        """
        store = reach_store(address, rank, self._timeout_s)
        self._groups[address.name] = make_group(address, rank, store, self._timeout_s)

    def receive(
        self, group: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> list[tuple[str, Tensor]]:
        """One bucket, as views of one buffer.

        Raises:
            PeerLost: the sender left, or took too long.
        """
        sizes = [tensor_bytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        member = self._groups[group]
        member.wait(member.broadcast(flat))
        parts = zip(names, dtypes, shapes, flat.split(sizes), strict=True)
        return [(name, _typed(part, dtype, shape)) for name, dtype, shape, part in parts]

    def leave(self, group: str) -> None:
        """Nothing happens when this process is in no such group."""
        member = self._groups.pop(group, None)
        if member is not None:
            member.close()


def _typed(part: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    wanted: torch.dtype = getattr(torch, dtype)
    if part.storage_offset() % wanted.itemsize:
        part = part.clone()  # a view at such a place is refused
    return part.view(wanted).reshape(shape)


def _check(tensors: list[tuple[str, Tensor]], manifest: Manifest, cut: slice) -> None:
    found = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors]
    promised = list(zip(manifest.names[cut], manifest.dtypes[cut], manifest.shapes[cut], strict=True))
    assert found == promised, f"weights differ from the manifest: {found} instead of {promised}"
