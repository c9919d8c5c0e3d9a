"""Models beside a policy in any layout, against transformers: a critic whose values are chosen logits, and a teacher.

A critic's value head that holds a row of the output layer gives that row's logits, and the same gradients.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from runtime import config
from runtime.config import Parallel
from runtime.trainer import maths
from runtime.trainer.megatron import frozen, schedule
from runtime.trainer.megatron import model as mm
from runtime.trainer.megatron.optimizer import AdamW
from tests.megatron import models

POLICY, TEACHER = "qwen3", "qwen2_tied"
ROW = 5
DIVERGENCE = ("jsd", 0.3, 0.8)
CPU = torch.device("cpu")
DIVERGING = frozenset({"divergence"})


def divergence_of(rows: Tensor, of_teacher: Tensor) -> Tensor:
    kind, beta, temperature = DIVERGENCE
    logp, logq = (maths.log_softmax(x / temperature) for x in (rows, of_teacher))
    return maths.divergence(logp, logq, kind, beta)


def reference(folder: Path, num: int) -> None:
    """Writes gradient norms of values and of divergences of the first `num` micro-batches, after models.reference."""
    model = AutoModelForCausalLM.from_pretrained(folder / POLICY, dtype=torch.float32, attn_implementation="eager")
    of_teacher = load_file(folder / TEACHER / f"reference-{num}.bin")
    norms = {}
    for what in ("values", "divergence"):
        model.zero_grad()
        for number, (tokens, starts) in enumerate(models.batches(num)):
            if len(tokens) < 2:
                continue
            rows = models.rows_of(model, tokens, starts)
            found = rows[:, ROW] if what == "values" else divergence_of(rows, of_teacher[f"logits.{number}"])
            (models.weights(number, len(tokens)) * found.index_fill(0, torch.tensor(starts[:-1]), 0.0)).sum().backward()
        norms[what] = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norms["row"] = model.lm_head.weight[ROW]
    save_file({name: norm.detach().clone() for name, norm in norms.items()}, folder / POLICY / f"beside-{num}.bin")


def check(folder: Path, parallel: Parallel, numbers: list[int], num: int) -> dict[str, float]:
    """The largest errors on this rank, which trains on the micro-batches `numbers`."""
    logits = load_file(folder / POLICY / f"reference-{num}.bin")
    of_teacher = load_file(folder / TEACHER / f"reference-{num}.bin")
    norms = load_file(folder / POLICY / f"beside-{num}.bin")
    batches = [models.batches(num)[n] for n in numbers]
    found = {"values": 0.0, "divergence": 0.0}

    def note(name: str, n: int, values: Tensor, expected: Tensor) -> Tensor:
        expected = expected.index_fill(0, torch.tensor(models.batches(num)[n][1][:-1]), 0.0)
        found[name] = max(found[name], float((values.detach() - expected).abs().max()))
        return (models.weights(n, len(values)) * values).sum()

    training = mm.Training(shards_optimizer=True, has_values=True)
    parallel = mm.beside(folder / POLICY, parallel)
    critic = mm.build(folder / POLICY, parallel, CPU, torch.float32, training=training)
    if (head := critic.weights.held.get("output_layer.weight")) is not None:
        assert head.eq(0).all()
        head.data.copy_(norms["row"][None])
    for n, scores in zip(numbers, schedule.score(critic, batches, 1.0, frozenset({"values"})), strict=True):
        note("values", n, scores.values, logits[f"logits.{n}"][:, ROW])

    def total(i: int, scores) -> tuple[Tensor, None]:
        return scores.values @ models.weights(numbers[i], len(scores.values)), None

    schedule.train(critic, batches, total, 1.0, frozenset())
    found["gradient norm of values"] = abs(norm_of(critic) / float(norms["values"]) - 1)

    policy = mm.build(folder / POLICY, parallel, CPU, torch.float32, training=mm.Training(shards_optimizer=True))
    teacher = frozen.MegatronFrozen(folder / TEACHER, StandIn(policy))

    def loss(i: int, scores) -> tuple[Tensor, None]:
        n = numbers[i]
        expected = divergence_of(logits[f"logits.{n}"], of_teacher[f"logits.{n}"])
        return note("divergence", n, scores.divergence(*DIVERGENCE), expected), None

    schedule.train(policy, batches, loss, 1.0, DIVERGING, teacher.heads_of(batches))
    found["gradient norm of a divergence"] = abs(norm_of(policy) / float(norms["divergence"]) - 1)
    return found


class StandIn:
    """What a frozen model needs to know of its policy."""

    def __init__(self, model: mm.Model) -> None:
        self.model, self.device, self.dtype, self.temperature = model, CPU, torch.float32, 1.0
        self.float32_output = False


def norm_of(model: mm.Model) -> float:
    norm, _ = AdamW(model, config.Optimizer(), torch.float32).step()
    return norm
