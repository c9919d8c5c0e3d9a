"""On-policy distillation: the policy samples, and a frozen teacher with the same tokens says what it would have said.

    sampled    A_t = log q - log p of the sampled token, and the clipped loss of `trainer.surrogate`: what the gradient
               of the reverse KL(p||q) is in expectation (GLM-5, arXiv 2602.15763 eq. 2; MOPD, arXiv 2601.02780)
    forward, reverse, jsd
               the divergence over the whole vocabulary at each token, itself the loss (GKD, arXiv 2306.13649)

p is the policy that is trained, q the teacher. `reward` mixes rewards in: their group advantages, weighted, are added
to A_t, or bring their own clipped loss along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from runtime.trainer import maths, surrogate
from runtime.trainer.algorithms import grpo
from runtime.trainer.base import Loss, Need, Refined, Scores, Sums
from runtime.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor


class Config(surrogate.Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["sampled", "forward", "reverse", "jsd"] = "sampled"
    """forward is KL(q||p), reverse KL(p||q); see maths.divergence."""
    beta: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.5
    """Of jsd: the teacher's part of the mixture."""
    temperature: Annotated[float, Meta(gt=0.0)] = 1.0
    """Both distributions of forward, reverse and jsd are taken at."""
    reward: surrogate.Coefficient = 0.0
    """Weight of GRPO's advantages; 0: rewards are only measured."""


class Distill:
    atom: Literal["sample", "group"] = "sample"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.denominator: Literal["tokens", "answers", "groups", "fixed"] = config.denominator
        self.is_sampled = config.kind == "sampled"
        also: set[Need] = {"teacher"} if self.is_sampled else {"divergence"}
        self.needs: frozenset[Need] = frozenset(surrogate.needs(config) | also)
        self.losses: Mapping[str, Loss] = {"policy": self.loss}
        self._group = grpo.build(grpo.Config())

    def advantages(self, rewards: Sequence[float | None]) -> list[float]:
        return [self.config.reward * advantage for advantage in self._group.advantages(rewards)]

    def refine(self, share: list[MicroBatch], all_sum: maths.AllSum) -> Refined:
        return share, {}

    def loss(self, scores: Scores, batch: MicroBatch) -> tuple[Tensor, Sums]:
        c, logprobs = self.config, scores.logprobs
        assert logprobs is not None
        if self.is_sampled:
            # Of the policy as it is now: an old one's would lag behind what is learned within the batch.
            gain, _ = maths.log_ratio(batch.extras["teacher"], logprobs.detach())
            batch = msgspec.structs.replace(batch, advantages=batch.advantages + gain)
            loss, sums = surrogate.loss(c, scores, batch)
            return loss, sums | {"kl_teacher": maths.masked_sum(batch.weights * -gain, batch.loss_mask)}
        assert scores.divergence is not None
        distance = scores.divergence(c.kind, c.beta, c.temperature)
        distance = maths.masked_sum(batch.weights * distance, batch.loss_mask)
        loss, sums = surrogate.loss(c, scores, batch)
        return loss + distance, sums | {f"{c.kind}_divergence": distance.detach()}


def build(options: Config) -> Distill:
    return Distill(options)
