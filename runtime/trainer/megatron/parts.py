"""What model families share: rows of the common blocks, and the fields of TransformerConfig that go with them.

Row names are relative to a layer. Sizes come from transformers' config object, here called `hf`.
"""

from __future__ import annotations

from typing import Any, Final

from transformers import PretrainedConfig

from runtime.errors import ConfigError
from runtime.trainer.megatron.table import Row

LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron-Core's scaled rotary embedding has built in."""


def where(hf: PretrainedConfig) -> str:
    """How an error names the config of a model."""
    return f"{hf.name_or_path or hf.model_type}/config.json"


def refuse(hf: PretrainedConfig, field: str, allowed: Any, fix: str = "use the fsdp trainer for this model") -> None:
    """
    Raises:
        ConfigError: the config's `field` is there and not `allowed`.
    """
    value = getattr(hf, field, allowed)
    if value != allowed:
        raise ConfigError(f"{where(hf)}: {field}", f"{value!r} is not supported by the megatron trainer", fix)


def head_dim(hf: PretrainedConfig) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def decoder(hf: PretrainedConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> dict[str, Any]:
    """TransformerConfig fields of a decoder with grouped-query attention, RMSNorm and SwiGLU."""
    refuse(hf, "hidden_act", "silu")
    refuse(hf, "use_sliding_window", False)
    refuse(hf, "mlp_bias", False)
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "layernorm_epsilon": hf.rms_norm_eps,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
    }


def rotary(hf: PretrainedConfig) -> dict[str, Any]:
    """GPTModel's arguments for plain and Llama 3 scaled rotary embeddings."""
    given = dict(hf.rope_parameters)
    arguments = {
        "position_embedding_type": "rope",
        "rotary_base": given["rope_theta"],
        "rotary_percent": given.get("partial_rotary_factor", 1.0),
    }
    kind = given["rope_type"]
    if kind == "default":
        return arguments
    if kind == "llama3" and all(given[name] == value for name, value in LLAMA3.items()):
        return arguments | {"rope_scaling": True, "rope_scaling_factor": given["factor"]}
    raise ConfigError(
        f"{where(hf)}: rope_parameters",
        f"{given} is not supported by the megatron trainer",
        "it knows rope_type default, and llama3 with " + ", ".join(f"{k} {v}" for k, v in LLAMA3.items()),
    )


def norm(megatron: str, hf_name: str, size: int) -> Row:
    return Row(megatron=f"{megatron}.weight", hf=(f"{hf_name}.weight",), shapes=((size,),))


def block_norms(hf: PretrainedConfig) -> list[Row]:
    return [
        norm("input_layernorm", "input_layernorm", hf.hidden_size),
        norm("pre_mlp_layernorm", "post_attention_layernorm", hf.hidden_size),
    ]


def attention(hf: PretrainedConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> list[Row]:
    """Grouped-query attention: queries, keys and values in one Megatron tensor, grouped by key head."""
    head, kv = head_dim(hf), int(hf.num_key_value_heads)
    hidden, sizes = int(hf.hidden_size), (int(hf.num_attention_heads) * head, kv * head, kv * head)
    names = tuple(f"self_attn.{x}_proj" for x in "qkv")
    rows = [
        Row(
            megatron=f"self_attention.linear_qkv.{kind}",
            hf=tuple(f"{name}.{kind}" for name in names),
            shapes=tuple((size, *tail) for size in sizes),
            cut=0,
            groups=kv,
        )
        for kind, tail in (("weight", (hidden,)), *([("bias", ())] if qkv_bias else []))
    ]
    rows.append(
        Row(
            megatron="self_attention.linear_proj.weight",
            hf=("self_attn.o_proj.weight",),
            shapes=((hidden, sizes[0]),),
            cut=1,
        )
    )
    if qk_norm:
        rows += [norm(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", head) for x in "qk"]
    return rows


def mlp(hf: PretrainedConfig, megatron: str = "mlp", hf_name: str = "mlp", size: int | None = None) -> list[Row]:
    """A gated MLP: gate and up in one Megatron tensor."""
    hidden, width = int(hf.hidden_size), int(size or hf.intermediate_size)
    return [
        Row(
            megatron=f"{megatron}.linear_fc1.weight",
            hf=(f"{hf_name}.gate_proj.weight", f"{hf_name}.up_proj.weight"),
            shapes=((width, hidden),) * 2,
            cut=0,
        ),
        Row(
            megatron=f"{megatron}.linear_fc2.weight",
            hf=(f"{hf_name}.down_proj.weight",),
            shapes=((hidden, width),),
            cut=1,
        ),
    ]


def experts(hf: PretrainedConfig, num_experts: int, *, has_bias: bool = False) -> list[Row]:
    """The router and its experts; tensor parallelism leaves an expert whole."""
    router = [
        Row(megatron="mlp.router.weight", hf=("mlp.gate.weight",), shapes=((num_experts, hf.hidden_size),)),
        *(
            [Row(megatron="mlp.router.expert_bias", hf=("mlp.gate.e_score_correction_bias",), shapes=((num_experts,),))]
            if has_bias
            else []
        ),
    ]
    size = hf.moe_intermediate_size
    return router + [
        Row(megatron=row.megatron, hf=row.hf, shapes=row.shapes, expert=expert)
        for expert in range(num_experts)
        for row in mlp(hf, f"mlp.experts.local_experts.{expert}", f"mlp.experts.{expert}", size)
    ]


def mixture(hf: PretrainedConfig, num_experts: int, is_sparse: list[bool]) -> dict[str, Any]:
    """TransformerConfig fields of a mixture of experts that drops no token and has no balancing loss.

    Args:
        is_sparse: for each layer, whether it has experts.
    """
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_layer_freq": [int(x) for x in is_sparse],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }


def biased_router(hf: PretrainedConfig) -> dict[str, Any]:
    """TransformerConfig fields of DeepSeek-V3's router: sigmoid scores, a bias that only selects, groups, a factor."""
    refuse(hf, "norm_topk_prob", True)
    refuse(hf, "scoring_func", "sigmoid")
    if hf.num_experts_per_tok < 2:
        refuse(hf, "num_experts_per_tok", 2)
    fields: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # else every update moves the bias, which no loss asked for
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_shared_expert_intermediate_size": hf.n_shared_experts * hf.moe_intermediate_size,
    }
    if hf.n_group == 1:
        return fields
    if hf.num_experts_per_tok != 2 * hf.topk_group:
        # transformers ranks a group by its best two experts, Megatron by its best top_k / topk_group.
        refuse(hf, "topk_group", hf.num_experts_per_tok // 2)
    return fields | {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group}


def biased_experts(hf: PretrainedConfig) -> list[Row]:
    """The rows that go with `biased_router`."""
    shared = hf.n_shared_experts * hf.moe_intermediate_size
    return experts(hf, hf.n_routed_experts, has_bias=True) + mlp(hf, "mlp.shared_experts", "mlp.shared_experts", shared)
