"""Trainers with every role, an algorithm that asks for all of them, and what two ranks of test_ranks do with it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import torch

from runtime import config
from runtime.batching import make_batch
from runtime.trainer import factory, maths
from runtime.trainer.algorithms import ppo
from runtime.trainer.base import Algorithm
from runtime.trainer.roles import Beside, Roles
from runtime.types import Batch, MicroBatch
from tests.contract.trainer_setup import CPU, ONE, given, make_groups, obey, tensors

LOGPROBS = frozenset({"logprobs"})
VALUES = frozenset({"values"})
DIVERGENCES = (("forward", 0.5, 1.0), ("reverse", 0.5, 0.7), ("jsd", 0.3, 1.0), ("jsd", 0.9, 2.0))


def make_roles(
    models: dict[str, Path],
    *,
    kind="fsdp",
    parallel=ONE,
    precision="float32",
    learning_rate=1e-2,
    critic_rate=3e-2,
    device=CPU,
    teachers=("untied",),
) -> Roles:
    """A tied policy and its critic; a single teacher is another model."""
    plain = {"clip_norm": 0.1, "eps": 1e-3}
    options = config.Trainer(
        kind=kind,
        parallel=parallel,
        precision=precision,
        optimizer=config.Optimizer(learning_rate=learning_rate, **plain),
        critic_optimizer=config.Optimizer(learning_rate=critic_rate, **plain | {"clip_norm": 1.0}),
    )
    taught = tuple(config.Teacher(path=str(models[name])) for name in teachers)
    beside = Beside(critic=models["tied"], reference=models["tied"], teachers=taught)
    return factory.make(models["tied"], options, device, temperature=1.0, bucket_bytes=1000, beside=beside)


class Everything(ppo.Ppo):
    """PPO that also learns from a teacher, in every way there is."""

    def __init__(self) -> None:
        super().__init__(ppo.Config(kl=0.1, gamma=0.9, lam=0.8))
        self.needs = self.needs | {"teacher", "divergence", "entropy"}

    def loss(self, scores, batch):
        loss, sums = super().loss(scores, batch)
        mean = partial(maths.masked_sum, mask=batch.loss_mask)
        distances = [mean(batch.weights * scores.divergence(*args)) for args in DIVERGENCES]
        sums |= {f"divergence{i}": distance.detach() for i, distance in enumerate(distances)}
        sums["teacher"] = mean(batch.weights * batch.extras["teacher"])
        return loss + sum(distances), sums


def batch_for(seed: int, num_dp: int = 1, algorithm: Algorithm | None = None, **shape) -> Batch:
    """Two updates."""
    groups = make_groups(seed, **shape)
    return make_batch(groups, seed, algorithm or Everything(), num_dp=num_dp, num_updates=2, max_tokens=64)


def teach(roles: Roles, num_dp: int = 1) -> list[dict[str, float]]:
    """Three batches; in the last a second data-parallel rank has nothing."""
    batches = [batch_for(0, num_dp), batch_for(1, num_dp), batch_for(2, num_dp, num_groups=1, num_samples=2)]
    device = str(roles.policy.device)
    return [obey(roles, given(roles.policy, batch), Everything(), device) for batch in batches]


def share_of(roles: Roles, seed: int = 5, num_dp: int = 1) -> list[MicroBatch]:
    share = roles.hand_on(given(roles.policy, batch_for(seed, num_dp)))
    return tensors(tuple(batch for update in share.updates for batch in update), roles.policy.device)


def scored(roles: Roles, module: str, num_dp: int = 1, seed: int = 5) -> torch.Tensor:
    """Log-probs, or values, of a batch of one's own."""
    want = VALUES if module == "critic" else LOGPROBS
    (name,) = want
    return torch.cat([getattr(s, name) for s in roles.score(share_of(roles, seed, num_dp), module, want)])


def taught_apart(roles: Roles, several: Roles, num_dp: int = 1) -> float:
    """How far log-probs by two teachers are from each sequence's own.

    Args:
        roles: whose teacher is the first of the two, and its reference the second.
    """
    share = [
        msgspec.structs.replace(batch, per_seq={"teacher": (batch.per_seq["group"] > 0).long()})
        for batch in share_of(roles, num_dp=num_dp)
    ]
    given, score = [], [teacher.score for teacher in several.teachers]
    for teacher, scored in zip(several.teachers, score, strict=True):
        teacher.score = lambda part, want, scored=scored: (given.append(part), scored(part, want))[1]
    found = several.score(share, "teacher", LOGPROBS)
    first, second = (roles.score(share, module, LOGPROBS) for module in ("teacher", "reference"))
    worst = 0.0
    for n, batch in enumerate(share):
        of_second = batch.per_seq["teacher"].repeat_interleave(torch.tensor(batch.starts).diff()).bool()
        expected = second[n].logprobs.where(of_second, first[n].logprobs)
        worst = max(worst, float((found[n].logprobs - expected).abs().max()) if len(expected) else 0.0)
        assert len(given[0][n].tokens) + len(given[1][n].tokens) == len(batch.tokens), "none is scored twice"
    assert not all(len(b.tokens) for part in given for b in part), "a micro-batch without anything for a teacher"
    return worst


def in_a_layout(make, num_dp: int, folder: Path) -> list[dict[str, float]]:
    for precision in ("bfloat16", "float32"):
        roles = make(precision=precision)
        start = scored(roles, "policy", num_dp)
        reference = scored(roles, "reference", num_dp)
        # A kernel may choose another way by how weights are aligned, which differs in buffers that are trained.
        assert (reference - start).abs().max() < 2e-6, "the same computation by another model"
    assert taught_apart(roles, make(teachers=("untied", "tied")), num_dp) < 2e-6
    found = teach(roles, num_dp)
    assert scored(roles, "reference", num_dp).equal(reference) and not scored(roles, "policy", num_dp).equal(start)
    roles.save(folder / "roles").result()
    return found
