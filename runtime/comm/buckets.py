"""How a push is cut into buckets: agents tell engines to expect what the trainer sends. Importable without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from runtime.types import Manifest

FLAT_BYTES: Final = 1 << 20
"""Mean size of tensors below which sending each costs more than putting them together."""

FUSED: Final = (".q_a_proj.", ".kv_a_proj_with_mqa.")
"""In names of latent attention's: SGLang makes one tensor of the two, and loses both where two buckets bring them."""

ITEM_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


TAKEN: Final = "taken"
"""An engine's processes have a delta whole."""


class TakeDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's processes are told where it is not our own: see comm.weights.loader."""

    manifest: Manifest
    source: str
    """Weight group or folder, as `manifest.via` has it."""
    answer: str
    """File that will say TAKEN, or what went wrong."""


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return ITEM_BYTES[dtype] * math.prod(shape)


def buckets(manifest: Manifest) -> list[slice]:
    """Runs of whole tensors, in the manifest's order, of at most `bucket_bytes`; a larger tensor goes alone, and so do
    those that SGLang must get together, with what stands between them.

    Each slice is for names, dtypes and shapes alike.
    """
    sizes = [tensor_bytes(*what) for what in zip(manifest.dtypes, manifest.shapes, strict=True)]
    cuts: list[slice] = []
    start = filled = 0
    for unit in _units(manifest.names):
        size = sum(sizes[unit])
        if unit.start > start and filled + size > manifest.bucket_bytes:
            cuts.append(slice(start, unit.start))
            start, filled = unit.start, 0
        filled += size
    if start < len(manifest.names):
        cuts.append(slice(start, len(manifest.names)))
    return cuts


def _units(names: Sequence[str]) -> Iterator[slice]:
    """What no bucket begins or ends within, in order."""
    places = {name: i for i, name in enumerate(names)}
    other = {i: places[twin] for name, i in places.items() if (twin := _twin(name)) in places}
    start = end = 0
    for i in range(len(names)):
        end = max(end, i, other.get(i, i))
        if i == end:
            yield slice(start, i + 1)
            start = i + 1


def _twin(name: str) -> str:
    """Of a tensor that is fused with another, the other's name."""
    one, two = FUSED
    return name.replace(one, two) if one in name else name.replace(two, one)


def is_flat(manifest: Manifest, bucket: slice) -> bool:
    """Whether a bucket travels as one piece. Large tensors go one by one: that spares a copy of all of them."""
    if manifest.kind == "delta":
        return True
    sizes = [tensor_bytes(*what) for what in zip(manifest.dtypes[bucket], manifest.shapes[bucket], strict=True)]
    return sum(sizes) < FLAT_BYTES * len(sizes)
