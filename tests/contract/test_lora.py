"""Adapters of every kind of trainer, on one rank, against PEFT; test_ranks and test_resharding hold them on two."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from runtime.config import Lora
from runtime.errors import ConfigError
from runtime.trainer.base import Trainer
from tests.contract.trainer_setup import (
    LAYOUTS,
    WANTED,
    around,
    batch_of,
    make_model,
    make_trainer,
    tensors,
    train,
    weights_of,
)

LORA = Lora(rank=3, alpha=5.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
"""Not all that one of Megatron's layers is joined from."""
OPTIONS = {"lora": LORA, "clip_norm": 0.0, "learning_rate": 3e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture(scope="module", params=LAYOUTS)
def make(request) -> Iterator[Callable[..., Trainer]]:
    with around(request.param):
        yield partial(make_trainer, kind=request.param, **OPTIONS)


@pytest.fixture(scope="module")
def trained(make, model, tmp_path_factory) -> tuple[Trainer, Path]:
    """A trainer after two updates, and what it exported."""
    trainer, folder = make(model), tmp_path_factory.mktemp("trained")
    for seed in (0, 1):
        train(trainer, batch_of(seed))
    trainer.export(folder / "hf")
    return trainer, folder / "hf"


def with_peft(model: Path, exported: Path) -> torch.nn.Module:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, exported / "adapter", is_trainable=True)


def log_probs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens.long()[None]).logits[0, :-1]
    return log_softmax(logits, -1).gather(1, tokens[1:, None].long()).squeeze(1)


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of adapters, as PEFT calls them."""
    if hasattr(trainer, "adapted"):
        layers = trainer.adapted.items()
        both = ("lora_A", "lora_B")
        named = {f"{name[:-7]}.{x}.weight": getattr(layer, x).grad for name, layer in layers for x in both}
    else:
        adapters = copy.copy(trainer.model.adapters.weights)
        adapters.held = {name: p.main_grad for name, p in adapters.held.items()}
        whole = copy.copy(trainer.model.adapters)
        object.__setattr__(whole, "weights", adapters)
        named = dict(whole.give(torch.float32))
    return {f"base_model.model.{name.removesuffix('.weight')}.default.weight": grad for name, grad in named.items()}


def test_peft_and_transformers_load_what_was_trained(trained, model) -> None:
    trainer, exported = trained
    (batch,) = tensors(batch_of(2, max_tokens=1000).shares[0].updates[0])
    (scores,) = trainer.score([batch], "policy", WANTED)
    merged = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for other in (with_peft(model, exported), merged):
            for a, b in pairwise(batch.starts):
                mask = batch.loss_mask[a + 1 : b]
                found = log_probs(other, batch.tokens[a:b]) - scores.logprobs[a + 1 : b]
                assert found[mask].abs().max() < 1e-4
        a, b = batch.starts[:2]
        moved = log_probs(start, batch.tokens[a:b]) - scores.logprobs[a + 1 : b]
        assert moved[batch.loss_mask[a + 1 : b]].abs().max() > 1e-2
    state = merged.state_dict()
    assert all((tensor - state[name]).abs().max() < 1e-6 for name, tensor in trainer.weights())
    told = json.loads((exported / "adapter/adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["base_model_name_or_path"]) == (3, 5.0, str(model))


def test_gradients_are_pefts(make, model, trained, tmp_path: Path) -> None:
    trainer, exported = trained
    trainer.save(tmp_path / "saved").result()
    other = make(model)
    other.restore(tmp_path / "saved")
    reference = with_peft(model, exported)
    packed = batch_of(3, max_tokens=50)
    train(other, packed)
    (batch,) = tensors(batch_of(3, max_tokens=1000).shares[0].updates[0])
    total = torch.zeros(())
    for a, b in pairwise(batch.starts):
        mask, logp = batch.loss_mask[a + 1 : b], log_probs(reference, batch.tokens[a:b])
        total -= (batch.advantages[a + 1 : b] * (logp - logp.detach()).exp())[mask].sum()
    (total / int(batch.loss_mask.sum())).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    found = gradients(other)
    assert found.keys() == expected.keys() and len(found) == 2 * 2 * len(LORA.targets)
    for name, grad in found.items():
        assert torch.allclose(grad, expected[name], atol=1e-6, rtol=1e-3), name


def test_only_adapters_are_trained_and_saved(trained, model, tmp_path: Path) -> None:
    trainer, exported = trained
    num_adapted = sum(t.numel() for t in load_file(exported / "adapter/adapter_model.safetensors").values())
    if hasattr(trainer, "adapted"):
        states = trainer.optimizer.state
        base = dict(trainer._named())
    else:
        (part,) = trainer.optimizer.parts
        states = part.optimizer.state
        base = dict(trainer.model.weights.give(trainer.listed))
    assert sum(state["exp_avg"].numel() for state in states.values()) == num_adapted
    start = load_file(model / "model.safetensors")
    assert all(tensor.equal(start[name]) for name, tensor in base.items()) and base.keys() == start.keys()
    changed = {name.split(".")[-2] for name, tensor in trainer.weights() if not tensor.equal(start[name])}
    assert changed == set(LORA.targets)
    trainer.save(tmp_path / "saved").result()
    keys = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert {key for key in keys if "lora_" not in key} <= {"counters"} and len(keys) >= 3 * 2 * 2 * len(LORA.targets)


def test_restoring_and_recomputing_change_no_bit(make, model, tmp_path: Path) -> None:
    plain, other = make(model), make(model, recompute="full")
    metrics = train(plain, batch_of(0))
    assert metrics == train(other, batch_of(0)) and metrics["grad_norm"] > 0
    plain.save(tmp_path / "saved").result()
    again = make(model, offload=True)
    again.restore(tmp_path / "saved")
    expected = train(plain, batch_of(1))
    assert train(other, batch_of(1)) == expected
    assert train(again, batch_of(1)) == pytest.approx(expected, abs=1e-6)
    weights = weights_of(plain)
    assert all(tensor.equal(weights[name]) for name, tensor in other.weights())
    assert all((tensor - weights[name]).abs().max() < 1e-6 for name, tensor in again.weights())
    if torch.distributed.is_initialized() and hasattr(again, "adapted"):
        torch.distributed.destroy_process_group()  # shards need one, also those of a single rank


def test_half_precision_keeps_float32_masters(make, model) -> None:
    trainer = make(model, precision="bfloat16")
    norms = [train(other, batch_of(0))["grad_norm"] for other in (trainer, make(model))]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)
    assert {tensor.dtype for _, tensor in trainer.weights()} == {torch.bfloat16}
    if hasattr(trainer, "adapted"):
        torch.distributed.destroy_process_group()


def test_what_cannot_have_an_adapter_is_refused(make, model) -> None:
    with pytest.raises(ConfigError, match=r"no linear layer 'k_prj'[^\n]*\n.*k_proj"):
        make(model, lora=Lora(targets=("k_prj", "k_proj")))
