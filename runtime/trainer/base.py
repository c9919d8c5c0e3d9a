"""The seams of training: Trainer, Algorithm, Scores. Importable without torch.

An algorithm is one file in algorithms/: `Config`, a frozen msgspec Struct of its options, and
`build(options: Config) -> Algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from runtime.trainer.maths import AllSum
from runtime.types import Manifest, MicroBatch, Share, Totals

if TYPE_CHECKING:
    from torch import Tensor

Need = Literal["old", "old_in_refine", "reference", "values", "entropy", "teacher", "divergence"]

Role = Literal["policy", "critic", "reference", "teacher"]
"""The policy and the critic are trained, the others never change."""

Divergence = Callable[[str, float, float], "Tensor"]
"""(kind, beta, temperature) -> [T] between policy and teacher over the whole vocabulary, with the policy's gradient;
see maths.divergence"""

Heads = Sequence[Callable[[], "Tensor"]]
"""For each micro-batch, what computes a frozen model's logits where the policy's are, in their layout. Hidden states
are kept for it, which are smaller by far."""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """What one forward of one role gave. Parallelism is hidden: a loss sees whole sequences, the whole vocabulary."""

    logprobs: Tensor | None = None
    """[T] float32; logprobs[t] = log p(tokens[t] | tokens[<t]) at the sampling temperature, 0 at starts"""
    entropy: Tensor | None = None
    """[T] float32, of the distribution tokens[t] was drawn from; if needs has "entropy" """
    values: Tensor | None = None
    """[T] float32, of a critic"""
    divergence: Divergence | None = None
    """if needs has "divergence" """


Sums = dict[str, "Tensor"]
"""Metric name -> its sum over the micro-batch, divided like the loss; or, if it ends in "_max", its maximum."""

Loss = Callable[[Scores, MicroBatch], tuple["Tensor", Sums]]
"""-> (sum over the micro-batch of weights * per-token loss, sums); tensors of a MicroBatch are torch's here."""


Refined = tuple[list[MicroBatch], dict[str, float]]
"""Micro-batches, and metrics of the batch, equal on all ranks."""


class Algorithm(Protocol):
    needs: frozenset[Need]
    """What a MicroBatch's extras or Scores must hold. "old", the policy's log-probs at the start of the batch, is left
    out of a batch with one update, where the current ones, detached, are the same; unless "old_in_refine" is there."""
    atom: Literal["sample", "group"]
    """What packing never splits over micro-batches or updates."""
    denominator: Literal["tokens", "answers", "groups", "fixed"]
    losses: Mapping[str, Loss]
    """By trained role: {"policy": ...}, or with "critic"."""

    def advantages(self, rewards: Sequence[float | None]) -> list[float]:
        """One group's, on the controller; None where a reward failed. Same length."""
        ...

    def refine(self, share: list[MicroBatch], all_sum: AllSum) -> Refined:
        """Once per batch on each trainer rank, its whole share, with what was scored in `extras`: GAE, KL in the
        reward, whitening. Every rank has as many micro-batches as every other; empty ones among them."""
        ...


class Trainer(Protocol):
    """A policy, and the models beside it, on this trainer rank and its peers. Called by every trainer rank in the same
    order."""

    def hand_on(self, share: Share | None) -> Share:
        """The share of this rank's data-parallel group: given to its leader, from there to the ranks that train on it
        too, which give None. See topology.leaders."""
        ...

    def score(
        self, share: Sequence[MicroBatch], module: str, want: frozenset[str], temperature: float | None = None
    ) -> list[Scores]:
        """Forward without gradient. `module` is a Role; `want` of: logprobs, entropy, and of a critic values.

        Args:
            temperature: None: the sampling temperature.
        """
        ...

    def update(
        self,
        share: Sequence[MicroBatch],
        losses: Mapping[str, Loss],
        totals: Totals,
        denominator: str,
        want: frozenset[str] = frozenset(),
        teacher: Heads | None = None,
    ) -> dict[str, float]:
        """One optimizer step of each trained role; metrics are equal on all ranks.

        Args:
            want: entropy, divergence; log-probs, or a critic's values, are always there.
            teacher: of the divergence, where it is no part of this trainer.
        """
        ...

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum over shares, on each trainer rank."""
        ...

    def manifest(self) -> Manifest: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in the engines' dtype), in the manifest's order."""
        ...

    def save(self, folder: Path) -> Future[None]:
        """Returns when this rank's shards are copied; they are written while it goes on. The future is done when all
        ranks' are, or raises why they are not."""
        ...

    def restore(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """A folder that transformers' from_pretrained loads."""
        ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...
