"""Log-probs and entropies of whole sequences from logits that are cut over vocabulary and context."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor

from runtime.trainer import maths
from runtime.trainer.base import Scores
from runtime.trainer.megatron import groups
from runtime.trainer.megatron.packing import Packed


def score(
    logits: Tensor,
    packed: Packed,
    temperature: float,
    want: frozenset[str],
    *,
    num_tokens: int,
    teacher: Callable[[], Tensor] | None = None,
) -> Scores:
    """The same on every tensor- and context-parallel rank, which all give it the same gradient.

    Args:
        logits: [1, L, V / tp] of this rank's rows; they may be overwritten.
        num_tokens: in the vocabulary; V may be filled up so that tensor-parallel ranks have the same number each.
        temperature: tokens were sampled at.
        want: "entropy", or nothing beside log-probs.
        teacher: gives a teacher's logits, cut as these, for the divergence.
    """
    logits = logits[0].float()
    divergence = None
    if teacher is not None:
        num_own = min(logits.shape[1], num_tokens - groups.tensor().rank() * logits.shape[1])
        divergence = partial(_divergence, logits[:, :num_own], teacher, packed)
        logits = logits.clone()
    column = groups.tensor().rank() * logits.shape[1]
    if column + logits.shape[1] > num_tokens:
        is_filling = torch.arange(column, column + logits.shape[1], device=logits.device) >= num_tokens
        logits = logits.masked_fill(is_filling, -torch.inf)
    if temperature != 1.0:
        logits = logits / temperature
    entropy = None
    if "entropy" in want:
        entropy = _whole(_Entropy.apply(logits, groups.tensor()), packed)
    # Megatron's works in place on the logits it is given, so it comes last.
    loss = vocab_parallel_cross_entropy(logits[None], packed.targets)[0]
    return Scores(logprobs=_whole(-loss, packed), entropy=entropy, divergence=divergence)


def values(found: Tensor, packed: Packed) -> Scores:
    """As `score`, of a critic.

    Args:
        found: [1, L, 1]
    """
    return Scores(values=_whole(found[0, :, 0].float(), packed))


def _divergence(
    logits: Tensor, teacher: Callable[[], Tensor], packed: Packed, kind: str, beta: float, temperature: float
) -> Tensor:
    """[L, V / tp] of the policy, without what fills it up, and of a teacher -> [T]; see base.Divergence."""
    group, of_teacher = groups.tensor(), teacher()[0, :, : logits.shape[1]].float()
    logp, logq = (_log_softmax(x / temperature, group) for x in (logits, of_teacher))
    parts = maths.divergence(logp, logq, kind, beta)
    return _whole(reduce_from_tensor_model_parallel_region(parts, group=group), packed)


def _log_softmax(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, V / tp] -> [N, V / tp], over the whole vocabulary.

    What is reduced is the same on all ranks, and so is its gradient; what each then does with it for its own columns
    gives gradients to be added up.
    """
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    own = (logits - largest[:, None]).exp().sum(-1)
    total = reduce_from_tensor_model_parallel_region(own, group=group).log() + largest
    return logits - copy_to_tensor_model_parallel_region(total, group=group)[:, None]


def _whole(values: Tensor, packed: Packed) -> Tensor:
    """[L] of this rank's rows -> [T] of the micro-batch's tokens.

    The loss is computed on every context-parallel rank, so backward hands each rank its own rows' gradient, unsummed.
    """
    group = groups.context()
    rows = gather_from_sequence_parallel_region(values.contiguous(), tensor_parallel_output_grad=False, group=group)
    return rows[packed.source].masked_fill(packed.is_start, 0.0)


class _Entropy(torch.autograd.Function):
    """[N, V / tp] -> [N] entropy of softmax over the whole vocabulary; Megatron-Core has none.

    With p = softmax(z): H = -sum p log p, and dH / dz = -p (log p + H). A logit of -inf adds nothing.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        logp = logits - largest
        total = logp.exp().sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        logp -= total.log()
        p = logp.exp()
        entropy = -(p * logp.where(p > 0, 0.0)).sum(-1)
        dist.all_reduce(entropy, group=group)
        ctx.save_for_backward(logp, entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        logp, entropy = ctx.saved_tensors
        p = logp.exp()
        return -grad[:, None] * p * (logp.where(p > 0, 0.0) + entropy[:, None]), None
