"""What a trainer takes of a GPU's memory, as it is and with what is to spare some."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.contract.trainer_setup import batch_of, make_model, make_trainer, train, weights_of

LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "head_dim": 128}
LONG = {"num_groups": 8, "num_samples": 8, "longest": 120, "max_tokens": 4096}
OPTIONS = {"plain": {}, "recomputed": {"recompute": "full"}, "offloaded": {"offload": True}}


@dataclass(frozen=True)
class Used:
    """Bytes, by OPTIONS."""

    num_parameters: int
    held: dict[str, int]
    """By a trainer that is made."""
    peak: dict[str, int]
    """More than that, in updates."""


def measure(folder: Path, kind: str, device: torch.device) -> Used:
    """With a model large enough to be seen, in bfloat16; all compute the same."""
    model = make_model(folder / "large", **LARGE)
    norms, held, peak, num_parameters = {}, {}, {}, 0
    for name, options in OPTIONS.items():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        trainer = make_trainer(model, kind=kind, precision="bfloat16", device=device, **options)
        held[name] = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        norms[name] = [train(trainer, batch_of(seed, **LONG))["grad_norm"] for seed in range(2)]
        peak[name] = torch.cuda.max_memory_allocated() - before - held[name]
        num_parameters = sum(tensor.numel() for tensor in weights_of(trainer).values())
        del trainer
        gc.collect()
    for other in norms.values():
        assert other == pytest.approx(norms["plain"], rel=1e-3)
    return Used(num_parameters, held, peak)
