"""Checkpoints written under one cut of a model and read under another: the same bits, and the same updates after."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file, save_file

from runtime.config import Lora, Parallel
from runtime.errors import ConfigError
from runtime.trainer.group import configure_torch
from tests.contract.trainer_setup import around, batch_of, leaders, make_trainer, train, weights_of
from tests.megatron import models

DENSE, SPARSE, LATENT = "qwen3_odd", "qwen3_moe", "deepseek_v3_plain"
ADAPTED, ADAPTED_LATENT, ADAPTED_ONCE = f"{DENSE} adapted", f"{LATENT} adapted", f"{SPARSE} adapted"
CUTS = {
    "dp2": (Parallel(), (DENSE, SPARSE)),
    "tp2": (Parallel(tensor=2), (DENSE, ADAPTED)),
    "tp2 sp": (Parallel(tensor=2, sequence_parallel=True), (SPARSE, LATENT, ADAPTED, ADAPTED_LATENT)),
    "pp2": (Parallel(pipeline=2), (DENSE, SPARSE, ADAPTED, ADAPTED_ONCE)),
    "pp2 vpp2": (Parallel(pipeline=2, virtual_pipeline=2), (DENSE, ADAPTED)),
    "cp2": (Parallel(context=2), (ADAPTED,)),
    "ep2": (Parallel(expert=2), (SPARSE, LATENT, ADAPTED_LATENT, ADAPTED_ONCE)),
}
"""Each reads its own checkpoint and that of the one before with the same model."""
"""SPARSE has adapters in its one layer without experts only: the second pipeline stage has none."""
ADAPTERS = {
    DENSE: Lora(rank=2, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
    LATENT: Lora(rank=2),
    SPARSE: Lora(rank=2, targets=("down_proj",)),
}
CASES = [(cut, name) for cut, (_, names) in CUTS.items() for name in names]


def two_ranks(rank: int, folder: Path) -> None:
    """Under each cut train, save and train on; restore what it and the one before saved, and train on."""
    configure_torch(1, True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, dict] = {}
    for cut, (parallel, names) in CUTS.items():
        with around("megatron", parallel):
            for name in names:
                model, *adapted = name.split()
                lora = ADAPTERS[model] if adapted else None
                trainer = make_trainer(folder / model, kind="megatron", parallel=parallel, warmup_updates=5, lora=lora)
                for step in (train_and_save, restore_and_train):
                    found |= step(trainer, folder, cut, name, len(leaders(parallel)))
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train_and_save(trainer, folder: Path, cut: str, name: str, num_dp: int) -> dict[str, dict]:
    for seed in (0, 1):
        train(trainer, batch_of(seed, num_dp=num_dp))
    trainer.save(folder / f"{name} {cut}").result()
    keep(folder / f"{name} {cut} saved", weights_of(trainer))
    metrics = train(trainer, batch_of(2, num_dp=num_dp))
    keep(folder / f"{name} {cut} next", weights_of(trainer))
    return {f"{name} {cut}": metrics}


def restore_and_train(trainer, folder: Path, cut: str, name: str, num_dp: int) -> dict[str, dict]:
    found = {}
    for other in sources(cut, name):
        trainer.restore(folder / f"{name} {other}")
        saved = load_file(folder / f"{name} {other} saved")
        is_equal = all(tensor.equal(saved[key]) for key, tensor in weights_of(trainer).items())
        metrics = train(trainer, batch_of(2, num_dp=num_dp))
        after = load_file(folder / f"{name} {other} next")
        error = max(float((tensor - after[key]).abs().max()) for key, tensor in weights_of(trainer).items())
        steps = [s["step"] for part in trainer.optimizer.parts for s in part.optimizer.state.values()]
        counts = {"counts": sorted({float(s) for s in steps}), "shared": len(steps) - len({id(s) for s in steps})}
        found[f"{name} {other} as {cut}"] = {"is_equal": is_equal, "error": error, "metrics": metrics, **counts}
    return found


def sources(cut: str, name: str) -> list[str]:
    """The cuts whose checkpoints this one reads."""
    cuts = [other for other, (_, names) in CUTS.items() if name in names]
    return cuts[max(0, cuts.index(cut) - 1) : cuts.index(cut) + 1]


def keep(path: Path, weights: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        save_file(weights, path)
    dist.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resharding")
    for name in (DENSE, SPARSE, LATENT):
        models.make(name, folder)
    torch.multiprocessing.spawn(two_ranks, (folder,), nprocs=2, join=True)
    return folder


@pytest.fixture(scope="module")
def found(folder) -> list[dict[str, dict]]:
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(("cut", "name"), CASES, ids=[f"{name} {cut}" for cut, name in CASES])
def test_a_cut_reads_what_another_wrote(found, cut, name):
    for rank in found:
        for other in sources(cut, name):
            seen, metrics = rank[f"{name} {other} as {cut}"], rank[f"{name} {other}"]
            assert seen["is_equal"], other
            assert seen["metrics"] == pytest.approx(metrics, abs=1e-5), other
            assert seen["error"] <= (0.0 if cut == other else 1e-5), other


def test_each_parameter_counts_its_updates_itself(found):
    """Sharing the count, each parameter's update would move it on for all."""
    restored = [seen for rank in found for key, seen in rank.items() if " as " in key]
    assert len(restored) == 2 * sum(len(sources(cut, name)) for cut, name in CASES)
    assert all(seen["shared"] == 0 for seen in restored)
    assert [seen["counts"] for seen in restored if seen["counts"] != [3.0]] == [[]], "a stage has nothing to update"


def test_a_checkpoint_of_another_model_or_half_of_one_changes_nothing(folder, tmp_path):
    with around("megatron"):
        trainer = make_trainer(folder / SPARSE, kind="megatron")
        before = weights_of(trainer)
        with pytest.raises(ConfigError, match="no checkpoint of this model"):
            trainer.restore(folder / f"{DENSE} dp2")
        trainer.save(tmp_path / "half").result()
        train(trainer, batch_of(0))
        after = weights_of(trainer)
        (tmp_path / "half/metadata.json").unlink()
        with pytest.raises(ConfigError, match=r"metadata\.json: No such file"):
            trainer.restore(tmp_path / "half")
        assert all(tensor.equal(after[name]) for name, tensor in trainer.weights())
        assert not all(tensor.equal(before[name]) for name, tensor in trainer.weights())
