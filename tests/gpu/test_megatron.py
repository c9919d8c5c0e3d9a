"""The megatron trainer on one GPU, with or without Transformer Engine, against the fsdp trainer on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.config import Lora
from tests.contract.trainer_setup import WANTED, around, batch_of, make_model, make_trainer, tensors, train, weights_of
from tests.gpu.memory import measure

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),  # kernels are compiled on first use
]
GPU = torch.device("cuda:0")


@pytest.fixture(scope="module", autouse=True)
def ready():
    with around("megatron", device=GPU):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tied", head_dim=32)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_scores_and_updates_are_those_of_the_other_trainer_on_the_cpu(model: Path, precision, tolerance) -> None:
    cpu, gpu = make_trainer(model), make_trainer(model, kind="megatron", precision=precision, device=GPU)
    batch = batch_of(0, max_tokens=1000)
    (expected,) = cpu.score(tensors(batch.shares[0].updates[0]), "policy", WANTED)
    (found,) = gpu.score(tensors(batch.shares[0].updates[0], GPU), "policy", WANTED)
    for name in ("logprobs", "entropy"):
        assert (getattr(found, name).cpu() - getattr(expected, name)).abs().max() < tolerance
    for seed in range(3):
        metrics, other = train(cpu, batch_of(seed)), train(gpu, batch_of(seed))
        assert other["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=max(tolerance, 1e-3))
        assert other.keys() == metrics.keys() and other["skipped_updates"] == 0.0
    for (name, tensor), (_, other) in zip(sorted(cpu.weights()), sorted(gpu.weights()), strict=True):
        assert (tensor - other.cpu()).abs().max() < max(tolerance / 10, 1e-5), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_sleeping_gives_memory_back_and_saving_keeps_every_bit(model: Path, precision: str, tmp_path: Path) -> None:
    trainer = make_trainer(model, kind="megatron", precision=precision, device=GPU)
    train(trainer, batch_of(0))
    trainer.save(tmp_path / "saved").result()
    before, used = weights_of(trainer), torch.cuda.memory_allocated()
    trainer.sleep()
    assert torch.cuda.memory_allocated() < used
    trainer.wake()
    assert all(tensor.equal(before[name]) for name, tensor in trainer.weights())
    train(trainer, batch_of(1))
    other = make_trainer(model, kind="megatron", precision=precision, device=GPU)
    other.restore(tmp_path / "saved")
    assert all(tensor.equal(before[name]) for name, tensor in other.weights())
    assert train(other, batch_of(1))["grad_norm"] > 0
    other.export(tmp_path / "hf")


def test_recomputing_and_the_host_take_memory_off_the_gpu(tmp_path: Path) -> None:
    used = measure(tmp_path, "megatron", GPU)
    print(f"\n{used}")
    assert used.held["plain"] - used.held["offloaded"] > 11 * used.num_parameters, "float32 masters and two moments"
    assert used.peak["recomputed"] < 0.7 * used.peak["plain"]


def test_adapters_train_on_the_gpu_as_on_the_cpu(model: Path, tmp_path: Path) -> None:
    lora = Lora(rank=4)
    cpu, gpu = make_trainer(model, lora=lora), make_trainer(model, kind="megatron", device=GPU, lora=lora)
    for seed in range(2):
        metrics, other = train(cpu, batch_of(seed)), train(gpu, batch_of(seed))
        assert other["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-3)
    for (name, tensor), (_, other) in zip(sorted(cpu.weights()), sorted(gpu.weights()), strict=True):
        assert (tensor - other.cpu()).abs().max() < 1e-5, name
    gpu.export(tmp_path / "hf")
