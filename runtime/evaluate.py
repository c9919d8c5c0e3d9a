"""Evaluation: every prompt of a set, sampled by the current policy with the set's own parameters, and scored.

An answer counts as correct when its reward is 1 or more. Samples whose reward failed are left out and counted.
pass@k is the unbiased estimate 1 - C(n-c, k) / C(n, k) of arXiv 2107.03374, averaged over the prompts of the set.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from runtime.config import EvalSet, Sampling
from runtime.data import read_all
from runtime.types import Group, Lease, Prompt, SamplingParams


def params_of(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        ignore_eos=sampling.ignore_eos,
    )


class Evaluation:
    """The evaluation sets of a run. One evaluation at a time; its leases have negative numbers."""

    def __init__(self, sets: Sequence[EvalSet]) -> None:
        self._sets: list[tuple[EvalSet, list[Prompt]]] = [(s, read_all(s, s.limit)) for s in sets]
        self._groups: dict[int, Group] = {}
        self._leases: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._sets)

    def leases(self, version: int) -> list[Lease]:
        """All of them, for one evaluation."""
        self._groups, self._leases, out = {}, {}, []
        for eval_set, prompts in self._sets:
            for prompt in prompts:
                lease = Lease(
                    number=-1 - len(out),
                    prompt=prompt,
                    version=version,
                    num_samples=eval_set.num_samples,
                    params=params_of(eval_set.sampling),
                    purpose="eval",
                )
                self._leases[lease.number] = eval_set.label
                out.append(lease)
        return out

    def add(self, group: Group) -> None:
        if group.lease in self._leases:
            self._groups[group.lease] = group

    def missing(self) -> int:
        return len(self._leases) - len(self._groups)

    def metrics(self) -> dict[str, float]:
        """`eval/<set>/{accuracy, reward, pass@k, length, failed}`; call when nothing is missing."""
        out: dict[str, float] = {}
        for eval_set, _ in self._sets:
            name = eval_set.label
            groups = [self._groups[n] for n in sorted(self._groups, reverse=True) if self._leases[n] == name]
            for key, value in _summary(groups, eval_set.num_samples).items():
                out[f"eval/{name}/{key}"] = value
        return out


def _summary(groups: Sequence[Group], num_samples: int) -> dict[str, float]:
    samples = [s for g in groups for s in g.samples]
    rewards = [s.reward for s in samples if s.reward is not None]
    out = {
        "accuracy": _mean([float(r >= 1.0) for r in rewards]),
        "reward": _mean(rewards),
        "length": _mean([float(s.loss_mask.sum()) for s in samples]),
        "failed": float(len(samples) - len(rewards)),
    }
    counts = [(len(known), sum(r >= 1.0 for r in known)) for known in map(_known, groups)]
    k = 1
    while k <= num_samples and num_samples > 1:
        out[f"pass@{k}"] = _mean([pass_at_k(n, c, k) for n, c in counts if n >= k])
        k *= 2
    return out


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k draws, without replacement, from n answers of which c are right is right."""
    return 1.0 - comb(n - c, k) / comb(n, k)


def _known(group: Group) -> list[float]:
    return [s.reward for s in group.samples if s.reward is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
