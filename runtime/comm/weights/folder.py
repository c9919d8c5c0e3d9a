"""The channels `disk` and `ipc`: a version is a folder of safetensors files, one a bucket, that engines load.

disk    the files lie in the folder, whole and synced before the folder gets its name: a half-written version is never
        seen.
ipc     the folder holds links to memory of the trainer's process (memfd), which engines of this node map, those that
        take no handles. The memory is gone with the process, however it ends, so that no segment is ever left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import safetensors
import torch
from torch import Tensor

from runtime.comm.buckets import buckets
from runtime.comm.weights.delta import Damaged, Kept
from runtime.comm.weights.tensors import Digests, cut, flat_bytes
from runtime.durable import sync_folder
from runtime.errors import ConfigError
from runtime.types import Manifest

PART: Final[str] = ".part"
WHOLE: Final[str] = "model-{:05d}-of-{:05d}.safetensors"
DELTA: Final[str] = "delta-{:05d}-of-{:05d}.bin"

_DTYPES: Final = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors calls them."""


class FolderSender:
    """Trainer rank 0's side. A version's name is the path of its folder; those of one run share the folder above.

    Args:
        in_memory: `ipc`.
        kept: what was pushed last, where deltas are wanted.
    """

    def __init__(self, *, in_memory: bool = False, kept: Kept | None = None) -> None:
        self._in_memory, self._kept = in_memory, kept
        self._memory: dict[str, list[int]] = {}
        """Folder -> file descriptors of what it links to."""
        self._begun = False

    def push(
        self, name: str, manifest: Manifest, weights: Iterator[tuple[str, Tensor]], *, digests: bool = True
    ) -> dict[str, str]:
        """Write all weights; the folder of that name is there, whole, on return.

        Args:
            weights: (name, tensor), in the manifest's order, with its dtypes and shapes.
            digests: compute them.

        Returns:
            Name -> digest, of all or of none.

        Raises:
            ConfigError: the folder above cannot be made.
        """
        folder = Path(name)
        if not self._begun:  # what an earlier attempt left
            shutil.rmtree(folder.parent, ignore_errors=True)
            self._begun = True
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError("sync.folder", f"{folder.parent} cannot be made: {e}", "choose another folder") from e
        part = folder.with_name(folder.name + PART)
        part.mkdir(mode=0o700)
        made, count = Digests(), len(buckets(manifest))
        for i, tensors in enumerate(cut(manifest, weights), 1):
            if digests:
                made.add(tensors)
            if self._kept is not None and manifest.kind == "delta":
                self._write(name, part / DELTA.format(i, count), [self._kept.encode(tensors)])
            else:
                pieces = [_header(tensors), *(flat_bytes(t) for _, t in tensors)]
                self._write(name, part / WHOLE.format(i, count), pieces)
                if self._kept is not None:
                    self._kept.keep(tensors)
        sync_folder(part)
        part.rename(folder)
        sync_folder(folder.parent)
        return made.result()

    def close(self, name: str) -> None:
        """Forget a version that engines no longer need; nothing happens when there is none of that name."""
        for fd in self._memory.pop(name, []):
            os.close(fd)
        shutil.rmtree(name, ignore_errors=True)
        shutil.rmtree(name + PART, ignore_errors=True)

    def _write(self, version: str, path: Path, pieces: Sequence[Tensor]) -> None:
        if self._in_memory:
            fd = os.memfd_create(path.name)
            self._memory.setdefault(version, []).append(fd)
            path.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        try:
            with path.open("wb") as file:
                for piece in pieces:
                    file.write(piece.cpu().numpy().data)
                if not self._in_memory:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(path)) from e  # that of a write does not say where


def read(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The weights of a version that was pushed whole, or of any folder of safetensors files, file by file. Tensors are
    views of the file: copy them before the next one is asked for.

    Raises:
        Damaged: a file cannot be read; what it says is in the message.
    """
    for path in _files(folder, "*.safetensors"):
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                yield {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        except safetensors.SafetensorError as e:
            raise Damaged(f"{path} cannot be read: {e}") from e


def read_deltas(folder: Path) -> Iterator[Tensor]:
    """The payloads of a version that was pushed as a delta, [n] uint8 each, in order.

    Raises:
        Damaged: there are none.
    """
    for path in _files(folder, "*.bin"):
        yield torch.from_numpy(np.fromfile(path, np.uint8))


def _files(folder: Path, pattern: str) -> list[Path]:
    """All of them: names tell how many there are."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise Damaged(f"{folder} holds no {pattern}")
    return files


def _header(tensors: Sequence[tuple[str, Tensor]]) -> Tensor:
    """[n] uint8: what stands before the bytes of these tensors in a safetensors file. (The library writes files of its
    own naming, or copies every byte twice; neither serves memory that is shared.)"""
    entries, at = {}, 0
    for name, tensor in tensors:
        end = at + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return torch.frombuffer(bytearray(struct.pack("<Q", len(text)) + text), dtype=torch.uint8)
