"""Numeric cases with expected values worked out elsewhere, in float64, through the code that trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runtime.trainer import maths
from runtime.trainer.algorithms import grpo
from runtime.trainer.base import Scores
from runtime.types import MicroBatch, Totals

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def floats(values) -> torch.Tensor:
    return tensor([float(x) for x in values])


def loss_of(options: grpo.Config, logp, old, adv, mask, rollout=None, denominator="tokens") -> torch.Tensor:
    """A batch of rows through Grpo.loss and the division by totals; padding is left out of nothing."""
    logp, old, adv, mask = (x.reshape(-1) for x in torch.broadcast_tensors(logp, old, adv, mask))
    mask = mask.bool()
    batch = MicroBatch(
        tokens=torch.zeros(len(logp), dtype=torch.int32),
        positions=torch.zeros(len(logp), dtype=torch.int32),
        starts=(0, len(logp)),
        loss_mask=mask,
        weights=mask.double(),
        advantages=adv,
        rollout_logprobs=old if rollout is None else rollout,
        extras={"old": old},
    )
    totals = Totals(tokens=int(mask.sum()), answers=1, groups=1)
    return grpo.build(options).loss(Scores(logprobs=logp), batch)[0] / totals.of(denominator)


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
    return maths.k3(tensor(inputs["logp"]) - tensor(inputs["ref"])).tolist()


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
