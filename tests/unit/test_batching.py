"""The invariants that runtime.batching promises, on random groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.batching import make_batch, with_teachers
from runtime.trainer.algorithms import grpo
from runtime.types import Batch, Group, MicroBatch, Prompt, Sample


@dataclass(frozen=True)
class Kind:
    """An algorithm as far as batching looks at it."""

    atom: str
    denominator: str

    def advantages(self, rewards):
        return grpo.build(grpo.Config()).advantages(rewards)


KINDS = [Kind("sample", "tokens"), Kind("sample", "answers"), Kind("group", "groups"), Kind("group", "fixed")]


def sample(lease: int, index: int, segment: int, mask: list[bool], **fields) -> Sample:
    """Tokens say where they come from, so that each can be found again in a batch."""
    ids = np.arange(len(mask), dtype=np.int32) + 1000 * (index + 10 * segment + 100 * lease)
    return Sample(
        prompt_id=f"p{lease}",
        index=index,
        segment=segment,
        tokens=ids,
        loss_mask=np.array(mask, np.bool_),
        logprobs=np.where(mask, -ids / 1e6, 0).astype(np.float32),
        versions=((0, lease),),
        **fields,
    )


@st.composite
def some_groups(draw) -> list[Group]:
    groups = []
    for lease in draw(st.lists(st.integers(0, 30), unique=True, max_size=6)):
        samples = []
        for index in range(draw(st.integers(1, 4))):
            reward = draw(st.sampled_from([None, 0.0, 0.5, 1.0]))
            for segment in range(draw(st.integers(1, 2))):
                mask = draw(st.lists(st.booleans(), min_size=1, max_size=12))
                status = draw(st.sampled_from(["done", "done", "done", "truncated", "failed"]))
                trainable = draw(st.sampled_from([True, True, True, False]))
                samples.append(sample(lease, index, segment, mask, reward=reward, status=status, trainable=trainable))
        groups.append(Group(lease=lease, prompt=Prompt(id=f"p{lease}", dataset="d"), samples=tuple(samples), version=9))
    return groups


LAYOUTS = st.fixed_dictionaries(
    {"num_dp": st.integers(1, 3), "num_updates": st.integers(1, 3), "max_tokens": st.integers(4, 40)}
)


def micro_batches(batch: Batch) -> list[MicroBatch]:
    return [m for share in batch.shares for update in share.updates for m in update]


def trained(groups: list[Group]) -> list[Sample]:
    """What should be in a batch of these, found the slow way."""
    found = []
    for group in groups:
        for s in group.samples:
            siblings = [o for o in group.samples if o.index == s.index]
            failed = any(o.status == "failed" for o in siblings) or s.reward is None
            if s.trainable and s.loss_mask.any() and not failed:
                found.append(s)
    return found


def sequences(m: MicroBatch) -> list[tuple[int, int]]:
    return list(zip(m.starts, m.starts[1:], strict=False))


def bytes_of(batch: Batch) -> list[list[bytes]]:
    return [[getattr(m, f).tobytes() for f in ("tokens", "weights", "advantages")] for m in micro_batches(batch)]


@given(some_groups(), LAYOUTS, st.sampled_from(KINDS))
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_doubled_or_changed(groups, layout, kind) -> None:
    batch = make_batch(groups, 0, kind, **layout)
    expected = {int(s.tokens[0]): s for s in trained(groups)}
    found = Counter(int(m.tokens[a]) for m in micro_batches(batch) for a, _ in sequences(m))
    assert found == Counter(expected.keys())
    for m in micro_batches(batch):
        assert m.starts[-1] == len(m.tokens)
        for a, b in sequences(m):
            s = expected[int(m.tokens[a])]
            assert m.tokens[a:b].tolist() == s.tokens.tolist()
            assert m.loss_mask[a:b].tolist() == s.loss_mask.tolist()
            assert m.rollout_logprobs[a:b].tolist() == s.logprobs.tolist()
            assert m.positions[a:b].tolist() == list(range(b - a))
        assert not m.weights[~m.loss_mask].any() and not m.advantages[~m.loss_mask].any()
        assert (m.weights[m.loss_mask] > 0).all()


@given(some_groups(), LAYOUTS, st.sampled_from(KINDS))
@settings(max_examples=80, deadline=None)
def test_weights_sum_to_the_totals(groups, layout, kind) -> None:
    batch = make_batch(groups, 0, kind, **layout)
    num_updates = len(batch.shares[0].updates)
    for u in range(num_updates):
        own = [m for share in batch.shares for m in share.updates[u]]
        totals = batch.shares[0].totals[u]
        assert totals.tokens == sum(int(m.loss_mask.sum()) for m in own) > 0
        assert totals.groups == len({int(g) for m in own for g in m.per_seq["group"]})
        answers = {(int(g), int(a)) for m in own for g, a in zip(m.per_seq["group"], m.per_seq["answer"], strict=True)}
        assert totals.answers == len(answers)
        if kind.denominator != "fixed":
            assert sum(float(m.weights.sum()) for m in own) == pytest.approx(totals.of(kind.denominator), rel=1e-5)
    assert all(share.totals == batch.shares[0].totals for share in batch.shares)
    assert sum(t.tokens for t in batch.shares[0].totals) == batch.metrics["num_tokens"]


@given(some_groups(), LAYOUTS, st.sampled_from(KINDS))
@settings(max_examples=80, deadline=None)
def test_layout_keeps_its_bounds(groups, layout, kind) -> None:
    batch = make_batch(groups, 3, kind, **layout)
    assert len(batch.shares) == layout["num_dp"]
    assert len(batch.shares[0].updates) <= layout["num_updates"]
    for counts in zip(*([len(u) for u in share.updates] for share in batch.shares), strict=True):
        assert len(set(counts)) == 1
    for m in micro_batches(batch):
        units = m.per_seq["group"].tolist() if kind.atom == "group" else sequences(m)
        assert len(m.tokens) <= layout["max_tokens"] or len(set(units)) == 1
    key = (lambda g, a: g) if kind.atom == "group" else (lambda g, a: (g, a))
    places: dict[object, set[int]] = {}
    batches: dict[object, set[int]] = {}
    for u in range(len(batch.shares[0].updates)):
        for m in (m for share in batch.shares for m in share.updates[u]):
            for g, a in zip(m.per_seq["group"].tolist(), m.per_seq["answer"].tolist(), strict=True):
                places.setdefault(key(g, a), set()).add(u)
                batches.setdefault(g, set()).add(id(m))
    assert all(len(where) == 1 for where in places.values())
    assert kind.atom == "sample" or all(len(where) == 1 for where in batches.values())


@given(some_groups(), LAYOUTS, st.sampled_from(KINDS), st.randoms())
@settings(max_examples=80, deadline=None)
def test_order_of_groups_and_samples_does_not_matter(groups, layout, kind, random) -> None:
    batch = make_batch(groups, 0, kind, **layout)
    shuffled = [
        Group(
            lease=g.lease, prompt=g.prompt, samples=tuple(random.sample(g.samples, len(g.samples))), version=g.version
        )
        for g in random.sample(groups, len(groups))
    ]
    again = make_batch(shuffled, 0, kind, **layout)
    assert bytes_of(batch) == bytes_of(again)
    assert batch.metrics == again.metrics and batch.oldest_version == again.oldest_version


@given(some_groups(), LAYOUTS)
@settings(max_examples=80, deadline=None)
def test_an_advantage_is_its_own_groups(groups, layout) -> None:
    """As if each group were alone, whatever its size and place."""
    kind = KINDS[0]
    together = {
        int(m.tokens[a]): m.advantages[a:b].tolist()
        for m in micro_batches(make_batch(groups, 0, kind, **layout))
        for a, b in sequences(m)
    }
    alone = {
        int(m.tokens[a]): m.advantages[a:b].tolist()
        for group in groups
        for m in micro_batches(make_batch([group], 0, kind, num_dp=1, num_updates=1, max_tokens=100))
        for a, b in sequences(m)
    }
    assert together == alone


def group(lease: int, samples: list[Sample]) -> Group:
    return Group(lease=lease, prompt=Prompt(id=f"p{lease}", dataset="d"), samples=tuple(samples), version=lease)


def equal_lengths(lease: int, num: int, length: int) -> Group:
    return group(lease, [sample(lease, i, 0, [False] + [True] * (length - 1), reward=float(i % 2)) for i in range(num)])


def test_segments_of_an_answer_share_its_denominator_and_reward() -> None:
    segments = [sample(1, 0, 0, [True] * 3, reward=0.0), sample(1, 0, 1, [True], reward=1.0)]
    other = sample(1, 1, 0, [True] * 2, reward=0.0)
    batch = make_batch([group(1, [*segments, other])], 0, KINDS[1], num_dp=1, num_updates=1, max_tokens=100)
    (m,) = micro_batches(batch)
    assert m.weights.tolist() == [0.25] * 3 + [0.5] * 2 + [0.25]
    assert m.advantages.tolist() == pytest.approx([0.7071] * 3 + [-0.7071] * 2 + [0.7071], abs=1e-4)
    assert batch.metrics["reward"] == 0.5 and batch.metrics["length_mean"] == 3.0


def test_tokens_are_balanced_over_ranks() -> None:
    groups = [group(1, [sample(1, i, 0, [True] * (i + 1), reward=float(i % 2)) for i in range(40)])]
    batch = make_batch(groups, 0, KINDS[0], num_dp=4, num_updates=1, max_tokens=64)
    loads = [sum(len(m.tokens) for u in share.updates for m in u) for share in batch.shares]
    assert max(loads) - min(loads) <= 1
    assert all(len(m.tokens) for m in micro_batches(batch)), "no rank idles when work can be shared"


def test_updates_get_as_many_atoms_each() -> None:
    batch = make_batch([equal_lengths(i, 4, 5) for i in range(3)], 0, KINDS[0], num_dp=1, num_updates=5, max_tokens=9)
    assert [t.answers for t in batch.shares[0].totals] == [2, 2, 3, 2, 3]


def test_a_rank_without_work_gets_empty_micro_batches() -> None:
    batch = make_batch([equal_lengths(0, 2, 5)], 0, KINDS[0], num_dp=3, num_updates=1, max_tokens=5)
    sizes = [[len(m.tokens) for m in share.updates[0]] for share in batch.shares]
    assert sizes == [[5], [5], [0]]
    assert batch.shares[2].updates[0][0].starts == (0,)


def test_nothing_trainable_means_no_update() -> None:
    failed = [sample(0, i, 0, [True], reward=None, status="failed") for i in range(3)]
    for groups in ([], [group(0, failed)]):
        batch = make_batch(groups, 0, KINDS[0], num_dp=2, num_updates=2, max_tokens=8)
        assert all(share.updates == () and share.totals == () for share in batch.shares)
    assert batch.metrics["failed"] == 1.0 and batch.metrics["reward"] == 0.0


def test_metrics_of_a_batch() -> None:
    right = [sample(0, i, 0, [True] * 2, reward=1.0, status=s) for i, s in enumerate(["done", "truncated"])]
    mixed = [sample(1, 0, 0, [True] * 4, reward=0.0), sample(1, 1, 0, [True], reward=None)]
    mixed.append(sample(1, 2, 0, [True] * 4, reward=1.0))
    metrics = make_batch([group(0, right), group(1, mixed)], 0, KINDS[0], num_dp=1, num_updates=1, max_tokens=8).metrics
    assert metrics["reward"] == 0.75 and metrics["equal_rewards"] == 0.5 and metrics["truncated"] == 0.25
    assert metrics["failed"] == 0.2 and metrics["length_mean"] == 3.0 and metrics["length_max"] == 4.0
    assert metrics["num_answers"] == 4 and metrics["num_tokens"] == 12 and metrics["num_groups"] == 2


def test_each_sequence_names_its_teacher() -> None:
    batch = make_batch([equal_lengths(i, 2, 5) for i in range(3)], 0, KINDS[0], num_dp=2, num_updates=2, max_tokens=9)
    found = micro_batches(with_teachers(batch, {0: 1, 1: 0, 2: 1}))
    assert [m.per_seq["teacher"].tolist() for m in found] == [
        [{0: 1, 1: 0, 2: 1}[lease] for lease in m.per_seq["group"].tolist()] for m in micro_batches(batch)
    ]


def test_one_lease_twice_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="lease"):
        make_batch([equal_lengths(1, 2, 3)] * 2, 0, KINDS[0], num_dp=1, num_updates=1, max_tokens=9)
