"""The trainer on one GPU: its variable-length kernel against the CPU, and an update in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.contract.trainer_setup import batch_of, make_model, make_trainer, tensors, train
from tests.gpu.memory import measure

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),  # kernels are compiled on first use
]
GPU = torch.device("cuda:0")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    shape = {"head_dim": 32, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return make_model(tmp_path_factory.mktemp("model") / "sliding", **shape)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_scores_and_updates_are_those_of_the_cpu(model: Path, precision: str, tolerance: float) -> None:
    cpu, gpu = make_trainer(model), make_trainer(model, precision=precision, device=GPU)
    batch = batch_of(0, max_tokens=1000)
    want = frozenset({"logprobs", "entropy"})
    (expected,) = cpu.score(tensors(batch.shares[0].updates[0]), "policy", want)
    (found,) = gpu.score(tensors(batch.shares[0].updates[0], GPU), "policy", want)
    for name in ("logprobs", "entropy"):
        assert (getattr(found, name).cpu() - getattr(expected, name)).abs().max() < tolerance
    for seed in range(2):
        norm = train(cpu, batch_of(seed))["grad_norm"]
        assert train(gpu, batch_of(seed))["grad_norm"] == pytest.approx(norm, rel=max(tolerance, 1e-3))
    gpu.sleep()
    gpu.wake()
    assert train(gpu, batch_of(2))["skipped_updates"] == 0.0
    if dist.is_initialized():
        dist.destroy_process_group()


def test_recomputing_and_the_host_take_memory_off_the_gpu(tmp_path: Path) -> None:
    used = measure(tmp_path, "fsdp", GPU)
    print(f"\n{used}")
    assert used.held["plain"] - used.held["offloaded"] > 11 * used.num_parameters, "float32 masters and two moments"
    assert used.peak["recomputed"] < used.peak["plain"]
    dist.destroy_process_group()
