"""Reads slices of tensors from the safetensors files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from runtime.errors import ConfigError

DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What a safetensors header calls a dtype; the others are those of quantised weights."""

INDEX: Final = "model.safetensors.index.json"


class WeightFiles:
    """Open for the length of a `with`; a slice is read from disk when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ConfigError: the folder holds no safetensors.
        """
        self.folder = folder
        index = folder / INDEX
        if index.is_file():
            files = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        else:
            files = {folder / "model.safetensors"}
        if missing := sorted(str(file) for file in files if not file.is_file()):
            raise ConfigError(str(folder), f"{missing[0]} is not there", "give a folder with the model's safetensors")
        self._handles: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in sorted(files)}
        self._homes = {name: handle for handle in self._handles.values() for name in handle.keys()}  # noqa: SIM118

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._homes.clear()
        self._handles.clear()

    def names(self) -> set[str]:
        return set(self._homes)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """
        Raises:
            ConfigError: it is a quantised tensor.
        """
        kind = self._slice(name).get_dtype()
        if kind not in DTYPES:
            raise ConfigError(f"{self.folder}: {name}", f"its dtype is {kind}", "convert the weights to bfloat16 first")
        return DTYPES[kind]

    def read(self, name: str, dim: int | None, part: int, num_parts: int) -> Tensor:
        """Part number `part` of `num_parts` along `dim`; no other byte is read where dim is 0. All are of one size,
        unless that does not come out even: then the last ones are smaller, or empty.

        Args:
            dim: 0 or 1; None: the whole tensor.
        """
        self.dtype(name)  # refuses quantised weights
        source = self._slice(name)
        if dim is None:
            return source[:]
        total = source.get_shape()[dim]
        size = -(-total // num_parts)
        wanted = slice(part * size, min((part + 1) * size, total))
        if part * size >= total:
            return source[:1][:0]
        return source[wanted] if dim == 0 else source[:, wanted]

    def _slice(self, name: str) -> Any:
        if name not in self._homes:
            raise ConfigError(str(self.folder), f"tensor {name} is not there", "give the folder of a whole model")
        return self._homes[name].get_slice(name)
