"""The contract of the models beside a policy, held by every kind of trainer on one rank; test_ranks holds it on two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime import config
from runtime.errors import ConfigError
from runtime.trainer import factory, roles
from runtime.trainer.algorithms import distill, grpo, ppo
from runtime.types import MicroBatch, Totals
from tests.contract.roles_setup import (
    DIVERGENCES,
    VALUES,
    batch_for,
    make_roles,
    scored,
    share_of,
    taught_apart,
    teach,
)
from tests.contract.trainer_setup import CPU, LAYOUTS, around, make_model, obey, weights_of

NOTHING = {"policy": lambda scores, batch: (scores.logprobs.sum() * 0.0, {})}
"""A loss that teaches a policy nothing."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": make_model(folder / "tied"),
        "untied": make_model(folder / "untied", tie_word_embeddings=False, num_hidden_layers=1),
    }


@pytest.fixture(scope="module", params=LAYOUTS)
def make(request, models) -> Iterator[Callable[..., roles.Roles]]:
    with around(request.param):
        yield partial(make_roles, models, kind=request.param)


def test_a_reference_is_the_start_policy_also_after_a_resume(make, tmp_path: Path) -> None:
    first = make()
    start = scored(first, "policy")
    assert (scored(first, "reference") - start).abs().max() < 2e-6
    reference = scored(first, "reference")
    before = weights_of(first)
    assert all(tensor.equal(before[name]) for name, tensor in first.weights()), "scoring it leaves the policy alone"
    teach(first)
    assert scored(first, "reference").equal(reference) and (scored(first, "policy") - start).abs().max() > 0.01
    first.save(tmp_path / "saved").result()
    second = make()
    second.restore(tmp_path / "saved")
    for module in ("policy", "critic", "reference", "teacher"):
        assert scored(second, module).equal(scored(first, module)), module
    second.sleep()
    second.wake()
    assert teach(second) == teach(first), "optimizer state of both, and nothing else"


def test_a_critic_fits_fixed_returns(make) -> None:
    """Values that depend on the prefix: +1 behind an even token, -1 behind an odd one."""
    trained = make()
    before = weights_of(trained)
    assert scored(trained, "critic").eq(0).all(), "a value head starts at zero"
    share = share_of(trained)
    returns = [(1.0 - 2.0 * (b.tokens.roll(1) % 2)).where(b.loss_mask, 0.0) for b in share]
    algorithm = ppo.build(ppo.Config(value_clip=100.0))
    losses = NOTHING | {"critic": algorithm.value_loss}
    totals = Totals(tokens=sum(int(b.loss_mask.sum()) for b in share), answers=1, groups=1)
    found = []
    for _ in range(12):
        scores = trained.score(share, "critic", VALUES)
        given = [
            b.with_extras({"values": s.values, "returns": r}) for b, s, r in zip(share, scores, returns, strict=True)
        ]
        found.append(trained.update(given, losses, totals, "tokens"))
    assert found[0]["value_loss"] == pytest.approx(0.5, abs=1e-6)
    assert found[-1]["value_loss"] < 0.5 / 10
    assert found[0]["critic_learning_rate"] == 3e-2 and found[0]["learning_rate"] == 1e-2
    assert found[0]["critic_grad_norm"] > 0 and found[0]["grad_norm"] == 0
    assert all(tensor.equal(before[name]) for name, tensor in trained.weights()), "the policy is another model"


def test_a_checkpoint_without_a_critic_is_refused(make, tmp_path: Path) -> None:
    trained = make()
    trained.policy.save(tmp_path / "saved").result()
    before = weights_of(trained)
    with pytest.raises(ConfigError, match="no critic"):
        trained.restore(tmp_path / "saved")
    assert all(tensor.equal(before[name]) for name, tensor in trained.weights())


@pytest.fixture(scope="module")
def plain(models) -> dict[str, Any]:
    """Of transformers alone."""
    return {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for name, path in models.items()
    }


def rows_of(model: Any, batch: MicroBatch) -> torch.Tensor:
    """[T, V] logits for each token, a sequence at a time; 0 at starts."""
    rows = []
    for a, b in pairwise(batch.starts):
        logits = model(input_ids=batch.tokens[a:b].long()[None]).logits[0]
        rows += [torch.zeros_like(logits[:1]), logits[:-1]]
    return torch.cat(rows)


def dense(kind: str, beta: float, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[T, V] probabilities -> [T], written out."""
    mixture = {"forward": p, "reverse": q, "jsd": beta * q + (1 - beta) * p}[kind]
    towards_q, towards_p = ((x * (x / mixture).log()).sum(-1) for x in (q, p))
    return {"forward": towards_q, "reverse": towards_p, "jsd": beta * towards_q + (1 - beta) * towards_p}[kind]


@pytest.mark.parametrize(("kind", "beta", "temperature"), DIVERGENCES)
def test_divergences_and_their_gradient_are_those_of_dense_logits(
    make, plain, kind: str, beta: float, temperature: float
) -> None:
    trained, found = make(learning_rate=0.0), []

    def loss(scores, batch):
        found.append(scores.divergence(kind, beta, temperature))
        return (batch.weights * found[-1]).sum(), {}

    share = share_of(trained)
    totals = Totals(tokens=sum(int(b.loss_mask.sum()) for b in share), answers=1, groups=1)
    losses = {"policy": loss, "critic": lambda scores, batch: (scores.values.sum() * 0.0, {})}
    metrics = trained.update(share, losses, totals, "tokens", frozenset({"divergence"}))
    policy, teacher = plain["tied"], plain["untied"]
    policy.zero_grad()
    total = torch.zeros(())
    for batch, mine in zip(share, found, strict=True):
        p, q = (torch.softmax(rows_of(model, batch) / temperature, -1) for model in (policy, teacher))
        expected = dense(kind, beta, p, q.detach()).where(batch.loss_mask, 0.0)
        assert (mine - expected).abs().max() < 1e-5
        total = total + expected.sum()
    (total / totals.tokens).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["loss"] == pytest.approx(float(total.detach()) / totals.tokens, rel=1e-5)


def test_a_teachers_log_probs_are_its_own(make, plain) -> None:
    trained = make()
    share = share_of(trained)
    logits = torch.cat([rows_of(plain["untied"], batch) for batch in share]).detach()
    tokens, mask = (torch.cat([getattr(batch, name) for batch in share]) for name in ("tokens", "loss_mask"))
    expected = torch.log_softmax(logits, -1).gather(1, tokens.long()[:, None])[:, 0].where(mask, 0.0)
    assert (scored(trained, "teacher") - expected).abs().max() < 1e-5


@pytest.mark.parametrize("options", [{}, {"kind": "reverse"}, {"kind": "forward"}, {"kind": "jsd"}], ids=str)
def test_distillation_brings_the_policy_to_its_teacher(make, options: dict) -> None:
    trained = make(critic_rate=0.0)
    share = share_of(trained)
    algorithm = distill.build(distill.Config(**options))
    batch = batch_for(5, algorithm=algorithm)

    def distance() -> float:
        found = []

        def loss(scores, batch):
            found.append(float((batch.weights * scores.divergence("jsd", 0.5, 1.0)).sum().detach()))
            return scores.logprobs.sum() * 0.0, {}

        losses = {"policy": loss, "critic": lambda scores, batch: (scores.values.sum() * 0.0, {})}
        trained.update(share, losses, batch.shares[0].totals[0], "tokens", frozenset({"divergence"}))
        return sum(found)

    def gap() -> float:
        return float((scored(trained, "policy") - scored(trained, "teacher")).square().sum())

    if not options:  # on samples that are given, not drawn, only their own log-probs come nearer
        distance = gap
    before = distance()
    trained.critic = None
    for _ in range(6):
        metrics = obey(trained, batch.shares[0], algorithm)
    assert {"kl_teacher", f"{options.get('kind')}_divergence"} & metrics.keys()
    assert distance() < 0.9 * before


def test_of_several_teachers_each_scores_its_own_sequences(make) -> None:
    assert taught_apart(make(), make(teachers=("untied", "tied"))) < 2e-6


def test_kl_in_the_loss_holds_the_policy_back(make) -> None:
    """On samples that are given, not drawn from the policy: there only k2 pulls each log-prob to the reference's."""
    far = {}
    for coefficient in (0.0, 10.0):
        trained = make()
        trained.critic = None
        algorithm = grpo.build(grpo.Config(kl=coefficient, kl_estimator="k2"))
        batch = batch_for(5, algorithm=algorithm)
        for _ in range(4):
            metrics = obey(trained, batch.shares[0], algorithm)
        far[coefficient] = float((scored(trained, "policy") - scored(trained, "reference")).square().mean())
        assert ("kl" in metrics) == bool(coefficient)
    assert far[10.0] < 0.5 * far[0.0], far


def test_an_algorithm_gets_the_models_that_it_asks_for(make, models) -> None:
    given = config.Models(policy=config.Model(path=str(models["tied"])))
    at_work = roles.beside(given, ppo.build(ppo.Config(kl=0.1)))
    assert at_work == roles.Beside(critic=models["tied"], reference=models["tied"])
    assert roles.beside(given, grpo.build(grpo.Config())) == roles.ALONE
    other = config.Teacher(path=str(models["untied"]))
    given = msgspec.structs.replace(given, reference=other, critic=other, teacher=other)
    every = roles.Beside(critic=models["untied"], reference=models["untied"], teachers=(other,))
    assert roles.beside(given, distill.build(distill.Config())) == roles.Beside(teachers=(other,))
    named = {"math": other, "code": config.Teacher(path=str(models["tied"]))}
    several = msgspec.structs.replace(given, teacher=None, teachers=named)
    assert roles.beside(several, distill.build(distill.Config())).teachers == (other, named["code"])
    options = config.Trainer(kind=make.keywords["kind"], precision="float32")
    trained = factory.make(models["tied"], options, CPU, temperature=1.0, bucket_bytes=1, beside=every)
    assert scored(trained, "reference").equal(scored(trained, "teacher"))
    assert not scored(trained, "reference").equal(scored(trained, "policy"))
    assert scored(trained, "critic").eq(0).all()
