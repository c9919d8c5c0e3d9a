"""A tiny model, groups for it, trainers of every kind, and the program that two trainer ranks run for test_ranks."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from runtime import config, topology
from runtime.batching import make_batch
from runtime.comm import commands as c
from runtime.config import Parallel
from runtime.trainer import worker
from runtime.trainer.algorithms import grpo
from runtime.trainer.base import Algorithm, Trainer
from runtime.trainer.fsdp import FsdpTrainer
from runtime.trainer.group import configure_torch
from runtime.types import Batch, Group, MicroBatch, Prompt, Sample, Share

torch.set_num_threads(1)  # on models so small more threads wait for each other, on a busy machine for seconds

VOCABULARY = 41
"""Odd, so that two tensor-parallel ranks have to fill theirs up."""
WANTED = frozenset({"logprobs", "entropy"})
CPU = torch.device("cpu")
ONE = Parallel()
LAYOUTS = {
    "fsdp": {"dp2": ONE},
    "megatron": {"dp2": ONE, "tp2": Parallel(tensor=2), "pp2": Parallel(pipeline=2)},
}
"""How two ranks are used, by kind of trainer."""


def make_model(folder: Path, **fields) -> Path:
    torch.manual_seed(0)
    plain = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "head_dim": 8,
    }
    shape = Qwen3Config(**plain | fields)
    model = Qwen3ForCausalLM(shape)
    with torch.no_grad():
        for p in model.parameters():  # far enough from uniform that a wrong neighbour shows
            p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"kept": "as it is"}')
    return folder


@contextlib.contextmanager
def around(kind: str, parallel: Parallel = ONE, device: torch.device = CPU) -> Iterator[None]:
    """What trainers of a kind need around them; runtime.trainer.factory makes a single one, here many share it."""
    if kind == "fsdp":
        yield
        return
    from runtime.trainer.megatron import process

    with process.ready(device, parallel):
        yield


def make_trainer(
    model: Path,
    *,
    kind="fsdp",
    parallel=ONE,
    precision="float32",
    temperature=1.0,
    device=CPU,
    recompute="none",
    lora=None,
    **optimizer,
) -> Trainer:
    """With a large eps: without, AdamW moves by a gradient's sign, and rounding decides that of a gradient near 0."""
    options = config.Trainer(
        kind=kind,
        parallel=parallel,
        precision=precision,
        recompute=recompute,
        lora=lora,
        optimizer=config.Optimizer(
            **{"learning_rate": 1e-2, "clip_norm": 0.1, "eps": 1e-3, "weight_decay": 0.01, **optimizer}
        ),
    )
    made = FsdpTrainer
    if kind == "megatron":
        from runtime.trainer.megatron.trainer import MegatronTrainer as made
    return made(model, options, device, temperature=temperature, bucket_bytes=1000)


def leaders(parallel: Parallel) -> tuple[int, ...]:
    return topology.leaders(range(dist.get_world_size() if dist.is_initialized() else 1), parallel)


def given(trainer: Trainer, batch: Batch) -> Share | None:
    """What the controller sends this rank of a batch."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    parallel = ONE if isinstance(trainer, FsdpTrainer) else trainer.model.parallel
    return dict(zip(leaders(parallel), batch.shares, strict=True)).get(rank)


def make_groups(seed: int, num_groups: int = 4, num_samples: int = 4, longest: int = 24) -> list[Group]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, VOCABULARY, (num_groups, 3))

    def sample(lease: int, index: int) -> Sample:
        size = int(rng.integers(4, longest))
        mask = np.arange(size) >= int(rng.integers(1, 4))
        answer = rng.integers(0, VOCABULARY, size - 3)
        logprobs = np.where(mask, -rng.random(size) * 4, 0).astype(np.float32)
        return Sample(
            prompt_id="p",
            index=index,
            tokens=np.concatenate([prompts[lease], answer]).astype(np.int32),
            loss_mask=mask,
            logprobs=logprobs,
            versions=((0, 0),),
            reward=float(rng.integers(0, 2)),
        )

    return [
        Group(
            lease=lease,
            prompt=Prompt(id=f"p{lease}", dataset="d"),
            samples=tuple(sample(lease, i) for i in range(num_samples)),
            version=0,
        )
        for lease in range(num_groups)
    ]


def batch_of(seed: int, *, num_dp: int = 1, max_tokens: int = 64, denominator="tokens", **shape) -> Batch:
    algorithm = grpo.build(grpo.Config(denominator=denominator))
    return make_batch(make_groups(seed, **shape), seed, algorithm, num_dp=num_dp, num_updates=1, max_tokens=max_tokens)


def tensors(batches: tuple[MicroBatch, ...], device=CPU) -> list[MicroBatch]:
    return [b.map(lambda array: torch.from_numpy(np.array(array)).to(device)) for b in batches]


def train(trainer: Trainer, batch: Batch, options: grpo.Config | None = None) -> dict[str, float]:
    algorithm = grpo.build(options or grpo.Config())
    share = trainer.hand_on(given(trainer, batch))
    update, totals = tensors(share.updates[0], trainer.device), share.totals[0]
    return trainer.update(update, algorithm.losses, totals, algorithm.denominator, algorithm.needs & {"entropy"})


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def named_modules(trainer: Trainer) -> Iterator[tuple[str, torch.nn.Module]]:
    """On one rank."""
    (whole,) = [trainer.model] if isinstance(trainer, FsdpTrainer) else trainer.model.chunks
    return whole.named_modules()


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of the last update, clipped; by Hugging Face name. On one rank."""
    if isinstance(trainer, FsdpTrainer):
        return {name: p.grad for name, p in trainer.model.named_parameters()}
    weights = copy.copy(trainer.model.weights)
    weights.held = {name: p.main_grad for name, p in weights.held.items()}
    return dict(weights.give(trainer.listed))


SCARCE = {"num_groups": 1, "num_samples": 1}
"""A batch with one sequence: with two data-parallel ranks one of them has none."""


def train_three(trainer: Trainer, num_dp: int) -> list[dict[str, float]]:
    """Three updates, the last of which leaves a second data-parallel rank without work."""
    return [train(trainer, batch_of(seed, num_dp=num_dp, **(SCARCE if seed == 2 else {}))) for seed in range(3)]


def scarce(num_dp: int) -> Batch:
    """Two updates of one sequence each: with two data-parallel ranks, one has nothing in either."""
    algorithm = grpo.build(grpo.Config())
    return make_batch(make_groups(4, 1, 2), 0, algorithm, num_dp=num_dp, num_updates=2, max_tokens=64)


def obey(
    trainer: Trainer, share: Share | None, algorithm: Algorithm | None = None, device: str = "cpu"
) -> dict[str, float]:
    """The share trained by the program of a trainer rank, times aside."""
    said: list[c.Answer] = []
    commands = [c.StopTrainer(), c.Train(share=share)]
    port = SimpleNamespace(receive=lambda timeout_s: commands.pop(), answer=said.append)
    algorithm = algorithm or grpo.build(grpo.Config())
    worker.serve(port, trainer, algorithm, None, worker.Settings(device=device, timeout_s=1.0))
    (metrics,) = (answer.metrics for answer in said if isinstance(answer, c.Trained))
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


def two_ranks(rank: int, kind: str, folder: Path, models: dict[str, Path]) -> None:
    """What each of two ranks runs: every layout of a kind. What they saw goes into folder/LAYOUT."""
    from tests.contract import roles_setup

    configure_torch(1, True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for layout, parallel in LAYOUTS[kind].items():
        with around(kind, parallel):
            make = partial(make_trainer, kind=kind, parallel=parallel)
            one_layout(make, len(leaders(parallel)), folder / layout, models)
            make = partial(roles_setup.make_roles, models, kind=kind, parallel=parallel)
            seen = roles_setup.in_a_layout(make, len(leaders(parallel)), folder / layout)
            (folder / layout / f"roles-{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        with around(kind):
            alone = make_trainer(models["tied"], kind=kind, precision="bfloat16")
            (folder / "alone.json").write_text(json.dumps(train_three(alone, 1)))  # it made a group of its own


def one_layout(make, num_dp: int, folder: Path, models: dict[str, Path]) -> None:
    rank = dist.get_rank()
    folder.mkdir(exist_ok=True)
    seen: dict[str, list[dict[str, float]]] = {}
    for name, precision in (("tied", "float32"), ("untied", "float32"), ("tied", "bfloat16")):
        trainer = make(models[name], precision=precision)
        if precision == "bfloat16":
            trainer.save(folder / "start").result()
        seen[f"{name}-{precision}"] = train_three(trainer, num_dp)
        weights = weights_of(trainer)
        shapes = dict(zip(trainer.manifest().names, trainer.manifest().shapes, strict=True))
        assert shapes == {key: tuple(tensor.shape) for key, tensor in weights.items()}
        saving = trainer.save(folder / f"{name}-{precision}")
        trainer.export(folder / f"{name}-{precision}-hf")
        saving.result()
        if rank == 0:
            save_file(weights, folder / f"{name}-{precision}.safetensors")
    trainer = make(models["tied"], precision="bfloat16", recompute="full", offload=True)
    trainer.restore(folder / "start")
    seen["spare"] = train_three(trainer, num_dp)
    trainer.save(folder / "spare").result()
    trainer = make(models["tied"], lora=config.Lora(rank=4), recompute="full")
    seen["adapted"] = train_three(trainer, num_dp)
    trainer.export(folder / "adapted-hf")
    trainer = make(models["tied"])
    trainer.restore(folder.parent / "one-rank")
    restored = weights_of(trainer)
    seen["restored"] = [train(trainer, batch_of(7, num_dp=num_dp))]
    weights = weights_of(trainer)
    if rank == 0:
        save_file(restored, folder / "restored.safetensors")
        save_file(weights, folder / "restored-next.safetensors")
    trainer = make(models["untied"])
    share = trainer.hand_on(given(trainer, batch_of(0, num_dp=num_dp)))
    scores = trainer.score(tensors(share.updates[0]), "policy", WANTED)
    assert all(len(s.logprobs) == len(b.tokens) for s, b in zip(scores, share.updates[0], strict=True))
    weights = weights_of(trainer)
    if rank == 0:
        save_file(weights, folder / "scored.safetensors")
    seen["scarce"] = [obey(trainer, given(trainer, scarce(num_dp)))]
    ranks = torch.tensor([float(rank)])
    seen["all_sum"] = [{"ranks": float(trainer.all_sum(ranks))}]
    (folder / f"metrics-{rank}.json").write_text(json.dumps(seen))
