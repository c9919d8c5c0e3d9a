"""Draws one token a row. What a row gets depends on its own logits, parameters, seed and position alone: never on its
neighbours in the batch, nor on how often or when it is asked.

The noise of a row is one uniform number, hashed from (seed, position) and put through the inverse of the row's
cumulative distribution; so it costs nothing per vocabulary entry, and tokens drawn again after a retraction are the
same as long as the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of the dialect, as far as they are known here; anything else is refused."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must not be negative, got {self.max_new_tokens}")
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"top_k must be -1 (all) or at least 1, got {self.top_k}")


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Numbers in [0, 1), one a (seed, position): two rounds of splitmix64 (Steele, Lea, Flood 2014).

    >>> bool((uniform([1, 2], [5, 5]) == [uniform([1], [5])[0], uniform([2], [5])[0]]).all())
    True
    """
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    mixed = _splitmix(_splitmix(seed) ^ np.asarray(positions, dtype=np.uint64))
    return (mixed >> np.uint64(16)).astype(np.float64) * 2.0**-48  # 48 bits: u * total stays below total


def _splitmix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(
    logits: Tensor, params: Sequence[Params], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """One token a row, and its log-prob in the distribution it was drawn from (temperature, top-k and top-p applied).

    A greedy row (temperature 0) reports its log-prob at temperature 1, as SGLang does.

    Args:
        logits: [rows, vocabulary]
        positions: index in its sequence of the token that is drawn.
    """
    logits = logits.float()
    if any(p.temperature not in (0.0, 1.0) for p in params):
        logits = logits / torch.tensor([p.temperature or 1.0 for p in params])[:, None]
    if narrowed := [i for i, p in enumerate(params) if p.temperature and (p.top_p < 1.0 or p.top_k > 0)]:
        logits = logits.clone()
        for row in narrowed:
            logits[row] = _narrow(logits[row], params[row])
    logprobs = torch.log_softmax(logits, dim=-1)
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    noise = torch.from_numpy(uniform(seeds, positions))[:, None]
    drawn = torch.searchsorted(cumulative, noise * cumulative[:, -1:], right=True)
    if any(p.temperature == 0.0 for p in params):
        greedy = torch.tensor([p.temperature == 0.0 for p in params])[:, None]
        drawn = torch.where(greedy, logits.argmax(dim=-1, keepdim=True), drawn)
    drawn.clamp_(max=logits.shape[-1] - 1)  # NaN sorts behind everything
    chosen = logprobs.gather(1, drawn)[:, 0].tolist()
    if any(map(math.isnan, chosen)):
        raise FloatingPointError("the weights give logits that are NaN")
    return drawn[:, 0].tolist(), chosen


def _narrow(row: Tensor, params: Params) -> Tensor:
    """[vocabulary] -> the same with -inf outside top-k, then outside the smallest set that holds top_p."""
    ordered, order = row.sort(descending=True, stable=True)
    if params.top_k > 0:
        ordered[params.top_k :] = -torch.inf
    if params.top_p < 1.0:
        chances = ordered.double().softmax(dim=-1)
        ordered[chances.cumsum(dim=-1) - chances >= params.top_p] = -torch.inf
    return torch.empty_like(row).scatter_(0, order, ordered)
