"""A reference or teacher of the `fsdp` trainer: a second model, in the precision of computing and never changed.

Between uses its weights lie in the host's memory, so that they take none of a GPU's while the policy is trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from runtime import output
from runtime.device import release_memory
from runtime.trainer import model
from runtime.trainer.base import Heads, Scores
from runtime.trainer.fsdp import FsdpTrainer
from runtime.types import MicroBatch


class FsdpFrozen:
    """Sharded over the ranks that a policy is sharded over."""

    def __init__(self, path: Path, policy: FsdpTrainer, *, expert: int = 0) -> None:
        assert not expert, "launcher.checks.layout refuses what is for megatron"
        self._device, self._dtype, self._temperature = policy.device, policy.dtype, policy.temperature
        self._model = model.load(path, policy.device, policy.dtype)
        self._model.requires_grad_(False)
        if policy.float32_output:
            output.widen(self._model)
        model.shard(self._model, policy.mesh, policy.dtype)
        self.rest()

    def score(self, share: Sequence[MicroBatch], want: frozenset[str]) -> list[Scores]:
        """As base.Trainer.score."""
        found: list[Scores] = []
        with self._at_work():
            for batch in share:
                filled = model.fill(batch)
                scores = model.score(*self._rows(filled), filled, self._temperature, want)
                found.append(model.cut(scores, len(batch.tokens)))
        self.rest()
        return found

    def heads(self, share: Sequence[MicroBatch]) -> Heads:
        """See base.Heads; of use until `rest`."""
        head = model.last_layer(self._model)
        kept: list[Tensor] = []

        def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            kept.append(arguments[0])

        hook = head.register_forward_pre_hook(keep)
        with self._at_work():
            for batch in share:
                self._rows(model.fill(batch))
        hook.remove()
        return [partial(_logits, head, hidden) for hidden in kept]

    def rest(self) -> None:
        """Out of the way of the others."""
        if isinstance(self._model, FSDPModule):
            self._model.reshard()  # its outermost parameters, the output layer among them, are left whole by a forward
        nn.Module.to(self._model, "cpu")
        release_memory(self._device)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        nn.Module.to(self._model, self._device)
        with torch.no_grad():
            yield

    def _rows(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return model.rows(self._model, batch, self._dtype)


def _logits(head: nn.Module, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        return head(hidden)[0].float()
