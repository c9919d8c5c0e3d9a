"""Low-rank adapters (see trainer.lora) on Megatron's linear layers, cut over tensor-parallel ranks as those are.

One of Megatron's layers is joined from several of Hugging Face's, and each of those has an adapter of its own. Where
the layer is cut by rows, so is B, and A is whole on every rank; where it is cut by columns, so is A, and B is whole.
What ranks exchange is never wider than the adapters' rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from runtime.config import Lora
from runtime.trainer import lora
from runtime.trainer.megatron import groups
from runtime.trainer.megatron.convert import Listed, Weights
from runtime.trainer.megatron.table import Row

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Of one rank's part of a model."""

    options: Lora
    rows: dict[str, list[Row]]
    """Hugging Face name of a weight -> how its A and its B are cut; the same on all ranks."""
    weights: Weights
    """Gives them out whole."""

    def give(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name as lora.export takes it, whole tensor) on every rank; all ranks walk through it together."""
        for name in self.rows:
            yield from self._pair(name, dtype).items()

    def merge(self, given: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The model's whole weights with what the adapters add; all ranks walk through it together."""
        for name, tensor in given:
            if name in self.rows:
                a, b = self._pair(name, torch.float32).values()
                yield name, lora.merge(tensor, a, b, lora.scale(self.options)).to(tensor.dtype)
            else:
                yield name, tensor

    def sharded(self) -> dict[Tensor, ShardedTensor]:
        """How a checkpoint names and places the adapters that this rank holds."""
        found: dict[Tensor, ShardedTensor] = {}
        for row in self.weights.rows:
            held = self.weights.held.get(row.megatron)
            if held is None:
                continue
            if row.cut is None:
                found[held] = make_sharded_tensor_for_checkpoint(held, row.megatron)
            else:
                found[held] = make_tp_sharded_tensor_for_checkpoint(held, row.megatron, tp_axis=row.cut)
        return found

    def _pair(self, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
        weights = copy.copy(self.weights)
        weights.rows = self.rows[name]
        return dict(weights.give([Listed(row.hf[0], dtype, row.shape) for row in weights.rows]))


def attach(options: Lora, weights: Weights, chunks: Sequence[nn.Module], config: TransformerConfig) -> Adapters:
    """Freeze the model chunks of this rank and give the targets adapters.

    Raises:
        ConfigError: the model has no such layers, or they cannot have one.
    """
    homes: dict[int, Any] = {id(m.weight): m for chunk in chunks for m in chunk.modules() if hasattr(m, "weight")}
    for chunk in chunks:
        chunk.requires_grad_(False)
        if hasattr(chunk, "embedding"):  # a layer computed again gives no gradients unless its input takes one
            chunk.get_submodule("embedding").register_forward_hook(lambda _, arguments, out: out.requires_grad_())
    rows: dict[str, list[Row]] = {}
    adapters = copy.copy(weights)
    adapters.held = {}
    for row in weights.rows:
        wanted = {name: _rows(row, n, options) for n, name in enumerate(row.hf) if _is_target(row, name, options)}
        rows |= wanted
        held = weights.held.get(row.megatron)
        if held is not None and wanted:
            home = homes[id(held)]
            home.adapter = Adapter(row, options, config, held)
            home.register_forward_hook(_add)
            adapters.held |= home.adapter.named()
    lora.check(options, {name.split(".")[-2] for name in rows})
    adapters.rows = [row for pair in rows.values() for row in pair]
    return Adapters(options=options, rows=rows, weights=adapters)


def _is_target(row: Row, name: str, options: Lora) -> bool:
    parts = name.split(".")
    is_layer = row.expert is None and row.cut is not None and parts[-1] == "weight" and len(parts) > 1
    return is_layer and parts[-2] in lora.LAYERS and lora.is_target(parts[-2], options)


def _rows(row: Row, number: int, options: Lora) -> list[Row]:
    """Of the A and the B of a layer's Hugging Face layer `number`."""
    stem, (rows, columns) = row.hf[number].removesuffix(".weight"), row.shapes[number]

    def one(name: str, shape: tuple[int, int], cut: Any) -> Row:
        return Row(megatron=f"{stem}.{name}", hf=(f"{stem}.{name}.weight",), shapes=(shape,), cut=cut, layer=row.layer)

    return [
        one("lora_A", (options.rank, columns), 1 if row.cut == 1 else None),
        one("lora_B", (rows, options.rank), 0 if row.cut == 0 else None),
    ]


class Adapter(nn.Module):
    """The adapters of one of Megatron's linear layers, on this tensor-parallel rank."""

    def __init__(self, row: Row, options: Lora, config: TransformerConfig, weight: Tensor) -> None:
        super().__init__()
        self.row, self.scale, self.is_cut_by_tokens = row, lora.scale(options), config.sequence_parallel
        self.eps = config.layernorm_epsilon
        self.tp = groups.tensor()
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for number, name in enumerate(row.hf):
            if not _is_target(row, name, options):
                continue
            stem = name.removesuffix(".weight")
            of_a, of_b = _rows(row, number, options)
            a = lora.start(stem, options.rank, row.shapes[number][1])
            part = a if of_a.cut is None else a.chunk(self.tp.size(), 1)[self.tp.rank()]
            self.a[str(number)] = self._parameter(part.to(weight), of_a)
            self.b[str(number)] = self._parameter(weight.new_zeros(of_b.held(self.tp.size())), of_b)

    def named(self) -> dict[str, Tensor]:
        """By the names of their rows."""
        stems = [name.removesuffix(".weight") for name in self.row.hf]
        return {
            f"{stems[int(number)]}.{name}": p
            for name, held in (("lora_A", self.a), ("lora_B", self.b))
            for number, p in held.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        """What the layer's output changes by: [L, 1, in], of this rank's columns or tokens -> [L, 1, out]."""
        parts = [self._part(x, number) for number in range(len(self.row.hf))]
        if len(parts) == 1:
            return parts[0] * self.scale
        per_rank = 1 if self.row.groups is None else self.row.groups // self.tp.size()
        return torch.cat([part.unflatten(-1, (per_rank, -1)) for part in parts], -1).flatten(-2) * self.scale

    def _part(self, x: Tensor, number: int) -> Tensor:
        if str(number) not in self.a:
            length = len(x) * (self.tp.size() if self.is_cut_by_tokens else 1)
            return x.new_zeros(length, x.shape[1], self.row.shapes[number][0] // self.tp.size())
        z = linear(x, self.a[str(number)])
        if self.row.cut == 1:
            sum_over_ranks = (
                tensor_parallel.reduce_scatter_to_sequence_parallel_region
                if self.is_cut_by_tokens
                else tensor_parallel.reduce_from_tensor_model_parallel_region
            )
            return linear(sum_over_ranks(z), self.b[str(number)])
        share = (
            tensor_parallel.gather_from_sequence_parallel_region
            if self.is_cut_by_tokens
            else tensor_parallel.copy_to_tensor_model_parallel_region
        )
        return linear(share(z), self.b[str(number)])

    def _parameter(self, value: Tensor, row: Row) -> nn.Parameter:
        p = nn.Parameter(value.contiguous())
        set_tensor_model_parallel_attributes(p, row.cut is not None, row.cut or 0, 1)
        if row.cut is None:  # then a rank has the gradient of its own tokens only, and Megatron adds them up
            p.sequence_parallel = self.is_cut_by_tokens  # pyright: ignore[reportAttributeAccessIssue]
        return p


def _add(layer: Any, arguments: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Forward hook of a linear layer of Megatron or Transformer Engine, which may have a norm in it."""
    (x, *_), (out, bias) = arguments, output
    gain = getattr(layer, "layer_norm_weight", None)
    if gain is not None:
        x = rms_norm(x, gain.shape, gain, layer.adapter.eps)
    return out + layer.adapter(x), bias
