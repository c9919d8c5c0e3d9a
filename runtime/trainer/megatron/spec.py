"""Which modules a layer is made of: the one place where that is chosen."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from runtime.device import is_gpu
from runtime.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # says at import what else could be installed
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.identity_op import IdentityOp

from runtime.trainer.megatron.attention import PackedAttention, RMSNorm

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

NORMS: Final = ("q_layernorm", "k_layernorm", "kv_layernorm")


def has_fused_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers are Transformer Engine's on this device. In float32 they are not: it multiplies with the 10 bits
    of TF32, and up to 2.10 its attention takes no packed sequences then."""
    return is_gpu(device) and transformer_engine.HAVE_TE and dtype != torch.float32


def layers(config: TransformerConfig, device: torch.device, chunk: int | None) -> TransformerBlockSubmodules:
    """The layers that this pipeline stage holds.

    On a GPU with Transformer Engine, in half precision: its modules. Elsewhere Megatron's plain linear layers with our
    attention and norm, because the plain ones of Megatron take no packed sequences.

    Args:
        chunk: which model chunk of this stage, under interleaved pipelining.

    Raises:
        ConfigError: these layers need Transformer Engine, and it is not installed.
    """
    fused = has_fused_kernels(device, config.params_dtype)
    is_missing = is_gpu(device) and not transformer_engine.HAVE_TE
    if is_missing and (config.num_moe_experts or config.multi_latent_attention):
        # Megatron 0.16 looks up classes of Transformer Engine there whether it has them or not; see cpu.py.
        problem = "experts and latent attention need Transformer Engine on a GPU, and it cannot be imported"
        raise ConfigError("trainer.kind", problem, "install transformer-engine in this environment")
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, fused, normalization="RMSNorm", vp_stage=chunk)
    if fused:
        return block
    block.layer_norm = RMSNorm  # pyright: ignore[reportAttributeAccessIssue]
    specs: Any = block.layer_specs
    for layer in specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        for name in NORMS:
            if getattr(attention, name, IdentityOp) is not IdentityOp:
                setattr(attention, name, RMSNorm)
    return block


def mark_whole(chunk: nn.Module) -> None:
    """Say of the weights that every tensor-parallel rank holds whole, in latent attention, that they are not cut.
    Transformer Engine says that all of its linear layers are, and Megatron's gradient norm then counts these once for
    each rank."""
    for module in chunk.modules():
        if getattr(module, "parallel_mode", "") is None and isinstance(
            weight := getattr(module, "weight", None), Tensor
        ):
            weight.tensor_model_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
