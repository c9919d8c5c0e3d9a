"""A float32 output layer on one GPU, whose kernel multiplies bfloat16 and gives float32: CUDA's and ROCm's alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from runtime import output

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda:0")


def test_logits_and_gradients_are_exact_without_a_wider_copy_of_the_weight() -> None:
    layer = nn.Linear(1024, 100_000, bias=False, device=GPU, dtype=torch.bfloat16)
    hidden = torch.randn(1, 32, 1024, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    inputs, factors = (hidden, layer.weight), torch.randn(1, 32, 100_000, device=GPU)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = output.OutputLayer(layer)(hidden)
    assert torch.cuda.max_memory_allocated() - before < layer.weight.nbytes
    found = torch.autograd.grad((logits * factors).sum(), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = linear(*exact)
    assert logits.dtype == torch.float32 and (logits - wanted).abs().max() < 1e-4
    for grad, right in zip(found, torch.autograd.grad((wanted * factors).sum(), exact), strict=True):
        assert (grad - right).norm() < 4e-3 * right.norm(), "one rounding before, one after"
