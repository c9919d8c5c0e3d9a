"""A transformers model on a trainer rank: loaded with float32 masters, sharded, and asked for log-probs.

The model runs on distinct prefixes (see `trainer.prefixes`), and only rows of the logits that the loss mask needs are
computed: the model gets their positions as `logits_to_keep`. One rank in float32 is left unsharded, because there is
nothing to shard and no second dtype to keep, and FSDP's hooks made a forward and backward of a small model on a CPU
half as slow again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from runtime.trainer import attention, maths
from runtime.trainer.base import Scores
from runtime.trainer.prefixes import distinct
from runtime.types import MicroBatch

DTYPES: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the config's `precision`."""


def load(path: Path, device: torch.device) -> PreTrainedModel:
    """The model of a Hugging Face folder, in float32 and without dropout."""
    attention.register()
    disable_progress_bar()  # a rank's log is no terminal
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention.NAME, local_files_only=True
    )
    nn.Module.to(model, device)
    return model.eval()


def shard(model: PreTrainedModel, mesh: DeviceMesh | None, dtype: torch.dtype) -> None:
    """Shard each decoder layer, and what is left, over a mesh; forward and backward run in `dtype`.

    Gradients are summed over ranks, not averaged: a loss is divided once, by the totals of all ranks.

    Args:
        mesh: one-dimensional; None leaves a float32 model whole.
    """
    if mesh is None:
        assert dtype == torch.float32, "casting is FSDP's work: a model in half precision needs a mesh, be it of one"
        return
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layer_kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in layer_kinds]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def score(model: nn.Module, batch: MicroBatch, dtype: torch.dtype, temperature: float, want: frozenset[str]) -> Scores:
    """One forward: log-probs of the tokens under the loss mask, 0 elsewhere, and their entropies if `want` names them.

    Args:
        dtype: the model runs in.
        temperature: tokens were sampled at.
    """
    device = batch.tokens.device
    prefixes = distinct(batch.tokens.cpu().numpy(), batch.starts)
    ends, of = (torch.from_numpy(index).to(device) for index in (prefixes.ends, prefixes.of))
    # A start has no prefix, so no log-prob: 0 whatever its mask says.
    at = (batch.loss_mask & (batch.positions > 0)).nonzero().squeeze(1)
    out = model(
        input_ids=batch.tokens[ends][None],
        position_ids=batch.positions[ends][None],
        use_cache=False,
        logits_to_keep=of[at - 1],
        packing=attention.pack(prefixes, device, dtype),
    )
    logits = out.logits[0].float()
    if temperature != 1.0:
        logits = logits / temperature

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(len(batch.tokens)).index_copy(0, at, values)

    return Scores(
        logprobs=spread(-cross_entropy(logits, batch.tokens[at].long(), reduction="none")),
        entropy=spread(maths.entropy(logits)) if "entropy" in want else None,
    )


def fill(batch: MicroBatch) -> MicroBatch:
    """One masked token in place of an empty micro-batch, so that a rank without work takes part in every collective:
    its loss is a zero that hangs on the graph. Others are left as they are."""
    if len(batch.tokens):
        return batch

    def one(array: Tensor) -> Tensor:
        return array.new_zeros((1, *array.shape[1:]))

    return msgspec.structs.replace(batch.map(one), starts=(0, 1))


def cut(scores: Scores, num_tokens: int) -> Scores:
    """The scores of the tokens that were there before `fill`."""
    entropy = None if scores.entropy is None else scores.entropy[:num_tokens]
    assert scores.logprobs is not None
    return Scores(logprobs=scores.logprobs[:num_tokens], entropy=entropy)
