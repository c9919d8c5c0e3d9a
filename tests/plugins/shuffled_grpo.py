"""The control: GRPO on rewards that were dealt out again at random within the batch. It must not learn."""

from collections import defaultdict

import msgspec
import torch

from runtime.trainer.algorithms import grpo
from runtime.types import MicroBatch


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seed: int = 0


class ShuffledGrpo(grpo.Grpo):
    """For one trainer rank, whose share is the whole batch."""

    def __init__(self, seed: int) -> None:
        super().__init__(grpo.Config())
        self._generator = torch.Generator().manual_seed(seed)

    def refine(self, share, all_sum):
        rewards = torch.cat([mb.per_seq["reward"] for mb in share])
        dealt = rewards[torch.randperm(len(rewards), generator=self._generator)].split(
            [len(mb.starts) - 1 for mb in share]
        )
        groups = defaultdict(list)
        for mb, given in zip(share, dealt, strict=True):
            for group, reward in zip(mb.per_seq["group"].tolist(), given.tolist(), strict=True):
                groups[group].append(reward)
        advantages = {group: iter(self.advantages(rewards)) for group, rewards in groups.items()}
        return [self._with(mb, [next(advantages[g]) for g in mb.per_seq["group"].tolist()]) for mb in share], {}

    def _with(self, mb: MicroBatch, advantages: list[float]) -> MicroBatch:
        lengths = torch.tensor([b - a for a, b in zip(mb.starts, mb.starts[1:], strict=False)])
        each = torch.tensor(advantages).repeat_interleave(lengths)
        return msgspec.structs.replace(mb, advantages=each.where(mb.loss_mask, 0.0))


def build(options: Config) -> ShuffledGrpo:
    return ShuffledGrpo(options.seed)
