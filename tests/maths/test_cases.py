"""Numeric cases with expected values worked out elsewhere, in float64, through the code that trains."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from runtime.trainer import maths
from runtime.trainer.algorithms import distill, grpo, ppo
from runtime.trainer.base import Scores
from runtime.types import MicroBatch, Totals

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def floats(values) -> torch.Tensor:
    return tensor([float(x) for x in values])


def micro_batch(mask, advantages, extras) -> MicroBatch:
    """One sequence, sampled by the policy of which `extras` may hold the log-probs."""
    return MicroBatch(
        tokens=torch.zeros(len(mask), dtype=torch.int32),
        positions=torch.zeros(len(mask), dtype=torch.int32),
        starts=(0, len(mask)),
        loss_mask=mask,
        weights=mask.double(),
        advantages=advantages,
        rollout_logprobs=extras.get("old", torch.zeros_like(advantages)),
        extras=extras,
    )


def loss_of(options: grpo.Config, logp, old, adv, mask, rollout=None, reference=None) -> torch.Tensor:
    """A batch of rows through Grpo.loss and the division by totals; padding is left out of nothing."""
    logp, old, adv, mask = (x.reshape(-1) for x in torch.broadcast_tensors(logp, old, adv, mask))
    mask = mask.bool()
    extras = {"old": old} if reference is None else {"old": old, "reference": reference.reshape(-1)}
    batch = micro_batch(mask, adv, extras)
    if rollout is not None:
        batch = msgspec.structs.replace(batch, rollout_logprobs=rollout)
    totals = Totals(tokens=int(mask.sum()), answers=1, groups=1)
    return grpo.build(options).loss(Scores(logprobs=logp), batch)[0] / totals.of("tokens")


def advantage(inputs):
    algorithm = grpo.build(grpo.Config(eps=inputs["eps"]))
    result: list[float] = []
    for group in sorted(set(inputs["group"])):
        result += algorithm.advantages(
            [r for r, g in zip(inputs["rewards"], inputs["group"], strict=True) if g == group]
        )
    return result


def aggregation(inputs):
    mask, loss = tensor(inputs["mask"]), tensor(inputs["loss"])
    value = float(loss_of(grpo.Config(), torch.zeros_like(loss), torch.zeros_like(loss), -loss, mask))
    return [value] * len(inputs["modes"]) if "modes" in inputs else value


def policy(inputs):
    eps = inputs.get("eps", 0.2)
    low, high = inputs.get("eps_low", eps), inputs.get("eps_high", eps)
    options = grpo.Config(clip_low=low, clip_high=high)
    if "log_ratio" in inputs:
        new, adv = tensor([inputs["log_ratio"]] * 2), tensor(inputs["adv"])
        ratio = maths.log_ratio(new, torch.zeros_like(new))[0].exp()
        return {
            "loss": maths.ppo_clip(ratio, adv, low, high, inputs["c"]).tolist(),
            "loss_no_dual": maths.ppo_clip(ratio, adv, low, high).tolist(),
        }
    rows = isinstance(inputs["logp"][0], list)
    logp, old = ((tensor(x) if rows else floats(x)) for x in (inputs["logp"], inputs["old"]))
    mask, adv = tensor(inputs.get("mask", 1.0)), tensor(inputs["adv"])
    return float(loss_of(options, logp, old, adv, mask))


def policy_per_token(inputs):
    ratio = maths.log_ratio(tensor(inputs["logp"]), tensor(inputs["old"]))[0].exp()
    loss = maths.ppo_clip(ratio, tensor(inputs["adv"]), inputs["eps_low"], inputs["eps_high"])
    return {"per_token": loss.where(tensor(inputs["mask"]).bool(), 0.0).tolist(), "loss": policy(inputs)}


def mismatch(inputs):
    rho = tensor(inputs["ratio"])
    if "C" in inputs:
        return maths.truncate(rho, inputs["C"]).tolist()
    kept = maths.pop(rho, inputs["lo"], inputs["hi"])
    if "adv" not in inputs:
        return kept.tolist()
    options = grpo.Config(correction="icepop", bounds=(inputs["lo"], inputs["hi"]))
    new, adv = tensor(inputs["ppo_ratio"]).log(), tensor(inputs["adv"])
    loss = loss_of(options, new, torch.zeros_like(new), adv, torch.ones_like(new), rollout=-rho.log())
    return {"per_token": (-kept * adv).tolist(), "loss": float(loss)}


def kl(inputs):
    if "logits_pi" in inputs:
        return {name: grad.tolist() for name, grad in kl_gradients(inputs).items()}
    logp, ref = tensor(inputs["logp"]), tensor(inputs["ref"])
    if "beta" not in inputs:
        return {k: maths.kl(logp - ref, k).tolist() for k in ("k1", "k2", "k3")}
    mask = tensor(inputs["mask"])
    options = grpo.Config(kl=inputs["beta"], kl_estimator="k3")
    loss = loss_of(options, logp, tensor(inputs["old"]), tensor(inputs["adv"])[:, None], mask, reference=ref)
    return float(loss)


def kl_gradients(inputs) -> dict[str, torch.Tensor]:
    """In expectation over samples of the policy: of each estimate as it is, and as what `maths.kl_loss` makes of it."""

    def gradient(estimate) -> torch.Tensor:
        logits = tensor(inputs["logits_pi"]).requires_grad_()
        logp = maths.log_softmax(logits)
        p, ref = logp.detach().exp(), maths.log_softmax(tensor(inputs["logits_ref"]))
        (p * estimate(logp - ref, (logp - logp.detach()).exp())).sum().backward()
        return logits.grad

    found = {k: gradient(lambda x, _, k=k: maths.kl(x, k)) for k in ("k1", "k2", "k3")}
    as_losses = [gradient(lambda x, r, k=k: maths.kl_loss(x, r, k)) for k in ("k1", "k2", "k3")]
    assert all(torch.allclose(grad, as_losses[0], atol=1e-12) for grad in as_losses)
    return found | {"true_reverse_kl": as_losses[0], "ratio_times_k3": as_losses[2]}


def chain(inputs, rewards, extras) -> dict:
    """One sequence through Ppo.refine."""
    options = ppo.Config(gamma=inputs["gamma"], lam=inputs["lam"], whiten=False, kl=inputs.get("coef", 0.0))
    mask = tensor(inputs["mask"]).bool()
    batch = micro_batch(mask, tensor([0.0] * len(mask)), extras | {"values": tensor(inputs["values"])})
    batch = msgspec.structs.replace(batch, per_seq={"reward": tensor([rewards])})
    (refined,), _ = ppo.build(options).refine([batch], lambda x: x)
    found = {"adv": refined.advantages.tolist(), "adv_trainable": refined.advantages[mask].tolist()}
    (whitened,) = maths.whiten([refined.advantages], [mask], lambda x: x)
    return found | {"returns": refined.extras["returns"].tolist(), "whitened": whitened.tolist()}


def gae(inputs):
    return chain(inputs, sum(inputs["rewards"]) if "rewards" in inputs else inputs["scalar_reward"], {})


def reward(inputs):
    """With no value and no discount of what is to come, an advantage is the step's own reward."""
    extras = {"old": tensor(inputs["logp"]), "reference": tensor(inputs["ref"])}
    plain = {"values": [0.0, 0.0], "mask": [1, 1], "gamma": 0.0, "lam": 0.0, "coef": inputs["coef"]}
    return chain(plain, inputs["task_reward_last"], extras)["adv"]


def whiten(inputs):
    rows, masks = list(tensor(inputs["x"])), list(tensor(inputs["mask"]).bool())
    return [row.tolist() for row in maths.whiten(rows, masks, lambda x: x, inputs.get("eps", 1e-8))]


def value(inputs):
    values, old, returns = (tensor(inputs[name]) for name in ("vpred", "vold", "returns"))
    loss, _ = maths.value_loss(values, old, returns, inputs["clip"])
    ones = torch.ones(len(values), dtype=torch.bool)
    batch = micro_batch(ones, torch.zeros_like(values), {"values": old, "returns": returns})
    total, _ = ppo.build(ppo.Config(value_clip=inputs["clip"])).value_loss(Scores(values=values), batch)
    return {"per_token": (2 * loss).tolist(), "loss_with_half": float(total) / len(values)}


def opd(inputs):
    if "student_logp" in inputs:
        student, teacher = tensor(inputs["student_logp"]), tensor(inputs["teacher_logp"])
        return (-distilled(distill.Config(), student, {"teacher": teacher})[1]).tolist()
    logits = tensor(inputs["logits_student"]).requires_grad_()
    logp, logq = maths.log_softmax(logits), maths.log_softmax(tensor(inputs["logits_teacher"]))
    gain = (logq - logp).detach()
    (-(logp.exp().detach() * distilled(distill.Config(), logp, {"teacher": logq})[0])).sum().backward()
    return {"E_advantage": float((logp.exp() * gain).sum().detach()), "policy_gradient": logits.grad.tolist()}


def distilled(options: distill.Config, logp, extras) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] each: losses of single tokens, and their gradients by the token's log-prob."""
    leaf = logp.detach().requires_grad_()
    ones = torch.ones(1, dtype=torch.bool)
    losses = [
        distill.build(options).loss(
            Scores(logprobs=x[None]),
            micro_batch(ones, torch.zeros(1, dtype=torch.float64), {k: v[t, None] for k, v in extras.items()}),
        )[0]
        for x_all in (logp, leaf)
        for t, x in enumerate(x_all)
    ]
    torch.stack(losses[len(logp) :]).sum().backward()
    return torch.stack(losses[: len(logp)]), leaf.grad


def gkd(inputs):
    """Through Distill.loss; at its ends beta means forward and reverse."""
    beta = inputs["beta"]
    kind = {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd")
    mask = torch.tensor([label != -100 for label in inputs.get("labels", [0, 0])])
    options = distill.Config(kind=kind, beta=beta if kind == "jsd" else 0.5, temperature=inputs.get("temperature", 1.0))
    logits, teacher = tensor(inputs["student_logits"]), tensor(inputs["teacher_logits"])

    def divergence(kind, beta, temperature):
        logp, logq = (maths.log_softmax(x / temperature) for x in (logits, teacher))
        return maths.divergence(logp, logq, kind, beta)

    zeros = torch.zeros(2, dtype=torch.float64)
    scores = Scores(logprobs=zeros, divergence=divergence)
    loss, _ = distill.build(options).loss(scores, micro_batch(mask, zeros, {}))
    return float(loss) / max(1, int(mask.sum()))


def entropy(inputs):
    rows = inputs["logits"]
    if isinstance(rows[0], list):
        return maths.entropy(tensor(rows)).tolist()
    return float(maths.entropy(floats(rows)))


RUN = {
    "advantage": advantage,
    "aggregation": aggregation,
    "policy": policy,
    "mismatch": mismatch,
    "kl": kl,
    "entropy": entropy,
    "gae": gae,
    "reward": reward,
    "whiten": whiten,
    "value": value,
    "opd": opd,
    "gkd": gkd,
}


def check(found, expected, tolerance: float) -> None:
    if isinstance(expected, dict):
        for key in expected.keys() & found.keys():
            check(found[key], expected[key], tolerance)
        assert expected.keys() & found.keys()
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for f, e in zip(found, expected, strict=True):
            check(f, e, tolerance)
    else:
        assert abs(found - expected) <= tolerance * max(1.0, abs(expected))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case(case) -> None:
    per_token = case["family"] == "policy" and isinstance(case["expected"], dict) and "logp" in case["inputs"]
    run = policy_per_token if per_token else RUN[case["family"]]
    check(run(case["inputs"]), case["expected"], case["tol"] or 1e-9)
