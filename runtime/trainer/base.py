"""The seams of training: Trainer, Algorithm, Scores. Importable without torch.

An algorithm is one file in algorithms/: `Config`, a frozen msgspec Struct of its options, and
`build(options: Config) -> Algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from runtime.types import Manifest, MicroBatch, Share, Totals

if TYPE_CHECKING:
    from torch import Tensor

Need = Literal["old", "reference", "values", "entropy", "teacher", "divergence"]


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """What one forward of one role gave. Parallelism is hidden: a loss sees whole sequences, the whole vocabulary."""

    logprobs: Tensor | None = None
    """[T] float32; logprobs[t] = log p(tokens[t] | tokens[<t]) at the sampling temperature, 0 at starts"""
    entropy: Tensor | None = None
    """[T] float32, of the distribution tokens[t] was drawn from; if needs has "entropy" """
    values: Tensor | None = None
    """[T] float32, of a critic"""
    divergence: Callable[[str, float, float], Tensor] | None = None


Sums = dict[str, "Tensor"]
"""Metric name -> its sum over the micro-batch, divided like the loss; or, if it ends in "_max", its maximum."""

Loss = Callable[[Scores, MicroBatch], tuple["Tensor", Sums]]
"""-> (sum over the micro-batch of weights * per-token loss, sums); tensors of a MicroBatch are torch's here."""


class Algorithm(Protocol):
    needs: frozenset[Need]
    """What a MicroBatch's extras or Scores must hold. "old", the policy's log-probs at the start of the batch, is left
    out of a batch with one update, where the current ones, detached, are the same."""
    atom: Literal["sample", "group"]
    """What packing never splits over micro-batches or updates."""
    denominator: Literal["tokens", "answers", "groups", "fixed"]
    losses: Mapping[str, Loss]
    """By trained role: {"policy": ...}, or with "critic"."""

    def advantages(self, rewards: Sequence[float | None]) -> list[float]:
        """One group's, on the controller; None where a reward failed. Same length."""
        ...

    def refine(self, share: list[MicroBatch], all_sum: Callable[[Tensor], Tensor]) -> list[MicroBatch]:
        """Once per batch on each trainer rank, its whole share: GAE, KL in the reward, whitening."""
        ...


class Trainer(Protocol):
    """One role's model on this trainer rank and its peers. Called by every trainer rank in the same order."""

    def hand_on(self, share: Share | None) -> Share:
        """The share of this rank's data-parallel group: given to its leader, from there to the ranks that train on it
        too, which give None. See topology.leaders."""
        ...

    def score(self, share: Sequence[MicroBatch], module: str, want: frozenset[str]) -> list[Scores]:
        """Forward without gradient. `module` is policy or reference; `want` of: logprobs, entropy, values."""
        ...

    def update(
        self,
        share: Sequence[MicroBatch],
        losses: Mapping[str, Loss],
        totals: Totals,
        denominator: str,
        want: frozenset[str] = frozenset(),
    ) -> dict[str, float]:
        """One optimizer step; metrics are equal on all ranks. `want` as in `score`; log-probs are always there."""
        ...

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum over shares, on each trainer rank."""
        ...

    def manifest(self) -> Manifest: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in the engines' dtype), in the manifest's order."""
        ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """A folder that transformers' from_pretrained loads."""
        ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...
