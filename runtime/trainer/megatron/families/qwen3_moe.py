"""Qwen3 with experts: softmax over all of them, the best few weighted."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from runtime.trainer.megatron import parts
from runtime.trainer.megatron.table import Row


def config(hf: PretrainedConfig) -> dict[str, Any]:
    parts.refuse(hf, "attention_bias", False)
    is_sparse = [_is_sparse(hf, number) for number in range(hf.num_hidden_layers)]
    # Weights that add up to one are the softmax over the chosen; else it is taken over all experts, before choosing.
    return {
        **parts.decoder(hf, qk_norm=True),
        **parts.mixture(hf, hf.num_experts, is_sparse),
        "moe_router_pre_softmax": not hf.norm_topk_prob,
    }


def rotary(hf: PretrainedConfig) -> dict[str, Any]:
    return parts.rotary(hf)


def layer(hf: PretrainedConfig, number: int) -> list[Row]:
    block = parts.experts(hf, hf.num_experts) if _is_sparse(hf, number) else parts.mlp(hf)
    return parts.block_norms(hf) + parts.attention(hf, qk_norm=True) + block


def _is_sparse(hf: PretrainedConfig, number: int) -> bool:
    return number not in hf.mlp_only_layers and (number + 1) % hf.decoder_sparse_step == 0
