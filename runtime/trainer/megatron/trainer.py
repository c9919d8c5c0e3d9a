"""The `megatron` trainer: a Megatron-Core model, cut by tensor, pipeline, context and experts, trained by AdamW.

One update is what it is in the `fsdp` trainer: gradients summed over micro-batches and ranks, the loss divided once by
the totals of the whole update, the global norm clipped, one step; one whose norm is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from runtime import config
from runtime.trainer import lora
from runtime.trainer import model as whole_model
from runtime.trainer.base import Heads, Loss, Role, Scores, Sums
from runtime.trainer.checkpoint import Writer
from runtime.trainer.megatron import checkpoint, groups, schedule
from runtime.trainer.megatron import model as megatron_model
from runtime.trainer.megatron.convert import Listed
from runtime.trainer.megatron.export import export
from runtime.trainer.megatron.memory import Memory
from runtime.trainer.megatron.optimizer import AdamW
from runtime.trainer.megatron.spread import from_last_stage, from_leader
from runtime.types import Manifest, MicroBatch, Share, Totals


class MegatronTrainer:
    """A policy or a critic on this trainer rank and its peers; inside `process.ready`."""

    def __init__(
        self,
        path: Path,
        options: config.Trainer,
        device: torch.device,
        *,
        temperature: float,
        bucket_bytes: int,
        role: Role = "policy",
    ) -> None:
        """Build and load this rank's part; arguments as in factory.ready."""
        self.path, self.device = path, device
        self.dtype = whole_model.DTYPES[options.precision]
        self.temperature, self.bucket_bytes = temperature, bucket_bytes
        self.role: Role = role
        training = megatron_model.Training(
            shards_optimizer=True,
            recomputes=options.recompute == "full",
            has_values=role == "critic",
            lora=options.lora if role == "policy" else None,
        )
        parallel = options.parallel if role == "policy" else megatron_model.beside(path, options.parallel)
        self.float32_output = options.widens_output
        self.model = megatron_model.build(
            path, parallel, device, self.dtype, training=training, float32_output=self.float32_output
        )
        self.optimizer = AdamW(self.model, options.optimizer, self.dtype)
        self.memory = Memory(self.model, self.optimizer)
        self.writer = Writer(device)
        self.listed = [_sent(item, self.dtype) for item in self.model.listed]

    def hand_on(self, share: Share | None) -> Share:
        return from_leader(share, Share, self.device)

    def score(
        self, share: Sequence[MicroBatch], module: str, want: frozenset[str], temperature: float | None = None
    ) -> list[Scores]:
        assert module == self.role, f"no {module} is loaded"
        return score(self.model, share, temperature or self.temperature, want)

    def update(
        self,
        share: Sequence[MicroBatch],
        losses: Mapping[str, Loss],
        totals: Totals,
        denominator: str,
        want: frozenset[str] = frozenset(),
        teacher: Heads | None = None,
    ) -> dict[str, float]:
        filled, divisor = [whole_model.fill(batch) for batch in share], totals.of(denominator)

        def loss(number: int, scores: Scores) -> tuple[Tensor, Sums]:
            value, sums = losses[self.role](_masked(scores, filled[number]), filled[number])
            return value / divisor, {"loss": value.detach().clone(), **sums}

        collected = schedule.train(self.model, sequences(filled), loss, self.temperature, want & {"entropy"}, teacher)
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
        return self.model.give(self.listed)

    def save(self, folder: Path) -> Future[None]:
        return checkpoint.save(self.writer, folder, self.optimizer)

    def restore(self, folder: Path) -> None:
        checkpoint.restore(folder, self.optimizer)

    def export(self, folder: Path) -> None:
        adapters = self.model.adapters
        if dist.get_rank() == 0:
            export(folder, self.path, self.model.hf, self.listed, self.weights())
            if adapters:
                lora.export(folder / lora.FOLDER, self.path, adapters.options, adapters.give(self.dtype))
        else:
            for _ in chain(self.weights(), adapters.give(self.dtype) if adapters else ()):
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


def sequences(batches: Sequence[MicroBatch]) -> list[schedule.Sequences]:
    return [(batch.tokens, batch.starts) for batch in batches]


def score(
    model: megatron_model.Model, share: Sequence[MicroBatch], temperature: float, want: frozenset[str]
) -> list[Scores]:
    """What base.Trainer.score gives, of any model."""
    filled = [whole_model.fill(batch) for batch in share]
    scores = schedule.score(model, sequences(filled), temperature, want & {"entropy"})
    return [
        whole_model.cut(_masked(s, f), len(batch.tokens)) for s, f, batch in zip(scores, filled, share, strict=True)
    ]


def _masked(scores: Scores, batch: MicroBatch) -> Scores:
    """0 outside the loss mask, as the other trainer leaves it."""
    given = scores.divergence

    def divergence(kind: str, beta: float, temperature: float) -> Tensor:
        assert given is not None
        return given(kind, beta, temperature).where(batch.loss_mask, 0.0)

    scores = msgspec.structs.replace(scores, divergence=divergence if given else None)
    return whole_model.arrays(scores, lambda values: values.where(batch.loss_mask, 0.0))


def _all_reduce(values: Tensor, op: Any) -> Tensor:
    """Over the data-parallel ranks: those that share a model hold the same values."""
    values = values.clone()
    dist.all_reduce(values, op, group=groups.data())
    return values
