"""What each rank of test_layouts runs: many layouts and models in one start, because imports take longest.

Usage: program.py FOLDER RANK RANKS; answers into FOLDER/answers-RANKS-RANK.json: case -> {check: error}.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from safetensors.torch import load_file

from runtime import topology
from runtime.comm.commands import Failed
from runtime.config import Parallel
from runtime.trainer.megatron import groups, schedule
from runtime.trainer.megatron import model as mm
from runtime.trainer.megatron.convert import Listed
from runtime.trainer.megatron.cpu import megatron_on_cpu
from runtime.trainer.megatron.model import Model
from runtime.trainer.megatron.packing import Packed
from runtime.trainer.megatron.spread import from_leader
from runtime.trainer.megatron.weight_files import WeightFiles
from tests.megatron import beside, models
from tests.megatron.layouts import LAYOUTS

CPU = torch.device("cpu")
ENTROPY = frozenset({"entropy"})


def main(folder: Path, rank: int, num_ranks: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store-{num_ranks}"
    dist.init_process_group("gloo", store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    answers = {}
    with megatron_on_cpu():
        for layout, (parallel, names) in LAYOUTS[num_ranks].items():
            groups.start(parallel, seed=1)
            for name in names:
                begun = time.monotonic()
                try:
                    model, *way = name.split()
                    run = WAYS[way[0]] if way else case
                    answers[f"{layout} {name}"] = run(folder / model, parallel)
                except Exception as e:
                    answers[f"{layout} {name}"] = {"failed": f"{e!r}\n{traceback.format_exc()}"}
                answers[f"{layout} {name}"]["seconds"] = time.monotonic() - begun
                (folder / f"answers-{num_ranks}-{rank}.json").write_text(json.dumps(answers))
                if "failed" in answers[f"{layout} {name}"]:
                    os._exit(1)  # its peers wait for it in vain
            groups.stop()
    dist.barrier()
    dist.destroy_process_group()


def case(folder: Path, parallel: Parallel) -> dict[str, float]:
    """The largest error of each check; `build`, `score` and `train` as a trainer uses them."""
    dp = groups.data().size()
    share = groups.data().rank()
    # An odd number leaves interleaved pipelining something to fill up.
    num = 3 * dp if parallel.virtual_pipeline > 1 else 6
    wanted = load_file(folder / f"reference-{num}.bin")
    numbers = list(range(num))[share::dp]
    batches = [models.batches(num)[n] for n in numbers]
    model = mm.build(folder, parallel, CPU, torch.float32, training=mm.Training())
    found = {"round trip": float(not is_unchanged(model, folder)), "read beside its own": read_beside(model, folder)}
    found["share of another"] = float(not is_own_share(parallel))
    for chunk in model.chunks:
        chunk.train()

    logits = schedule.forward(model, batches, lambda i, logits, packed: whole_logits(logits, packed))
    for n, rows in zip(numbers, logits, strict=bool(logits)):
        put(found, "logits", rows[:, : model.hf.vocab_size] - wanted[f"logits.{n}"])
    for n, scores in zip(numbers, schedule.score(model, batches, 1.0, frozenset()), strict=True):
        logp = torch.log_softmax(wanted[f"logits.{n}"], -1)
        tokens, starts = models.batches(num)[n]
        plain = logp.gather(1, tokens[:, None])[:, 0].index_fill(0, torch.tensor(starts[:-1]), 0.0)
        put(found, "logprobs at temperature 1", scores.logprobs - plain)
    for n, scores in zip(numbers, schedule.score(model, batches, models.TEMPERATURE, ENTROPY), strict=True):
        put(found, "logprobs", scores.logprobs - wanted[f"logprobs.{n}"])
        put(found, "entropy", scores.entropy - wanted[f"entropy.{n}"])

    def loss(i, scores):
        value = models.loss(numbers[i], scores.logprobs, scores.entropy)
        return value, (value.detach(), value.detach().clone())  # the first shares memory with the loss

    for kept, cloned in schedule.train(model, batches, loss, models.TEMPERATURE, ENTROPY):
        put(found, "loss changed in place", kept - cloned)
    found["round trip after training"] = float(not is_unchanged(model, folder))  # only an optimizer changes weights
    found |= gradients(model, {k.removeprefix("grad."): v for k, v in wanted.items() if k.startswith("grad.")})
    found["updated weight"] = update(model, wanted, is_sharded=False)
    training = mm.Training(shards_optimizer=True, recomputes=True)
    model = mm.build(folder, parallel, CPU, torch.float32, training=training)
    schedule.train(model, batches, loss, models.TEMPERATURE, ENTROPY)
    found["weight updated in shards"] = update(model, wanted, is_sharded=True)
    return found | (beside.check(folder.parent, parallel, numbers, num) if folder.name == beside.POLICY else {})


def is_own_share(parallel: Parallel) -> bool:
    """Whether what topology calls leaders hand on reaches the ranks that Megatron has train on it."""
    leaders, rank = topology.leaders(range(dist.get_world_size()), parallel), dist.get_rank()
    given = Failed(reason=f"share {leaders.index(rank)}") if rank in leaders else None
    return from_leader(given, Failed, CPU).reason == f"share {groups.data().rank()}"


def in_half(folder: Path, parallel: Parallel) -> dict[str, float]:
    """A model that is only scored, in bfloat16: files in bfloat16 come out as they are, and log-probs are near."""
    wanted = load_file(folder / "reference-3.bin")
    model = mm.build(folder, parallel, CPU, torch.bfloat16)
    assert not any(p.requires_grad for chunk in model.chunks for p in chunk.parameters())
    found = {"round trip": float(not is_unchanged(model, folder))}
    for n, scores in enumerate(schedule.score(model, models.batches(3), models.TEMPERATURE, frozenset())):
        assert scores.entropy is None
        assert scores.logprobs.dtype == torch.float32
        put(found, "logprobs in bfloat16", scores.logprobs - wanted[f"logprobs.{n}"])
    return found


def in_float32_at_last(folder: Path, parallel: Parallel) -> dict[str, float]:
    """A model in bfloat16 whose logits are float32: exactly the product of what the output layer sees, and gradients
    reach every weight, cut or not."""
    wanted, batches = load_file(folder / "reference-6.bin"), models.batches(6)
    model = mm.build(folder, parallel, CPU, torch.bfloat16, training=mm.Training(), float32_output=True)
    found = {"round trip": float(not is_unchanged(model, folder))} if folder.name in models.HALF else {}

    def look(layer: Any, arguments: tuple[Any, ...], given: dict[str, Any], out: tuple[torch.Tensor, None]) -> None:
        hidden = torch.cat(all_gather(arguments[0], groups.tensor())) if parallel.sequence_parallel else arguments[0]
        weight = layer.weight if given["weight"] is None else given["weight"]
        assert out[0].dtype == torch.float32
        put(found, "logits of hidden states", out[0] - hidden.float() @ weight.float().T)

    for chunk in model.chunks:
        chunk.train()
        if (layer := getattr(chunk.module, "output_layer", None)) is not None:
            layer.register_forward_hook(look, with_kwargs=True)
    for n, scores in enumerate(schedule.score(model, batches, models.TEMPERATURE, frozenset())):
        put(found, "logprobs in bfloat16", scores.logprobs - wanted[f"logprobs.{n}"])

    def loss(i, scores):
        return models.loss(i, scores.logprobs, scores.entropy), None

    schedule.train(model, batches, loss, models.TEMPERATURE, ENTROPY)
    in_float32 = {key.removeprefix("grad."): grad for key, grad in wanted.items() if key.startswith("grad.")}
    return found | {f"{name} in bfloat16": error for name, error in gradients(model, in_float32).items()}


def beside_experts(folder: Path, parallel: Parallel) -> dict[str, float]:
    """Models without experts where the policy's are shared out."""
    share, dp = groups.data().rank(), groups.data().size()
    return beside.check(folder.parent, parallel, list(range(6))[share::dp], 6)


def apart(folder: Path, parallel: Parallel) -> dict[str, float]:
    """A teacher whose experts all ranks of a stage share out, unlike the policy's."""
    expert, share, dp = dist.get_world_size() // parallel.pipeline, groups.data().rank(), groups.data().size()
    model = mm.build(folder, mm.beside(folder, parallel, expert), CPU, torch.float32)
    own = {name.split(".")[6] for name in model.weights.held if ".local_experts." in name}
    assert expert != parallel.expert and len(own) == model.hf.num_experts // expert
    found, wanted = {"round trip": float(not is_unchanged(model, folder))}, load_file(folder / "reference-6.bin")
    numbers = range(6)[share::dp]
    batches = [models.batches(6)[n] for n in numbers]
    for n, scores in zip(numbers, schedule.score(model, batches, models.TEMPERATURE, frozenset()), strict=True):
        put(found, "logprobs", scores.logprobs - wanted[f"logprobs.{n}"])
    return found


WAYS = {"bfloat16": in_half, "float32-output": in_float32_at_last, "beside": beside_experts, "apart": apart}
"""Of running a model, beside `case`."""


def whole_logits(logits: torch.Tensor, packed: Packed) -> torch.Tensor:
    """[1, L, V / tp] of this rank -> [T, V] of the whole micro-batch: row t is that of tokens[t]'s prefix, 0 at
    starts."""
    rows = all_gather(torch.cat(all_gather(logits[0], groups.tensor()), -1), groups.context())
    return torch.cat(rows)[packed.source].masked_fill(packed.is_start[:, None], 0.0)


def all_gather(part: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def put(found: dict[str, float], name: str, difference: torch.Tensor) -> None:
    found[name] = max(found.get(name, 0.0), float(difference.abs().max()))
    if torch.isnan(difference).any():
        found[name] = float("inf")


def is_unchanged(model: Model, folder: Path) -> bool:
    """Names, dtypes and bytes given out are those of the folder."""
    with WeightFiles(folder) as files:
        given = dict(model.weights.give(model.listed))
        said = [(x.name, x.dtype, x.shape) for x in model.listed]
        same = given.keys() == files.names() and said == [(n, x.dtype, tuple(x.shape)) for n, x in given.items()]
        for name, tensor in given.items():
            stored = files.read(name, None, 0, 1)
            same &= tensor.dtype == stored.dtype and torch.equal(
                tensor.contiguous().view(torch.uint8), stored.view(torch.uint8)
            )
    return same


def update(model: Model, wanted: dict[str, torch.Tensor], *, is_sharded: bool) -> float:
    """How far one clipped step of Megatron's optimizer is from transformers' model and torch's AdamW."""
    beta1, beta2 = models.ADAM["betas"]
    options = OptimizerConfig(
        optimizer="adam",
        lr=models.ADAM["lr"],
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=models.ADAM["eps"],
        weight_decay=0.0,
        clip_grad=models.CLIP_NORM,
        use_distributed_optimizer=is_sharded,
    )
    get_megatron_optimizer(options, model.chunks).step()
    listed = [Listed(x.name, torch.float32, x.shape) for x in model.listed]
    updated = {k.removeprefix("updated."): v for k, v in wanted.items() if k.startswith("updated.")}
    return max(float((x - updated[n]).abs().max()) for n, x in model.weights.give(listed) if n in updated)


class Counting(WeightFiles):
    num_read = 0

    def read(self, *args):
        found = super().read(*args)
        self.num_read += found.numel()
        return found


def read_beside(model: Model, folder: Path) -> float:
    """Elements that loading reads and this rank does not hold."""
    with Counting(folder) as files:
        model.weights.load(files)
        padding = -model.hf.vocab_size % groups.tensor().size() * model.hf.hidden_size
        excess = float(files.num_read - sum(x.numel() for x in model.weights.held.values()))
        return excess % padding if padding else excess


def gradients(model: Model, wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Every parameter's gradient, gathered the way weights are; and the norm over all."""
    weights = copy.copy(model.weights)
    weights.held = {n: p.main_grad for n, p in weights.held.items() if hasattr(p, "main_grad")}
    weights.rows = [row for row in weights.rows if "expert_bias" not in row.megatron]
    listed = [Listed(x.name, torch.float32, x.shape) for x in model.listed]
    given = dict(weights.give(listed))
    # An expert that no token was sent to has a gradient of exactly zero.
    errors = {name: float((given[name] - g).abs().max() / g.abs().max().clamp(min=1e-30)) for name, g in wanted.items()}
    assert not any(error != error for error in errors.values()), errors
    norms = [torch.stack([g.double().norm() for g in x.values()]).norm() for x in (given, wanted)]
    worst = max(errors, key=errors.__getitem__)
    copies = [row for row in weights.rows if row.is_copy and row.megatron in weights.held]
    found = {"gradient": errors[worst], "gradient norm": abs(float(norms[0] / norms[1]) - 1)}
    if errors[worst] > 1e-4:
        found["worst gradients"] = sorted(((round(e, 6), n) for n, e in errors.items()), reverse=True)[:8]
    for row in copies:
        own = weights.held[row.megatron]
        whole = wanted[row.hf[0]]
        part = whole.chunk(weights.tp.size())[weights.tp.rank()]
        put(found, "gradient of the tied copy", (own[: len(part)] - part) / whole.abs().max())
        put(found, "gradient of the tied copy", own[len(part) :].sum())
    assert given.keys() == wanted.keys(), given.keys() ^ wanted.keys()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
