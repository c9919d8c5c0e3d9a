"""The channel `ipc` to engines that map memory which trainer ranks share: bucket by bucket, with no copy between them.

An engine gets a handle for each of its ranks, from the trainer rank on the same device. A handle is what SGLang's load
format `flattened_bucket` is: a pickle that its unpickler, which knows a list of names, takes. In it stand the tensors'
names and places, and where the memory is, said by torch.multiprocessing: on a GPU the device's own IPC handle, CUDA's
or HIP's, on a CPU the name of a file in shared memory.

Memory belongs to its trainer rank. It is given back when engines have taken the bucket after it; that they ended
meanwhile changes nothing.
"""

from __future__ import annotations

import base64
import io
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import rebuild_storage_filename, reduce_tensor
from torch.storage import TypedStorage

from runtime.comm.weights.tensors import cut, flat_bytes
from runtime.device import is_gpu, release_shared, uuid
from runtime.types import Manifest

Named = Sequence[tuple[str, Tensor]]

KEPT: Final = 3
"""Buckets whose memory is kept: the one that engines take, the next one, and the one before, which other ranks of an
engine than the one that answers may still be copying from."""

ALIGNED: Final = 16
"""Bytes: every dtype can be viewed there."""

SHARED: Final = Path("/dev/shm")

DEVICE: Final = 6
COUNTER: Final = slice(11, 13)
"""Where reduce_tensor puts a GPU's index, and the count of those who use its memory, in what it gives."""


class Lender:
    """A trainer rank's side.

    Args:
        device: of the engines' ranks too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buckets: Iterator[Named] = iter(())
        self._loans: deque[_Loan] = deque()

    def begin(self, manifest: Manifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Of a push; what is left of the one before is given up.

        Args:
            weights: (name, tensor), in the manifest's order, with its dtypes and shapes.
        """
        self.take_back()
        self._buckets = cut(manifest, weights)

    def lend(self, readers: int) -> str:
        """The next bucket's handle.

        Args:
            readers: engines that will use it; 0: this rank only takes part in gathering, and there is no handle.
        """
        tensors = next(self._buckets)
        if not readers:
            return ""
        self._loans.append(_Loan(tensors, self._device, readers))
        if len(self._loans) > KEPT:
            self._loans.popleft().end()
        return self._loans[-1].handle

    def take_back(self) -> None:
        """End a push: nobody uses a bucket of it any more."""
        self._buckets = iter(())
        while self._loans:
            self._loans.popleft().end()
        release_shared(self._device)


class _Loan:
    """One bucket in memory that others can map, until `end`."""

    def __init__(self, tensors: Named, device: torch.device, readers: int) -> None:
        self._flat, metadata = _flatten(tensors, device)
        described = io.BytesIO()
        pickler = _Pickler(described)
        pickler.dump({"flattened_tensor": self._flat, "metadata": metadata})
        self._place = pickler.place
        self.handle = base64.b64encode(described.getvalue()).decode()
        if not is_gpu(device):
            # Whoever brings the count of users to zero deletes the file, and every reader counts itself out twice. It
            # is deleted here instead, once and for certain, so the count must not get there.
            for _ in range(readers + 1):
                self._flat.untyped_storage()._shared_incref()

    def end(self) -> None:
        if is_gpu(self._flat.device):
            # One that ended before it had counted itself out would hold the memory for ever.
            TypedStorage._release_ipc_counter(*self._place, device=self._flat.device)
        else:
            with suppress(FileNotFoundError):
                SHARED.joinpath(self._place[1].decode().lstrip("/")).unlink()
        del self._flat


class _Pickler(ForkingPickler):
    """As torch.multiprocessing pickles, but for readers that no fork has related to this process."""

    place: tuple[Any, ...] = ()
    """Of the memory: (manager, file name, size), or the GPU's (file name, offset) of the count of its users."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, UntypedStorage):  # an open file would be passed over a connection with this process's key
            self.place = value._share_filename_cpu_()
            return rebuild_storage_filename, (UntypedStorage, *self.place)
        if isinstance(value, Tensor) and is_gpu(value.device):
            rebuild, args = reduce_tensor(value)
            self.place = args[COUNTER]
            # Engines see their own GPUs only, and so count them otherwise.
            return rebuild, (*args[:DEVICE], uuid(value.device), *args[DEVICE + 1 :])
        return NotImplemented


def _flatten(tensors: Named, device: torch.device) -> tuple[Tensor, list[SimpleNamespace]]:
    """[n] uint8: all of them, in new memory; and what SGLang wants to know of each."""
    metadata, end = [], 0
    for name, tensor in tensors:
        start = -(-end // ALIGNED) * ALIGNED
        end = start + tensor.nbytes
        shape = tuple(tensor.shape)
        metadata.append(
            SimpleNamespace(
                name=name, shape=shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=tensor.nbytes
            )
        )
    flat = torch.empty(end, dtype=torch.uint8, device=device)
    for (_, tensor), place in zip(tensors, metadata, strict=True):
        flat[place.start_idx : place.end_idx].copy_(flat_bytes(tensor))
    return flat, metadata
