"""Which trainer a run has: the one place that looks at `trainer.kind`. Each kind loads its own libraries only."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from runtime import config
from runtime.errors import ConfigError
from runtime.trainer.base import Trainer
from runtime.trainer.roles import ALONE, Beside, Roles


@contextlib.contextmanager
def ready(
    path: Path,
    options: config.Trainer,
    device: torch.device,
    *,
    temperature: float,
    bucket_bytes: int,
    beside: Beside = ALONE,
) -> Iterator[Trainer]:
    """A trainer, and what its kind needs around it; entered once a process, by all trainer ranks. The default process
    group, where there are peers, exists before.

    Args:
        path: Hugging Face folder of the start weights.
        temperature: of sampling, which log-probs are scaled by.
        bucket_bytes: of a push, told to engines in the manifest.
        beside: further models.

    Raises:
        ConfigError: greedy sampling, a library that is missing, a model or cut that this kind does not support.
    """
    if temperature <= 0:
        problem = f"{temperature}: greedy answers cannot be trained on"
        raise ConfigError("rollout.sampling.temperature", problem, "use e.g. 1.0")
    with _process(options, device):
        yield make(path, options, device, temperature=temperature, bucket_bytes=bucket_bytes, beside=beside)


def _process(options: config.Trainer, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """What trainers of a kind need around them."""
    if options.kind == "fsdp":
        return contextlib.nullcontext()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says at import what else could be installed
            from runtime.trainer.megatron import process
    except ModuleNotFoundError as e:
        raise ConfigError(
            "trainer.kind", f"megatron: {e}", "install megatron-core as constraints/cpu.txt pins it, or use fsdp"
        ) from e
    return process.ready(device, options.parallel)


def make(
    path: Path,
    options: config.Trainer,
    device: torch.device,
    *,
    temperature: float,
    bucket_bytes: int,
    beside: Beside = ALONE,
) -> Roles:
    """The trainer that `ready` gives; inside what it puts around."""
    trained_kind, frozen_kind = _kinds(options.kind)
    sizes = {"temperature": temperature, "bucket_bytes": bucket_bytes}
    policy, critic = trained_kind(path, options, device, **sizes), None
    if beside.critic is not None:
        its_own = msgspec.structs.replace(options, optimizer=options.critic_optimizer or options.optimizer)
        critic = trained_kind(beside.critic, its_own, device, **sizes, role="critic")
    reference = frozen_kind(beside.reference, policy) if beside.reference else None
    teachers = [frozen_kind(Path(one.path), policy, expert=one.expert) for one in beside.teachers]
    return Roles(policy, critic, reference, teachers)


def _kinds(name: str) -> tuple[Any, Any]:
    """Of a trained and of a frozen model."""
    if name == "fsdp":
        from runtime.trainer.frozen import FsdpFrozen
        from runtime.trainer.fsdp import FsdpTrainer

        return FsdpTrainer, FsdpFrozen
    from runtime.trainer.megatron.frozen import MegatronFrozen
    from runtime.trainer.megatron.trainer import MegatronTrainer

    return MegatronTrainer, MegatronFrozen
