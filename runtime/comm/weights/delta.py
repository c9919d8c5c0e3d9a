"""What changed in a bucket since the version before, exactly and checksummed.

Training moves few of the bytes that engines hold: at a learning rate of 1e-6 most steps are lost in the rounding to
bfloat16. Of each tensor go the places and the new values of the items that changed:

    steps    [m] uint8   how far on the next changed item is, 0: it is the next one; 255: so many on, and not changed
    values   [n] items   their new bytes

A place costs about one byte, near the least it could at any density, and no search is needed to write or read it. Where
that is no shorter than the tensor (half of its items changed), all of it goes.

    payload = size of the header (uint64) | header (MessagePack: a Part for each tensor) | steps and values of each
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from runtime.comm.weights.tensors import flat_bytes
from runtime.errors import SluiceError

_FAR: Final[int] = 255
_SIZE: Final = struct.Struct("<Q")


class Damaged(SluiceError):
    """A payload is not what was sent; the message names the tensor."""


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    num_steps: int
    """-1: `values` is the whole tensor."""
    value_bytes: int
    checksum: bytes
    """Of steps and values."""


class Kept:
    """What engines hold after the last push, on the host: as many bytes as the model has for them."""

    def __init__(self) -> None:
        self._bytes: dict[str, np.ndarray] = {}

    def keep(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """These were pushed whole."""
        for name, tensor in tensors:
            flat = flat_bytes(tensor)
            into = self._bytes.setdefault(name, np.empty(len(flat), np.uint8))
            torch.from_numpy(into).copy_(flat)

    def encode(self, tensors: Sequence[tuple[str, Tensor]]) -> Tensor:
        """[n] uint8: the payload of a bucket whose tensors were all pushed before; they are kept in their place."""
        header: list[Part] = []
        bodies: list[np.ndarray] = []
        for name, tensor in tensors:
            new = flat_bytes(tensor).cpu().numpy()
            steps, values = _changed(new, self._bytes[name], tensor.element_size())
            pieces = [values] if steps is None else [steps, values]
            num_steps = -1 if steps is None else len(steps)
            header.append(Part(name, num_steps, values.nbytes, _checksum(pieces)))
            bodies += pieces
        head = msgspec.msgpack.encode(header)
        front = np.frombuffer(_SIZE.pack(len(head)) + head, np.uint8)
        return torch.from_numpy(np.concatenate([front, *bodies]))


def _changed(new: np.ndarray, old: np.ndarray, item_bytes: int) -> tuple[np.ndarray | None, np.ndarray]:
    """Steps (None: all of it changes) and values, as bytes; `old` becomes `new`."""
    item = np.dtype(f"u{item_bytes}")
    fresh, known = new.view(item), old.view(item)
    places = np.flatnonzero(fresh != known)
    values = fresh[places]
    known[places] = values
    gaps = np.diff(places, prepend=-1) - 1
    far = np.flatnonzero(gaps >= _FAR)
    times = gaps[far] // _FAR
    if len(gaps) + times.sum() + values.nbytes >= new.nbytes > 0:
        return None, new
    steps = gaps.astype(np.uint8)
    steps[far] = gaps[far] % _FAR
    return np.insert(steps, np.repeat(far, times), _FAR), values.view(np.uint8)


def apply(payload: Tensor, holds: Mapping[str, Tensor]) -> list[str]:
    """Put a bucket's changes into the tensors they are of.

    Args:
        payload: [n] uint8, on the CPU.
        holds: contiguous tensors on the CPU, by name.

    Returns:
        Names of the tensors that the bucket is of, also where nothing changed.

    Raises:
        Damaged: it is not what was sent; tensors before the one that is named have changed.
    """
    names = []
    for part, steps, values in parts(payload):
        target = holds.get(part.name)
        if target is None:
            raise Damaged(f"a delta is of tensor {part.name!r}, which the model does not have")
        held = flat_bytes(target).numpy()
        if part.num_steps < 0:
            fits = len(values) == len(held)
            held[...] = values if fits else held
        else:
            items = held.view(np.dtype(f"u{target.element_size()}"))
            changed = places(steps)
            if fits := fit(changed, values, len(items), target.element_size()):
                items[changed] = np.frombuffer(values.tobytes(), items.dtype)  # copied: it may stand at any place
        if not fits:
            raise Damaged(f"the delta of tensor {part.name!r} does not fit its {len(held)} bytes")
        names.append(part.name)
    return names


def parts(payload: Tensor) -> Iterator[tuple[Part, np.ndarray, np.ndarray]]:
    """What a bucket says of each tensor, with its steps and its values, [n] uint8 each.

    Args:
        payload: [n] uint8, on the CPU.

    Raises:
        Damaged: it is not what was sent; what was given before is.
    """
    data = payload.numpy()
    header, at = _header(data)
    for part in header:
        steps, values = data[at : at + max(0, part.num_steps)], data[at + max(0, part.num_steps) :][: part.value_bytes]
        at += len(steps) + len(values)
        if _checksum([steps, values]) != part.checksum:
            raise Damaged(f"the delta of tensor {part.name!r} was damaged on its way")
        yield part, steps, values


def places(steps: np.ndarray) -> np.ndarray:
    """[n] int64: where the items that changed are, ascending."""
    found = np.cumsum(steps, dtype=np.int64)[steps != _FAR]
    return found + np.arange(len(found))


def fit(changed: np.ndarray, values: np.ndarray, num_items: int, item_bytes: int) -> bool:
    """Whether these places, and the bytes of their values, are of a tensor of so many items."""
    return len(changed) * item_bytes == len(values) and not (len(changed) and changed[-1] >= num_items)


def _header(data: np.ndarray) -> tuple[list[Part], int]:
    """The header, and where the first steps begin."""
    try:
        (size,) = _SIZE.unpack(data[: _SIZE.size].tobytes())
        end = _SIZE.size + size
        header = msgspec.msgpack.decode(data[_SIZE.size : end].tobytes(), type=list[Part])
    except (struct.error, msgspec.DecodeError, OverflowError) as e:
        raise Damaged(f"a delta was damaged on its way: {e}") from e
    wanted = end + sum(max(0, part.num_steps) + part.value_bytes for part in header)
    if wanted != len(data):
        raise Damaged(f"a delta has {len(data)} bytes instead of {wanted}, from tensor {header[:1]}")
    return header, end


def _checksum(pieces: Sequence[np.ndarray]) -> bytes:
    h = xxhash.xxh3_128()
    for piece in pieces:
        h.update(np.ascontiguousarray(piece).view(np.uint8).data)
    return h.digest()
