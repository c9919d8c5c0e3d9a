"""Masters and moments in the host's memory, stepped there: gradients go down, weights come up.

Megatron-Core has an optimizer for this (HybridDeviceOptimizer), but not for us: beside the copies on the host it leaves
the masters on the GPU, makes new ones whenever state is loaded, and cannot run without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from runtime import config
from runtime.device import is_gpu


class HostAdamW:
    """Of one of Megatron's distributed optimizers, which goes on to hand out gradients and to measure their norm. Its
    own masters are emptied, except where they are the model's weights themselves."""

    def __init__(self, part: DistributedOptimizer, options: config.Optimizer) -> None:
        pairs = [*_pairs(part.shard_float16_groups, part.shard_fp32_from_float16_groups)]
        pairs += _pairs(part.shard_fp32_groups, part.shard_fp32_groups)
        self._weights = {main: weight for weight, main in pairs}
        """Megatron's master -> the part of the model's weights that is made from it."""
        self.masters = {main: _pinned(main.detach()) for main in self._weights}
        """Megatron's master -> ours."""
        for main, weight in self._weights.items():
            if main is not weight:
                main.untyped_storage().resize_(0)
        for master in self.masters.values():
            master.grad = _pinned(torch.zeros_like(master))
        self.optimizer = torch.optim.AdamW(
            self.masters.values(),
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def step(self, rate: float) -> None:
        """An update by the gradients that Megatron handed out, up to this rank's part of the weights."""
        for main, master in self.masters.items():
            assert main.grad is not None and master.grad is not None
            master.grad.copy_(main.grad)
            main.grad = None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.to_model()

    @torch.no_grad()
    def to_model(self) -> None:
        """Give this rank's part of the weights what the masters hold."""
        for main, weight in self._weights.items():
            weight.copy_(self.masters[main].to(weight.device))


def _pairs(weights: Any, mains: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Megatron has both by groups of its optimizer."""
    return zip(chain.from_iterable(weights), chain.from_iterable(mains), strict=True)


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, pinned where it travels to and from a GPU."""
    copy = tensor.to("cpu", copy=True)
    return copy.pin_memory() if is_gpu(tensor.device) else copy
