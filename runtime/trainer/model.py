"""A transformers model on a trainer rank: loaded with float32 masters, sharded, and asked for log-probs.

The model runs on distinct prefixes (see `trainer.prefixes`), and only rows of the logits that the loss mask needs are
computed: the model gets their positions as `logits_to_keep`. One rank in float32 is left unsharded, because there is
nothing to shard and no second dtype to keep, and FSDP's hooks made a forward and backward of a small model on a CPU
half as slow again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from runtime.device import is_gpu
from runtime.errors import ConfigError
from runtime.trainer import attention, maths
from runtime.trainer.base import Scores
from runtime.trainer.prefixes import distinct
from runtime.types import MicroBatch

DTYPES: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the config's `precision`."""


class ValueHead(nn.Module):
    """[..., hidden_size] -> [..., 1] float32, the value of each prefix; at first 0."""

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self.weight.float().T


def load(path: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a Hugging Face folder, without dropout."""
    attention.register()
    disable_progress_bar()  # a rank's log is no terminal
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True
    )
    nn.Module.to(model, device)
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None  # nothing is padded: it would leave a token untrained, often the end of a turn
    return model.eval()


def in_files(model: PreTrainedModel, name: str, parameter: Tensor) -> dict[str, Tensor]:
    """A parameter as Hugging Face files hold it, which is how engines take it: where transformers stacks the experts of
    a layer, one tensor for each."""
    return revert_weight_conversion(model, {name: parameter})


def buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that belong to a model's weights though nothing trains them, as the bias by which a router selects."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def give_values(model: PreTrainedModel) -> None:
    """Make a critic of it: a value head in place of the output layer."""
    hidden_size = last_layer(model).in_features
    model.set_output_embeddings(ValueHead(hidden_size).to(model.device))


def last_layer(model: PreTrainedModel) -> nn.Linear:
    """That gives logits."""
    found = model.get_output_embeddings()
    assert isinstance(found, nn.Linear), f"{type(model).__name__} has no plain output layer"
    return found


def recompute(model: PreTrainedModel) -> None:
    """Keep of each layer only its input, for backward to compute the layer again.

    Raises:
        ConfigError: this kind of model does not know how.
    """
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    except ValueError as e:
        raise ConfigError("trainer.recompute", f"full: {e}", "write none") from e
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # it does so in training alone; what is in it stays without dropout


def shard(model: PreTrainedModel, mesh: DeviceMesh | None, dtype: torch.dtype, offload: bool = False) -> None:
    """Shard each decoder layer, and what is left, over a mesh; forward and backward run in `dtype`.

    Gradients are summed over ranks, not averaged: a loss is divided once, by the totals of all ranks.

    Args:
        mesh: one-dimensional; None leaves a float32 model whole.
        offload: shards, their gradients, and so what an optimizer makes of them, live in the host's memory.
    """
    if mesh is None:
        assert dtype == torch.float32, "casting is FSDP's work: a model in half precision needs a mesh, be it of one"
        return
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    where = CPUOffloadPolicy(pin_memory=is_gpu(model.device)) if offload else OffloadPolicy()
    layer_kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in layer_kinds]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=where)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def rows(model: nn.Module, batch: MicroBatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One forward: what the model's last layer gives for the prefixes of N tokens under the loss mask, [N, V] float32,
    and where those tokens are, [N].

    Args:
        dtype: the model runs in.
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
    return out.logits[0].float(), at


def score(
    logits: Tensor,
    at: Tensor,
    batch: MicroBatch,
    temperature: float,
    want: frozenset[str],
    teacher: Callable[[], Tensor] | None = None,
) -> Scores:
    """Log-probs of the tokens under the loss mask, 0 elsewhere; their entropies if `want` names them.

    Args:
        logits, at: as `rows` gives them.
        temperature: tokens were sampled at.
        teacher: gives a teacher's logits, for the divergence.
    """

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(len(batch.tokens)).index_copy(0, at, values)

    def divergence(kind: str, beta: float, temperature: float) -> Tensor:
        assert teacher is not None
        logp, logq = (maths.log_softmax(x / temperature) for x in (logits, teacher()))
        return spread(maths.divergence(logp, logq, kind, beta))

    scaled = logits if temperature == 1.0 else logits / temperature
    return Scores(
        logprobs=spread(-cross_entropy(scaled, batch.tokens[at].long(), reduction="none")),
        entropy=spread(maths.entropy(scaled)) if "entropy" in want else None,
        divergence=divergence if teacher else None,
    )


def values(rows: Tensor, at: Tensor, batch: MicroBatch) -> Scores:
    """Values of the prefixes of tokens under the loss mask, 0 elsewhere; `rows` and `at` as `rows` gives them."""
    return Scores(values=rows.new_zeros(len(batch.tokens)).index_copy(0, at, rows[:, 0]))


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
    return arrays(scores, lambda values: values[:num_tokens])


def arrays(scores: Scores, change: Callable[[Tensor], Tensor]) -> Scores:
    """The scores with each array changed."""
    there = {name: getattr(scores, name) for name in ("logprobs", "entropy", "values")}
    return msgspec.structs.replace(scores, **{name: change(x) for name, x in there.items() if x is not None})
