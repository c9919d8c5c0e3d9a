"""The clipped policy loss that algorithms share, with the options that say which of its variants is meant.

    loss_t = m_t * max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)) + kl * K_t - entropy_coef * H_t
    r_t    = pi / pi_old,   m_t a function of rho_t = pi_old / mu,   K_t an estimate of KL(pi||reference)

pi is the policy that is trained, pi_old the same at the start of the batch, mu the engine that sampled. A token whose
log-probs are not finite adds nothing to the numerator and stays in the denominator, as do tokens that IcePop rejects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from runtime.trainer import maths
from runtime.trainer.base import Need, Scores, Sums
from runtime.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor

Coefficient = Annotated[float, Meta(ge=0.0)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    clip_low: Coefficient = 0.2
    clip_high: Coefficient = 0.28
    dual_clip: Annotated[float, Meta(gt=1.0)] | None = None
    """Bound on the loss of a negative advantage, in units of it; usually 3."""
    denominator: Literal["tokens", "answers"] = "tokens"
    """Mean over all trained tokens (DAPO), or over answers of each answer's mean (the GRPO paper)."""
    entropy_coef: Coefficient = 0.0
    kl: Coefficient = 0.0
    """Weight of KL(pi||reference); above 0 there is a reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """See maths.kl; as a loss, the gradient of each is that of KL(pi||reference)."""
    correction: Literal["none", "tis", "icepop"] = "none"
    """Weight of a token by rho: cut at the upper bound (TIS), or 0 outside the bounds (IcePop, arXiv 2510.18855)."""
    bounds: tuple[float, float] = (0.5, 2.0)
    """Of rho; TIS uses the upper one. (0.5, 2) is GLM-5's, arXiv 2602.15763; Ring-1T's is (0.5, 5)."""

    def __post_init__(self) -> None:
        if not 0 <= self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds {list(self.bounds)}: the first must be below the second, and at least 0")


def needs(options: Options) -> set[Need]:
    wanted: dict[Need, bool] = {"old": True, "entropy": options.entropy_coef > 0, "reference": options.kl > 0}
    return {need for need, is_wanted in wanted.items() if is_wanted}


def loss(c: Options, scores: Scores, batch: MicroBatch, *, has_kl: bool = True) -> tuple[Tensor, Sums]:
    """A `base.Loss` of a policy.

    Args:
        has_kl: False where the reward already has the KL to the reference.
    """
    logprobs = scores.logprobs
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

    def mean(values: Tensor, mask: Tensor = keep) -> Tensor:
        return maths.masked_sum(batch.weights * values, mask)

    sums = {
        "clip_fraction": mean(maths.is_clipped(ratio, batch.advantages, c.clip_low, c.clip_high).float()),
        "ratio": mean(ratio),
        "kl_old": mean(maths.kl(-log_ratio)),  # KL(old||new), from samples of old
        "mismatch": mean(gap.abs(), batch.loss_mask & comparable),
        "mismatch_max": gap.abs().where(batch.loss_mask & comparable, 0.0).amax(),
        "kl_engine": mean(maths.kl(-gap), batch.loss_mask & comparable),  # KL(engine||old)
    }
    if c.kl and has_kl:
        from_reference, _ = maths.log_ratio(logprobs, batch.extras["reference"])
        per_token = per_token + c.kl * maths.kl_loss(from_reference, ratio, c.kl_estimator)
        sums["kl"] = mean(maths.kl(from_reference))
    if c.entropy_coef:
        assert scores.entropy is not None
        per_token = per_token - c.entropy_coef * scores.entropy
    if scores.entropy is not None:
        sums["entropy"] = mean(scores.entropy, batch.loss_mask)
    if c.correction == "icepop":
        rejected = (gap.exp() < c.bounds[0]) | (gap.exp() > c.bounds[1])
        sums["icepop_rejected"] = mean(rejected.float())
    return mean(per_token), {name: value.detach() for name, value in sums.items()}
