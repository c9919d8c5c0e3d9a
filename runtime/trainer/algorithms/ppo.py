"""PPO with a critic (arXiv 1707.06347; advantages by GAE, arXiv 1506.02438).

Each answer's chain of steps is its trainable tokens: what tools or an environment wrote between them is no step and its
values do not count. The reward stands at the last of them, the value after it is 0, also where an answer was truncated.

    r_t = R [t is last] - kl * K_t,   A = GAE(r, V_old),   returns = A + V_old, before A is whitened

The policy's loss is that of `trainer.surrogate`; the critic's is clipped around the values at the start of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from runtime.trainer import maths, surrogate
from runtime.trainer.base import Loss, Need, Refined, Scores, Sums
from runtime.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor

Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]


class Config(surrogate.Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    clip_high: surrogate.Coefficient = 0.2
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    """1: returns are the rewards to come; lower trusts the critic more."""
    whiten: bool = True
    """Advantages with mean 0 and variance 1 over all trained tokens of the batch."""
    value_clip: surrogate.Coefficient = 0.2
    """How far from its old values an update moves the critic."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL to the reference is taken off."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """In the reward only k1 has the gradient of KL(pi||reference)."""


class Ppo:
    atom: Literal["sample", "group"] = "sample"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.denominator: Literal["tokens", "answers", "groups", "fixed"] = config.denominator
        self.in_reward = config.kl > 0 and config.kl_in == "reward"
        also: set[Need] = {"values", "old_in_refine"} if self.in_reward else {"values"}
        self.needs: frozenset[Need] = frozenset(surrogate.needs(config) | also)
        self.losses: Mapping[str, Loss] = {"policy": self.loss, "critic": self.value_loss}

    def advantages(self, rewards: Sequence[float | None]) -> list[float]:
        """Rewards, until `refine` knows the values."""
        return [reward or 0.0 for reward in rewards]

    def refine(self, share: list[MicroBatch], all_sum: maths.AllSum) -> Refined:
        if not share:
            return share, {}
        c, masks, metrics = self.config, [batch.loss_mask for batch in share], {}
        penalties: list[Tensor | None] = [None] * len(share)
        if self.in_reward:
            ratios = [maths.log_ratio(b.extras["old"], b.extras["reference"])[0] for b in share]
            penalties = [c.kl * maths.kl(ratio, c.kl_estimator) for ratio in ratios]
            metrics["kl"], _ = maths.moments([maths.kl(ratio) for ratio in ratios], masks, all_sum)
        advantages = [self._gae(batch, penalty) for batch, penalty in zip(share, penalties, strict=True)]
        values = [batch.extras["values"] for batch in share]
        returns = [(a + v).where(m, 0.0) for a, v, m in zip(advantages, values, masks, strict=True)]
        metrics["return"], spread = maths.moments(returns, masks, all_sum)
        _, left = maths.moments(advantages, masks, all_sum)  # returns - values
        metrics["explained_variance"] = 1 - left / spread if spread else 0.0
        if c.whiten:
            advantages = maths.whiten(advantages, masks, all_sum)
        refined = [
            msgspec.structs.replace(batch.with_extras({"returns": r}), advantages=a)
            for batch, a, r in zip(share, advantages, returns, strict=True)
        ]
        return refined, metrics

    def _gae(self, batch: MicroBatch, penalty: Tensor | None) -> Tensor:
        """[T], 0 outside the mask."""
        values, rewards = batch.extras["values"], batch.per_seq["reward"].tolist()
        found: list[float] = []
        for (a, b), reward in zip(pairwise(batch.starts), rewards, strict=True):
            mask = batch.loss_mask[a:b]
            chain = values[a:b][mask].tolist()
            if chain:
                steps = [0.0] * len(chain) if penalty is None else (-penalty[a:b][mask]).tolist()
                steps[-1] += reward
                found += maths.gae(steps, chain, self.config.gamma, self.config.lam)
        return values.new_zeros(len(values)).masked_scatter(batch.loss_mask, values.new_tensor(found))

    def loss(self, scores: Scores, batch: MicroBatch) -> tuple[Tensor, Sums]:
        return surrogate.loss(self.config, scores, batch, has_kl=not self.in_reward)

    def value_loss(self, scores: Scores, batch: MicroBatch) -> tuple[Tensor, Sums]:
        assert scores.values is not None
        values, old = (x.where(batch.loss_mask, 0.0) for x in (scores.values, batch.extras["values"]))
        per_token, is_clipped = maths.value_loss(values, old, batch.extras["returns"], self.config.value_clip)
        sums = {"clip_fraction": is_clipped.float(), "value": values.detach()}

        def mean(values: Tensor) -> Tensor:
            return maths.masked_sum(batch.weights * values, batch.loss_mask)

        return mean(per_token), {name: mean(value) for name, value in sums.items()}


def build(options: Config) -> Ppo:
    return Ppo(options)
