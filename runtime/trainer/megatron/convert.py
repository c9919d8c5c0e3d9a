"""Moves weights between a Hugging Face folder and the ranks of a Megatron model, tensor by tensor.

In: each rank reads only its own pieces. Out: each rank gives out every tensor whole, in the order of the table, and
never holds more than one beside the model. Both follow the family's table; a tensor that it does not know is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.errors import ConfigError
from runtime.trainer.megatron import groups
from runtime.trainer.megatron.stages import Stages
from runtime.trainer.megatron.table import Row, Shape, global_name
from runtime.trainer.megatron.weight_files import WeightFiles

COMPUTED: Final = re.compile(r"\.rotary_emb\.inv_freq$")
LAYER: Final = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Listed:
    """One tensor of a model in Hugging Face's terms."""

    name: str
    dtype: torch.dtype
    shape: Shape


def listing(rows: Sequence[Row], files: WeightFiles, dtype: torch.dtype | None = None) -> list[Listed]:
    """What `weights` gives out, in its order; only headers are read.

    Args:
        dtype: of every tensor; None: each has that of its file.

    Raises:
        ConfigError: a tensor of the table is not in the files, has another shape there, or is quantised.
    """
    found = []
    for row in rows:
        if row.is_new:
            continue
        for name, shape in zip(row.hf, row.shapes, strict=True):
            if files.shape(name) != shape:
                problem = f"its shape is {list(files.shape(name))}, but the config says {list(shape)}"
                raise ConfigError(f"{files.folder}: {name}", problem, "weights and config.json are of two models")
            if not row.is_copy:
                found.append(Listed(name, dtype or files.dtype(name), shape))
    return found


def check_known(rows: Sequence[Row], files: WeightFiles) -> None:
    """Layers behind the last are those of multi-token prediction: they are left alone, as transformers does.

    Raises:
        ConfigError: the files hold a tensor that the table does not know, and that training would therefore lose.
    """
    num_layers = 1 + max(row.layer for row in rows if row.layer is not None)
    is_tied = any(row.is_copy for row in rows)
    known = {name for row in rows for name in row.hf} | ({"lm_head.weight"} if is_tied else set())
    for name in sorted(files.names() - known):
        layer = LAYER.match(name)
        if COMPUTED.search(name) or (layer and int(layer.group(1)) >= num_layers):
            continue
        raise ConfigError(f"{files.folder}: {name}", "no part of this model family", "use the fsdp trainer")


class Weights:
    """The weights of one rank's model chunks, by their names in the table."""

    def __init__(self, rows: Sequence[Row], chunks: Sequence[nn.Module], stages: Stages, num_experts: int) -> None:
        """
        Args:
            chunks: of this pipeline stage, not wrapped yet.
            num_experts: of a layer, over all ranks; 0: none.
        """
        self.rows, self.stages = rows, stages
        self.tp = groups.tensor()
        self.pp = groups.pipeline()
        first_chunk: Any = chunks[0]
        self.ep: dist.ProcessGroup = first_chunk.pg_collection.ep
        self.experts_each = max(1, num_experts // self.ep.size())
        self.held: dict[str, Tensor] = {}
        for number, chunk in enumerate(chunks):
            first = stages.first_layer(self.pp.rank(), number)
            for name, tensor in _tensors(chunk):
                self.held[global_name(name, first, self.ep.rank() * self.experts_each)] = tensor
        self.device = next(iter(self.held.values())).device
        unknown = self.held.keys() - {row.megatron for row in rows}
        assert not unknown, f"no table row for {sorted(unknown)}"

    def load(self, files: WeightFiles) -> None:
        """Read this rank's pieces, one tensor at a time, into the model in the model's dtype.

        Raises:
            ConfigError: see `listing` and `check_known`.
        """
        listing(self.rows, files)
        check_known(self.rows, files)
        for target, piece in self.read(files):
            with torch.no_grad():
                target.copy_(piece)

    def read(self, files: WeightFiles) -> Iterator[tuple[Tensor, Tensor]]:
        """(tensor of the model, what the files hold for it, in their dtype)"""
        for row in self.rows:
            target = self.held.get(row.megatron)
            if target is None:
                continue
            if row.is_new:
                yield target, torch.zeros(target.shape)
                continue
            cut, num_ranks = self._cut(row, target)
            pieces = [files.read(name, cut, self.tp.rank(), num_ranks) for name in row.hf]
            yield target, row.fill_up(row.join(pieces, num_ranks), num_ranks)

    def give(self, listed: Sequence[Listed]) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor in its listed dtype) on every rank; all ranks walk through it together."""
        wanted = {item.name: item for item in listed}
        for row in self.rows:
            if row.is_copy or row.is_new:
                continue
            items = [wanted[name] for name in row.hf]
            yield from zip(row.hf, self._gather(row, items), strict=True)

    def _gather(self, row: Row, items: Sequence[Listed]) -> list[Tensor]:
        stage = self.stages.stage_of(row)
        piece = self.held.get(row.megatron)
        if piece is None:
            whole = [torch.empty(item.shape, dtype=item.dtype, device=self.device) for item in items]
        else:
            cut, num_ranks = self._cut(row, piece)
            parts = row.split(piece.detach(), num_ranks)
            whole = [
                _all_gather(part.to(item.dtype), cut, self.tp)[: item.shape[0]]
                for part, item in zip(parts, items, strict=True)
            ]
        for tensor in whole:
            if row.expert is not None and self.ep.size() > 1 and stage == self.pp.rank():
                dist.broadcast(tensor, group=self.ep, group_src=row.expert // self.experts_each)
            if self.pp.size() > 1:
                dist.broadcast(tensor, group=self.pp, group_src=stage)
        return whole

    def _cut(self, row: Row, piece: Tensor) -> tuple[int | None, int]:
        """How tensor parallelism cuts this tensor here: some modules hold whole what others cut."""
        shape, num_ranks = tuple(piece.shape), self.tp.size()
        if shape == row.shape:
            return None, 1
        assert shape == row.held(num_ranks), f"{row.megatron} is {shape}; the table says {row.held(num_ranks)}"
        return row.cut, num_ranks


def _tensors(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that are saved; not the state that Transformer Engine keeps beside them."""
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _all_gather(part: Tensor, dim: int | None, group: dist.ProcessGroup) -> Tensor:
    if dim is None or group.size() == 1:
        return part.contiguous()
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)
