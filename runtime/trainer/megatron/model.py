"""Builds a Megatron-Core model from a Hugging Face folder, cut as a `Parallel` says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # says at import what else could be installed
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

from runtime import topology
from runtime.config import Lora, Parallel
from runtime.device import is_gpu
from runtime.trainer.megatron import family, groups, lora, output, spec, values
from runtime.trainer.megatron.convert import Listed, Weights, listing
from runtime.trainer.megatron.stages import Stages
from runtime.trainer.megatron.weight_files import WeightFiles


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is built that is trained: wrapped for gradients, which are summed over data- and context-parallel
    ranks, in float32."""

    shards_optimizer: bool = False
    """Each of those ranks gets its share of the sums only, for Megatron's distributed optimizer."""
    recomputes: bool = False
    """Of each layer only its input is kept for backward."""
    has_values: bool = False
    """A critic: its last layer gives one value."""
    lora: Lora | None = None
    """Only adapters are trained."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One rank's part of a model."""

    folder: Path
    """It was loaded from."""
    hf: PretrainedConfig
    config: TransformerConfig
    parallel: Parallel
    chunks: list[nn.Module]
    """One, or with interleaved pipelining more; each wrapped in Megatron's DistributedDataParallel if it is trained"""
    weights: Weights
    listed: list[Listed]
    """What the folder held, in the order of `weights.give`."""
    adapters: lora.Adapters | None = None
    has_values: bool = False
    """A critic: rows are not logits but values, [1, L, 1], the same on all tensor-parallel ranks."""

    def give(self, listed: Sequence[Listed]) -> Iterator[tuple[str, Tensor]]:
        """As `weights.give`, with what adapters add."""
        given = self.weights.give(listed)
        return self.adapters.merge(given) if self.adapters else given


def build(
    folder: Path,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    training: Training | None = None,
    float32_output: bool = False,
) -> Model:
    """This rank's part of the model in a Hugging Face folder, with its weights; after `groups.start`.

    Args:
        dtype: of weights and of computing.
        training: None: it is only run.
        float32_output: logits are computed in float32.

    Raises:
        ConfigError: the family, one of its features or the cut is not supported, or files and config do not agree.
    """
    hf = family.read_config(folder)
    has_values = training is not None and training.has_values
    if has_values:
        hf.tie_word_embeddings = False
    kind = family.find(hf)
    fields = kind.config(hf)
    check(hf, fields, parallel)
    stages = Stages(hf.num_hidden_layers, parallel.pipeline, parallel.virtual_pipeline)
    rotary = kind.rotary(hf)
    if training and training.recomputes:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = transformer_config(fields, parallel, stages, device, dtype)
    collection = groups.collection(parallel.expert) if config.num_moe_experts else None
    chunks = [_chunk(hf, config, rotary, collection, n, device) for n in range(parallel.virtual_pipeline)]
    rows = family.table(kind, hf)
    if has_values:
        values.give(chunks, config, device)
        rows = values.rows(rows, hf)
    elif float32_output:
        output.widen(chunks)
    weights = Weights(rows, chunks, stages, config.num_moe_experts or 0)
    with WeightFiles(folder) as files:
        listed = listing(rows, files)
        weights.load(files)
    adapters = lora.attach(training.lora, weights, chunks, config) if training and training.lora else None
    if training:
        chunks = [_trained(config, chunk, number, training.shards_optimizer) for number, chunk in enumerate(chunks)]
    else:
        for chunk in chunks:
            chunk.requires_grad_(False)
    return Model(
        folder=folder,
        hf=hf,
        config=config,
        parallel=parallel,
        chunks=chunks,
        weights=weights,
        listed=listed,
        adapters=adapters,
        has_values=has_values,
    )


def beside(folder: Path, parallel: Parallel, expert: int = 0) -> Parallel:
    """How the model in a folder is cut that stands beside a policy cut so: alike, its experts aside. Who shares those
    out changes neither which ranks see which sequences nor what they hold of all else.

    Args:
        expert: ranks that share out its experts, if it has some; 0: as many as the policy's.
    """
    hf = family.read_config(folder)
    has_experts = "num_moe_experts" in family.find(hf).config(hf)
    return msgspec.structs.replace(parallel, expert=(expert or parallel.expert) if has_experts else 1)


def check(hf: PretrainedConfig, fields: dict[str, Any], parallel: Parallel) -> None:
    """
    Raises:
        ConfigError: this model cannot be cut so.
    """
    sizes = {
        "attention heads": fields["num_attention_heads"],
        "key-value heads": fields["num_query_groups"],
        "columns of an MLP": fields["ffn_hidden_size"],
    }
    topology.check_cut(parallel, sizes, fields["num_layers"], fields.get("num_moe_experts") or 0)


def transformer_config(
    fields: dict[str, Any], parallel: Parallel, stages: Stages, device: torch.device, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's config: a family's fields, the cut, and what this project always wants."""
    fused = spec.has_fused_kernels(device, dtype)
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    interleaved = parallel.virtual_pipeline > 1
    return kind(
        **fields,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Not perform_initialization=False: Megatron would not mark either which parameters are cut over ranks, and its
        # optimizer then counts only the first rank's piece of them in the gradient norm.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        use_cpu_initialization=not is_gpu(device),
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        pipeline_model_parallel_layout=stages.layout(),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=parallel.sequence_parallel,
        # Losses come divided by the totals of the whole update: neither micro-batches nor ranks are averaged over.
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finish_gradients,
        # Interleaved, two messages between the same two ranks are under way at once; batched, they can swap unnoticed.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Frees what was sent on. A message of gloo may still be under way then: interleaved, gradients come out wrong.
        deallocate_pipeline_outputs=is_gpu(device),
        moe_grouped_gemm=fused and "num_moe_experts" in fields,
        masked_softmax_fusion=False,
        persist_layer_norm=fused,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused and fields.get("rope_type") != "rope",  # of latent attention only YaRN's is fused
        gradient_accumulation_fusion=False,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
    )


def _leave(weight: Tensor) -> Tensor:
    """Initialises nothing: weights are read from files."""
    return weight


def _finish_gradients(chunks: list[nn.Module], num_tokens: Any = None, **others: Any) -> None:
    """Megatron's sums over ranks, without its division by the tokens that were counted."""
    finalize_model_grads(chunks, None, **others)


def _chunk(
    hf: PretrainedConfig,
    config: TransformerConfig,
    rotary: dict[str, Any],
    collection: Any,
    number: int,
    device: torch.device,
) -> nn.Module:
    tp, chunk = config.tensor_model_parallel_size, number if config.virtual_pipeline_model_parallel_size else None
    model = GPTModel(
        config,
        spec.layers(config, device, chunk),  # pyright: ignore[reportArgumentType]
        vocab_size=-(-hf.vocab_size // tp) * tp,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        share_embeddings_and_output_weights=bool(hf.tie_word_embeddings),
        vp_stage=chunk,
        pg_collection=collection,
        **rotary,
    )
    return model.to(device)


def _trained(config: TransformerConfig, chunk: nn.Module, number: int, shards_optimizer: bool) -> nn.Module:
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            # Sum its gradient over the ranks that hold this expert. Megatron 0.16 says so itself only with ep > 1, and
            # with ep 1 and tp > 1 would leave out the tokens of the other tensor-parallel ranks.
            parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
    spec.mark_whole(chunk)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=shards_optimizer)
    return DistributedDataParallel(config, options, chunk, disable_bucketing=number > 0)
