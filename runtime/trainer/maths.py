"""The maths of policy optimisation as pure functions of tensors. No torch import: tensor methods do.

Shapes: [T] is the packed token axis of a micro-batch, [N, V] rows of logits over the vocabulary. Log-ratios are clamped
before exp, and non-finite values are taken out with `where` before arithmetic: multiplying by a mask keeps NaN, and a
NaN in a branch that is not taken still reaches backward.
"""

from __future__ import annotations

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


def k3(log_ratio: Tensor) -> Tensor:
    """[T] log(p/q) on samples of p -> [T] estimate of KL(p||q), unbiased and never negative (Schulman 2020). A measure,
    not a loss: its gradient through log p is that of KL(q||p)."""
    return (-log_ratio).exp() - 1 + log_ratio


def entropy(logits: Tensor) -> Tensor:
    """[N, V] -> [N] of softmax(logits); a logit of -inf adds nothing."""
    logp = logits - logits.logsumexp(-1, keepdim=True)
    p = logp.exp()
    return -(p * logp.where(p > 0, 0.0)).sum(-1)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """[T], [T] bool -> [] over the masked tokens; what lies outside, NaN included, does not matter."""
    return values.where(mask, 0.0).sum()
