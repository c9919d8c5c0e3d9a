"""The output layer in float32 where the rest of a model is bfloat16, so that engines and trainer agree better; as in
MiniMax-M1 (arXiv 2506.13585).

Neither weights nor hidden states change: products of two bfloat16 numbers are exact in float32, and are added up in it
anyhow. What is spared is that logits are rounded, by up to 1/16 where they are near 20.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from runtime.device import is_gpu
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS: Final = 1024
"""Of the weight that a CPU makes float32 at a time: they fit into its caches."""


class OutputLayer(nn.Linear):
    """[..., hidden_size] -> logits [..., vocabulary] float32; in place of another, whose parameters it takes over."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, input: Tensor) -> Tensor:
        found = logits(input, self.weight)
        return found if self.bias is None else found + self.bias.float()


def widen(model: PreTrainedModel) -> None:
    """Give a model of half precision, or one that will run in it, such an output layer.

    Raises:
        ConfigError: it has another kind of output layer.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        problem = f"the output layer of {type(model).__name__} is a {type(layer).__name__}, not a plain linear layer"
        raise ConfigError("trainer.float32_output", problem, "leave this out, or adapters of the output layer")
    model.set_output_embeddings(OutputLayer(layer))


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[..., hidden_size] and [vocabulary, hidden_size] of the same half precision -> [..., vocabulary] float32.

    Gradients are what they are in any other layer: in half precision, their sums in float32.
    """
    return _Logits.apply(hidden, weight) if torch.is_grad_enabled() else _product(hidden, weight)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _product(hidden, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        grad = grads[0].to(hidden.dtype)
        of_hidden, of_weight = ctx.needs_input_grad
        return (
            grad @ weight if of_hidden else None,
            grad.flatten(0, -2).T @ hidden.flatten(0, -2) if of_weight else None,
        )


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    if is_gpu(hidden.device):
        rows = torch.mm(hidden.flatten(0, -2), weight.T, out_dtype=torch.float32)
        return rows.unflatten(0, hidden.shape[:-1])
    wide = hidden.float()
    return torch.cat([linear(wide, part.float()) for part in weight.split(ROWS)], -1)
