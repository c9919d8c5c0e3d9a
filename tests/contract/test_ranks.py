"""The contract of a Trainer on two ranks: every kind, in every layout it has for two, against one rank of that kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from runtime.config import Lora
from runtime.trainer.base import Trainer
from tests.contract import roles_setup
from tests.contract.trainer_setup import (
    LAYOUTS,
    around,
    batch_of,
    make_model,
    make_trainer,
    obey,
    scarce,
    train,
    train_three,
    two_ranks,
    weights_of,
)


@dataclass(frozen=True)
class Alone:
    """One rank of a kind, in this process."""

    kind: str
    make: Callable[..., Trainer]
    trained: dict[str, tuple[Trainer, list[dict[str, float]]]]
    """By model: a trainer after the same three updates that two ranks make, and their metrics."""
    folder: Path
    """What two ranks wrote; they also read the checkpoint that this one wrote into it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": make_model(folder / "tied"),
        "untied": make_model(folder / "untied", tie_word_embeddings=False),
    }


@pytest.fixture(scope="module", params=LAYOUTS)
def alone(request, models, tmp_path_factory) -> Iterator[Alone]:
    kind, folder = request.param, tmp_path_factory.mktemp("ranks")
    make = partial(make_trainer, kind=kind)
    with ExitStack() as stack:
        stack.enter_context(around(kind))
        trainers = {name: make(models[name]) for name in ("tied", "untied")}
        trained = {name: (trainer, train_three(trainer, 1)) for name, trainer in trainers.items()}
        trainers["tied"].save(folder / "one-rank").result()
        torch.multiprocessing.spawn(two_ranks, (kind, folder, models), nprocs=2, join=True)
        yield Alone(kind, make, trained, folder)


@pytest.fixture
def layouts(alone) -> list[Path]:
    """The folder of each layout."""
    return [path for path in alone.folder.iterdir() if path.name in ("dp2", "tp2", "pp2")]


def seen(layout: Path, rank: int = 0) -> dict[str, list[dict[str, float]]]:
    return json.loads((layout / f"metrics-{rank}.json").read_text())


def test_every_layout_was_run_and_its_ranks_saw_the_same(alone, layouts) -> None:
    assert len(layouts) in (1, 3)
    for layout in layouts:
        assert seen(layout, 0).keys() == seen(layout, 1).keys()
        for name, metrics in seen(layout, 0).items():
            assert metrics == seen(layout, 1)[name] or (layout.name != "dp2" and name == "all_sum"), (layout, name)


def test_sums_are_over_shares(alone, layouts) -> None:
    """Of ranks 0 and 1, each giving its number: both shares in dp2, elsewhere each rank has the only share."""
    for layout in layouts:
        found = [seen(layout, rank)["all_sum"] for rank in (0, 1)]
        expected = [1.0, 1.0] if layout.name == "dp2" else [0.0, 1.0]
        assert found == [[{"ranks": value}] for value in expected]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_two_ranks_train_as_one_does(alone, layouts, name: str) -> None:
    trainer, metrics = alone.trained[name]
    for layout in layouts:
        theirs = seen(layout)[f"{name}-float32"]
        for mine, other in zip(metrics, theirs, strict=True):
            assert other == pytest.approx(mine, abs=1e-5), layout.name
        weights = load_file(layout / f"{name}-float32.safetensors")
        for key, tensor in trainer.weights():
            assert (tensor - weights[key]).abs().max() < 1e-6, (layout.name, key)


def test_all_roles_on_two_ranks_learn_as_on_one(alone, layouts, models) -> None:
    roles = roles_setup.make_roles(models, kind=alone.kind)
    mine = roles_setup.teach(roles)
    values = roles_setup.scored(roles, "critic")
    assert {"value_loss", "kl", "explained_variance", "critic_grad_norm", "divergence3"} <= mine[0].keys()
    for layout in layouts:
        theirs = [json.loads((layout / f"roles-{rank}.json").read_text()) for rank in (0, 1)]
        assert theirs[0] == theirs[1]
        for metrics, other in zip(mine, theirs[0], strict=True):
            assert other == pytest.approx(metrics, abs=1e-4, rel=1e-4), layout.name
        restored = roles_setup.make_roles(models, kind=alone.kind)
        restored.restore(layout / "roles")
        assert (roles_setup.scored(restored, "critic") - values).abs().max() < 1e-5, layout.name


def test_a_rank_without_work_scores_and_trains_with_the_other(alone, layouts, models) -> None:
    mine = obey(alone.make(models["untied"]), scarce(1).shares[0])
    for layout in layouts:
        theirs = seen(layout)["scarce"][0]
        assert theirs == pytest.approx(mine, abs=1e-5), layout.name
        assert theirs["kl_old"] > 0, "the second update is off the policy that old log-probs were taken from"


def test_scoring_changes_no_bit(layouts, models) -> None:
    start = load_file(models["untied"] / "model.safetensors")
    for layout in layouts:
        scored = load_file(layout / "scored.safetensors")
        assert all(scored[name].equal(tensor) for name, tensor in start.items())


def test_checkpoints_of_two_ranks_are_read_by_one(alone, layouts, models) -> None:
    whole = alone.make(models["tied"])
    whole.restore(alone.folder / "one-rank")
    metrics = train(whole, batch_of(7))
    for layout in layouts:
        trainer = alone.make(models["tied"])
        trainer.restore(layout / "tied-float32")
        weights = load_file(layout / "tied-float32.safetensors")
        assert all(tensor.equal(weights[name]) for name, tensor in trainer.weights())
        assert train(trainer, batch_of(7)) == pytest.approx(metrics, abs=1e-5), layout.name
        for (name, a), (_, b) in zip(trainer.weights(), whole.weights(), strict=True):
            assert (a - b).abs().max() < 1e-5, (layout.name, name)


def test_checkpoints_of_one_rank_are_read_by_two(alone, layouts, models) -> None:
    trainer = alone.make(models["tied"])
    trainer.restore(alone.folder / "one-rank")
    restored = weights_of(trainer)
    metrics = [pytest.approx(train(trainer, batch_of(7)), abs=1e-5)]
    for layout in layouts:
        theirs = load_file(layout / "restored.safetensors")
        assert all(tensor.equal(theirs[name]) for name, tensor in restored.items())
        assert seen(layout)["restored"] == metrics, layout.name
        after = load_file(layout / "restored-next.safetensors")
        assert all((tensor - after[name]).abs().max() < 1e-5 for name, tensor in trainer.weights())


def test_bfloat16_keeps_float32_masters(alone, layouts, models) -> None:
    """A restored master has bits that bfloat16 has not, and follows the float32 run."""
    start = load_file(models["tied"] / "model.safetensors")
    norms = [metrics["grad_norm"] for metrics in alone.trained["tied"][1]]
    for layout in layouts:
        sent = load_file(layout / "tied-bfloat16.safetensors")
        assert all(tensor.dtype == torch.bfloat16 for tensor in sent.values())
        trainer = alone.make(models["tied"])
        trainer.restore(layout / "tied-bfloat16")
        for name, master in trainer.weights():
            assert master.dtype == torch.float32 and not master.equal(start[name])
            assert master.bfloat16().equal(sent[name])
        assert any(not master.bfloat16().float().equal(master) for _, master in trainer.weights())
        trainer.restore(layout / "start")
        assert all(master.equal(start[name]) for name, master in trainer.weights()), "masters are the files', unrounded"
        theirs = [metrics["grad_norm"] for metrics in seen(layout)["tied-bfloat16"]]
        assert theirs == pytest.approx(norms, rel=0.1), layout.name
    single = [metrics["grad_norm"] for metrics in json.loads((alone.folder / "alone.json").read_text())]
    assert single == pytest.approx(norms, rel=0.1)


def test_what_spares_memory_changes_no_bit(alone, layouts, models) -> None:
    for layout in layouts:
        assert seen(layout)["spare"] == seen(layout)["tied-bfloat16"], layout.name
        trainer, plain = alone.make(models["tied"]), alone.make(models["tied"])
        trainer.restore(layout / "spare")
        plain.restore(layout / "tied-bfloat16")
        assert all(tensor.equal(weights_of(plain)[name]) for name, tensor in trainer.weights()), layout.name
        assert train(trainer, batch_of(7)) == train(plain, batch_of(7)), "moments and counts are the same too"


def test_adapters_are_trained_on_two_ranks_as_on_one(alone, layouts, models) -> None:
    trainer = alone.make(models["tied"], lora=Lora(rank=4))
    metrics = train_three(trainer, 1)
    for layout in layouts:
        for mine, other in zip(metrics, seen(layout)["adapted"], strict=True):
            assert other == pytest.approx(mine, abs=1e-5), layout.name
        exported = load_file(layout / "adapted-hf/model.safetensors")
        for key, tensor in trainer.weights():
            assert (tensor - exported[key]).abs().max() < 1e-6, (layout.name, key)
        assert len(load_file(layout / "adapted-hf/adapter/adapter_model.safetensors")) == 2 * 2 * 7


def test_exports_of_sharded_models_bear_the_plain_class(layouts) -> None:
    for layout in layouts:
        for name, dtype in (("untied-float32", torch.float32), ("tied-bfloat16", torch.bfloat16)):
            loaded = AutoModelForCausalLM.from_pretrained(layout / f"{name}-hf", dtype="auto")
            assert loaded.config.architectures == ["Qwen3ForCausalLM"] and loaded.dtype == dtype
            state = loaded.state_dict()
            weights = load_file(layout / f"{name}.safetensors")
            assert all(tensor.equal(state[key]) for key, tensor in weights.items())
