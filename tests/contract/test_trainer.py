"""The contract of a Trainer, held by every kind on one rank, in this process; test_ranks holds it on two."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from runtime import config
from runtime.errors import ConfigError
from runtime.rollout.embedded.weights import Weights
from runtime.trainer import factory
from runtime.trainer import model as model_module
from runtime.trainer.algorithms import grpo
from runtime.trainer.base import Trainer
from runtime.types import MicroBatch
from tests.contract.trainer_setup import (
    CPU,
    LAYOUTS,
    VOCABULARY,
    WANTED,
    around,
    batch_of,
    gradients,
    make_model,
    make_trainer,
    named_modules,
    tensors,
    train,
    weights_of,
)
from tests.megatron import models as families

PADDING = 5
"""As a model's config may name a token that means something too: it is trained like any other."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sliding = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return {
        "tied": make_model(folder / "tied"),
        "untied": make_model(folder / "untied", tie_word_embeddings=False, pad_token_id=PADDING),
        "sliding": make_model(folder / "sliding", **sliding),
    }


@pytest.fixture(scope="module", params=LAYOUTS)
def kind(request) -> Iterator[str]:
    with around(request.param):
        yield request.param


@pytest.fixture(scope="module")
def make(kind) -> Callable[..., Trainer]:
    return partial(make_trainer, kind=kind)


@pytest.fixture(scope="module")
def trained(make, models) -> dict[str, Trainer]:
    """Trainers after two updates."""
    trainers = {name: make(models[name]) for name in ("tied", "untied")}
    for trainer in trainers.values():
        train(trainer, batch_of(0)), train(trainer, batch_of(1))
    return trainers


def one_by_one(path: Path, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies by transformers alone, a sequence at a time, with its own attention."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    logprobs, entropy = torch.zeros(len(batch.tokens)), torch.zeros(len(batch.tokens))
    for a, b in pairwise(batch.starts):
        tokens = batch.tokens[a:b].long()
        with torch.no_grad():
            logp = log_softmax(model(input_ids=tokens[None]).logits[0] / temperature, -1)
        logprobs[a + 1 : b] = logp[:-1].gather(1, tokens[1:, None]).squeeze(1)
        entropy[a + 1 : b] = -(logp.exp() * logp).sum(-1)[:-1]
    return logprobs.where(batch.loss_mask, 0.0), entropy.where(batch.loss_mask, 0.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["tied", "sliding"])
def test_packed_scores_are_those_of_each_sequence_alone(kind, make, models, name: str, temperature: float) -> None:
    if (kind, name) == ("megatron", "sliding"):
        with pytest.raises(ConfigError, match="use_sliding_window"):
            make(models[name])
        return
    trainer = make(models[name], temperature=temperature)
    (batch,) = tensors(batch_of(0, max_tokens=1000).shares[0].updates[0])
    lengths = [b - a for a, b in pairwise(batch.starts)]
    assert len(set(lengths)) > 3, "several buckets, some of them padded"
    (scores,) = trainer.score([batch], "policy", WANTED)
    logprobs, entropy = one_by_one(models[name], batch, temperature)
    assert (scores.logprobs - logprobs).abs().max() < 1e-5
    assert (scores.entropy - entropy).abs().max() < 1e-5


def test_sequences_of_equal_length(make, models) -> None:
    (batch,) = tensors(batch_of(0, longest=5, max_tokens=1000).shares[0].updates[0])
    assert len({b - a for a, b in pairwise(batch.starts)}) == 1
    (scores,) = make(models["tied"]).score([batch], "policy", WANTED)
    assert (scores.logprobs - one_by_one(models["tied"], batch, 1.0)[0]).abs().max() < 1e-5


def test_other_sequences_do_not_reach_a_sequence(make, models) -> None:
    trainer = make(models["tied"])
    (batch,) = tensors(batch_of(0, max_tokens=1000).shares[0].updates[0])
    second = slice(batch.starts[1], batch.starts[2])
    tokens = (batch.tokens + 1) % VOCABULARY
    tokens[second] = batch.tokens[second]
    changed = msgspec.structs.replace(batch, tokens=tokens)
    before, after = trainer.score([batch, changed], "policy", WANTED)
    assert (before.logprobs[second] - after.logprobs[second]).abs().max() < 1e-5
    assert (before.logprobs - after.logprobs).abs().max() > 0.1


def test_a_start_has_no_log_prob_even_under_the_mask(make, models) -> None:
    (batch,) = tensors(batch_of(0, max_tokens=1000).shares[0].updates[0])
    everything = msgspec.structs.replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    (scores,) = make(models["tied"]).score([everything], "policy", WANTED)
    assert scores.logprobs[list(batch.starts[:-1])].eq(0).all()
    assert scores.logprobs.ne(0).sum() == len(batch.tokens) - len(batch.starts) + 1


@pytest.mark.parametrize("denominator", ["tokens", "answers"])
def test_gradients_are_those_of_a_plain_loop(make, models, denominator: str) -> None:
    """Unpacked, one sequence at a time, the loss written out: mean over tokens, or over answers of their means."""
    options = grpo.Config(denominator=denominator)
    trainer = make(models["untied"], learning_rate=0.0, clip_norm=0.0)
    packed = batch_of(1, max_tokens=50, denominator=denominator)
    train(trainer, packed, options)
    assert len(packed.shares[0].updates[0]) > 3

    reference = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float32)
    reference.get_input_embeddings().padding_idx = None
    (batch,) = tensors(batch_of(1, max_tokens=1000).shares[0].updates[0])
    assert PADDING in batch.tokens
    per_answer, num_tokens = [], int(batch.loss_mask.sum())
    for a, b in pairwise(batch.starts):
        logits, tokens, mask = (
            reference(batch.tokens[a:b].long()[None]).logits[0],
            batch.tokens[a:b].long(),
            batch.loss_mask[a:b],
        )
        logp = log_softmax(logits[:-1], -1).gather(1, tokens[1:, None]).squeeze(1)[mask[1:]]
        per_answer.append(-batch.advantages[a:b][mask] * (logp - logp.detach()).exp())
    if denominator == "tokens":
        (sum(x.sum() for x in per_answer) / num_tokens).backward()
    else:
        (sum(x.mean() for x in per_answer) / len(per_answer)).backward()
    expected = dict(reference.named_parameters())
    found = gradients(trainer)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert torch.allclose(grad, expected[name].grad, atol=1e-6, rtol=1e-4), name


def test_the_cut_into_micro_batches_does_not_matter(make, models) -> None:
    whole, cut = make(models["tied"]), make(models["tied"])
    a, b = train(whole, batch_of(3, max_tokens=1000)), train(cut, batch_of(3, max_tokens=30))
    assert a == pytest.approx(b, abs=1e-5)
    for (name, x), (_, y) in zip(whole.weights(), cut.weights(), strict=True):
        assert torch.allclose(x, y, atol=1e-5), name


def test_updates_teach_what_is_rewarded(make, models) -> None:
    """Answers with an even first token are right: their tokens become likelier, update by update."""
    trainer = make(models["tied"], learning_rate=3e-3, clip_norm=1.0)
    (batch,) = tensors(batch_of(4, max_tokens=1000).shares[0].updates[0])
    good = torch.arange(len(batch.tokens)) < batch.starts[8]
    taught = msgspec.structs.replace(batch, advantages=good.float() * 2 - 1)
    gaps = []
    for _ in range(4):
        (scores,) = trainer.score([taught], "policy", WANTED)
        gaps.append(float(scores.logprobs[good].sum() - scores.logprobs[~good].sum()))
        totals = batch_of(4).shares[0].totals[0]
        trainer.update([taught], grpo.build(grpo.Config()).losses, totals, "tokens")
    assert all(later > earlier + 1 for earlier, later in pairwise(gaps)), gaps


def test_old_log_probs_are_what_the_policy_gave(make, models) -> None:
    trainer = make(models["tied"])
    batch = batch_of(5)
    share = tensors(batch.shares[0].updates[0])
    scores = trainer.score(share, "policy", frozenset({"logprobs"}))
    share = [b.with_extras({"old": s.logprobs}) for b, s in zip(share, scores, strict=True)]
    metrics = trainer.update(share, grpo.build(grpo.Config()).losses, batch.shares[0].totals[0], "tokens")
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6) and metrics["kl_old"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["mismatch"] > 0.1, "the engine's log-probs of these groups are made up"


def test_warm_up_and_clipping(make, models) -> None:
    trainer = make(models["tied"], warmup_updates=4, learning_rate=1.0, clip_norm=0.0)
    before = weights_of(trainer)
    rates = [train(trainer, batch_of(0))["learning_rate"] for _ in range(2)]
    assert rates == [0.25, 0.5]
    clipped = make(models["tied"], clip_norm=1e-3)
    assert train(clipped, batch_of(0))["grad_norm"] > 1e-3
    assert float(torch.nn.utils.get_total_norm(gradients(clipped).values())) == pytest.approx(1e-3, rel=1e-2)
    assert not weights_of(trainer)["model.norm.weight"].equal(before["model.norm.weight"])


def test_learning_rate_0_changes_no_bit(make, models) -> None:
    trainer = make(models["tied"], learning_rate=0.0)
    before = weights_of(trainer)
    train(trainer, batch_of(0))
    assert all(tensor.equal(before[name]) for name, tensor in trainer.weights())


def test_an_update_that_is_not_finite_is_skipped_and_counted(make, models) -> None:
    trainer, plain = make(models["tied"]), make(models["tied"])
    before = weights_of(trainer)
    (batch,) = tensors(batch_of(0, max_tokens=1000).shares[0].updates[0])
    broken = msgspec.structs.replace(batch, weights=batch.weights * math.inf)
    metrics = trainer.update([broken], grpo.build(grpo.Config()).losses, batch_of(0).shares[0].totals[0], "tokens")
    assert metrics["skipped_updates"] == 1.0
    assert all(tensor.equal(before[name]) for name, tensor in trainer.weights())
    assert train(trainer, batch_of(1)) == train(plain, batch_of(1)), "nothing of it is left"


def test_an_empty_micro_batch_adds_nothing(make, models) -> None:
    trainer, plain = make(models["tied"]), make(models["tied"])
    batch = batch_of(0)
    empty = tensors(batch_of(2, num_dp=2, num_groups=1, num_samples=1).shares[1].updates[0])
    share = [*tensors(batch.shares[0].updates[0]), *empty]
    metrics = trainer.update(share, grpo.build(grpo.Config()).losses, batch.shares[0].totals[0], "tokens")
    assert metrics == train(plain, batch)


def test_an_empty_micro_batch_of_fsdp_is_a_zero_that_hangs_on_the_graph(models) -> None:
    trainer = make_trainer(models["tied"])
    (empty,) = tensors(batch_of(2, num_dp=2, num_groups=1, num_samples=1).shares[1].updates[0])
    filled = model_module.fill(empty)
    loss, _ = grpo.build(grpo.Config()).loss(trainer._forward(filled, frozenset()), filled)
    loss.backward()
    assert float(loss.detach()) == 0.0 and all(p.grad is not None for p in trainer.model.parameters())


def test_manifest_names_what_is_sent_and_tied_weights_go_once(make, models) -> None:
    for name, tied in (("tied", True), ("untied", False)):
        trainer = make(models[name])
        manifest, sent = trainer.manifest(), list(trainer.weights())
        assert manifest.names == tuple(n for n, _ in sent)
        assert manifest.shapes == tuple(tuple(t.shape) for _, t in sent)
        assert set(manifest.dtypes) == {"float32"} and manifest.bucket_bytes == 1000
        assert ("lm_head.weight" in manifest.names) == (not tied)
        on_disk = load_file(models[name] / "model.safetensors")
        assert all(t.equal(on_disk[n]) for n, t in sent) and len(sent) == len(on_disk)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_are_sent_one_by_one_as_files_hold_them(make, name: str, tmp_path: Path) -> None:
    trainer = make(families.make(name, tmp_path))
    train(trainer, batch_of(0))
    trainer.export(tmp_path / "hf")
    on_disk = {n: t for file in (tmp_path / "hf").glob("*.safetensors") for n, t in load_file(file).items()}
    sent, manifest = weights_of(trainer), trainer.manifest()
    assert manifest.names == tuple(sent) and manifest.shapes == tuple(tuple(t.shape) for t in sent.values())
    assert all(t.equal(on_disk[n]) for n, t in sent.items()) and any(".experts.3.up_proj." in n for n in sent)
    assert sent.keys() == on_disk.keys() and (name == "qwen3_moe" or any("e_score_correction_bias" in n for n in sent))

    net = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).requires_grad_(False)
    engine, exported = Weights(net), AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for _ in range(2):
        engine.begin()
        engine.load(sent.items())
        engine.end()
        assert all(t.equal(net.state_dict()[n]) for n, t in exported.state_dict().items())
        engine.release()
        assert all(p.numel() == 0 for p in net.parameters())
        engine.resume()


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_restore_is_bit_exact(make, models, trained, name: str, tmp_path: Path) -> None:
    trainer = trained[name]
    trainer.save(tmp_path / "checkpoint").result()
    other = make(models[name], warmup_updates=9)
    shard = tmp_path / "checkpoint/__0_0.distcp"
    written = shard.read_bytes()
    shard.write_bytes(written[:-4000] + b"?" + written[-3999:])
    with pytest.raises(ConfigError, match=r"__0_0\.distcp: it is not as it was written"):
        other.restore(tmp_path / "checkpoint")
    shard.write_bytes(written)
    other.restore(tmp_path / "checkpoint")
    trainer.export(tmp_path / "hf")
    control = make(tmp_path / "hf", warmup_updates=9)
    metrics = train(other, batch_of(6))
    assert metrics["learning_rate"] == pytest.approx(3e-2 / 9), "the count of updates is restored too"
    again = make(models[name], warmup_updates=9)
    again.restore(tmp_path / "checkpoint")
    assert train(again, batch_of(6)) == metrics
    assert all(t.equal(weights_of(again)[n]) for n, t in other.weights())
    train(control, batch_of(6))
    assert not all(t.equal(weights_of(control)[n]) for n, t in other.weights()), "AdamW's state is restored too"


def test_restored_and_undisturbed_go_on_alike(make, models, tmp_path: Path) -> None:
    undisturbed = make(models["tied"])
    undisturbed.save(tmp_path / "start").result()
    train(undisturbed, batch_of(0))
    undisturbed.save(tmp_path / "one").result()
    expected = train(undisturbed, batch_of(1))
    for start, seeds in (("start", (0, 1)), ("one", (1,))):
        other = make(models["tied"])
        other.restore(tmp_path / start)
        found = [train(other, batch_of(seed)) for seed in seeds][-1]
        assert found == expected
        assert all(t.equal(weights_of(undisturbed)[n]) for n, t in other.weights())
    with pytest.raises(ConfigError, match=r"no checkpoint of this model: .*(lm_head|output_layer)"):
        make(models["untied"]).restore(tmp_path / "start")


def test_what_is_saved_is_written_while_training_goes_on(make, models, tmp_path: Path) -> None:
    trainer, gate = make(models["tied"]), threading.Event()
    train(trainer, batch_of(0))
    before = weights_of(trainer)
    trainer.writer._thread.submit(gate.wait)
    saving = trainer.save(tmp_path / "saved")
    expected = train(trainer, batch_of(1))
    assert not saving.done()
    gate.set()
    saving.result()
    other = make(models["tied"])
    other.restore(tmp_path / "saved")
    assert all(tensor.equal(before[name]) for name, tensor in other.weights())
    assert train(other, batch_of(1)) == expected


def test_export_is_a_folder_for_from_pretrained(trained, tmp_path: Path) -> None:
    trainer = trained["tied"]
    trainer.export(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(loaded).__name__ == "Qwen3ForCausalLM" and loaded.dtype == torch.float32
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    state = loaded.state_dict()
    assert all(tensor.equal(state[name]) for name, tensor in trainer.weights())
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == '{"kept": "as it is"}'
    told = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert told["architectures"] == ["Qwen3ForCausalLM"] and told["tie_word_embeddings"]


def test_sleep_and_wake_change_nothing(make, models) -> None:
    trainer, other = make(models["tied"]), make(models["tied"])
    train(trainer, batch_of(0)), train(other, batch_of(0))
    trainer.sleep()
    trainer.wake()
    assert train(trainer, batch_of(1)) == train(other, batch_of(1))


def test_a_layer_is_computed_again_for_backward(make, models) -> None:
    plain, other = make(models["tied"]), make(models["tied"], recompute="full")
    calls = dict.fromkeys((plain, other), 0)
    for trainer in calls:
        layer = next(module for name, module in named_modules(trainer) if name.endswith("layers.1"))
        layer.register_forward_pre_hook(lambda *_, trainer=trainer: calls.update({trainer: calls[trainer] + 1}))
    assert [train(other, batch_of(seed)) for seed in (0, 1)] == [train(plain, batch_of(seed)) for seed in (0, 1)]
    assert calls[other] == 2 * calls[plain] > 0
    assert all(tensor.equal(weights_of(plain)[name]) for name, tensor in other.weights())


def test_state_on_the_host_changes_no_number(kind, make, models, tmp_path: Path) -> None:
    plain, other = make(models["tied"]), make(models["tied"], offload=True)
    for seed in (0, 1):
        assert train(other, batch_of(seed)) == pytest.approx(train(plain, batch_of(seed)), abs=1e-6)
    other.sleep()
    other.wake()
    other.save(tmp_path / "host").result()
    again = make(models["tied"])
    again.restore(tmp_path / "host")
    other.restore(tmp_path / "host")
    for trainer in (other, again):
        assert all((tensor - weights_of(plain)[name]).abs().max() < 1e-6 for name, tensor in trainer.weights())
    expected = pytest.approx(train(plain, batch_of(2)), abs=1e-6)
    assert train(other, batch_of(2)) == expected and train(again, batch_of(2)) == expected
    if kind == "fsdp":
        dist.destroy_process_group()  # shards need one, also those of a single rank


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_sampling_cannot_be_trained_on(models, name: str) -> None:
    making = factory.ready(models["tied"], config.Trainer(kind=name), CPU, temperature=0.0, bucket_bytes=1)
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.temperature"), making:
        pass
