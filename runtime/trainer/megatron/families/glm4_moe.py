"""GLM-4.5 to 4.7: rotary embedding on half of each head, DeepSeek's router, dense layers first."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from runtime.trainer.megatron import parts
from runtime.trainer.megatron.table import Row


def config(hf: PretrainedConfig) -> dict[str, Any]:
    is_sparse = [number >= hf.first_k_dense_replace for number in range(hf.num_hidden_layers)]
    return {
        **parts.decoder(hf, qkv_bias=hf.attention_bias, qk_norm=hf.use_qk_norm),
        **parts.mixture(hf, hf.n_routed_experts, is_sparse),
        **parts.biased_router(hf),
    }


def rotary(hf: PretrainedConfig) -> dict[str, Any]:
    return parts.rotary(hf)


def layer(hf: PretrainedConfig, number: int) -> list[Row]:
    block = parts.mlp(hf) if number < hf.first_k_dense_replace else parts.biased_experts(hf)
    return parts.block_norms(hf) + parts.attention(hf, qkv_bias=hf.attention_bias, qk_norm=hf.use_qk_norm) + block
