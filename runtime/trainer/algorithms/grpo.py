"""GRPO (arXiv 2402.03300) with the clip-higher, dual-clip and engine-mismatch variants in use today.

    A_i    = (R_i - mean) / (std + eps)                    sample standard deviation over the group's known rewards
    loss_t = m_t * max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)) - entropy_coef * H_t
    r_t    = pi / pi_old,   m_t a function of rho_t = pi_old / mu

pi is the policy that is trained, pi_old the same at the start of the batch, mu the engine that sampled. A group of one
known reward has no baseline: its advantage is 0. A token whose log-probs are not finite adds nothing to the numerator
and stays in the denominator, as do tokens that IcePop rejects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from runtime.trainer import maths
from runtime.trainer.base import Loss, Need, Scores, Sums
from runtime.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    clip_low: Annotated[float, Meta(ge=0.0)] = 0.2
    clip_high: Annotated[float, Meta(ge=0.0)] = 0.28
    dual_clip: Annotated[float, Meta(gt=1.0)] | None = None
    """Bound on the loss of a negative advantage, in units of it; usually 3."""
    eps: Annotated[float, Meta(ge=0.0)] = 1e-6
    """Keeps rewards that differ by rounding only from being blown up."""
    normalise_std: bool = True
    """False: advantages are R - mean only (Dr. GRPO, arXiv 2503.20783)."""
    denominator: Literal["tokens", "answers"] = "tokens"
    """Mean over all trained tokens (DAPO), or over answers of each answer's mean (the GRPO paper)."""
    entropy_coef: Annotated[float, Meta(ge=0.0)] = 0.0
    correction: Literal["none", "tis", "icepop"] = "none"
    """Weight of a token by rho: cut at the upper bound (TIS), or 0 outside the bounds (IcePop, arXiv 2510.18855)."""
    bounds: tuple[float, float] = (0.5, 2.0)
    """Of rho; TIS uses the upper one. (0.5, 2) is GLM-5's, arXiv 2602.15763; Ring-1T's is (0.5, 5)."""


class Grpo:
    atom: Literal["sample", "group"] = "sample"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.denominator: Literal["tokens", "answers", "groups", "fixed"] = config.denominator
        self.needs: frozenset[Need] = frozenset({"old", "entropy"} if config.entropy_coef else {"old"})
        self.losses: Mapping[str, Loss] = {"policy": self.loss}

    def advantages(self, rewards: Sequence[float | None]) -> list[float]:
        known = [reward for reward in rewards if reward is not None]
        if len(known) < 2:
            return [0.0] * len(rewards)
        mean = fmean(known)
        scale = stdev(known) + self.config.eps if self.config.normalise_std else 1.0
        # Equal rewards with eps 0: each difference is 0, whatever it is divided by.
        return [0.0 if reward is None else (reward - mean) / (scale or 1.0) for reward in rewards]

    def refine(self, share: list[MicroBatch], all_sum: Callable[[Tensor], Tensor]) -> list[MicroBatch]:
        return share

    def loss(self, scores: Scores, batch: MicroBatch) -> tuple[Tensor, Sums]:
        c, logprobs = self.config, scores.logprobs
        assert logprobs is not None
        old = batch.extras.get("old", logprobs.detach())
        log_ratio, sane = maths.log_ratio(logprobs, old)
        ratio = log_ratio.exp()
        per_token = maths.ppo_clip(ratio, batch.advantages, c.clip_low, c.clip_high, c.dual_clip)
        gap, comparable = maths.log_ratio(old, batch.rollout_logprobs)
        keep = batch.loss_mask & sane
        if c.correction != "none":
            rho = gap.exp()
            weight = maths.truncate(rho, c.bounds[1]) if c.correction == "tis" else maths.pop(rho, *c.bounds)
            per_token = weight * per_token
            keep = keep & comparable
        if c.entropy_coef:
            assert scores.entropy is not None
            per_token = per_token - c.entropy_coef * scores.entropy

        def mean(values: Tensor, mask: Tensor = keep) -> Tensor:
            return maths.masked_sum(batch.weights * values, mask)

        sums = {
            "clip_fraction": mean(maths.is_clipped(ratio, batch.advantages, c.clip_low, c.clip_high).float()),
            "ratio": mean(ratio),
            "kl_old": mean(maths.k3(-log_ratio)),  # KL(old||new), from samples of old
            "mismatch": mean(gap.abs(), batch.loss_mask & comparable),
            "mismatch_max": gap.abs().where(batch.loss_mask & comparable, 0.0).amax(),
            "kl_engine": mean(maths.k3(-gap), batch.loss_mask & comparable),  # KL(engine||old)
        }
        if scores.entropy is not None:
            sums["entropy"] = mean(scores.entropy, batch.loss_mask)
        if c.correction == "icepop":
            rejected = (gap.exp() < c.bounds[0]) | (gap.exp() > c.bounds[1])
            sums["icepop_rejected"] = mean(rejected.float())
        return mean(per_token), {name: value.detach() for name, value in sums.items()}


def build(options: Config) -> Grpo:
    return Grpo(options)
