"""What must hold of PPO's advantages, returns and losses for any input."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from runtime.trainer import maths
from runtime.trainer.algorithms import ppo
from runtime.trainer.base import Scores
from runtime.types import MicroBatch
from tests.maths.test_grpo import random_batch


def scored_batch(seed: int) -> MicroBatch:
    _, batch = random_batch(seed)
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(len(batch.tokens), generator=g, dtype=torch.float64)
    rewards = torch.randn(len(batch.starts) - 1, generator=g, dtype=torch.float64)
    batch = msgspec.structs.replace(batch.with_extras({"values": values}), per_seq={"reward": rewards})
    assert batch.loss_mask.any() and not batch.loss_mask.all()
    return batch


def part(batch: MicroBatch, first: int, last: int) -> MicroBatch:
    """Sequences first to last - 1."""
    a, b = batch.starts[first], batch.starts[last]
    cut = msgspec.structs.replace(batch, per_seq={}).map(lambda x: x[a:b])
    starts = tuple(start - a for start in batch.starts[first : last + 1])
    return msgspec.structs.replace(cut, starts=starts, per_seq={"reward": batch.per_seq["reward"][first:last]})


OPTIONS = [
    ppo.Config(gamma=0.9, lam=0.8),
    ppo.Config(kl=0.3),
    ppo.Config(whiten=False, kl=0.3, kl_in="loss"),
]


def alone(values: torch.Tensor) -> torch.Tensor:
    return values


def refine(options: ppo.Config, *share: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    refined, metrics = ppo.build(options).refine(list(share), alone)
    advantages = torch.cat([batch.advantages for batch in refined])
    return advantages, torch.cat([batch.extras["returns"] for batch in refined]), metrics


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_cut_into_micro_batches_does_not_matter_nor_do_empty_ones(options) -> None:
    batch = scored_batch(0)
    whole = refine(options, batch)
    cut = refine(options, part(batch, 0, 1), part(batch, 0, 0), part(batch, 1, 4))
    assert cut[0].allclose(whole[0], atol=1e-12) and cut[1].allclose(whole[1], atol=1e-12)
    assert cut[2] == pytest.approx(whole[2], abs=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("garbage", [math.nan, -math.inf, 1e30])
def test_what_lies_outside_the_mask_does_not_matter(options, garbage: float) -> None:
    batch = scored_batch(1)
    spoilt = batch.with_extras({k: v.where(batch.loss_mask, garbage) for k, v in batch.extras.items()})
    for ours, theirs in zip(refine(options, batch), refine(options, spoilt), strict=True):
        assert ours == theirs if isinstance(ours, dict) else ours.equal(theirs)
    found = []
    for given in (batch, spoilt):
        refined, _ = ppo.build(options).refine([given], alone)
        values = given.extras["values"].clone().requires_grad_()
        loss, _ = ppo.build(options).value_loss(Scores(values=values + 0.3), refined[0])
        loss.backward()
        found.append((float(loss.detach()), values.grad.where(batch.loss_mask, 0.0)))
        assert values.grad[~batch.loss_mask].eq(0).all()
    assert found[0][0] == found[1][0] and found[0][1].equal(found[1][1])


def test_advantages_are_white_over_ranks() -> None:
    """Two ranks, each of which calls `all_sum` as often as the other; here one after the other, the sums looked up."""
    batch, options = scored_batch(2), ppo.Config()
    shares = [[part(batch, 0, 2)], [part(batch, 2, 4)]]
    whole, _, metrics = refine(options, batch)
    asked: list[list[torch.Tensor]] = [[], []]
    for _ in range(8):  # each round knows one sum more
        for rank, share in enumerate(shares):
            calls = iter(range(99))

            def all_sum(x, rank=rank, calls=calls):
                call = next(calls)
                asked[rank][call:] = [x]
                return x + asked[1 - rank][call] if call < len(asked[1 - rank]) else x

            refined, found = ppo.build(options).refine(share, all_sum)
            a = batch.starts[2 * rank]
            theirs = whole[a : a + len(refined[0].advantages)]
    assert refined[0].advantages.allclose(theirs, atol=1e-12) and found == pytest.approx(metrics, abs=1e-12)
    inside = whole[batch.loss_mask]
    assert float(inside.mean()) == pytest.approx(0, abs=1e-12) and float(inside.var()) == pytest.approx(1, abs=1e-6)


def test_with_no_discount_returns_are_the_rewards_and_a_perfect_critic_explains_all() -> None:
    batch = scored_batch(3)
    _, returns, _ = refine(ppo.Config(), batch)
    each = batch.per_seq["reward"].repeat_interleave(torch.tensor(batch.starts).diff())
    assert returns.allclose(each.where(batch.loss_mask, 0.0), atol=1e-12)
    *_, metrics = refine(ppo.Config(), batch.with_extras({"values": returns}))
    assert metrics["explained_variance"] == pytest.approx(1.0)
    *_, metrics = refine(ppo.Config(), batch.with_extras({"values": returns * 0}))
    assert metrics["explained_variance"] == pytest.approx(0.0)


def test_moments_of_large_values_do_not_cancel() -> None:
    x = torch.tensor([1e4, 1e4 + 1, 1e4 + 2])
    assert maths.moments([x], [torch.ones(3, dtype=torch.bool)], alone) == (1e4 + 1, 1.0)


def test_a_batch_without_trainable_tokens_stays_finite() -> None:
    batch = scored_batch(4)
    nothing = msgspec.structs.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    advantages, returns, metrics = refine(ppo.Config(kl=0.1), nothing)
    assert advantages.eq(0).all() and returns.eq(0).all() and all(map(math.isfinite, metrics.values()))
    assert ppo.build(ppo.Config()).refine([], alone) == ([], {})
