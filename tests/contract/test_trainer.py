"""The contract of a Trainer, held by `fsdp` on one rank (in this process) and on two."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from runtime.errors import ConfigError
from runtime.trainer import model as model_module
from runtime.trainer.algorithms import grpo
from runtime.trainer.fsdp import FsdpTrainer
from runtime.types import MicroBatch
from tests.contract.trainer_setup import (
    VOCABULARY,
    batch_of,
    make_model,
    make_trainer,
    obey,
    scarce,
    tensors,
    train,
    train_three,
    two_ranks,
    weights_of,
)

WANTED = frozenset({"logprobs", "entropy"})


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sliding = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return {
        "tied": make_model(folder / "tied"),
        "untied": make_model(folder / "untied", tie_word_embeddings=False),
        "sliding": make_model(folder / "sliding", **sliding),
    }


@pytest.fixture(scope="module")
def one_rank(models, tmp_path_factory) -> dict[str, tuple[FsdpTrainer, list[dict[str, float]]]]:
    """Trainers after the same three updates that two ranks make."""
    trainers = {name: make_trainer(models[name]) for name in ("tied", "untied")}
    return {name: (trainer, train_three(trainer, 1)) for name, trainer in trainers.items()}


@pytest.fixture(scope="module")
def folder(models, one_rank, tmp_path_factory) -> Path:
    """What two ranks wrote; they also read the checkpoint that one rank writes into it."""
    folder = tmp_path_factory.mktemp("ranks")
    one_rank["tied"][0].save(folder / "one-rank")
    torch.multiprocessing.spawn(two_ranks, (folder, models), nprocs=2, join=True)
    return folder


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
def test_packed_scores_are_those_of_each_sequence_alone(models, name: str, temperature: float) -> None:
    trainer = make_trainer(models[name], temperature=temperature)
    (batch,) = tensors(batch_of(0, max_tokens=1000).shares[0].updates[0])
    lengths = [b - a for a, b in pairwise(batch.starts)]
    assert len(set(lengths)) > 3, "several buckets, some of them padded"
    (scores,) = trainer.score([batch], "policy", WANTED)
    logprobs, entropy = one_by_one(models[name], batch, temperature)
    assert (scores.logprobs - logprobs).abs().max() < 1e-5
    assert (scores.entropy - entropy).abs().max() < 1e-5


def test_sequences_of_equal_length(models) -> None:
    (batch,) = tensors(batch_of(0, longest=5, max_tokens=1000).shares[0].updates[0])
    assert len({b - a for a, b in pairwise(batch.starts)}) == 1
    (scores,) = make_trainer(models["tied"]).score([batch], "policy", WANTED)
    assert (scores.logprobs - one_by_one(models["tied"], batch, 1.0)[0]).abs().max() < 1e-5


def test_other_sequences_do_not_reach_a_sequence(models) -> None:
    trainer = make_trainer(models["tied"])
    (batch,) = tensors(batch_of(0, max_tokens=1000).shares[0].updates[0])
    second = slice(batch.starts[1], batch.starts[2])
    tokens = (batch.tokens + 1) % VOCABULARY
    tokens[second] = batch.tokens[second]
    changed = msgspec.structs.replace(batch, tokens=tokens)
    before, after = trainer.score([batch, changed], "policy", WANTED)
    assert (before.logprobs[second] - after.logprobs[second]).abs().max() < 1e-5
    assert (before.logprobs - after.logprobs).abs().max() > 0.1


def test_a_start_has_no_log_prob_even_under_the_mask(models) -> None:
    (batch,) = tensors(batch_of(0, max_tokens=1000).shares[0].updates[0])
    everything = msgspec.structs.replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    (scores,) = make_trainer(models["tied"]).score([everything], "policy", WANTED)
    assert scores.logprobs[list(batch.starts[:-1])].eq(0).all()
    assert scores.logprobs.ne(0).sum() == len(batch.tokens) - len(batch.starts) + 1


@pytest.mark.parametrize("denominator", ["tokens", "answers"])
def test_gradients_are_those_of_a_plain_loop(models, denominator: str) -> None:
    """Unpacked, one sequence at a time, the loss written out: mean over tokens, or over answers of their means."""
    options = grpo.Config(denominator=denominator)
    trainer = make_trainer(models["untied"], learning_rate=0.0, clip_norm=0.0)
    packed = batch_of(1, max_tokens=50, denominator=denominator)
    train(trainer, packed, options)
    assert len(packed.shares[0].updates[0]) > 3

    reference = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float32)
    (batch,) = tensors(batch_of(1, max_tokens=1000).shares[0].updates[0])
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
    for name, p in trainer.model.named_parameters():
        assert torch.allclose(p.grad, expected[name].grad, atol=1e-6, rtol=1e-4), name


def test_the_cut_into_micro_batches_does_not_matter(models) -> None:
    whole, cut = make_trainer(models["tied"]), make_trainer(models["tied"])
    a, b = train(whole, batch_of(3, max_tokens=1000)), train(cut, batch_of(3, max_tokens=30))
    assert a == pytest.approx(b, abs=1e-5)
    for (name, x), (_, y) in zip(whole.weights(), cut.weights(), strict=True):
        assert torch.allclose(x, y, atol=1e-5), name


def test_updates_teach_what_is_rewarded(models) -> None:
    """Answers with an even first token are right: their tokens become likelier, update by update."""
    trainer = make_trainer(models["tied"], learning_rate=3e-3, clip_norm=1.0)
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


def test_old_log_probs_are_what_the_policy_gave(models) -> None:
    trainer = make_trainer(models["tied"])
    batch = batch_of(5)
    share = tensors(batch.shares[0].updates[0])
    scores = trainer.score(share, "policy", frozenset({"logprobs"}))
    share = [b.with_extras({"old": s.logprobs}) for b, s in zip(share, scores, strict=True)]
    metrics = trainer.update(share, grpo.build(grpo.Config()).losses, batch.shares[0].totals[0], "tokens")
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6) and metrics["kl_old"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["mismatch"] > 0.1, "the engine's log-probs of these groups are made up"


def test_warm_up_and_clipping(models) -> None:
    trainer = make_trainer(models["tied"], warmup_updates=4, learning_rate=1.0, clip_norm=0.0)
    before = weights_of(trainer)
    rates = [train(trainer, batch_of(0))["learning_rate"] for _ in range(2)]
    assert rates == [0.25, 0.5]
    clipped = make_trainer(models["tied"], clip_norm=1e-3)
    assert train(clipped, batch_of(0))["grad_norm"] > 1e-3
    grads = [p.grad for p in clipped.model.parameters()]
    assert float(torch.nn.utils.get_total_norm(grads)) == pytest.approx(1e-3, rel=1e-2)
    assert not weights_of(trainer)["model.norm.weight"].equal(before["model.norm.weight"])


def test_learning_rate_0_changes_no_bit(models) -> None:
    trainer = make_trainer(models["tied"], learning_rate=0.0)
    before = weights_of(trainer)
    train(trainer, batch_of(0))
    assert all(tensor.equal(before[name]) for name, tensor in trainer.weights())


def test_an_update_that_is_not_finite_is_skipped_and_counted(models) -> None:
    trainer, plain = make_trainer(models["tied"]), make_trainer(models["tied"])
    before = weights_of(trainer)
    (batch,) = tensors(batch_of(0, max_tokens=1000).shares[0].updates[0])
    broken = msgspec.structs.replace(batch, weights=batch.weights * math.inf)
    metrics = trainer.update([broken], grpo.build(grpo.Config()).losses, batch_of(0).shares[0].totals[0], "tokens")
    assert metrics["skipped_updates"] == 1.0
    assert all(tensor.equal(before[name]) for name, tensor in trainer.weights())
    assert train(trainer, batch_of(1)) == train(plain, batch_of(1)), "nothing of it is left"


def test_an_empty_micro_batch_adds_a_zero_that_hangs_on_the_graph(models) -> None:
    trainer, plain = make_trainer(models["tied"]), make_trainer(models["tied"])
    batch = batch_of(0)
    empty = tensors(batch_of(2, num_dp=2, num_groups=1, num_samples=1).shares[1].updates[0])
    share = [*tensors(batch.shares[0].updates[0]), *empty]
    metrics = trainer.update(share, grpo.build(grpo.Config()).losses, batch.shares[0].totals[0], "tokens")
    assert metrics == train(plain, batch)
    filled = model_module.fill(empty[0])
    loss, _ = grpo.build(grpo.Config()).loss(trainer._forward(filled, frozenset()), filled)
    loss.backward()
    assert float(loss.detach()) == 0.0 and all(p.grad is not None for p in trainer.model.parameters())


def test_manifest_names_what_is_sent_and_tied_weights_go_once(models) -> None:
    for name, tied in (("tied", True), ("untied", False)):
        trainer = make_trainer(models[name])
        manifest, sent = trainer.manifest(), list(trainer.weights())
        assert manifest.names == tuple(n for n, _ in sent)
        assert manifest.shapes == tuple(tuple(t.shape) for _, t in sent)
        assert set(manifest.dtypes) == {"float32"} and manifest.bucket_bytes == 1000
        assert ("lm_head.weight" in manifest.names) == (not tied)
        on_disk = load_file(models[name] / "model.safetensors")
        assert all(t.equal(on_disk[n]) for n, t in sent) and len(sent) == len(on_disk)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_restore_is_bit_exact(models, one_rank, name: str, tmp_path: Path) -> None:
    trainer, _ = one_rank[name]
    trainer.save(tmp_path / "checkpoint")
    other = make_trainer(models[name], warmup_updates=9)
    other.restore(tmp_path / "checkpoint")
    control = make_trainer(models[name], warmup_updates=9)
    control.model.load_state_dict(trainer.model.state_dict())
    trained = train(other, batch_of(6))
    assert trained["learning_rate"] == pytest.approx(4e-2 / 9), "the count of updates is restored too"
    again = make_trainer(models[name], warmup_updates=9)
    again.restore(tmp_path / "checkpoint")
    assert train(again, batch_of(6)) == trained
    assert all(t.equal(weights_of(again)[n]) for n, t in other.weights())
    train(control, batch_of(6))
    assert not all(t.equal(weights_of(control)[n]) for n, t in other.weights()), "AdamW's state is restored too"


def test_restored_and_undisturbed_go_on_alike(models, tmp_path: Path) -> None:
    undisturbed = make_trainer(models["tied"])
    undisturbed.save(tmp_path / "start")
    train(undisturbed, batch_of(0))
    undisturbed.save(tmp_path / "one")
    expected = train(undisturbed, batch_of(1))
    for start, seeds in (("start", (0, 1)), ("one", (1,))):
        other = make_trainer(models["tied"])
        other.restore(tmp_path / start)
        found = [train(other, batch_of(seed)) for seed in seeds][-1]
        assert found == expected
        assert all(t.equal(weights_of(undisturbed)[n]) for n, t in other.weights())


def test_export_is_a_folder_for_from_pretrained(models, one_rank, tmp_path: Path) -> None:
    trainer, _ = one_rank["tied"]
    trainer.export(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(loaded).__name__ == "Qwen3ForCausalLM" and loaded.dtype == torch.float32
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    state = loaded.state_dict()
    assert all(tensor.equal(state[name]) for name, tensor in trainer.weights())
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == '{"kept": "as it is"}'
    told = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert told["architectures"] == ["Qwen3ForCausalLM"] and told["tie_word_embeddings"]


def test_sleep_and_wake_change_nothing(models) -> None:
    trainer, other = make_trainer(models["tied"]), make_trainer(models["tied"])
    train(trainer, batch_of(0)), train(other, batch_of(0))
    trainer.sleep()
    trainer.wake()
    assert train(trainer, batch_of(1)) == train(other, batch_of(1))


def test_greedy_sampling_cannot_be_trained_on(models) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.temperature"):
        make_trainer(models["tied"], temperature=0.0)


# ---- two ranks


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_two_ranks_train_as_one_does(folder: Path, one_rank, name: str) -> None:
    trainer, metrics = one_rank[name]
    theirs = json.loads((folder / "metrics.json").read_text())[f"{name}-float32"]
    for mine, other in zip(metrics, theirs, strict=True):
        assert other == pytest.approx(mine, abs=1e-5)
    weights = load_file(folder / f"{name}-float32.safetensors")
    for key, tensor in trainer.weights():
        assert (tensor - weights[key]).abs().max() < 1e-6, key


def test_a_rank_without_work_scores_and_trains_with_the_other(folder: Path, models) -> None:
    theirs = json.loads((folder / "metrics.json").read_text())["scarce"][0]
    assert theirs == pytest.approx(obey(make_trainer(models["untied"]), scarce(1).shares[0]), abs=1e-5)
    assert theirs["kl_old"] > 0, "the second update is off the policy that old log-probs were taken from"


def test_scoring_leaves_float32_shards(folder: Path, models) -> None:
    scored, start = load_file(folder / "scored.safetensors"), load_file(models["untied"] / "model.safetensors")
    assert all(scored[name].equal(tensor) for name, tensor in start.items())


def test_checkpoints_of_two_ranks_are_read_by_one(folder: Path, models, one_rank) -> None:
    trainer = make_trainer(models["tied"])
    trainer.restore(folder / "tied-float32")
    weights = load_file(folder / "tied-float32.safetensors")
    assert all(tensor.equal(weights[name]) for name, tensor in trainer.weights())
    whole = make_trainer(models["tied"])
    whole.restore(folder / "one-rank")
    assert train(trainer, batch_of(7)) == pytest.approx(train(whole, batch_of(7)), abs=1e-5)
    for (name, a), (_, b) in zip(trainer.weights(), whole.weights(), strict=True):
        assert (a - b).abs().max() < 1e-5, name


def test_checkpoints_of_one_rank_are_read_by_two(folder: Path, models) -> None:
    trainer = make_trainer(models["tied"])
    trainer.restore(folder / "one-rank")
    restored = load_file(folder / "restored.safetensors")
    assert all(tensor.equal(restored[name]) for name, tensor in trainer.weights())
    theirs = json.loads((folder / "metrics.json").read_text())["restored"]
    assert theirs == [pytest.approx(train(trainer, batch_of(7)), abs=1e-5)]
    after = load_file(folder / "restored-next.safetensors")
    assert all((tensor - after[name]).abs().max() < 1e-5 for name, tensor in trainer.weights())


def test_bfloat16_keeps_float32_masters(folder: Path, models, one_rank) -> None:
    """A restored master has bits that bfloat16 has not, and follows the float32 run."""
    sent = load_file(folder / "tied-bfloat16.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in sent.values())
    trainer = make_trainer(models["tied"])
    trainer.restore(folder / "tied-bfloat16")
    start = load_file(models["tied"] / "model.safetensors")
    for name, master in trainer.weights():
        assert master.dtype == torch.float32 and not master.equal(start[name])
        assert master.bfloat16().equal(sent[name])
    assert any(not master.bfloat16().float().equal(master) for _, master in trainer.weights())
    theirs = json.loads((folder / "metrics.json").read_text())
    for kind in ("tied-bfloat16", "alone-bfloat16"):
        norms = [metrics["grad_norm"] for metrics in theirs[kind]]
        assert norms == pytest.approx([metrics["grad_norm"] for metrics in one_rank["tied"][1]], rel=0.1), kind


def test_exports_of_sharded_models_bear_the_plain_class(folder: Path) -> None:
    for name, dtype in (("untied-float32", torch.float32), ("tied-bfloat16", torch.bfloat16)):
        loaded = AutoModelForCausalLM.from_pretrained(folder / f"{name}-hf", dtype="auto")
        assert loaded.config.architectures == ["Qwen3ForCausalLM"] and loaded.dtype == dtype
        state = loaded.state_dict()
        assert all(tensor.equal(state[key]) for key, tensor in load_file(folder / f"{name}.safetensors").items())
