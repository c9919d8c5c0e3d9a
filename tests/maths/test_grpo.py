"""What must hold of GRPO's advantages and loss for any input."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.trainer import maths
from runtime.trainer.algorithms import grpo
from runtime.trainer.base import Scores
from runtime.types import MicroBatch

REWARDS = st.lists(st.one_of(st.none(), st.floats(-5, 5).map(lambda x: round(x, 3))), min_size=1, max_size=12)


@given(REWARDS)
def test_advantages_have_mean_zero_and_failures_none(rewards) -> None:
    found = grpo.build(grpo.Config()).advantages(rewards)
    known = [a for a, r in zip(found, rewards, strict=True) if r is not None]
    assert all(a == 0.0 for a, r in zip(found, rewards, strict=True) if r is None)
    assert abs(sum(known)) < 1e-6
    assert all(map(math.isfinite, found))


@given(REWARDS, st.integers(0, 100), st.randoms())
def test_failures_and_order_do_not_change_advantages(rewards, extra, random) -> None:
    algorithm = grpo.build(grpo.Config())
    with_failures = [*rewards, *[None] * (extra % 4)]
    order = list(range(len(with_failures)))
    random.shuffle(order)
    shuffled = algorithm.advantages([with_failures[i] for i in order])
    plain = algorithm.advantages(rewards) + [0.0] * (extra % 4)
    assert shuffled == pytest.approx([plain[i] for i in order])


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_rewards_have_no_gradient(eps: float) -> None:
    assert grpo.build(grpo.Config(eps=eps)).advantages([0.5] * 4) == [0.0] * 4


def test_one_known_reward_has_no_baseline() -> None:
    assert grpo.build(grpo.Config()).advantages([1.0, None, None]) == [0.0] * 3


def test_without_normalisation_the_mean_is_subtracted_only() -> None:
    assert grpo.build(grpo.Config(normalise_std=False)).advantages([3.0, 1.0, None]) == [1.0, -1.0, 0.0]


def random_batch(seed: int, lengths: tuple[int, ...] = (5, 9, 3, 7)) -> tuple[torch.Tensor, MicroBatch]:
    """Log-probs and a micro-batch with ratios on both sides of every bound."""
    g = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    logp, old, rollout, adv, ref = (torch.randn(size, generator=g, dtype=torch.float64) for _ in range(5))
    mask = torch.rand(size, generator=g) < 0.6
    starts = (0, *torch.tensor(lengths).cumsum(0).tolist())
    batch = MicroBatch(
        tokens=torch.zeros(size, dtype=torch.int32),
        positions=torch.zeros(size, dtype=torch.int32),
        starts=starts,
        loss_mask=mask,
        weights=torch.rand(size, generator=g, dtype=torch.float64),
        advantages=adv,
        rollout_logprobs=rollout * 0.5,
        extras={"old": old * 0.5, "reference": ref * 0.5},
    )
    return logp * 0.5, batch


OPTIONS = [
    grpo.Config(),
    grpo.Config(correction="tis"),
    grpo.Config(correction="icepop"),
    grpo.Config(dual_clip=3.0),
    grpo.Config(entropy_coef=0.1),
    grpo.Config(kl=0.1),
]


def run(options: grpo.Config, logp: torch.Tensor, batch: MicroBatch):
    logp = logp.clone().requires_grad_()
    loss, sums = grpo.build(options).loss(Scores(logprobs=logp, entropy=(-logp).detach()), batch)
    loss.backward()
    return float(loss.detach()), logp.grad, {name: float(value) for name, value in sums.items()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("garbage", [math.nan, -math.inf, math.inf, 1e30])
def test_what_lies_outside_the_mask_does_not_matter(options, garbage: float) -> None:
    logp, batch = random_batch(0)
    clean = run(options, logp, batch)

    def spoil(values: torch.Tensor) -> torch.Tensor:
        return values.where(batch.loss_mask, garbage)

    spoilt = msgspec.structs.replace(
        batch,
        weights=spoil(batch.weights),
        advantages=spoil(batch.advantages),
        rollout_logprobs=spoil(batch.rollout_logprobs),
        extras={name: spoil(values) for name, values in batch.extras.items()},
    )
    loss, grad, sums = run(options, spoil(logp), spoilt)
    assert loss == clean[0] and sums == clean[2]
    assert grad.where(batch.loss_mask, 0.0).equal(clean[1].where(batch.loss_mask, 0.0))
    assert grad[~batch.loss_mask].eq(0).all(), "a masked token got a gradient"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("broken", ["logprobs", "old", "rollout"])
def test_a_token_without_a_finite_log_prob_adds_nothing(options, broken: str) -> None:
    logp, batch = random_batch(1)
    at = int(batch.loss_mask.nonzero()[0])
    old, rollout = batch.extras["old"].clone(), batch.rollout_logprobs.clone()
    {"logprobs": (logp := logp.clone()), "old": old, "rollout": rollout}[broken][at] = -math.inf
    batch = msgspec.structs.replace(batch.with_extras({"old": old}), rollout_logprobs=rollout)
    loss, grad, _ = run(options, logp, batch)
    assert math.isfinite(loss) and grad.isfinite().all()
    if broken != "rollout" or options.correction != "none":
        assert grad[at] == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sums_do_not_depend_on_the_cut_into_micro_batches(options) -> None:
    logp, batch = random_batch(2)
    whole = run(options, logp, batch)
    half = batch.starts[2]
    parts = [
        run(options, logp[s], batch.map(lambda x, s=s: x[s])) for s in (slice(0, half), slice(half, batch.starts[-1]))
    ]
    assert sum(p[0] for p in parts) == pytest.approx(whole[0], abs=1e-12)
    assert torch.cat([p[1] for p in parts]).allclose(whole[1], atol=1e-14)
    for name in whole[2]:
        join = max if name.endswith("_max") else sum
        assert join(p[2][name] for p in parts) == pytest.approx(whole[2][name], abs=1e-12)


def test_without_old_the_current_policy_is_the_old_one() -> None:
    logp, batch = random_batch(3)
    explicit = run(grpo.Config(), logp, msgspec.structs.replace(batch, extras={"old": logp}))
    assert run(grpo.Config(), logp, msgspec.structs.replace(batch, extras={}))[0] == explicit[0]
    assert run(grpo.Config(), logp, msgspec.structs.replace(batch, extras={}))[1].equal(explicit[1])


def test_corrections_carry_no_gradient_and_keep_their_bounds() -> None:
    rho = torch.tensor([0.1, 0.5, 1.0, 2.0, 9.0], dtype=torch.float64, requires_grad=True)
    assert not maths.truncate(rho, 2.0).requires_grad and not maths.pop(rho, 0.5, 2.0).requires_grad
    assert maths.truncate(rho, 2.0).tolist() == [0.1, 0.5, 1.0, 2.0, 2.0]
    assert maths.pop(rho, 0.5, 2.0).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]


def test_clip_fraction_counts_the_tokens_whose_gradient_is_gone() -> None:
    logp, batch = random_batch(4)
    batch = msgspec.structs.replace(batch, weights=torch.ones_like(batch.weights))
    _, grad, sums = run(grpo.Config(), logp, batch)
    assert sums["clip_fraction"] == float((grad[batch.loss_mask] == 0).sum()) > 0


def test_entropy_of_masked_logits_has_a_finite_gradient() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    maths.entropy(logits).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
