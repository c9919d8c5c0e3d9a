"""The `fsdp` trainer: a transformers model, sharded by FSDP2 over the trainer ranks, trained by AdamW.

One update is: gradients summed over micro-batches and ranks, the loss divided once by the totals of the whole update,
the global norm clipped, one step. So weights do not depend on how a batch was cut into micro-batches or dealt over
ranks, up to the order of additions. An update whose gradient norm is not finite changes nothing and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from runtime import config, output
from runtime.device import backend, release_memory, select
from runtime.trainer import checkpoint, lora, model
from runtime.trainer.base import Heads, Loss, Role, Scores
from runtime.types import Manifest, MicroBatch, Share, Totals


class FsdpTrainer:
    """A policy or a critic on this trainer rank and its peers. The default process group, where there are peers, exists
    before."""

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
        self.role: Role = role
        self.model = model.load(path, device)
        if role == "critic":
            model.give_values(self.model)
        self.lora = options.lora if role == "policy" else None
        self.adapted = lora.attach(self.model, self.lora) if self.lora else {}
        """By the name of the weight that the adapter adds to."""
        self.float32_output = options.widens_output
        if self.float32_output and role != "critic":
            output.widen(self.model)
        if options.recompute == "full":
            model.recompute(self.model)
        o = options.optimizer
        whole = self.num_ranks == 1 and self.dtype == torch.float32 and not o.offload
        self.mesh = None if whole else self._mesh()
        model.shard(self.model, self.mesh, self.dtype, o.offload)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=o.learning_rate,
            betas=(o.beta1, o.beta2),
            eps=o.eps,
            weight_decay=o.weight_decay,
            fused=True,
        )
        checkpoint.initialise(self.optimizer)
        self.writer = checkpoint.Writer(device)
        self.counters = torch.zeros(1, dtype=torch.int64)
        """[1]: updates made."""

    def hand_on(self, share: Share | None) -> Share:
        assert share is not None, "every rank leads a data-parallel group of one"
        return share

    def score(
        self, share: Sequence[MicroBatch], module: str, want: frozenset[str], temperature: float | None = None
    ) -> list[Scores]:
        assert module == self.role, f"no {module} is loaded"
        with torch.no_grad():
            scores = [model.cut(self._forward(batch, want, temperature), len(batch.tokens)) for batch in share]
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
        teacher: Heads | None = None,
    ) -> dict[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        collected: dict[str, list[Tensor]] = {}
        for number, batch in enumerate(share):
            filled = model.fill(batch)
            scores = self._forward(filled, want, teacher=teacher[number] if teacher else None)
            loss, sums = losses[self.role](scores, filled)
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
        wholes = ((n, torch.empty(x.shape, dtype=self._sent_as(x), device="meta")) for n, x in self._named())
        given = [item for name, whole in wholes for item in self._in_files(name, whole)]
        return Manifest(
            names=tuple(name for name, _ in given),
            dtypes=tuple(str(x.dtype).removeprefix("torch.") for _, x in given),
            shapes=tuple(tuple(x.shape) for _, x in given),
            bucket_bytes=self.bucket_bytes,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, whole in self._merged():
            yield from self._in_files(name, whole)

    def save(self, folder: Path) -> Future[None]:
        return checkpoint.save(self.writer, folder, self.model, self.optimizer, self.counters)

    def restore(self, folder: Path) -> None:
        checkpoint.restore(folder, self.model, self.optimizer, self.counters)

    def export(self, folder: Path) -> None:
        if self.rank == 0:
            checkpoint.export(folder, self.path, self._merged(), self.dtype)
            if self.lora:
                lora.export(folder / lora.FOLDER, self.path, self.lora, self._adapters())
        else:
            for _ in chain(self._merged(), self._adapters()):
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

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Of the model alone."""
        own = (item for item in self.model.named_parameters() if ".lora_" not in item[0])
        return chain(own, model.buffers(self.model))

    def _sent_as(self, x: Tensor) -> torch.dtype:
        """What selects experts but is not trained stays as it is: half precision would choose others."""
        return self.dtype if isinstance(x, nn.Parameter) else x.dtype

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        """The model's weights, whole, with what adapters add."""
        for name, x in self._named():
            full = self._whole(x)
            if layer := self.adapted.get(name):
                full = lora.merge(full, self._whole(layer.lora_A), self._whole(layer.lora_B), layer.scale)
            yield name, full.to(self._sent_as(x))

    def _in_files(self, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        return ((key, x.contiguous()) for key, x in model.in_files(self.model, name, whole).items())

    def _adapters(self) -> Iterator[tuple[str, Tensor]]:
        """As lora.export takes them."""
        for name, layer in self.adapted.items():
            for which in ("lora_A", "lora_B"):
                full = self._whole(getattr(layer, which)).to(self.dtype)
                yield f"{name.removesuffix('.weight')}.{which}.weight", full

    def _whole(self, p: Tensor) -> Tensor:
        full = p.detach().to(self.device)
        return full.full_tensor() if isinstance(full, DTensor) else full

    def _mesh(self) -> DeviceMesh:
        if not dist.is_initialized():
            dist.init_process_group(backend(self.device), store=HashStore(), rank=0, world_size=1)
        return init_device_mesh(self.device.type, (self.num_ranks,))

    def _forward(
        self,
        batch: MicroBatch,
        want: frozenset[str],
        temperature: float | None = None,
        teacher: Callable[[], Tensor] | None = None,
    ) -> Scores:
        filled = model.fill(batch)
        rows, at = model.rows(self.model, filled, self.dtype)
        if self.role == "critic":
            return model.values(rows, at, filled)
        return model.score(rows, at, filled, temperature or self.temperature, want, teacher)

    def _step(self) -> tuple[float, float]:
        """Clip, set the warm-up's learning rate and step; returns the norm before clipping and the rate."""
        o = self.options
        params = [p for p in self.model.parameters() if p.grad is not None]
        norm = self._norm([p.grad for p in params if p.grad is not None])
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

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Over all ranks; each squares its shards where they lie."""
        own = get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in gradients])
        is_cut = any(isinstance(g, DTensor) for g in gradients)
        return self.all_sum(own.to(self.device) ** 2).sqrt() if is_cut else own

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
        if self.options.offload:
            return  # all but a layer that is at work is in the host's memory anyhow
        nn.Module.to(self.model, device)
        for state in self.optimizer.state.values():
            state |= {name: value.to(device) for name, value in state.items()}
