"""The channel `broadcast`: the trainer's rank 0 sends all weights to engines over a process group of their own.

A bucket of small tensors is one broadcast of uint8, their bytes one after the other, as SGLang's load format
`flattened_bucket` wants it; of large ones each is a broadcast, as it wants them without a format; of a delta the size
goes first. While a bucket is on the wire the next one is gathered, and checksums are computed. Engines receive into
their parameters: those of a bucket that comes as one piece are moved into memory of its shape at the first push.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore, Work

from runtime.comm.buckets import buckets, is_flat, tensor_bytes
from runtime.comm.rendezvous import Group, absent, listen_store, make_group, reach_store
from runtime.comm.weights.delta import Kept
from runtime.comm.weights.tensors import Digests, cut, flat_bytes, typed
from runtime.types import GroupAddress, Manifest

_ALIGNED: Final[int] = 64
"""Bytes: where torch lays a tensor of its own on a CPU. Kernels may be slower, and round otherwise, at other places."""

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

    def missing(self, name: str) -> tuple[int, ...]:
        """Ranks of the others that `join` would wait for; returns in a moment."""
        return absent(*self._listening[name])

    def join(self, name: str) -> None:
        """Wait until the group is complete.

        Raises:
            WaitTimeout: names the ranks that did not come.
        """
        address, store = self._listening[name]
        self._groups[name] = make_group(address, 0, store, self._timeout_s)

    def push(
        self, name: str, manifest: Manifest, weights: Iterator[tuple[str, Tensor]], *, digests: bool = True
    ) -> dict[str, str]:
        """Send all weights to a group.

        Args:
            weights: (name, tensor), in the manifest's order, with its dtypes and shapes.
            digests: compute them.

        Returns:
            Name -> digest, of all or of none.

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
            # Begun before the last bucket is known to be through: the wire is not idle between them.
            last, on_the_wire = on_the_wire, [group.broadcast(piece) for piece in pieces]
            if digests:
                made.add(tensors)
            group.wait(*last)
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
        size = sum(map(len, parts))
        buffer = self._turns.pop(0)
        if len(buffer) < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=buffer.device)
        self._turns.append(buffer)
        return torch.cat(list(parts), out=buffer[:size])


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
            held: contiguous tensors by name. Where it has all of a bucket, they are written to as it arrives, without a
                copy, and are what is returned. What comes as one piece is written to such as lie in line, or are
                parameters: these are moved so that they do.

        Raises:
            PeerLost: the sender left, or took too long.
        """
        sizes = _sizes(dtypes, shapes)
        if names and held is not None and _fit(held, names, dtypes, shapes):
            mine = [held[name] for name in names]
            whole = _in_line(mine, sizes) if flat else None
            if not flat or whole is not None:
                self._fill(group, [flat_bytes(tensor) for tensor in mine] if whole is None else [whole])
                return list(zip(names, mine, strict=True))
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


def _in_line(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
    """[n] uint8: the memory of these, of so many bytes each, one after the other; None if it cannot be such."""
    places = list(pairwise(accumulate(sizes, initial=0)))
    num_bytes, memory = sum(sizes), tensors[0].untyped_storage()
    first = tensors[0].storage_offset() * tensors[0].itemsize
    if first + num_bytes <= memory.nbytes() and all(
        _address(tensor) == memory.data_ptr() + first + start
        for tensor, (start, _) in zip(tensors, places, strict=True)
    ):
        return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory, first, (num_bytes,), (1,))
    if not all(
        isinstance(tensor, nn.Parameter) and tensor.untyped_storage().nbytes() == size and start % _ALIGNED == 0
        for tensor, size, (start, _) in zip(tensors, sizes, places, strict=True)
    ):
        return None  # some are parts of others, which must stay where they are, or would lie worse than they do
    whole = torch.empty(num_bytes, dtype=torch.uint8, device=memory.device)
    for tensor, (start, end) in zip(tensors, places, strict=True):
        tensor.data = whole[start:end].view(tensor.dtype).view(tensor.shape)
    return whole


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize
