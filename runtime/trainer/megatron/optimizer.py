"""AdamW of Megatron-Core's distributed optimizer: float32 masters and moments, each rank of a data-parallel group
holding its part of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from runtime import config
from runtime.trainer.megatron.host import HostAdamW
from runtime.trainer.megatron.model import Model
from runtime.trainer.megatron.table import WRAPPERS
from runtime.trainer.megatron.weight_files import WeightFiles

MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Of one rank's part of a model that was built with `shards_optimizer`.

    Megatron keeps dense and expert parameters in optimizers of their own. How many updates were made is counted here,
    for all of them: their own count is shared between parameters by Megatron's loading, and each parameter's update
    then moves it on.
    """

    def __init__(self, model: Model, options: config.Optimizer, dtype: torch.dtype) -> None:
        self.model, self.options = model, options
        chained = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.learning_rate,
                weight_decay=options.weight_decay,
                adam_beta1=options.beta1,
                adam_beta2=options.beta2,
                adam_eps=options.eps,
                clip_grad=options.clip_norm,
                bf16=dtype == torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            model.chunks,  # pyright: ignore[reportArgumentType]
            config_overrides={},  # None would leave norms and biases without weight decay
        )
        assert isinstance(chained, ChainedOptimizer)
        self.chained = chained
        self.updates = 0
        is_whole = model.adapters is None
        if is_whole and dtype != torch.float32 and any(item.dtype != dtype for item in model.listed):
            self._read_masters()
        self.hosts = [HostAdamW(part, options) for part in self.parts] if options.offload else []
        for p, state in self._states():
            state |= {name: torch.zeros_like(p) for name in MOMENTS}
        self.count(0)

    @property
    def parts(self) -> list[DistributedOptimizer]:
        """Those with parameters on this rank."""
        found: Any = self.chained.chained_optimizers
        return [part for part in found if not part.is_stub_optimizer]

    def count(self, updates: int) -> None:
        """Say how many updates were made."""
        self.updates = updates
        for optimizer in self._optimizers():
            is_torchs = isinstance(optimizer, torch.optim.AdamW)
            for group in optimizer.param_groups:
                group |= {"fused": True} if is_torchs else {"step": updates}  # Transformer Engine counts by group
                for p in group["params"] if is_torchs else ():
                    optimizer.state[p]["step"] = torch.tensor(float(updates), device=p.device)

    def step(self) -> tuple[float, float]:
        """Clip, set the warm-up's learning rate and step, unless the norm is not finite; the gradients are in
        `main_grad`. Returns the norm before clipping and the rate."""
        o = self.options
        rate = o.learning_rate * min(1.0, (self.updates + 1) / max(1, o.warmup_updates))
        self.chained.prepare_grads()
        norm = float(self.chained.get_grad_norm())
        if not math.isfinite(norm):
            return norm, rate
        for part in self.parts:
            if o.clip_norm:
                clip_grad_by_total_norm_fp32([*part.get_parameters()], o.clip_norm, norm)
            for group in part.param_groups:
                group["lr"] = rate
        if self.hosts:
            for host in self.hosts:
                host.step(rate)
            self._share_weights()
        else:
            self.chained.step_with_ready_grads()
        self.updates += 1
        return norm, rate

    def masters_to_model(self) -> None:
        """Give the model what the masters hold, as an update does at its end."""
        with torch.no_grad():
            for part in self.parts if not self.hosts else ():
                part._copy_main_params_to_model_params()
            for host in self.hosts:
                host.to_model()
        self._share_weights()

    def held(self, number: int, main: Tensor) -> dict[str, Tensor]:
        """Of part `number`, what belongs to one of Megatron's masters: "param" (the master) and its moments."""
        master = self.hosts[number].masters[main] if self.hosts else main
        return {**self._optimizers()[number].state[master], "param": master.detach()}

    def tensors(self) -> Iterator[Tensor]:
        """Masters and moments on this rank's device."""
        for p, state in self._states() if not self.hosts else ():
            yield p.data
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that hold the state of each part."""
        return [host.optimizer for host in self.hosts] or [part.optimizer for part in self.parts]

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    yield p, optimizer.state[p]

    def _share_weights(self) -> None:
        """Each rank has made its part of the weights; now all have all of them."""
        for chunk in self.model.chunks:
            chunk.start_param_sync()  # pyright: ignore[reportCallIssue]

    def _read_masters(self) -> None:
        """Masters from the files: those that Megatron made from the model have lost what its dtype cannot hold."""
        with WeightFiles(self.model.folder) as files:
            pieces = {id(held): piece.contiguous() for held, piece in self.model.weights.read(files)}
            state = {
                f"model{number}": {WRAPPERS.sub("", name): pieces[id(p)] for name, p in chunk.named_parameters()}
                for number, chunk in enumerate(self.model.chunks)
            }
            for part in self.parts:
                part.reload_model_params(state)
