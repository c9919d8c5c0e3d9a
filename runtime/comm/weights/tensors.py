"""Bytes and checksums of tensors, and the buckets that a push takes them in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Final

import torch
import xxhash
from torch import Tensor

from runtime.comm.buckets import buckets
from runtime.types import Manifest

_HASHING: Final[int] = 4
"""Threads that compute checksums: one of them is slower than the wire."""

_PORTION_BYTES: Final[int] = 4 << 20
"""What a thread is given at a time: handing it each small tensor would cost more than the checksums do."""


def flat_bytes(tensor: Tensor) -> Tensor:
    """[n] uint8: the tensor's bytes, row-major; a view where it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def digest(tensor: Tensor) -> str:
    """Checksum of a tensor's dtype, shape and exact bytes, wherever it lives."""
    h = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    h.update(flat_bytes(tensor).cpu().numpy().data)
    return h.hexdigest()[:32]


def typed(part: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Bytes as the tensor they are of; a view where its place in memory allows one."""
    wanted: torch.dtype = getattr(torch, dtype)
    if part.storage_offset() % wanted.itemsize:
        part = part.clone()
    return part.view(wanted).reshape(shape)


class Digests:
    """Checksums of tensors, computed beside what the caller does meanwhile."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_HASHING, "digest")
        self._made: list[Future[dict[str, str]]] = []
        self._last: list[Future[dict[str, str]]] = []

    def add(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Begin with these, once those added before are done: no more tensors are kept alive than two buckets have.
        They must stay as they are until `result`."""
        wait(self._last)
        self._last = [self._threads.submit(_digests, some) for some in _portions(named)]
        self._made += self._last

    def result(self) -> dict[str, str]:
        """Name -> digest, of all that were added."""
        self._threads.shutdown()
        return {name: found for made in self._made for name, found in made.result().items()}


def _digests(named: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in named}


def _portions(named: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    portion: list[tuple[str, Tensor]] = []
    for name, tensor in named:
        portion.append((name, tensor))
        if sum(t.nbytes for _, t in portion) >= _PORTION_BYTES:
            yield portion
            portion = []
    if portion:
        yield portion


def digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name -> digest."""
    made = Digests()
    made.add(named)
    return made.result()


def cut(manifest: Manifest, weights: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Weights by buckets.

    Args:
        weights: (name, tensor), in the manifest's order, with its dtypes and shapes.
    """
    for place in buckets(manifest):
        tensors = list(islice(weights, place.stop - place.start))
        _check(tensors, manifest, place)
        yield tensors


def _check(tensors: Sequence[tuple[str, Tensor]], manifest: Manifest, place: slice) -> None:
    found = [(name, t.dtype, t.shape) for name, t in tensors]
    dtypes = [getattr(torch, dtype) for dtype in manifest.dtypes[place]]
    promised = list(zip(manifest.names[place], dtypes, manifest.shapes[place], strict=True))
    assert found == promised, f"weights differ from the manifest: {found} instead of {promised}"
