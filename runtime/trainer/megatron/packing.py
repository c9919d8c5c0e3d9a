"""Lays the sequences of a micro-batch out for Megatron-Core's packed attention, and finds their tokens again.

Under context parallelism each sequence is padded to a multiple of 2 cp and cut into 2 cp chunks; rank r holds chunks r
and 2 cp - 1 - r of each, one after the other. Behind the last sequence comes one more, of padding, up to a length that
sequence parallelism can cut and that a pipeline wants to be the same for all micro-batches. Padding stands behind real
tokens or in a sequence of its own, so no real token attends to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One micro-batch as this context-parallel rank sees it: L tokens of cp * L."""

    tokens: Tensor
    """[1, L]"""
    positions: Tensor
    """[1, L] within the sequence"""
    targets: Tensor
    """[1, L] the token that comes next in the sequence; 0 behind the last one"""
    params: PackedSeqParams
    source: Tensor
    """[T] for each token of the micro-batch: which of the cp * L rows, those of rank 0 first, holds its prefix, and so
    predicts it; for the first token of a sequence any"""
    is_start: Tensor
    """[T]"""


def padded_length(starts: Sequence[int], cp: int, tp: int) -> int:
    """How many tokens the layout needs at least, over all context-parallel ranks.

    Args:
        starts: [S+1] where sequences start, and the end of the last.
        tp: ranks that sequence parallelism cuts over; 1: none.
    """
    unit = 2 * cp if cp > 1 else 1
    total = sum(-(-(b - a) // unit) * unit for a, b in pairwise(starts))
    return -(-total // (unit * tp)) * unit * tp


def pack(tokens: Tensor, starts: Sequence[int], *, rank: int, cp: int, length: int) -> Packed:
    """
    Args:
        tokens: [T]
        starts: [S+1] where sequences start, and the end of the last.
        rank, cp: this context-parallel rank and how many there are.
        length: over all ranks, at least `padded_length`.
    """
    assert starts[0] == 0 and starts[-1] == len(tokens) > 0
    unit = 2 * cp if cp > 1 else 1
    sizes = np.diff(np.asarray(starts))
    padded = -(-sizes // unit) * unit
    if length > padded.sum():
        sizes, padded = np.append(sizes, 0), np.append(padded, length - padded.sum())
    bounds = np.concatenate([[0], np.cumsum(padded)])
    assert bounds[-1] == length, f"{bounds[-1]} tokens do not fit in {length}"

    place = np.concatenate([a + np.arange(n) for a, n in zip(bounds[:-1], sizes, strict=True)])
    order = np.concatenate([_share(bounds, r, cp) for r in range(cp)])
    row = np.empty(length, dtype=np.int64)
    row[order] = np.arange(length)
    is_start = np.isin(np.arange(len(tokens)), starts[:-1])
    own = torch.from_numpy(order.reshape(cp, -1)[rank]).to(tokens.device)

    def spread(values: Tensor, at: np.ndarray) -> Tensor:
        """Values on their places in the layout, zeros elsewhere; this rank's of those."""
        whole = torch.zeros(length, dtype=torch.long, device=tokens.device)
        whole[torch.from_numpy(at).to(tokens.device)] = values.long()
        return whole[own][None]

    later = ~is_start
    cumulative = torch.from_numpy(bounds).to(tokens.device, torch.int32)
    longest = int(padded.max())
    return Packed(
        tokens=spread(tokens, place),
        positions=spread(torch.from_numpy(place - np.repeat(bounds[:-1], sizes)), place),
        targets=spread(tokens[torch.from_numpy(later).to(tokens.device)], place[later] - 1),
        params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cumulative,
            cu_seqlens_kv=cumulative,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        source=torch.from_numpy(row[np.where(is_start, place, place - 1)]).to(tokens.device),
        is_start=torch.from_numpy(is_start).to(tokens.device),
    )


def _share(bounds: np.ndarray, rank: int, cp: int) -> np.ndarray:
    """Which places of the layout a context-parallel rank holds, in its order."""
    if cp == 1:
        return np.arange(bounds[-1])
    chunks = []
    for a, b in pairwise(bounds):
        size = (b - a) // (2 * cp)
        chunks += [a + chunk * size + np.arange(size) for chunk in (rank, 2 * cp - 1 - rank)]
    return np.concatenate(chunks)
