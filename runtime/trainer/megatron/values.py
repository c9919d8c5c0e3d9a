"""A critic's value head, which stands where a policy has its output layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from runtime.trainer.megatron.table import Row
from runtime.trainer.model import ValueHead

HEAD = "output_layer.weight"


class OutputLayer(ValueHead):
    """Every tensor-parallel rank holds it whole, and all compute the same loss of its values."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, config.params_dtype)
        self._is_cut = config.sequence_parallel
        # Then a rank has the gradient of its own tokens only, and Megatron adds them up.
        self.weight.sequence_parallel = self._is_cut  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: Tensor, **others: Any) -> Any:
        """As GPTModel calls its output layer: [L, 1, hidden_size] -> [L, 1, 1] and no bias."""
        values = super().forward(hidden)
        if self._is_cut:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def give(chunks: Sequence[nn.Module], config: TransformerConfig, device: torch.device) -> None:
    """Put the head into the chunk of this rank that has an output layer, if one has."""
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = OutputLayer(config).to(device)


def rows(of_policy: Sequence[Row], hf: PretrainedConfig) -> list[Row]:
    """A family's rows with the head's in place of the output layer's."""
    assert of_policy[-1].megatron == HEAD
    head = Row(megatron=HEAD, hf=("lm_head.weight",), shapes=((1, hf.hidden_size),), is_new=True)
    return [*of_policy[:-1], head]
