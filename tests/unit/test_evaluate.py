"""Accuracy and pass@k of evaluation sets."""

import json
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import EvalSet, Sampling
from runtime.evaluate import Evaluation, pass_at_k
from tests.unit.test_buffer import finished


@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_chance_over_all_draws(n, data):
    right = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    answers = [True] * right + [False] * (n - right)
    assert pass_at_k(n, right, k) == pytest.approx(fmean(any(draw) for draw in combinations(answers, k)))


@pytest.fixture
def sets(tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i), "answer": i}) + "\n" for i in range(3)))
    greedy = EvalSet(path=str(path), limit=2)
    sampled = EvalSet(
        path=str(path), name="sampled", num_samples=4, sampling=Sampling(temperature=0.5, max_new_tokens=7)
    )
    return [greedy, sampled]


def test_each_set_has_its_own_sampling_and_its_own_metrics(sets):
    evaluation = Evaluation(sets)
    leases = evaluation.leases(version=5)
    assert [lease.number for lease in leases] == [-1, -2, -3, -4, -5]
    assert [lease.params.temperature for lease in leases] == [0.0] * 2 + [0.5] * 3
    assert leases[-1].params.max_new_tokens == 7 and leases[-1].num_samples == 4 and leases[-1].purpose == "eval"
    rewards = [(1.0,), (0.5,), (1.0, 0.0, 0.0, 0.0), (0.0, None, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0)]
    for lease, given_rewards in zip(leases, rewards, strict=True):
        assert evaluation.missing()
        evaluation.add(finished(lease, given_rewards))
    assert not evaluation.missing()
    metrics = evaluation.metrics()
    assert metrics["eval/held/accuracy"] == 0.5 and metrics["eval/held/reward"] == 0.75
    assert "eval/held/pass@1" not in metrics, "with one answer it is the accuracy"
    assert metrics["eval/sampled/pass@1"] == pytest.approx((0.25 + 0.0 + 1.0) / 3)
    assert metrics["eval/sampled/pass@2"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert metrics["eval/sampled/pass@4"] == pytest.approx((1.0 + 1.0) / 2), "a prompt with a failed answer has three"
    assert metrics["eval/sampled/failed"] == 1.0 and metrics["eval/sampled/accuracy"] == pytest.approx(5 / 11)
