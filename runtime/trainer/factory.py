"""Which trainer a run has: the one place that looks at `trainer.kind`. Each kind loads its own libraries only."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from runtime import config
from runtime.errors import ConfigError
from runtime.trainer.base import Trainer


@contextlib.contextmanager
def ready(
    path: Path, options: config.Trainer, device: torch.device, *, temperature: float, bucket_bytes: int
) -> Iterator[Trainer]:
    """A trainer, and what its kind needs around it; entered once a process, by all trainer ranks. The default process
    group, where there are peers, exists before.

    Args:
        path: Hugging Face folder of the start weights.
        temperature: of sampling, which log-probs are scaled by.
        bucket_bytes: of a push, told to engines in the manifest.

    Raises:
        ConfigError: greedy sampling, a library that is missing, a model or cut that this kind does not support.
    """
    if temperature <= 0:
        problem = f"{temperature}: greedy answers cannot be trained on"
        raise ConfigError("rollout.sampling.temperature", problem, "use e.g. 1.0")
    if options.kind == "fsdp":
        from runtime.trainer.fsdp import FsdpTrainer

        yield FsdpTrainer(path, options, device, temperature=temperature, bucket_bytes=bucket_bytes)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says at import what else could be installed
            from runtime.trainer.megatron import process
            from runtime.trainer.megatron.trainer import MegatronTrainer
    except ModuleNotFoundError as e:
        raise ConfigError(
            "trainer.kind", f"megatron: {e}", "install megatron-core as constraints/cpu.txt pins it, or use fsdp"
        ) from e
    with process.ready(device, options.parallel):
        yield MegatronTrainer(path, options, device, temperature=temperature, bucket_bytes=bucket_bytes)
