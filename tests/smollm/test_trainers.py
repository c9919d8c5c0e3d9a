"""GRPO on real weights: both trainers make the same step, and how much of bfloat16 weights a step changes."""

from pathlib import Path

import msgspec
import pytest
import torch

from runtime.batching import make_batch
from runtime.comm.buckets import buckets
from runtime.comm.weights.delta import Kept, apply
from runtime.comm.weights.tensors import cut, digest
from runtime.config import Sync
from runtime.trainer.algorithms import grpo
from runtime.types import Group
from tests.contract.trainer_setup import around, make_trainer, train, weights_of

pytestmark = [pytest.mark.smollm, pytest.mark.timeout(1200)]

STEPS = 4


def batch_of(groups: list[Group], step: int = 0):
    """Of answers that are liked in turn, so that no two steps are the same."""
    liked = [
        msgspec.structs.replace(
            group,
            samples=tuple(
                msgspec.structs.replace(s, reward=float((s.index >> step % 2) % 2 == step // 2 % 2))
                for s in group.samples
            ),
        )
        for group in groups
    ]
    return make_batch(liked, step, grpo.build(grpo.Config()), num_dp=1, num_updates=1, max_tokens=512)


def test_both_trainers_make_the_same_step(smollm: Path, groups: list[Group]) -> None:
    changes, told = {}, {}
    for kind in ("fsdp", "megatron"):
        with around(kind):
            trainer = make_trainer(smollm, kind=kind)
            start = weights_of(trainer)
            told[kind] = train(trainer, batch_of(groups))
            changes[kind] = {name: tensor - start.pop(name) for name, tensor in trainer.weights()}
            del trainer
    fsdp, megatron = told["fsdp"], told["megatron"]
    assert fsdp["grad_norm"] > 0
    assert fsdp["mismatch_max"] < 1e-3 and megatron["mismatch_max"] < 1e-3, "transformers sampled the answers"
    assert megatron["grad_norm"] == pytest.approx(fsdp["grad_norm"], rel=1e-3)
    assert changes["fsdp"].keys() == changes["megatron"].keys()
    size = sum(float(c.square().sum()) for c in changes["fsdp"].values()) ** 0.5
    off = sum(float((c - changes["megatron"][n]).square().sum()) for n, c in changes["fsdp"].items()) ** 0.5
    print(f"\na step of both trainers: gradient norm {fsdp['grad_norm']:.4f}, weights {off / size:.1e} apart")
    assert 0 < off < 1e-3 * size


@pytest.mark.parametrize("learning_rate", [1e-6, 1e-5])
def test_a_delta_of_a_real_step_is_small(smollm: Path, groups: list[Group], learning_rate: float) -> None:
    trainer = make_trainer(
        smollm, precision="bfloat16", learning_rate=learning_rate, clip_norm=1.0, eps=1e-8, weight_decay=0.0
    )
    manifest = msgspec.structs.replace(trainer.manifest(), bucket_bytes=Sync().bucket_bytes)
    held, kept = weights_of(trainer), Kept()
    kept.keep(list(held.items()))
    full = sum(t.nbytes for t in held.values())
    ratios = []
    for step in range(STEPS):
        train(trainer, batch_of(groups, step))
        new = weights_of(trainer)
        items = sum(int((tensor != held[name]).sum()) for name, tensor in new.items())
        changed = sum(int((t.view(torch.uint8) != held[n].view(torch.uint8)).sum()) for n, t in new.items())
        payloads = [kept.encode(named) for named in cut(manifest, iter(new.items()))]
        assert len(payloads) == len(buckets(manifest))
        for payload in payloads:
            apply(payload, held)
        assert all(digest(held[name]) == digest(tensor) for name, tensor in new.items())
        ratios.append(sum(map(len, payloads)) / full)
        print(
            f"\nlearning rate {learning_rate:g}, step {step + 1}: {items / (full / 2):.2%} of the items and "
            f"{changed / full:.2%} of the bytes changed; the delta is {ratios[-1]:.2%} of {full / 1e6:.0f} MB",
            end="",
        )
    assert 0 < max(ratios) < 1
