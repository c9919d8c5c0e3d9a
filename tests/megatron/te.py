"""Stands for Transformer Engine, which has no CPU build: the modules that Megatron makes layers of, in plain torch.

Arguments are those that its versions 2.5 and 2.18 have in common, weights have its names and marks, and attention and
rotary embeddings refuse what its kernels refuse. So it shows that Megatron and this project speak to it in its words,
not that it computes well.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm


def mark(weight, mode):
    """As if it were cut, whatever the mode: so does the original."""
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, int(mode == "row"), 1


class Base(nn.Module):
    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass


class RMSNorm(Base):
    def __init__(self, *, hidden_size, eps, sequence_parallel, zero_centered_gamma, params_dtype, device):
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Linear(Base):
    def __init__(
        self,
        *,
        in_features,
        out_features,
        sequence_parallel,
        fuse_wgrad_accumulation,
        tp_group,
        tp_size,
        get_rng_state_tracker,
        init_method,
        bias,
        return_bias,
        parallel_mode,
        params_dtype,
        device,
        rng_tracker_name=None,
    ):
        super().__init__()
        assert not fuse_wgrad_accumulation and not return_bias
        self.parallel_mode, self.tp_group, self.tp_size, self.use_bias = parallel_mode, tp_group, tp_size, bias
        self.is_cut_by_tokens = sequence_parallel and tp_size > 1
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=params_dtype, device=device))
        init_method(self.weight)
        mark(self.weight, parallel_mode)
        if bias:
            self.bias = nn.Parameter(torch.zeros(rows, dtype=params_dtype, device=device))
            mark(self.bias, parallel_mode)

    def forward(self, x, *, is_first_microbatch):
        from megatron.core import tensor_parallel as tp

        is_cut, group = self.tp_size > 1, self.tp_group
        if is_cut and self.parallel_mode == "column":
            gather = tp.gather_from_sequence_parallel_region
            x = (gather if self.is_cut_by_tokens else tp.copy_to_tensor_model_parallel_region)(x, group=group)
        out = linear(x, self.weight, self.bias if self.use_bias else None)
        if is_cut and self.parallel_mode == "row":
            scatter = tp.reduce_scatter_to_sequence_parallel_region
            out = (scatter if self.is_cut_by_tokens else tp.reduce_from_tensor_model_parallel_region)(out, group=group)
        return out


class LayerNormLinear(Linear):
    def __init__(self, *, eps, normalization, return_layernorm_output, zero_centered_gamma, **others):
        super().__init__(**others)
        assert normalization == "RMSNorm" and not return_layernorm_output and not zero_centered_gamma
        self.eps = eps
        place = {"dtype": others["params_dtype"], "device": others["device"]}
        self.layer_norm_weight = nn.Parameter(torch.ones(others["in_features"], **place))
        self.layer_norm_weight.sequence_parallel = self.is_cut_by_tokens

    def forward(self, x, *, is_first_microbatch):
        gain = self.layer_norm_weight
        x = rms_norm(x.float(), gain.shape, gain.float(), self.eps).to(x.dtype)
        return super().forward(x, is_first_microbatch=is_first_microbatch)


class GroupedLinear(Base):
    def __init__(self, *, num_gemms, ub_name, bias, tp_size, parallel_mode, **others):
        super().__init__()
        assert tp_size == 1 and not bias
        self.num_gemms, self.parallel_mode, self.use_bias = num_gemms, parallel_mode, bias
        for i in range(num_gemms):
            shape, place = (others["out_features"], others["in_features"]), others["params_dtype"]
            weight = nn.Parameter(torch.empty(shape, dtype=place, device=others["device"]))
            others["init_method"](weight)
            mark(weight, parallel_mode)
            setattr(self, f"weight{i}", weight)

    def forward(self, x, m_splits, *, is_first_microbatch):
        assert isinstance(m_splits, list) and sum(m_splits) == len(x)
        return torch.cat([linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(x.split(m_splits))])


class DotProductAttention(Base):
    def __init__(
        self,
        *,
        num_attention_heads,
        kv_channels,
        num_gqa_groups,
        attention_type,
        attention_dropout,
        attn_mask_type,
        sequence_parallel,
        tp_size,
        tp_group,
        get_rng_state_tracker,
        layer_number,
        softmax_scale,
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type=None,
    ):
        super().__init__()
        self.sizes = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.heads = num_attention_heads // tp_size, num_gqa_groups // tp_size
        self.scale, self.cp_group = softmax_scale, cp_group

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        *,
        attn_mask_type,
        qkv_format,
        cu_seqlens_q,
        cu_seqlens_kv,
        cu_seqlens_q_padded,
        cu_seqlens_kv_padded,
        max_seqlen_q,
        max_seqlen_kv,
    ):
        from runtime.trainer.megatron.attention import PackedAttention

        assert attention_mask is None and (qkv_format, attn_mask_type) == ("thd", "padding_causal")
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32 and cu_seqlens_q.equal(cu_seqlens_kv)
        assert cu_seqlens_q_padded is None and cu_seqlens_kv_padded is None
        assert max_seqlen_q == max_seqlen_kv == int(cu_seqlens_q.diff().max()) and isinstance(max_seqlen_q, int)
        assert query.shape[1:] == (self.heads[0], self.sizes[0]) and key.shape[1:] == (self.heads[1], self.sizes[0])
        assert value.shape[1:] == (self.heads[1], self.sizes[1]) and query.dtype == key.dtype == value.dtype
        ranks = self.cp_group.size() if self.cp_group else 1
        assert cu_seqlens_q[-1] == len(query) * ranks and (ranks == 1 or not (cu_seqlens_q % (2 * ranks)).any())
        one = SimpleNamespace(size=lambda: 1)
        groups = SimpleNamespace(cp=self.cp_group or one, tp=one)
        made = PackedAttention(SimpleNamespace(window_size=None), 1, None, "self", self.scale, pg_collection=groups)
        return made(query, key, value, None, SimpleNamespace(cu_seqlens_q=cu_seqlens_q))[:, 0]


def apply_rotary_pos_emb(t, freqs, *, tensor_format, fused, cu_seqlens, cp_size, cp_rank):
    assert tensor_format == "thd" and fused and cu_seqlens.dtype == torch.int32 and t.dim() == 3
    assert freqs.dtype == torch.float32 and freqs.shape[1:3] == (1, 1) and freqs.shape[3] <= t.shape[2]
    found = []
    for x in t.split((cu_seqlens.diff() // cp_size).tolist()):
        whole, size = len(x) * cp_size, len(x) // 2
        assert whole <= len(freqs), "the kernel would read behind them"
        at = torch.arange(whole)
        if cp_size > 1:
            at = torch.cat([at[chunk * size :][:size] for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank)])
        angles = freqs[at][:, 0]
        turned, rest = x[..., : angles.shape[-1]].float(), x[..., angles.shape[-1] :]
        first, second = turned.chunk(2, -1)
        turned = turned * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
        found.append(torch.cat([turned.to(x.dtype), rest], -1))
    return torch.cat(found)


class FusedAdam(torch.optim.Optimizer):
    """It counts steps by group, and takes states that are there already."""

    def __init__(self, params, *, lr, weight_decay, betas, eps, adam_w_mode=True):
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = number = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                for name, beta, value in (("exp_avg", beta1, p.grad), ("exp_avg_sq", beta2, p.grad**2)):
                    state.setdefault(name, torch.zeros_like(p)).lerp_(value, 1 - beta)
                mean, square = state["exp_avg"] / (1 - beta1**number), state["exp_avg_sq"] / (1 - beta2**number)
                p -= group["lr"] * (mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * p)


def install() -> None:
    """Before Megatron is imported."""

    def put(name, **held):
        made = sys.modules[name] = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        vars(made).update(held)
        return made

    def nothing(*args, **kwargs):
        return contextlib.nullcontext()

    recipe = put("transformer_engine.common.recipe", DelayedScaling=type("DelayedScaling", (), {}))
    layers = (Linear, LayerNormLinear, GroupedLinear, DotProductAttention, RMSNorm)
    tracker = SimpleNamespace(CudaRNGStatesTracker=type("CudaRNGStatesTracker", (), {}))
    ops = SimpleNamespace(Sequential=None, FusibleOperation=None)
    pytorch = {c.__name__: c for c in layers} | {"distributed": tracker, "ops": ops}
    put(
        "transformer_engine",
        __version__="2.18.0",
        common=SimpleNamespace(recipe=recipe),
        pytorch=put("transformer_engine.pytorch", **pytorch),
    )
    manager = SimpleNamespace(is_fp8_enabled=lambda: False)
    put("transformer_engine.pytorch.fp8", FP8GlobalStateManager=manager, fp8_autocast=nothing)
    put("transformer_engine.pytorch.distributed", activation_recompute_forward=nothing, get_all_rng_states=dict)
    put("transformer_engine.pytorch.attention.rope", apply_rotary_pos_emb=apply_rotary_pos_emb)
    put("transformer_engine.pytorch.tensor", QuantizedTensor=type("QuantizedTensor", (), {}))
    put("transformer_engine.pytorch.module.base", get_dummy_wgrad=None)
    put("transformer_engine.pytorch.router", **dict.fromkeys(ROUTER))
    put("transformer_engine.pytorch.optimizers", FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD, **MULTI)


ROUTER = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")


def _applier(op, overflow, lists, *args):
    return op(1, overflow, lists, *args)


def _norm(chunk, overflow, lists, per_tensor):
    return torch.stack([x.norm() for x in lists[0]]).norm()[None], None


def _scale(chunk, overflow, lists, factor):
    for source, into in zip(*lists, strict=True):
        into.copy_(source * factor)


MULTI = {"multi_tensor_applier": _applier, "multi_tensor_l2norm": _norm, "multi_tensor_scale": _scale}
