"""The models of a run as one Trainer: the policy, and beside it a critic, a reference and teachers where an algorithm
asks for them.

All are cut over the trainer ranks as the policy is, their experts aside. The critic is trained by an optimizer of its
own, and is in checkpoints. Reference and teachers are what their folders hold, at the start as after a resume. Of
several teachers each scores the sequences that are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from runtime import config
from runtime.errors import ConfigError
from runtime.trainer.base import Algorithm, Heads, Loss, Scores, Trainer
from runtime.types import Manifest, MicroBatch, Share, Totals

if TYPE_CHECKING:
    from torch import Tensor

CRITIC: Final = "critic"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """The models beside the policy, or their Hugging Face folders; None: there is none."""

    critic: Path | None = None
    """It starts from: its last layer becomes a value head."""
    reference: Path | None = None
    teachers: tuple[config.Teacher, ...] = ()


ALONE: Final = Beside()


def beside(models: config.Models, algorithm: Algorithm) -> Beside:
    """What an algorithm needs beside the policy. Without a folder of their own, critic and reference start where the
    policy does."""

    def folder(model: config.Model | None, is_wanted: bool) -> Path | None:
        return Path((model or models.policy).path) if is_wanted else None

    teachers = (models.teacher,) if models.teacher else tuple(models.teachers.values())
    has_teachers = bool(algorithm.needs & {"teacher", "divergence"})
    return Beside(
        critic=folder(models.critic, CRITIC in algorithm.losses),
        reference=folder(models.reference, "reference" in algorithm.needs),
        teachers=teachers if has_teachers else (),
    )


class Frozen(Protocol):
    """A model that is only scored."""

    def score(self, share: Sequence[MicroBatch], want: frozenset[str]) -> list[Scores]: ...

    def heads(self, share: Sequence[MicroBatch]) -> Heads:
        """Of use until `rest`."""
        ...

    def rest(self) -> None: ...


class Roles:
    """A Trainer; see base.Trainer for what its methods do."""

    def __init__(
        self, policy: Trainer, critic: Trainer | None, reference: Frozen | None, teachers: Sequence[Frozen]
    ) -> None:
        """
        Args:
            teachers: by number.
        """
        self.policy, self.critic, self.reference, self.teachers = policy, critic, reference, tuple(teachers)

    def hand_on(self, share: Share | None) -> Share:
        return self.policy.hand_on(share)

    def score(
        self, share: Sequence[MicroBatch], module: str, want: frozenset[str], temperature: float | None = None
    ) -> list[Scores]:
        if module == "teacher" and len(self.teachers) > 1:
            return self._taught(share)
        frozen = self.reference if module == "reference" else next(iter(self.teachers), None)
        if module in ("reference", "teacher"):
            assert frozen is not None, f"no {module} is loaded"
            assert temperature is None, "frozen models are scored at the sampling temperature"
            return frozen.score(share, want)
        trained = self.critic if module == CRITIC else self.policy
        assert trained is not None, f"no {module} is loaded"
        return trained.score(share, module, want, temperature)

    def update(
        self,
        share: Sequence[MicroBatch],
        losses: Mapping[str, Loss],
        totals: Totals,
        denominator: str,
        want: frozenset[str] = frozenset(),
        teacher: Heads | None = None,
    ) -> dict[str, float]:
        if "divergence" in want:
            (compared,) = self.teachers  # launcher.checks.models saw to it
            teacher = compared.heads(share)
        metrics = self.policy.update(share, losses, totals, denominator, want, teacher)
        if "divergence" in want:
            self.teachers[0].rest()
        if self.critic is not None:
            found = self.critic.update(share, losses, totals, denominator)
            metrics |= {"value_loss" if name == "loss" else f"critic_{name}": value for name, value in found.items()}
        return metrics

    def all_sum(self, values: Tensor) -> Tensor:
        return self.policy.all_sum(values)

    def manifest(self) -> Manifest:
        return self.policy.manifest()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.policy.weights()

    def save(self, folder: Path) -> Future[None]:
        saving = self.policy.save(folder)
        return saving if self.critic is None else _both(saving, self.critic.save(folder / CRITIC))

    def restore(self, folder: Path) -> None:
        """
        Raises:
            ConfigError: there is no critic in it, but this run has one.
        """
        if self.critic is not None and not (folder / CRITIC).is_dir():
            problem = "this checkpoint holds no critic, but the algorithm trains one"
            raise ConfigError(str(folder), problem, "go on with the algorithm it was made by, or start a new run")
        self.policy.restore(folder)
        if self.critic is not None:
            self.critic.restore(folder / CRITIC)

    def export(self, folder: Path) -> None:
        self.policy.export(folder)

    def sleep(self) -> None:
        for trained in self._trained():
            trained.sleep()

    def wake(self) -> None:
        for trained in self._trained():
            trained.wake()

    def _taught(self, share: Sequence[MicroBatch]) -> list[Scores]:
        """Log-probs of each sequence by its own teacher. A teacher is given no other, so all cost what one would."""
        wholes = [batch.weights.new_zeros(len(batch.tokens)) for batch in share]
        for number, teacher in enumerate(self.teachers):
            parts = [_of(batch, number) for batch in share]
            found = teacher.score([part for _, part in parts], frozenset({"logprobs"}))
            for whole, (mask, _), scores in zip(wholes, parts, found, strict=True):
                whole[mask] = scores.logprobs
        return [Scores(logprobs=whole) for whole in wholes]

    def _trained(self) -> list[Trainer]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]


def _of(batch: MicroBatch, teacher: int) -> tuple[Tensor, MicroBatch]:
    """The sequences that have this teacher: which tokens are theirs, [T], and they alone, as far as scoring looks at
    them; maybe none."""
    mask, starts = batch.loss_mask.new_zeros(len(batch.tokens)), [0]
    for (a, b), number in zip(pairwise(batch.starts), batch.per_seq["teacher"].tolist(), strict=True):
        if number == teacher:
            mask[a:b] = True
            starts.append(starts[-1] + b - a)
    part = msgspec.structs.replace(batch, extras={}, per_seq={}).map(lambda values: values[mask])
    return mask, msgspec.structs.replace(part, starts=tuple(starts))


def _both(first: Future[None], second: Future[None]) -> Future[None]:
    """Done when both are; it raises what one of them does."""
    both: Future[None] = Future()

    def end(_: Future[None]) -> None:
        if error := first.exception() or second.exception():
            both.set_exception(error)
        else:
            both.set_result(None)

    first.add_done_callback(lambda _: second.add_done_callback(end))
    return both
