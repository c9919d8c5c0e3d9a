"""The `megatron` trainer: a Megatron-Core model, cut by tensor, pipeline, context and experts, trained by AdamW.

One update is what it is in the `fsdp` trainer: gradients summed over micro-batches and ranks, the loss divided once by
the totals of the whole update, the global norm clipped, one step; one whose norm is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from runtime import config
from runtime.trainer import model as whole_model
from runtime.trainer.base import Loss, Scores, Sums
from runtime.trainer.megatron import checkpoint, groups, schedule
from runtime.trainer.megatron import model as megatron_model
from runtime.trainer.megatron.convert import Listed
from runtime.trainer.megatron.export import export
from runtime.trainer.megatron.memory import Memory
from runtime.trainer.megatron.optimizer import AdamW
from runtime.trainer.megatron.spread import from_last_stage, from_leader
from runtime.types import Manifest, MicroBatch, Share, Totals


class MegatronTrainer:
    """A policy on this trainer rank and its peers; inside `process.ready`."""

    def __init__(
        self, path: Path, options: config.Trainer, device: torch.device, *, temperature: float, bucket_bytes: int
    ) -> None:
        """Build and load this rank's part; arguments as in factory.ready."""
        self.path, self.device = path, device
        self.dtype = whole_model.DTYPES[options.precision]
        self.temperature, self.bucket_bytes = temperature, bucket_bytes
        self.model = megatron_model.build(
            path, options.parallel, device, self.dtype, is_trained=True, shards_optimizer=True
        )
        self.optimizer = AdamW(self.model, options.optimizer, self.dtype)
        self.memory = Memory(self.model, self.optimizer)
        self.listed = [_sent(item, self.dtype) for item in self.model.listed]

    def hand_on(self, share: Share | None) -> Share:
        return from_leader(share, Share, self.device)

    def score(self, share: Sequence[MicroBatch], module: str, want: frozenset[str]) -> list[Scores]:
        assert module == "policy", f"no {module} model is loaded"
        filled = [whole_model.fill(batch) for batch in share]
        scores = schedule.score(self.model, _sequences(filled), self.temperature, want & {"entropy"})
        return [
            whole_model.cut(_masked(s, f), len(batch.tokens)) for s, f, batch in zip(scores, filled, share, strict=True)
        ]

    def update(
        self,
        share: Sequence[MicroBatch],
        losses: Mapping[str, Loss],
        totals: Totals,
        denominator: str,
        want: frozenset[str] = frozenset(),
    ) -> dict[str, float]:
        filled, divisor = [whole_model.fill(batch) for batch in share], totals.of(denominator)

        def loss(number: int, scores: Scores) -> tuple[Tensor, Sums]:
            value, sums = losses["policy"](_masked(scores, filled[number]), filled[number])
            return value / divisor, {"loss": value.detach().clone(), **sums}

        collected = schedule.train(self.model, _sequences(filled), loss, self.temperature, want & {"entropy"})
        norm, rate = self.optimizer.step()
        return {
            **self._reduce(collected, divisor),
            "grad_norm": norm,
            "learning_rate": rate,
            "skipped_updates": float(not math.isfinite(norm)),
        }

    def all_sum(self, values: Tensor) -> Tensor:
        return _all_reduce(values, dist.ReduceOp.SUM)

    def manifest(self) -> Manifest:
        return Manifest(
            names=tuple(item.name for item in self.listed),
            dtypes=tuple(str(item.dtype).removeprefix("torch.") for item in self.listed),
            shapes=tuple(item.shape for item in self.listed),
            bucket_bytes=self.bucket_bytes,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.weights.give(self.listed)

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self.optimizer)

    def restore(self, folder: Path) -> None:
        checkpoint.restore(folder, self.optimizer)

    def export(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            export(folder, self.path, self.model.hf, self.listed, self.weights())
        else:
            for _ in self.weights():
                pass
        dist.barrier()

    def sleep(self) -> None:
        self.memory.sleep()

    def wake(self) -> None:
        self.memory.wake()

    def _reduce(self, collected: Sequence[Sums], divisor: float) -> dict[str, float]:
        """Sums (or maxima) of micro-batches, which the last stage has -> metrics over all ranks."""
        result: dict[str, float] | None = None
        if collected:
            maxima = sorted(name for name in collected[0] if name.endswith("_max"))
            sums = sorted(name for name in collected[0] if not name.endswith("_max"))
            summed = self.all_sum(torch.stack([torch.stack([c[n] for c in collected]).sum() for n in sums])) / divisor
            result = dict(zip(sums, summed.tolist(), strict=True))
            if maxima:
                largest = torch.stack([torch.stack([c[n] for c in collected]).amax() for n in maxima])
                result |= zip(maxima, _all_reduce(largest, dist.ReduceOp.MAX).tolist(), strict=True)
        return from_last_stage(result, dict[str, float], self.device)


def _sent(item: Listed, dtype: torch.dtype) -> Listed:
    """As engines get it. What selects experts but is not trained stays as it is: half precision would choose others."""
    return item if item.name.endswith("e_score_correction_bias") else Listed(item.name, dtype, item.shape)


def _sequences(batches: Sequence[MicroBatch]) -> list[schedule.Sequences]:
    return [(batch.tokens, batch.starts) for batch in batches]


def _masked(scores: Scores, batch: MicroBatch) -> Scores:
    """0 outside the loss mask, as the other trainer leaves it."""

    def under(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.where(batch.loss_mask, 0.0)

    return msgspec.structs.replace(scores, logprobs=under(scores.logprobs), entropy=under(scores.entropy))


def _all_reduce(values: Tensor, op: Any) -> Tensor:
    """Over the data-parallel ranks: those that share a model hold the same values."""
    values = values.clone()
    dist.all_reduce(values, op, group=groups.data())
    return values
