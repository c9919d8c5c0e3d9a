"""Leases under way and groups waiting to be trained: one object with a bound.

    data source --leases()--> running --add()--> ready --take()--> a batch
                                 |         +---> dropped by a filter, with a reason
                                 +---- snapshot(): both sides are saved, journals included

Leased before version v is over: at most (v + max_versions + 1) batches, the one in training included. A group leased at
version v is *due* at step v + max_versions. A younger group may overtake an older one that still runs only while every
group can still be trained when it is due, at n groups a step (earliest deadline first); else the step waits. So the
staleness bound is exact, nothing is dropped for age, and no long answer is starved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from runtime.data import DataSource
from runtime.types import Group, Lease, Prompt, SamplingParams

ALL_FAILED: Final = "all samples failed: "
"""Begins the reason for which a group is dropped that could not be scored."""

Filter = Callable[[Group], str]
"""Why a finished group is not trained on; empty: keep it."""


def equal_rewards(group: Group) -> str:
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): without spread the advantages are zero."""
    known = [s.reward for s in group.samples if s.reward is not None]
    return "equal rewards" if known and max(known) - min(known) < 1e-6 else ""


def nothing_to_train(group: Group) -> str:
    """Every sample failed: there is no advantage to compute."""
    if any(s.reward is not None and s.trainable for s in group.samples):
        return ""
    return ALL_FAILED + next((s.reason for s in group.samples if s.reason), "no reason was given")


class Buffer:
    """See the module. Not thread-safe: the loop owns it."""

    def __init__(
        self,
        source: DataSource,
        *,
        num_samples: int,
        params: SamplingParams,
        max_versions: int,
        in_order: bool,
        filters: Sequence[Filter] = (),
    ) -> None:
        """
        Args:
            in_order: a batch is the oldest leases, waited for, whichever groups finished first (deterministic mode).
        """
        self._source, self._num_samples, self._params = source, num_samples, params
        self._max_versions, self._in_order = max_versions, in_order
        self._filters = (nothing_to_train, *filters)
        self._running: dict[int, Lease] = {}
        self._ready: dict[int, Group] = {}
        self._again: list[Lease] = []
        self.next_lease = 0
        """Number of the next new lease."""

    def leases(self, n: int, version: int) -> list[Lease]:
        """n leases: those of an earlier attempt first, with their journals, then new prompts."""
        old, self._again = self._again[:n], self._again[n:]
        new = [
            self._anew(self.next_lease + i, prompt, version) for i, prompt in enumerate(self._source.next(n - len(old)))
        ]
        self.next_lease += len(new)
        self._running |= {lease.number: lease for lease in [*old, *new]}
        return [*old, *new]

    def add(self, group: Group) -> str | None:
        """A finished group: "" when it is kept, a filter's reason when not, None when nobody waits for it."""
        if self._running.pop(group.lease, None) is None:
            return None
        reason = next((r for r in (f(group) for f in self._filters) if r), "")
        if not reason:
            self._ready[group.lease] = group
        return reason

    def open(self) -> int:
        """Groups leased in this attempt, or finished in an earlier one, and not yet taken."""
        return len(self._running) + len(self._ready)

    def running(self) -> int:
        return len(self._running)

    def take(self, n: int, step: int) -> list[Group] | None:
        """n ready groups for this step, oldest lease first; None: not yet."""
        oldest = sorted(self._ready)[:n]
        if len(oldest) < n or not self._may_overtake(oldest, step):
            return None
        return [self._ready.pop(number) for number in oldest]

    def _may_overtake(self, batch: Sequence[int], step: int) -> bool:
        """Whether what still runs may wait for a later step than this batch's."""
        running = {x.number: x.version for x in (*self._running.values(), *self._again)}
        if self._in_order:
            return all(number > batch[-1] for number in running)
        versions = [*running.values(), *(g.version for g in self._ready.values())]
        for version in set(running.values()):
            # Groups as old as this, or older, are all due in so many further steps, which have room for as many
            # batches of them. What is more than that has to be in this batch.
            steps_left = max(0, version + self._max_versions - step)
            must = sum(v <= version for v in versions) - steps_left * len(batch)
            if sum(self._ready[number].version <= version for number in batch) < min(must, len(batch)):
                return False
        return True

    def snapshot(self, journals: dict[int, tuple]) -> tuple[tuple[Group, ...], tuple[Lease, ...], int]:
        """(ready groups, running leases with what they sampled so far, next lease number), for a RunState."""
        running = [
            msgspec.structs.replace(lease, journal=journals.get(lease.number, lease.journal))
            for lease in [*self._running.values(), *self._again]
        ]
        return tuple(self._ready.values()), tuple(running), self.next_lease

    @property
    def source_state(self) -> dict[str, int]:
        return self._source.state

    def restore(
        self, ready: Sequence[Group], running: Sequence[Lease], next_lease: int, version: int
    ) -> dict[int, Prompt]:
        """What `snapshot` gave. Prompts of groups that are too old, as the bound was lowered since, are leased anew.

        Args:
            version: of the policy.

        Returns:
            By lease, prompts that are dropped: the run has their data set, with its reward and teacher, no more.
        """
        known = self._source.names
        every = {g.lease: g.prompt for g in ready} | {x.number: x.prompt for x in running}
        dropped = {number: prompt for number, prompt in every.items() if prompt.dataset not in known}
        ready = [g for g in ready if g.lease not in dropped]
        running = [x for x in running if x.number not in dropped]
        oldest = version - self._max_versions
        self._ready = {g.lease: g for g in ready if g.version >= oldest}
        leases = [x if x.version >= oldest else self._anew(x.number, x.prompt, version) for x in running]
        leases += [self._anew(g.lease, g.prompt, version) for g in ready if g.version < oldest]
        self._again = sorted(leases, key=lambda lease: lease.number)
        self.next_lease = next_lease
        return dropped

    def _anew(self, number: int, prompt: Prompt, version: int) -> Lease:
        return Lease(number=number, prompt=prompt, version=version, num_samples=self._num_samples, params=self._params)
