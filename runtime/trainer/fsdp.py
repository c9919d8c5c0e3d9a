"""The `fsdp` trainer: a transformers model, sharded by FSDP2 over the trainer ranks, trained by AdamW.

One update is: gradients summed over micro-batches and ranks, the loss divided once by the totals of the whole update,
the global norm clipped, one step. So weights do not depend on how a batch was cut into micro-batches or dealt over
ranks, up to the order of additions. An update whose gradient norm is not finite changes nothing and is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from runtime import config
from runtime.device import backend, release_memory, select
from runtime.trainer import checkpoint, model
from runtime.trainer.base import Loss, Scores
from runtime.types import Manifest, MicroBatch, Share, Totals


class FsdpTrainer:
    """A policy on this trainer rank and its peers. The default process group, where there are peers, exists before."""

    def __init__(
        self, path: Path, options: config.Trainer, device: torch.device, *, temperature: float, bucket_bytes: int
    ) -> None:
        """Load and shard.

        Args:
            path: Hugging Face folder of the start weights.
            temperature: of sampling, which log-probs are scaled by.
            bucket_bytes: of a push, told to engines in the manifest.
        """
        select(device)
        self.path, self.options, self.device = path, options.optimizer, device
        self.dtype, self.temperature, self.bucket_bytes = model.DTYPES[options.precision], temperature, bucket_bytes
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.model = model.load(path, device)
        whole = self.num_ranks == 1 and self.dtype == torch.float32
        model.shard(self.model, None if whole else self._mesh(), self.dtype)
        o = options.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=o.learning_rate,
            betas=(o.beta1, o.beta2),
            eps=o.eps,
            weight_decay=o.weight_decay,
            fused=True,
        )
        checkpoint.initialise(self.optimizer)
        self.counters = torch.zeros(1, dtype=torch.int64)
        """[1]: updates made."""

    def hand_on(self, share: Share | None) -> Share:
        assert share is not None, "every rank leads a data-parallel group of one"
        return share

    def score(self, share: Sequence[MicroBatch], module: str, want: frozenset[str]) -> list[Scores]:
        assert module == "policy", f"no {module} model is loaded"
        with torch.no_grad():
            scores = [model.cut(self._forward(batch, want), len(batch.tokens)) for batch in share]
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # its outermost parameters wait for a backward otherwise
        return scores

    def update(
        self,
        share: Sequence[MicroBatch],
        losses: Mapping[str, Loss],
        totals: Totals,
        denominator: str,
        want: frozenset[str] = frozenset(),
    ) -> dict[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        collected: dict[str, list[Tensor]] = {}
        for batch in share:
            filled = model.fill(batch)
            loss, sums = losses["policy"](self._forward(filled, want), filled)
            (loss / totals.of(denominator)).backward()
            for name, value in {"loss": loss.detach(), **sums}.items():
                collected.setdefault(name, []).append(value)
        norm, rate = self._step()
        return {
            **self._reduce(collected, totals.of(denominator)),
            "grad_norm": norm,
            "learning_rate": rate,
            "skipped_updates": float(not torch.isfinite(torch.tensor(norm))),
        }

    def manifest(self) -> Manifest:
        named = list(self.model.named_parameters())
        return Manifest(
            names=tuple(name for name, _ in named),
            dtypes=(str(self.dtype).removeprefix("torch."),) * len(named),
            shapes=tuple(tuple(p.shape) for _, p in named),
            bucket_bytes=self.bucket_bytes,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.model.named_parameters():
            full = p.detach()
            yield name, (full.full_tensor() if isinstance(full, DTensor) else full).to(self.dtype).contiguous()

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self.model, self.optimizer, self.counters)

    def restore(self, folder: Path) -> None:
        checkpoint.restore(folder, self.model, self.optimizer, self.counters)

    def export(self, folder: Path) -> None:
        if self.rank == 0:
            checkpoint.export(folder, self.path, self.weights(), self.dtype)
        else:
            for _ in self.weights():
                pass
        if self.num_ranks > 1:
            dist.barrier()

    def sleep(self) -> None:
        self._move(torch.device("cpu"))
        release_memory(self.device)

    def wake(self) -> None:
        self._move(self.device)

    def all_sum(self, values: Tensor) -> Tensor:
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def _mesh(self) -> DeviceMesh:
        if not dist.is_initialized():
            dist.init_process_group(backend(self.device), store=HashStore(), rank=0, world_size=1)
        return init_device_mesh(self.device.type, (self.num_ranks,))

    def _forward(self, batch: MicroBatch, want: frozenset[str]) -> Scores:
        return model.score(self.model, model.fill(batch), self.dtype, self.temperature, want)

    def _step(self) -> tuple[float, float]:
        """Clip, set the warm-up's learning rate and step; returns the norm before clipping and the rate."""
        o = self.options
        params = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in params if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        rate = o.learning_rate * min(1.0, (int(self.counters) + 1) / max(1, o.warmup_updates))
        if not torch.isfinite(norm):
            return float(norm), rate
        if o.clip_norm:
            clip_grads_with_norm_(params, o.clip_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.counters += 1
        return float(norm), rate

    def _reduce(self, collected: Mapping[str, list[Tensor]], divisor: float) -> dict[str, float]:
        """Sums (or maxima) of micro-batches -> metrics over all ranks."""
        maxima = sorted(name for name in collected if name.endswith("_max"))
        sums = sorted(name for name in collected if not name.endswith("_max"))
        summed = self.all_sum(torch.stack([torch.stack(collected[name]).sum() for name in sums])) / divisor
        result = dict(zip(sums, summed.tolist(), strict=True))
        if maxima:
            largest = torch.stack([torch.stack(collected[name]).amax() for name in maxima])
            result |= zip(maxima, self._all_reduce(largest, dist.ReduceOp.MAX).tolist(), strict=True)
        return result

    def _all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.num_ranks > 1:
            values = values.clone()
            dist.all_reduce(values, op)
        return values

    def _move(self, device: torch.device) -> None:
        nn.Module.to(self.model, device)
        for state in self.optimizer.state.values():
            state |= {name: value.to(device) for name, value in state.items()}
