"""The channel `broadcast`: the trainer's rank 0 sends all weights to engines over a process group of their own.

A bucket of small tensors is one broadcast of uint8, their bytes one after the other, as SGLang's load format
`flattened_bucket` wants it; of large ones each is a broadcast, as it wants them without a format; of a delta the size
goes first. While a bucket is on the wire the next one is gathered, and checksums are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore, Work

from runtime.comm.buckets import buckets, is_flat, tensor_bytes
from runtime.comm.rendezvous import Group, listen_store, make_group, reach_store
from runtime.comm.weights.delta import Kept
from runtime.comm.weights.tensors import Digests, cut, flat_bytes, typed
from runtime.types import GroupAddress, Manifest

Names = Sequence[str]
Shapes = Sequence[tuple[int, ...]]
Named = list[tuple[str, Tensor]]


class BroadcastSender:
    """Trainer rank 0's side; it may hold several groups, told apart by name. It keeps two buckets' memory.

    Args:
        host: numeric address the group's store listens on.
        backend: gloo or nccl.
        device: where buckets are put together; the backend sends from there.
        timeout_s: for members to join, and for one bucket.
        kept: what was pushed last, where deltas are wanted.
    """

    def __init__(self, host: str, backend: str, *, device: str, timeout_s: float, kept: Kept | None = None) -> None:
        self._host, self._backend, self._device, self._timeout_s = host, backend, device, timeout_s
        self._kept, self._buffers = kept, _Buffers(device)
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
        made = Digests()
        on_the_wire: list[Work] = []
        for place, tensors in zip(buckets(manifest), cut(manifest, weights), strict=True):
            if self._kept is not None and manifest.kind == "delta":
                payload = self._kept.encode(tensors).to(self._device)
                pieces = [torch.tensor([len(payload)], device=self._device), payload]
            else:
                if self._kept is not None:
                    self._kept.keep(tensors)
                parts = [flat_bytes(tensor).to(self._device) for _, tensor in tensors]
                pieces = [self._buffers.fill(parts)] if is_flat(manifest, place) else parts
            group.wait(*on_the_wire)
            on_the_wire = [group.broadcast(piece) for piece in pieces]
            made.add(tensors)
        group.wait(*on_the_wire)
        return made.result()

    def close(self, name: str) -> None:
        """Leave a group, or stop listening for it; nothing happens when there is none of that name."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        self._listening.pop(name, None)


class _Buffers:
    """Two flat buffers in turn, one filled while the other is on the wire. They are kept for the next push, as fresh
    memory costs more than a copy."""

    def __init__(self, device: str) -> None:
        self._turns = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def fill(self, parts: Sequence[Tensor]) -> Tensor:
        """[n] uint8: these, one after the other."""
        sizes = [len(part) for part in parts]
        buffer = self._turns.pop(0)
        if len(buffer) < sum(sizes):
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=buffer.device)
        self._turns.append(buffer)
        for into, part in zip(buffer[: sum(sizes)].split(sizes), parts, strict=True):
            into.copy_(part)
        return buffer[: sum(sizes)]


class BroadcastReceiver:
    """An engine's side; it may be in several groups.

    Args:
        device: where buckets are received.
        timeout_s: for members to join, and for one bucket.
    """

    def __init__(self, *, device: str, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._groups: dict[str, Group] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def join(self, address: GroupAddress, rank: int) -> None:
        """Become a member; returns when the group is complete.

        Raises:
            WaitTimeout: names the ranks that did not come.
        """
        store = reach_store(address, rank, self._timeout_s)
        self._groups[address.name] = make_group(address, rank, store, self._timeout_s)

    def receive(
        self,
        group: str,
        names: Names,
        dtypes: Names,
        shapes: Shapes,
        *,
        flat: bool = True,
        held: Mapping[str, Tensor] | None = None,
    ) -> Named:
        """One bucket, as views of one buffer that the next bucket overwrites.

        Args:
            flat: it comes as one piece; see buckets.is_flat.
            held: contiguous tensors by name. Where it has all of a bucket that comes tensor by tensor, they are written
                to as they arrive, without a copy, and are what is returned.

        Raises:
            PeerLost: the sender left, or took too long.
        """
        sizes = _sizes(dtypes, shapes)
        if not flat and held is not None and _fit(held, names, dtypes, shapes):
            self._fill(group, [flat_bytes(held[name]) for name in names])
            return [(name, held[name]) for name in names]
        parts = self._take(group, [sum(sizes)])[0].split(sizes) if flat else self._take(group, sizes)
        every = zip(names, dtypes, shapes, parts, strict=True)
        return [(name, typed(part, dtype, shape)) for name, dtype, shape, part in every]

    def receive_delta(self, group: str) -> Tensor:
        """[n] uint8: what changed in one bucket, see `delta`.

        Raises:
            PeerLost: the sender left, or took too long.
        """
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        member = self._groups[group]
        member.wait(member.broadcast(size))
        return self._take(group, [int(size)])[0]

    def leave(self, group: str) -> None:
        """Nothing happens when this process is in no such group."""
        member = self._groups.pop(group, None)
        if member is not None:
            member.close()
        self._buffer = self._buffer[:0].clone()

    def _take(self, group: str, sizes: Sequence[int]) -> Sequence[Tensor]:
        if len(self._buffer) < sum(sizes):
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        parts = self._buffer[: sum(sizes)].split(list(sizes))
        self._fill(group, parts)
        return parts

    def _fill(self, group: str, parts: Sequence[Tensor]) -> None:
        member = self._groups[group]
        member.wait(*[member.broadcast(part) for part in parts])


def _sizes(dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[int]:
    return [tensor_bytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]


def _fit(held: Mapping[str, Tensor], names: Names, dtypes: Names, shapes: Shapes) -> bool:
    """Whether all of these are held, as they come."""
    return all(
        (tensor := held.get(name)) is not None
        and tensor.dtype == getattr(torch, dtype)
        and tuple(tensor.shape) == tuple(shape)
        and tensor.is_contiguous()
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    )
