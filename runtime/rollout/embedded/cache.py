"""The KV cache by slots, and the attention that reads it.

A transformers model sees two ordinary things: an object given as `past_key_values`, whose `update` stores new keys and
values and returns those to attend to, and an attention function registered under a name. So any causal model with
plain attention works, and no tensor of the cache is copied to decode: active rows are its first n slots.

Layout [slots, KV heads, width, head size]. What stands beyond a row's length is stale but finite, and masked.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "sluice_slots"


class SlotCache:
    """Keys and values of all layers.

    Before each forward the decoder says what it is: `prefill`, or `decode` with positions and the width to read.
    """

    def __init__(self, layers: int, slots: int, heads: int, width: int, head_size: int, dtype: torch.dtype) -> None:
        shape = (slots, heads, width, head_size)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self.width, self.heads = width, heads
        self._fresh: list[tuple[Tensor, Tensor]] | None = None
        self._index: Tensor | None = None
        self._read = width

    def prefill(self) -> None:
        """The next forward starts sequences; `take` gives what it computed."""
        self._fresh, self._index = [], None

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Per layer, keys and values [rows, heads, tokens, head size] of the prefill."""
        assert self._fresh is not None, "no prefill was made"
        fresh, self._fresh = self._fresh, None
        return fresh

    def write(self, slot: int, fresh: list[tuple[Tensor, Tensor]], row: int, length: int) -> None:
        """Store `length` tokens of one prefilled row in a slot."""
        for keys, values, (k, v) in zip(self.keys, self.values, fresh, strict=True):
            keys[slot, :, :length] = k[row, :, :length]
            values[slot, :, :length] = v[row, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        for stored in (*self.keys, *self.values):
            stored[target, :, :length] = stored[source, :, :length]

    def clear(self) -> None:
        """Zero everything: even NaN of bad weights must not reach a masked sum later."""
        for stored in (*self.keys, *self.values):
            stored.zero_()

    def decode(self, positions: Tensor, read: int) -> None:
        """The next forward adds one token to each of the first n slots, at positions [n]; it reads `read` columns."""
        rows = torch.arange(len(positions) * self.heads) * self.width
        self._index = (rows.view(-1, self.heads) + positions[:, None]).view(-1)
        self._read = read

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by every attention layer with its new keys and values [rows, heads, tokens, head size]."""
        if self._fresh is not None:
            self._fresh.append((k, v))
            return k, v
        assert self._index is not None, "decode() was not called"
        keys, values, rows = self.keys[layer], self.values[layer], len(k)
        keys.view(-1, k.shape[-1]).index_copy_(0, self._index, k.reshape(-1, k.shape[-1]))
        values.view(-1, v.shape[-1]).index_copy_(0, self._index, v.reshape(-1, v.shape[-1]))
        return keys[:rows, :, : self._read], values[:rows, :, : self._read]

    def get_seq_length(self, *_: Any) -> int:
        """Asked by models only where no positions are given; ours always are."""
        return 0


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of a prefill (mask None: causal) or of one decode step (mask [rows, 1, 1, width]).

    Queries that share a KV head are attended as so many rows of one head, which spares repeating the cache.
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
