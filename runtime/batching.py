"""Groups -> Batch: advantages, loss weights, updates, and the dealing of sequences over ranks and micro-batches.

Invariants, each held by a property test:
- Every trainable token of every trainable sample is in exactly one micro-batch; nothing else carries weight.
- An advantage depends on the rewards of its own group only, and a failed answer (reward None, status failed) is in no
  statistic and in no micro-batch. A sequence without a trainable token is left out, of the denominator too.
- The weights of an update sum to the total its losses are divided by, whatever it was cut into.
- No atom (an answer with all its segments, or a group) is split over updates; a group atom is not split over
  micro-batches either.
- A micro-batch holds at most `max_tokens` tokens, unless it holds a single sequence (or group) that is longer.
- Every rank gets as many micro-batches for an update as every other; some may be empty.
- The result is a function of the set of groups: their order, and that of samples in them, does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from runtime.trainer.base import Algorithm
from runtime.types import Batch, Group, MicroBatch, Sample, Share, Totals


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One trainable sequence with what its group gave it."""

    sample: Sample
    group: int
    """Lease number: the id a group is known by."""
    advantage: float
    weight: float
    """Of each trainable token."""

    @property
    def answer(self) -> tuple[int, int]:
        return (self.group, self.sample.index)

    @property
    def size(self) -> int:
        return len(self.sample.tokens)


_Unit = tuple[_Row, ...]
"""Rows that stay in one micro-batch."""

EMPTY: Final = ()


def make_batch(
    groups: Sequence[Group], step: int, algorithm: Algorithm, *, num_dp: int, num_updates: int, max_tokens: int
) -> Batch:
    """The batch of one step.

    Args:
        groups: with distinct leases.
        num_dp: data-parallel ranks; one Share each.
        num_updates: optimizer steps; fewer if there are fewer atoms, none if nothing is trainable.
        max_tokens: budget of a micro-batch.
    """
    assert len({group.lease for group in groups}) == len(groups), "two groups of one lease"
    ordered = sorted(groups, key=lambda group: group.lease)
    rows = [row for group in ordered for row in _rows(group, algorithm)]
    updates = _split(rows, algorithm.atom, num_updates)
    dealt = [_deal(_units(update, algorithm.atom), num_dp, max_tokens) for update in updates]
    totals = tuple(_totals(update) for update in updates)
    shares = tuple(
        Share(step=step, updates=tuple(tuple(map(_pack, update[rank])) for update in dealt), totals=totals)
        for rank in range(num_dp)
    )
    return Batch(
        step=step,
        shares=shares,
        oldest_version=min((group.oldest_version for group in groups), default=0),
        metrics=_metrics(ordered, totals),
    )


def with_teachers(batch: Batch, teachers: Mapping[int, int]) -> Batch:
    """The batch with the number of each sequence's teacher among `per_seq`.

    Args:
        teachers: lease -> its number.
    """

    def one(micro_batch: MicroBatch) -> MicroBatch:
        numbers = [teachers[lease] for lease in micro_batch.per_seq["group"].tolist()]
        per_seq = {**micro_batch.per_seq, "teacher": np.array(numbers, np.int64)}
        return msgspec.structs.replace(micro_batch, per_seq=per_seq)

    def whole(share: Share) -> Share:
        return msgspec.structs.replace(share, updates=tuple(tuple(map(one, update)) for update in share.updates))

    return msgspec.structs.replace(batch, shares=tuple(map(whole, batch.shares)))


def _answers(group: Group) -> list[list[Sample]]:
    """The answers of a group, in order; each is its segments, in order."""
    answers: dict[int, list[Sample]] = defaultdict(list)
    for sample in sorted(group.samples, key=lambda sample: (sample.index, sample.segment)):
        answers[sample.index].append(sample)
    return list(answers.values())


def _reward(answer: Sequence[Sample]) -> float | None:
    """The reward of an answer is that of its last segment; None if any segment failed."""
    return None if any(sample.status == "failed" for sample in answer) else answer[-1].reward


def _trained(answer: Sequence[Sample]) -> list[Sample]:
    return [] if _reward(answer) is None else [s for s in answer if s.trainable and s.loss_mask.any()]


def trained_samples(group: Group) -> list[Sample]:
    """The samples of a group that a batch trains on."""
    return [sample for answer in _answers(group) for sample in _trained(answer)]


def _rows(group: Group, algorithm: Algorithm) -> list[_Row]:
    answers = _answers(group)
    rewards = [_reward(answer) for answer in answers]
    kept: list[tuple[Sample, float, int]] = []
    for answer, advantage in zip(answers, algorithm.advantages(rewards), strict=True):
        trained = _trained(answer)
        size = sum(int(s.loss_mask.sum()) for s in trained)
        kept += [(sample, advantage, size) for sample in trained]
    of_group = sum(int(sample.loss_mask.sum()) for sample, _, _ in kept)
    weight = {"answers": lambda size: 1.0 / size, "groups": lambda _: 1.0 / of_group}.get(algorithm.denominator)
    return [
        _Row(sample=sample, group=group.lease, advantage=advantage, weight=weight(size) if weight else 1.0)
        for sample, advantage, size in kept
    ]


def _split(rows: list[_Row], atom: str, num_updates: int) -> list[list[_Row]]:
    """Consecutive atoms, as many in each update as in any other, give or take one."""
    atoms: dict[object, list[_Row]] = defaultdict(list)
    for row in rows:
        atoms[row.group if atom == "group" else row.answer].append(row)
    whole = list(atoms.values())
    count = min(num_updates, len(whole))
    bounds = [len(whole) * u // count for u in range(count + 1)] if count else [0]
    return [[row for rows in whole[a:b] for row in rows] for a, b in pairwise(bounds)]


def _units(rows: list[_Row], atom: str) -> list[_Unit]:
    if atom == "sample":
        return [(row,) for row in rows]
    groups: dict[int, list[_Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    return [tuple(rows) for rows in groups.values()]


def _size(unit: Iterable[_Row]) -> int:
    return sum(row.size for row in unit)


def _deal(units: list[_Unit], num_dp: int, max_tokens: int) -> list[list[_Unit]]:
    """Longest first, each to the rank with the fewest tokens; then, on each rank, to the first micro-batch with room.

    `sorted` and `min` keep the earlier of equals, so ties fall to the older group and the lower rank.
    """
    ranks: list[list[_Unit]] = [[] for _ in range(num_dp)]
    loads = [0] * num_dp
    for unit in sorted(units, key=lambda unit: -_size(unit)):
        rank = min(range(num_dp), key=loads.__getitem__)
        ranks[rank].append(unit)
        loads[rank] += _size(unit)
    packed = [_first_fit(rank, max_tokens) for rank in ranks]
    count = max(map(len, packed))
    return [batches + [EMPTY] * (count - len(batches)) for batches in packed]


def _first_fit(units: list[_Unit], max_tokens: int) -> list[_Unit]:
    batches: list[_Unit] = []
    room: list[int] = []
    for unit in units:
        size = _size(unit)
        at = next((i for i, left in enumerate(room) if size <= left), None)
        if at is None:
            batches.append(unit)
            room.append(max_tokens - size)
        else:
            batches[at] += unit
            room[at] -= size
    return batches


def _pack(rows: _Unit) -> MicroBatch:
    def flat(arrays: Iterable[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)

    def spread(values: Iterable[float]) -> np.ndarray:
        return flat((np.where(row.sample.loss_mask, v, 0.0) for row, v in zip(rows, values, strict=True)), np.float32)

    return MicroBatch(
        tokens=flat((row.sample.tokens for row in rows), np.int32),
        positions=flat((np.arange(row.size) for row in rows), np.int32),
        starts=(0, *np.cumsum([row.size for row in rows], dtype=int).tolist()),
        loss_mask=flat((row.sample.loss_mask for row in rows), np.bool_),
        weights=spread(row.weight for row in rows),
        advantages=spread(row.advantage for row in rows),
        rollout_logprobs=flat((row.sample.logprobs for row in rows), np.float32),
        per_seq={
            "group": np.array([row.group for row in rows], np.int64),
            "answer": np.array([row.sample.index for row in rows], np.int64),
            "reward": np.array([row.sample.reward or 0.0 for row in rows], np.float32),
        },
    )


def _totals(rows: list[_Row]) -> Totals:
    return Totals(
        tokens=sum(int(row.sample.loss_mask.sum()) for row in rows),
        answers=len({row.answer for row in rows}),
        groups=len({row.group for row in rows}),
    )


def _metrics(groups: Sequence[Group], totals: Sequence[Totals]) -> dict[str, float]:
    """What the batch is made of; failed answers count in `failed` alone."""
    answers = [answer for group in groups for answer in _answers(group)]
    known = [(answer, reward) for answer in answers if (reward := _reward(answer)) is not None]
    rewards = np.array([reward for _, reward in known], np.float64)
    lengths = np.array([sum(int(s.loss_mask.sum()) for s in answer) for answer, _ in known], np.float64)
    spreads = [np.ptp(r) for group in groups if (r := [x for a in _answers(group) if (x := _reward(a)) is not None])]

    def mean(values: Iterable[float]) -> float:
        values = list(values)
        return float(np.mean(values)) if values else 0.0

    return {
        "reward": mean(rewards),
        "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "equal_rewards": mean(float(spread < 1e-6) for spread in spreads),
        "length_mean": mean(lengths),
        "length_max": float(lengths.max(initial=0.0)),
        "truncated": mean(float(answer[-1].status == "truncated") for answer, _ in known),
        "failed": mean(float(_reward(answer) is None) for answer in answers),
        "num_groups": float(len(groups)),
        "num_answers": float(sum(t.answers for t in totals)),
        "num_tokens": float(sum(t.tokens for t in totals)),
    }
