"""The KV cache by slots, and the attention that reads it.

A transformers model sees two ordinary things: an object given as `past_key_values`, whose `update` takes new keys and
values and returns those to attend to, and an attention function registered under a name. So any causal model with
plain attention works, and no tensor of the cache is copied to decode: active rows are its first n slots.

Layout [slots, KV heads, width, head size]. What stands beyond a row's length is stale but finite, and masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION: Final[str] = "sluice_slots"

Layers = Sequence[Tensor]
"""A tensor for each layer."""


class SlotCache:
    """Keys and values of all layers and slots."""

    def __init__(self, layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self.width = shape[2]

    def read(self, rows: int, columns: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Views of the first slots and columns: keys, values."""
        return tuple(k[:rows, :, :columns] for k in self.keys), tuple(v[:rows, :, :columns] for v in self.values)

    def write(self, slot: int, keys: Layers, values: Layers) -> None:
        """Store one sequence, [1, heads, tokens, head size] a layer, from the start of a slot."""
        for stored, fresh in ((self.keys, keys), (self.values, values)):
            for into, tensor in zip(stored, fresh, strict=True):
                into[slot, :, : tensor.shape[2]] = tensor[0]

    def move(self, source: int, target: int, length: int) -> None:
        for stored in (*self.keys, *self.values):
            stored[target, :, :length] = stored[source, :, :length]

    def clear(self) -> None:
        """Zero everything: a NaN of bad weights, though masked, would spoil what later weights compute."""
        for stored in () if self.is_released else (*self.keys, *self.values):
            stored.zero_()

    def release(self) -> None:
        """Give the memory back; there is nothing to read or write before `resume`."""
        for stored in (*self.keys, *self.values):
            stored.untyped_storage().resize_(0)

    def resume(self) -> None:
        for stored in (*self.keys, *self.values):
            stored.untyped_storage().resize_(stored.numel() * stored.element_size())
        self.clear()

    @property
    def is_released(self) -> bool:
        return self.keys[0].untyped_storage().nbytes() == 0


class Prefill:
    """`past_key_values` of a forward over whole prompts: keeps what the layers computed."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.append(keys)
        self.values.append(values)
        return keys, values


class Decode:
    """`past_key_values` of a forward of one token a row: stores it in the cache's views, and shows these."""

    def __init__(self, keys: Layers, values: Layers, positions: Tensor) -> None:
        """
        Args:
            positions: [rows, 1], where the new token stands.
        """
        self._keys, self._values = keys, values
        self._at = positions[:, None, :, None]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        stored_keys, stored_values = self._keys[layer], self._values[layer]
        stored_keys.scatter_(2, self._at.expand(-1, keys.shape[1], -1, keys.shape[3]), keys)
        stored_values.scatter_(2, self._at.expand(-1, values.shape[1], -1, values.shape[3]), values)
        return stored_keys, stored_values


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of a prefill (mask None: causal) or of one decode step (mask [rows, 1, 1, width]).

    In a decode step, queries that share a KV head are attended as so many rows of one head: that spares repeating the
    cache for each of them.
    """
    rows, heads, tokens, size = q.shape
    scale = options.get("scaling")
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        shared = k.shape[1]
        grouped = q.reshape(rows, shared, heads // shared, size)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        out = out.reshape(rows, heads, tokens, size)
    return out.transpose(1, 2), None
