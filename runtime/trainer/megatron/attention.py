"""Core attention and norm in plain torch, for Megatron-Core's layer spec where Transformer Engine is not installed.

Megatron's own plain attention refuses packed sequences, context parallelism and heads of unequal size, and its plain
norm refuses sequence parallelism; these two take exactly those.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig


class RMSNorm(nn.RMSNorm):
    """torch's, marked where each tensor-parallel rank sees a part of the tokens: its gradient is then summed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **others: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class PackedAttention(nn.Module):
    """Causal attention within each sequence of a packed micro-batch; several query heads may share a key head.

    Under context parallelism a rank holds chunks r and 2 cp - 1 - r of each sequence (so that all have as much to do).
    Keys and values are gathered, queries stay; backward scatters the gradients of keys and values back.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        assert config.window_size is None, "sliding windows are refused where the config is read"
        self.context_group = others["pg_collection"].cp
        self.tensor_group = others["pg_collection"].tp
        self.num_shared = getattr(config, "qk_pos_emb_head_dim", 0)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> Tensor:
        """[L, H, D], [L, Hk, D], [L, Hk, Dv] -> [L, 1, H * Dv]; L tokens of this context-parallel rank."""
        assert packed_seq_params is not None, "only packed sequences are trained on"
        num_ranks = self.context_group.size()
        starts = packed_seq_params.cu_seqlens_q.tolist()
        if self.num_shared and self.tensor_group.size() > 1:
            key = _SumShared.apply(key, self.num_shared, self.tensor_group)
        if num_ranks == 1:
            out = [self._attend(query[a:b], key[a:b], value[a:b]) for a, b in pairwise(starts) if a < b]
            return torch.cat(out).flatten(1).unsqueeze(1)
        keys, values = (
            gather_from_sequence_parallel_region(x.contiguous(), group=self.context_group).unflatten(0, (num_ranks, -1))
            for x in (key, value)
        )
        rank = self.context_group.rank()
        out = []
        for a, b in pairwise(a // num_ranks for a in starts):
            if a == b:
                continue
            k, v = _in_order(keys[:, a:b]), _in_order(values[:, a:b])
            half = (b - a) // 2
            for first, chunk in ((a, rank), (a + half, 2 * num_ranks - 1 - rank)):
                end = (chunk + 1) * half
                out.append(self._attend(query[first : first + half], k[:end], v[:end]))
        return torch.cat(out).flatten(1).unsqueeze(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[n, H, D], [m, Hk, D], [m, Hk, Dv] -> [n, H, Dv]: the queries are the last n of m tokens."""
        n, m = len(query), len(key)
        mask = None
        if n != m:
            mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)
        out = scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (query, key, value)),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)


def _in_order(parts: Tensor) -> Tensor:
    """[cp, 2 c, ...] chunks r and 2 cp - 1 - r of each rank -> [2 cp c, ...] as they were."""
    first, last = parts.chunk(2, dim=1)
    return torch.cat([first, last.flip(0)]).flatten(0, 1)


class _SumShared(torch.autograd.Function):
    """Keys [L, H, D] whose last columns are one vector for all heads of all tensor-parallel ranks, as in MLA.

    Megatron 0.16 gathers that vector from the ranks and in backward takes back its slice of the gradient, of which each
    rank has only what its own heads gave. Here every head gets the mean over ranks and heads, times the ranks: the sum
    over a rank's heads, which is what flows on, is then the sum over all heads.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, num_shared: int, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.num_shared, ctx.group = num_shared, group
        return key.view_as(key)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        own, shared = grad.split([grad.shape[-1] - ctx.num_shared, ctx.num_shared], dim=-1)
        total = shared.sum(1, keepdim=True)
        torch.distributed.all_reduce(total, group=ctx.group)
        return torch.cat([own, (total / grad.shape[1]).expand_as(shared)], dim=-1), None, None
