"""Attention over packed sequences that never crosses a boundary, plugged into transformers by its own interface.

The model runs on one row of T tokens. Only here, and only on devices without a variable-length kernel, are sequences
laid out as rows of a rectangle, in buckets of similar length so that little is padded. Right padding needs no mask: a
causal query never looks to its right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from runtime.device import is_gpu
from runtime.errors import ConfigError

NAME: Final = "sluice_packed"
"""What the function below is registered as; a model is loaded with this `attn_implementation`."""

MAX_WASTE: Final = 1.25
"""A bucket's longest sequence over its shortest."""

UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")
"""Arguments some model families pass to attention and that change its result."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    rows: int
    length: int
    """Of the longest sequence in it."""
    gather: Tensor | None
    """[rows * length] index into the packed tokens; padding points at any of them. None: the tokens as they are."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the sequences of one micro-batch lie; made once, used by every layer."""

    cumulative: Tensor
    """[S+1] int32"""
    longest: int
    buckets: tuple[Bucket, ...]
    """Empty: the variable-length kernel takes the packed tokens as they are."""
    place: Tensor | None
    """[T] where the output of each token is among those of all buckets; None: in order already."""


def pack(starts: Sequence[int], device: torch.device, dtype: torch.dtype) -> Packing:
    """The packing of sequences tokens[starts[s]:starts[s+1]], none of them empty.

    Args:
        dtype: attention is computed in; the variable-length kernel knows half precision only.
    """
    lengths = [b - a for a, b in pairwise(starts)]
    longest = max(lengths)
    cumulative = torch.tensor(starts, dtype=torch.int32, device=device)
    if is_gpu(device) and dtype in (torch.bfloat16, torch.float16):
        return Packing(cumulative=cumulative, longest=longest, buckets=(), place=None)
    if min(lengths) == longest:
        whole = Bucket(rows=len(lengths), length=longest, gather=None)
        return Packing(cumulative=cumulative, longest=longest, buckets=(whole,), place=None)
    buckets, place = _buckets(starts, lengths, device)
    return Packing(cumulative=cumulative, longest=longest, buckets=buckets, place=place)


def _buckets(starts: Sequence[int], lengths: list[int], device: torch.device) -> tuple[tuple[Bucket, ...], Tensor]:
    groups: list[list[int]] = []
    for s in sorted(range(len(lengths)), key=lambda s: (-lengths[s], s)):
        if groups and lengths[groups[-1][0]] <= MAX_WASTE * lengths[s]:
            groups[-1].append(s)
        else:
            groups.append([s])
    buckets, place, offset = [], torch.empty(starts[-1], dtype=torch.long), 0
    for group in groups:
        length = lengths[group[0]]
        begin = torch.tensor([starts[s] for s in group])[:, None]
        size = torch.tensor([lengths[s] for s in group])[:, None]
        column = torch.arange(length)[None]
        index = begin + column.minimum(size - 1)
        real = column < size
        place[index[real]] = offset + torch.arange(index.numel()).view_as(index)[real]
        buckets.append(Bucket(rows=len(group), length=length, gather=index.reshape(-1).to(device)))
        offset += index.numel()
    return tuple(buckets), place.to(device)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, Hk, T, D] -> [1, T, H, D].

    `packing` travels from the model's forward through its keyword arguments.
    """
    refused = [name for name in UNSUPPORTED if others.get(name) is not None]
    if refused:
        family = type(module).__name__
        raise ConfigError("models.policy", f"{family} attends with {refused[0]}", "use a model family without it")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < packing.longest else None
    if not packing.buckets:
        out = varlen_attn(
            q,
            k,
            v,
            packing.cumulative,
            packing.cumulative,
            packing.longest,
            packing.longest,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        assert isinstance(out, Tensor)
        return out[None], None
    parts = [_rectangle(q, k, v, bucket, scaling, window) for bucket in packing.buckets]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if packing.place is not None:
        out = out.index_select(0, packing.place)
    return out[None], None


def _rectangle(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, scaling: float | None, window: int | None) -> Tensor:
    """[T, H, D], [T, Hk, D] twice -> [rows * length, H, D] of one bucket."""

    def lay(x: Tensor) -> Tensor:
        flat = x if bucket.gather is None else x.index_select(0, bucket.gather)
        return flat.reshape(bucket.rows, bucket.length, *x.shape[1:]).transpose(1, 2)

    mask = None
    if window is not None:
        at = torch.arange(bucket.length, device=q.device)
        distance = at[:, None] - at[None]
        mask = (distance >= 0) & (distance < window)
    out = scaled_dot_product_attention(
        lay(q),
        lay(k),
        lay(v),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).reshape(-1, *q.shape[1:])


def register() -> None:
    """Make the function known to transformers; doing it again changes nothing."""
    AttentionInterface.register(NAME, packed_attention)
