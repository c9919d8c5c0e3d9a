"""A reference or teacher of the `megatron` trainer: a second model, cut as the policy is, its experts aside, and never
changed.

Between uses its weights lie in the host's memory, so that they take none of a GPU's while the policy is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.device import release_memory
from runtime.trainer import model as whole_model
from runtime.trainer.base import Heads, Scores
from runtime.trainer.megatron import model as megatron_model
from runtime.trainer.megatron import schedule
from runtime.trainer.megatron.packing import Packed
from runtime.trainer.megatron.trainer import MegatronTrainer, score, sequences
from runtime.types import MicroBatch


class MegatronFrozen:
    """On the ranks of a policy."""

    def __init__(self, path: Path, policy: MegatronTrainer, *, expert: int = 0) -> None:
        """
        Args:
            expert: ranks that share out its experts; 0: as many as the policy's.
        """
        self._device, self._temperature = policy.device, policy.temperature
        parallel = megatron_model.beside(path, policy.model.parallel, expert)
        self._model = megatron_model.build(
            path, parallel, policy.device, policy.dtype, float32_output=policy.float32_output
        )
        self.rest()

    def score(self, share: Sequence[MicroBatch], want: frozenset[str]) -> list[Scores]:
        """As base.Trainer.score."""
        self._wake()
        found = score(self._model, share, self._temperature, want)
        self.rest()
        return found

    def heads(self, share: Sequence[MicroBatch]) -> Heads:
        """See base.Heads; of use until `rest`, and only in the last pipeline stage, where the logits are."""
        return self.heads_of(sequences([whole_model.fill(batch) for batch in share]))

    def heads_of(self, batches: Sequence[schedule.Sequences]) -> Heads:
        self._wake()
        last: Any = self._model.chunks[-1]
        kept: list[Tensor] = []

        def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            kept.append(arguments[0])

        def finish(number: int, logits: Tensor, packed: Packed) -> Any:
            return partial(_logits, last, kept[-1])

        hook = last.output_layer.register_forward_pre_hook(keep) if last.post_process else None
        heads = schedule.forward(self._model, batches, finish)
        if hook is not None:
            hook.remove()
        return heads

    def rest(self) -> None:
        """Out of the way of the others."""
        self._move(torch.device("cpu"))
        release_memory(self._device)

    def _wake(self) -> None:
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        for chunk in self._model.chunks:
            chunk.to(device)


def _logits(chunk: Any, hidden: Tensor) -> Tensor:
    """[L, 1, hidden_size] -> [1, L, V / tp]"""
    tied = chunk.shared_embedding_or_output_weight() if chunk.share_embeddings_and_output_weights else None
    with torch.no_grad():
        logits, _ = chunk.output_layer(hidden, weight=tied)
        return logits.transpose(0, 1)
