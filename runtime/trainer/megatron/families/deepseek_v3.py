"""DeepSeek-V3, V3.1 and R1 in bfloat16: latent attention, dense layers first, then shared and routed experts."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from runtime.errors import ConfigError
from runtime.trainer.megatron import parts
from runtime.trainer.megatron.table import Row


def config(hf: PretrainedConfig) -> dict[str, Any]:
    parts.refuse(hf, "attention_bias", False)
    parts.refuse(hf, "rope_interleave", True)
    is_sparse = [number >= hf.first_k_dense_replace for number in range(hf.num_hidden_layers)]
    return {
        **parts.decoder(hf, qk_norm=True),
        **parts.mixture(hf, hf.n_routed_experts, is_sparse),
        **parts.biased_router(hf),
        **_rotary(hf),
        "multi_latent_attention": True,
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
    }


def rotary(hf: PretrainedConfig) -> dict[str, Any]:
    return {"position_embedding_type": "rope"}  # latent attention has its own, told in its config


def layer(hf: PretrainedConfig, number: int) -> list[Row]:
    block = parts.mlp(hf) if number < hf.first_k_dense_replace else parts.biased_experts(hf)
    return parts.block_norms(hf) + _attention(hf) + block


def _attention(hf: PretrainedConfig) -> list[Row]:
    heads, hidden = hf.num_attention_heads, hf.hidden_size
    queries = heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim)

    def linear(megatron: str, name: str, rows: int, columns: int, cut: int = 0) -> Row:
        assert cut in (0, 1)
        names = (f"self_attn.{name}.weight",)
        return Row(megatron=f"self_attention.{megatron}.weight", hf=names, shapes=((rows, columns),), cut=cut)

    if hf.q_lora_rank is None:
        query = [linear("linear_q_proj", "q_proj", queries, hidden)]
    else:
        query = [
            linear("linear_q_down_proj", "q_a_proj", hf.q_lora_rank, hidden),
            parts.norm("self_attention.q_layernorm", "self_attn.q_a_layernorm", hf.q_lora_rank),
            linear("linear_q_up_proj", "q_b_proj", queries, hf.q_lora_rank),
        ]
    latent = hf.kv_lora_rank + hf.qk_rope_head_dim
    return [
        *query,
        linear("linear_kv_down_proj", "kv_a_proj_with_mqa", latent, hidden),
        parts.norm("self_attention.kv_layernorm", "self_attn.kv_a_layernorm", hf.kv_lora_rank),
        linear("linear_kv_up_proj", "kv_b_proj", heads * (hf.qk_nope_head_dim + hf.v_head_dim), hf.kv_lora_rank),
        linear("linear_proj", "o_proj", hidden, heads * hf.v_head_dim, cut=1),
    ]


def _rotary(hf: PretrainedConfig) -> dict[str, Any]:
    given = dict(hf.rope_parameters)
    fields = {"rotary_base": given["rope_theta"]}
    if given["rope_type"] == "default":
        return fields | {"rope_type": "rope", "mscale_all_dim": 0.0}
    scales = given.get("mscale"), given.get("mscale_all_dim")
    if given["rope_type"] != "yarn" or bool(scales[0]) != bool(scales[1]):
        raise ConfigError(
            f"{parts.where(hf)}: rope_parameters",
            f"{given} is not supported by the megatron trainer",
            "it knows rope_type default, and yarn with mscale and mscale_all_dim both given or both left out",
        )
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": given["factor"],
        "original_max_position_embeddings": given["original_max_position_embeddings"],
        "beta_fast": given.get("beta_fast") or 32,
        "beta_slow": given.get("beta_slow") or 1,
        "mscale": scales[0] or 1.0,
        "mscale_all_dim": scales[1] or 0.0,
    }
