"""Megatron-Core's output layer in float32 where the rest is bfloat16: see runtime.output."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from runtime import output
from runtime.trainer.megatron import groups


class OutputLayer(ColumnParallelLinear):
    """In place of another, whose weight it takes over; cut and saved as that is."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__(
            layer.input_size,
            layer.output_size,
            config=layer.config,
            init_method=nn.Identity(),  # there is nothing to fill
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=groups.tensor(),
        )
        self.weight = layer.weight

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[L, 1, hidden_size], of this rank's tokens under sequence parallelism -> [L, 1, V / tp] float32, no bias.

        Args:
            weight: the input embedding's, where the two are one.
        """
        held = self.weight if weight is None else weight
        assert held is not None and not runtime_gather_output
        share = gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        return output.logits(share(input_, group=groups.tensor()), held), None


def widen(chunks: Sequence[nn.Module]) -> None:
    """Give the chunk of this rank that has an output layer, if one has, such a one."""
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = OutputLayer(chunk.output_layer)  # pyright: ignore[reportArgumentType]
