"""The maths of policy optimisation as pure functions of tensors. No torch import: tensor methods do.

Shapes: [T] is the packed token axis of a micro-batch, [N, V] rows of logits over the vocabulary. Log-ratios are clamped
before exp, and non-finite values are taken out with `where` before arithmetic: multiplying by a mask keeps NaN, and a
NaN in a branch that is not taken still reaches backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO: Final = 20.0


def log_ratio(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """[T], [T] -> new - old within +-20, and where both are finite (elsewhere the difference is 0)."""
    sane = new.isfinite() & old.isfinite()
    difference = new.where(sane, 0.0) - old.where(sane, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), sane


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """[T], [T] -> [T] max(-A r, -A clip(r, 1 - low, 1 + high)): PPO, arXiv 1707.06347 eq. 7; low < high is DAPO's
    clip-higher, arXiv 2503.14476. `dual` bounds the loss of negative advantages by dual * |A|, arXiv 1912.09729."""
    loss = (-advantages * ratio).maximum(-advantages * ratio.clamp(1 - low, 1 + high))
    if dual is None:
        return loss
    return loss.minimum(-dual * advantages).where(advantages < 0, loss)


def is_clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """[T], [T] -> [T] bool, True where clipping took the gradient away."""
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))


def truncate(ratio: Tensor, high: float) -> Tensor:
    """[T] -> [T] min(rho, high), without gradient: truncated importance sampling (TIS)."""
    return ratio.detach().clamp(max=high)


def pop(ratio: Tensor, low: float, high: float) -> Tensor:
    """[T] -> [T] rho where low <= rho <= high, else 0, without gradient: IcePop, arXiv 2510.18855."""
    ratio = ratio.detach()
    return ratio.where((ratio >= low) & (ratio <= high), 0.0)


def kl(log_ratio: Tensor, estimator: str = "k3") -> Tensor:
    """[T] log(p/q) on samples of p -> [T] estimate of KL(p||q) (Schulman 2020). k1 = log(p/q) and k3 = q/p - 1 +
    log(p/q) are unbiased, k3 and k2 = log(p/q)^2 / 2 never negative. A measure, not a loss: see `kl_loss`."""
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return (-log_ratio).exp() - 1 + log_ratio
    raise AssertionError(estimator)


def kl_loss(log_ratio: Tensor, ratio: Tensor, estimator: str) -> Tensor:
    """[T], [T] -> [T] with the value of the estimate, weighted by pi/pi_old, and on samples of pi_old the gradient of
    KL(pi||ref), whatever the estimator (arXiv 2512.21852). Without the gradient of the weight, k1's would be zero and
    k3's that of KL(ref||pi).

    Args:
        log_ratio: log(pi/ref), with gradient.
        ratio: pi/pi_old, with gradient.
    """
    return (ratio.detach() if estimator == "k2" else ratio) * kl(log_ratio, estimator)


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Generalised advantages (arXiv 1506.02438 eq. 16) of one chain of tokens, after whose end the value is 0.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1}
    """
    later = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, later, strict=True)]
    return list(accumulate(reversed(deltas), lambda advantage, delta: delta + gamma * lam * advantage))[::-1]


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """[T] three times -> [T] max((V - R)^2, (V_old + clip(V - V_old, +-clip) - R)^2) / 2, and [T] bool, True where the
    second is the larger, so that no gradient is left; as in PPO's own code."""
    plain = (values - returns).square()
    near = (old + (values - old).clamp(-clip, clip) - returns).square()
    return plain.maximum(near) / 2, near > plain


AllSum = Callable[["Tensor"], "Tensor"]
"""Adds a tensor up over data-parallel ranks."""


def moments(xs: Sequence[Tensor], masks: Sequence[Tensor], all_sum: AllSum) -> tuple[float, float]:
    """Mean and sample variance over the masked tokens of all ranks; the variance of fewer than two is 0.

    In two passes and float64: of large values that differ little, squares would cancel.

    Args:
        xs, masks: [T] each, at least one; every rank calls this, also with nothing under its masks.
    """
    sums = [x.where(mask, 0.0).double().sum() for x, mask in zip(xs, masks, strict=True)]
    count = sum(int(mask.sum()) for mask in masks)
    total, n = all_sum(sums[0].new_tensor([float(sum(sums)), float(count)])).tolist()
    mean = total / max(n, 1.0)
    squares = [(x.double() - mean).where(mask, 0.0).square().sum() for x, mask in zip(xs, masks, strict=True)]
    (square,) = all_sum(sums[0].new_tensor([float(sum(squares))])).tolist()
    return mean, square / (n - 1) if n > 1 else 0.0


def whiten(xs: Sequence[Tensor], masks: Sequence[Tensor], all_sum: AllSum, eps: float = 1e-8) -> list[Tensor]:
    """[T] each -> with mean 0 and variance 1 over the masked tokens of all ranks, 0 elsewhere; see `moments`."""
    mean, variance = moments(xs, masks, all_sum)
    return [((x - mean) * (variance + eps) ** -0.5).where(mask, 0.0) for x, mask in zip(xs, masks, strict=True)]


def log_softmax(logits: Tensor) -> Tensor:
    """[N, V] -> [N, V]"""
    return logits - logits.logsumexp(-1, keepdim=True)


def divergence(logp: Tensor, logq: Tensor, kind: str, beta: float) -> Tensor:
    """[N, V] log-probs of a student p and a teacher q -> [N] by `kind`: forward KL(q||p), reverse KL(p||q), or jsd
    (arXiv 2306.13649 eq. 2): beta KL(q||m) + (1 - beta) KL(p||m), m = beta q + (1 - beta) p, 0 < beta < 1.

    Over part of the vocabulary the sum of its terms, which add up to the whole.
    """
    match kind:
        case "forward":
            return _kl_terms(logq, logp).sum(-1)
        case "reverse":
            return _kl_terms(logp, logq).sum(-1)
        case "jsd":
            logm = (logq + math.log(beta)).logaddexp(logp + math.log1p(-beta))
            return (beta * _kl_terms(logq, logm) + (1 - beta) * _kl_terms(logp, logm)).sum(-1)
    raise AssertionError(kind)


def _kl_terms(logp: Tensor, logq: Tensor) -> Tensor:
    """p log(p/q); what p has not adds nothing."""
    p = logp.exp()
    return p * (logp - logq).where(p > 0, 0.0)


def entropy(logits: Tensor) -> Tensor:
    """[N, V] -> [N] of softmax(logits); a logit of -inf adds nothing."""
    logp = log_softmax(logits)
    p = logp.exp()
    return -(p * logp.where(p > 0, 0.0)).sum(-1)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """[T], [T] bool -> [] over the masked tokens; what lies outside, NaN included, does not matter."""
    return values.where(mask, 0.0).sum()
