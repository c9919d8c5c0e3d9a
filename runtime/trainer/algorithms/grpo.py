"""GRPO (arXiv 2402.03300) with the clip-higher, dual-clip and engine-mismatch variants in use today.

    A_i = (R_i - mean) / (std + eps)     sample standard deviation over the group's known rewards

The loss is that of `trainer.surrogate`. A group of one known reward has no baseline: its advantage is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal

from runtime.trainer import surrogate
from runtime.trainer.base import Loss, Need, Refined, Scores, Sums
from runtime.trainer.maths import AllSum
from runtime.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor


class Config(surrogate.Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    eps: surrogate.Coefficient = 1e-6
    """Keeps rewards that differ by rounding only from being blown up."""
    normalise_std: bool = True
    """False: advantages are R - mean only (Dr. GRPO, arXiv 2503.20783)."""


class Grpo:
    atom: Literal["sample", "group"] = "sample"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.denominator: Literal["tokens", "answers", "groups", "fixed"] = config.denominator
        self.needs: frozenset[Need] = frozenset(surrogate.needs(config))
        self.losses: Mapping[str, Loss] = {"policy": self.loss}

    def advantages(self, rewards: Sequence[float | None]) -> list[float]:
        known = [reward for reward in rewards if reward is not None]
        if len(known) < 2:
            return [0.0] * len(rewards)
        mean = fmean(known)
        scale = stdev(known) + self.config.eps if self.config.normalise_std else 1.0
        # Equal rewards with eps 0: each difference is 0, whatever it is divided by.
        return [0.0 if reward is None else (reward - mean) / (scale or 1.0) for reward in rewards]

    def refine(self, share: list[MicroBatch], all_sum: AllSum) -> Refined:
        return share, {}

    def loss(self, scores: Scores, batch: MicroBatch) -> tuple[Tensor, Sums]:
        return surrogate.loss(self.config, scores, batch)


def build(options: Config) -> Grpo:
    return Grpo(options)
