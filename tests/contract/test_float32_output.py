"""Logits in float32 where all else is bfloat16: of every kind of trainer and the model beside it, and of the embedded
engine, against transformers alone, whose output layer is written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime import config, output
from runtime.errors import ConfigError
from runtime.rollout.embedded.model import SlotModel
from runtime.trainer import factory
from runtime.trainer.roles import Beside, Roles
from tests.contract.trainer_setup import (
    CPU,
    LAYOUTS,
    WANTED,
    around,
    batch_of,
    gradients,
    make_model,
    named_modules,
    tensors,
    train,
)

NAMES = ("tied", "untied")
VOCABULARY = output.ROWS + 200
"""More than a CPU makes float32 at a time."""
SHARE = tensors(batch_of(0, max_tokens=60).shares[0].updates[0])


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Sure of their tokens, so that logits are large."""
    folder, made = tmp_path_factory.mktemp("models"), {}
    for name in NAMES:
        path = make_model(folder / name, vocab_size=VOCABULARY, tie_word_embeddings=name == "tied")
        model = AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            model.model.norm.weight.mul_(5.0)
        model.save_pretrained(path)
        made[name] = path
    return made


@pytest.fixture(scope="module", params=LAYOUTS)
def kind(request) -> Iterator[str]:
    with around(request.param):
        yield request.param
    if dist.is_initialized():
        dist.destroy_process_group()  # shards need one, also those of a single rank


@pytest.fixture(scope="module")
def make(kind, models) -> Callable[..., Roles]:
    """A policy, and as its reference the same model."""

    def roles(name: str, **fields) -> Roles:
        optimizer = config.Optimizer(learning_rate=0.0, clip_norm=0.0)
        options = config.Trainer(kind=kind, **{"optimizer": optimizer, "float32_output": True} | fields)
        beside = Beside(reference=models[name])
        return factory.make(models[name], options, CPU, temperature=1.0, bucket_bytes=1000, beside=beside)

    return roles


def plain(path: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.get_input_embeddings().padding_idx = None
    return model


def logits_of(model: PreTrainedModel, tokens: Tensor, *, is_wide: bool) -> Tensor:
    """[T] -> [T, V] float32"""
    hidden, weight = model.model(input_ids=tokens.long()[None]).last_hidden_state[0], model.lm_head.weight
    return linear(hidden.float(), weight.float()) if is_wide else linear(hidden, weight).float()


def logprobs_of(model: PreTrainedModel, tokens: Tensor, *, is_wide: bool) -> Tensor:
    """[T], 0 for the first."""
    logp = logits_of(model, tokens, is_wide=is_wide)[:-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), logp.gather(1, tokens[1:, None].long())[:, 0]])


def expected(path: Path, *, is_wide: bool) -> Tensor:
    """Log-probs of the share, a sequence at a time."""
    model = plain(path).requires_grad_(False)
    found = [logprobs_of(model, b.tokens[s:e], is_wide=is_wide) for b in SHARE for s, e in pairwise(b.starts)]
    return torch.cat(found).where(torch.cat([b.loss_mask for b in SHARE]), 0.0)


def scored(roles: Roles, module: str = "policy") -> Tensor:
    return torch.cat([s.logprobs for s in roles.score(SHARE, module, WANTED)])


def far(a: Tensor, b: Tensor) -> float:
    """Mean distance over the loss mask."""
    return float((a - b).abs()[torch.cat([b.loss_mask for b in SHARE])].mean())


def output_layers(roles: Roles) -> list[nn.Module]:
    """Of the policy and of its reference."""
    beside = roles.reference._model
    chunks = getattr(beside, "chunks", [beside])
    both = *named_modules(roles.policy), *(named for chunk in chunks for named in chunk.named_modules())
    return [module for name, module in both if name.endswith(("lm_head", "output_layer"))]


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_are_those_of_a_float32_output_layer(kind, make, models, name: str) -> None:
    roles, rounding = make(name), make(name, float32_output=False)
    errors = []

    def check(layer, arguments, given, out):
        weight = layer.weight if given.get("weight") is None else given["weight"]
        logits = out[0] if isinstance(out, tuple) else out
        assert logits.dtype == torch.float32
        errors.append(float((logits - linear(arguments[0].float(), weight.float())).abs().max()))

    for layer in output_layers(roles):
        layer.register_forward_hook(check, with_kwargs=True)
    found, of_reference = scored(roles), scored(roles, "reference")
    assert len(errors) == 2 * len(SHARE) and max(errors) < 1e-5
    assert far(found, of_reference) < 1e-6
    wide, rounded = (expected(models[name], is_wide=is_wide) for is_wide in (True, False))
    spared = far(wide, rounded)
    assert far(found, scored(rounding)) > spared / 2
    if kind == "fsdp":  # what Megatron-Core rounds within its layers is more than that
        assert far(found, wide) < spared / 2 < far(scored(rounding), wide)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_transformers(make, models, name: str) -> None:
    policy = make(name).policy
    train(policy, batch_of(0, max_tokens=60))
    reference, num_tokens = plain(models[name]).float(), sum(int(b.loss_mask.sum()) for b in SHARE)
    for b in SHARE:
        for s, e in pairwise(b.starts):
            logp = logprobs_of(reference, b.tokens[s:e], is_wide=True)
            loss = -b.advantages[s:e] * (logp - logp.detach()).exp()
            (loss.where(b.loss_mask[s:e], 0.0).sum() / num_tokens).backward()
    wanted, found = dict(reference.named_parameters()), gradients(policy)
    assert found.keys() == wanted.keys()
    for key, grad in found.items():
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert off(whole, wanted[key].grad) < 0.06, key


def off(a: Tensor, b: Tensor) -> float:
    """Distance, as part of the size."""
    return float((a.float() - b).norm() / b.norm())


def test_the_layer_alone_gives_its_gradients() -> None:
    layer = nn.Linear(64, VOCABULARY).bfloat16()
    hidden = torch.randn(1, 30, 64).bfloat16().requires_grad_()
    inputs = hidden, layer.weight, layer.bias
    factors = torch.randn(1, 30, VOCABULARY)
    found = torch.autograd.grad((output.OutputLayer(layer)(hidden) * factors).sum(), inputs)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad((linear(*exact) * factors).sum(), exact)
    assert all(off(a, b) < 4e-3 for a, b in zip(found, wanted, strict=True)), "one rounding before, one after"


def test_in_float32_there_is_nothing_to_widen(make) -> None:
    layers = output_layers(make("tied", precision="float32"))
    assert layers and not any("runtime" in type(layer).__module__ for layer in layers)


def test_an_output_layer_of_another_kind_is_refused(models) -> None:
    options = config.Trainer(float32_output=True, lora=config.Lora(targets=("lm_head",)))
    with pytest.raises(ConfigError, match=r"trainer\.float32_output: .*Qwen3ForCausalLM is a LoraLinear"):
        factory.make(models["untied"], options, CPU, temperature=1.0, bucket_bytes=1)


@torch.inference_mode()
def test_the_embedded_engine_scores_and_decodes_so(models) -> None:
    path, tokens = models["tied"], SHARE[0].tokens[: SHARE[0].starts[1]]
    engine = SlotModel(str(path), dtype="bfloat16", slots=2, max_length=64, frozen=True, float32_output=True)
    assert isinstance(engine._step, torch.jit.ScriptModule), "it can be traced"
    scores = [engine.score(b.tokens[s:e].tolist()) for b in SHARE for s, e in pairwise(b.starts)]
    found = torch.tensor([logp for one in scores for logp in one])
    wide, rounded = (expected(path, is_wide=is_wide) for is_wide in (True, False))
    assert far(found, wide) < far(wide, rounded) / 2

    first, computed = engine.prefill([tokens[:2].tolist()])
    engine.cache.write(0, computed.keys, computed.values)
    decoded = [engine.decode([token], [2 + at], full_width=False) for at, token in enumerate(tokens[2:].tolist())]
    logits = torch.cat([first, *decoded])
    assert (logits - logits_of(plain(path), tokens, is_wide=True)[1:]).abs().max() < 0.1
    assert (logits.bfloat16() == logits).float().mean() < 0.1, "some were rounded"
