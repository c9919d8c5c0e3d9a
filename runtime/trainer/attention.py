"""Attention over packed sequences that never crosses a boundary, plugged into transformers by its own interface.

The model runs on one row of N distinct prefixes (see `trainer.prefixes`). Only here are they laid out as sequences; on
devices without a variable-length kernel as rows of a rectangle, in buckets of similar length so that little is padded.
Right padding needs no mask: a causal query never looks to its right.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from runtime.device import is_gpu
from runtime.errors import ConfigError
from runtime.trainer.prefixes import Prefixes

NAME: Final = "sluice_packed"
"""What the function below is registered as; a model is loaded with this `attn_implementation`."""

_GROUPED: Final[dict[str, Any]] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
"""What lets several query heads share a key head; up to torch 2.11 the kernel takes that as it is."""

MAX_WASTE: Final = 1.25
"""A bucket's longest sequence over its shortest."""

UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")
"""Arguments some model families pass to attention and that change its result."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    rows: int
    length: int
    """Of the longest sequence in it."""
    gather: Tensor
    """[rows * length] indices of prefixes; padding points at any of them."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the sequences of one micro-batch lie; made once, used by every layer."""

    longest: int
    cumulative: Tensor
    """[S+1] int32"""
    path: Tensor | None
    """[L] index of prefixes, for the variable-length kernel; None: the sequences lie there one after another."""
    buckets: tuple[Bucket, ...]
    """Empty: the variable-length kernel is used."""
    place: Tensor | None
    """[N] where the output of each prefix is among those of all sequences or buckets; None: in order already."""


def pack(prefixes: Prefixes, device: torch.device, dtype: torch.dtype) -> Packing:
    """The packing of a micro-batch.

    Args:
        dtype: attention is computed in; the variable-length kernel knows half precision only.
    """
    longest = max(b - a for a, b in pairwise(prefixes.starts))
    cumulative = torch.tensor(prefixes.starts, dtype=torch.int32, device=device)
    path = place = None
    buckets: tuple[Bucket, ...] = ()
    if not (is_gpu(device) and dtype in (torch.bfloat16, torch.float16)):
        buckets, place = _buckets(prefixes, device)
    elif prefixes.are_shared:
        path = torch.from_numpy(prefixes.path).to(device)
        place = _place(prefixes.path, len(prefixes.ends), device)
    return Packing(longest=longest, cumulative=cumulative, path=path, buckets=buckets, place=place)


def _buckets(prefixes: Prefixes, device: torch.device) -> tuple[tuple[Bucket, ...], Tensor]:
    starts = np.asarray(prefixes.starts)
    lengths = np.diff(starts)
    groups: list[list[int]] = []
    for s in sorted(range(len(lengths)), key=lambda s: (-lengths[s], s)):
        if groups and lengths[groups[-1][0]] <= MAX_WASTE * lengths[s]:
            groups[-1].append(s)
        else:
            groups.append([s])
    indices = []
    for group in groups:
        column = np.arange(lengths[group[0]])
        indices.append(prefixes.path[starts[group, None] + np.minimum(column, lengths[group, None] - 1)])
    buckets = tuple(
        Bucket(rows=len(index), length=index.shape[1], gather=torch.from_numpy(index.reshape(-1)).to(device))
        for index in indices
    )
    return buckets, _place(np.concatenate([index.reshape(-1) for index in indices]), len(prefixes.ends), device)


def _place(gathered: np.ndarray, num_prefixes: int, device: torch.device) -> Tensor:
    """[N] where each prefix stands first in a list of them; padding repeats what stands before it."""
    _, first = np.unique(gathered, return_index=True)
    assert len(first) == num_prefixes
    return torch.from_numpy(first).to(device)


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
    """transformers' attention function: query [1, H, N, D], key [1, Hk, N, D], value [1, Hk, N, Dv] -> [1, N, H, Dv].

    `packing` travels from the model's forward through its keyword arguments.
    """
    refused = [name for name in UNSUPPORTED if others.get(name) is not None]
    if refused:
        family = type(module).__name__
        raise ConfigError("models.policy", f"{family} attends with {refused[0]}", "use a model family without it")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < packing.longest else None
    if packing.buckets:
        parts = [_rectangle(q, k, v, bucket, scaling, window) for bucket in packing.buckets]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
    else:
        out = _variable_length(q, k, v, packing, scaling, window)
    if packing.place is not None:
        out = out.index_select(0, packing.place)
    return out[None], None


def _variable_length(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """[N, H, D], [N, Hk, D], [N, Hk, Dv] -> [L, H, Dv] of all sequences."""
    if packing.path is not None:
        q, k, v = (_gather(x, packing.path) for x in (q, k, v))
    width = v.shape[-1]
    out = varlen_attn(
        q,
        k,
        pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v,  # latent attention's: the kernel knows one size
        packing.cumulative,
        packing.cumulative,
        packing.longest,
        packing.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **(_GROUPED if q.shape[1] != k.shape[1] else {}),
    )
    assert isinstance(out, Tensor)
    return out[..., :width]


def _rectangle(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, scaling: float | None, window: int | None) -> Tensor:
    """[N, H, D], [N, Hk, D], [N, Hk, Dv] -> [rows * length, H, Dv] of one bucket."""

    def lay(x: Tensor) -> Tensor:
        return _gather(x, bucket.gather).reshape(bucket.rows, bucket.length, *x.shape[1:]).transpose(1, 2)

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
    return out.transpose(1, 2).flatten(0, 1)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x; the gradients of one that is taken often are added up in float32."""
    return x.float().index_select(0, index).to(x.dtype)


def register() -> None:
    """Make the function known to transformers; doing it again changes nothing."""
    AttentionInterface.register(NAME, packed_attention)
