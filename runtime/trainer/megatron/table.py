"""A family's table of names: which Hugging Face tensors make which Megatron tensor, and how ranks share it out.

Megatron names here are those of the whole model: layers and experts are counted through over all pipeline stages and
expert-parallel ranks, and norms stand where the plain modules have them. `global_name` translates a rank's own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import torch

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One Megatron tensor and the Hugging Face tensors that it is joined from."""

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Of the whole Hugging Face tensors."""
    cut: Literal[0, 1] | None = None
    """The dimension of each Hugging Face tensor that tensor-parallel ranks share out; None: each holds it whole."""
    is_padded: bool = False
    """Whose size along `cut` ranks need not divide: the last ranks' pieces are filled up with zeros."""
    groups: int | None = None
    """The parts alternate in this many groups along dimension 0 of the whole tensor, as queries, keys and values of one
    key head do; None: on each rank they lie one after another."""
    layer: int | None = None
    """Counted through the model. None: in the first stage, or the last."""
    expert: int | None = None
    is_copy: bool = False
    """The last stage's copy of tied embeddings: read, never given out."""
    is_new: bool = False
    """Not what the files hold under this name, but zeros at first; never given out."""

    @property
    def shape(self) -> Shape:
        """Of the whole Megatron tensor."""
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    def held(self, num_ranks: int) -> Shape:
        """The shape of one tensor-parallel rank's piece."""
        if self.cut is None:
            return self.shape
        return tuple(-(-size // num_ranks) if d == self.cut else size for d, size in enumerate(self.shape))

    def fill_up(self, piece: Tensor, num_ranks: int) -> Tensor:
        """Of zeros, what padding leaves this rank's piece short of."""
        missing = self.held(num_ranks)[0] - piece.shape[0]
        return torch.cat([piece, piece.new_zeros(missing, *piece.shape[1:])]) if self.is_padded and missing else piece

    def join(self, parts: Sequence[Tensor], num_ranks: int) -> Tensor:
        """One rank's pieces of the Hugging Face tensors -> its piece of the Megatron tensor."""
        if len(parts) == 1:
            return parts[0]
        groups = self._groups(num_ranks)
        grouped = [part.unflatten(0, (groups, -1)) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 1)

    def split(self, piece: Tensor, num_ranks: int) -> list[Tensor]:
        """The inverse of `join`."""
        if len(self.shapes) == 1:
            return [piece]
        groups = self._groups(num_ranks)
        total, own = self.shape[0], piece.shape[0]
        sizes = [shape[0] * own // (total * groups) for shape in self.shapes]
        return [part.flatten(0, 1) for part in piece.unflatten(0, (groups, -1)).split(sizes, 1)]

    def _groups(self, num_ranks: int) -> int:
        return 1 if self.groups is None else self.groups // num_ranks


FUSED_NORMS: Final = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"self_attention\.linear_q_up_proj\.layer_norm_weight$"), "self_attention.q_layernorm.weight"),
    (re.compile(r"self_attention\.linear_kv_up_proj\.layer_norm_weight$"), "self_attention.kv_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.\1.weight"),
)
"""Names of Transformer Engine's fused and grouped modules -> those of the plain ones."""

WRAPPERS: Final = re.compile(r"^(module\.)+")
LAYER: Final = re.compile(r"(?<=decoder\.layers\.)\d+")
EXPERT: Final = re.compile(r"(?<=mlp\.experts\.local_experts\.)\d+")


def global_name(name: str, first_layer: int, first_expert: int) -> str:
    """A parameter's name in one model chunk on one rank -> its name in a table.

    Args:
        first_layer, first_expert: the numbers, in the whole model, of the chunk's first layer and the rank's first
            expert.
    """
    name = WRAPPERS.sub("", name)
    for fused, plain in FUSED_NORMS:
        name = fused.sub(plain, name)
    name = LAYER.sub(lambda found: str(int(found.group()) + first_layer), name)
    return EXPERT.sub(lambda found: str(int(found.group()) + first_expert), name)


def within(rows: Iterable[Row], layer: int) -> list[Row]:
    """Rows whose names are relative to a layer -> those of layer number `layer`."""
    return [
        msgspec.structs.replace(
            row,
            megatron=f"decoder.layers.{layer}.{row.megatron}",
            hf=tuple(f"model.layers.{layer}.{name}" for name in row.hf),
            layer=layer,
        )
        for row in rows
    ]
