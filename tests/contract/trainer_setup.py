"""A tiny model, groups for it, and the program that two trainer ranks run for test_trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from runtime import config
from runtime.batching import make_batch
from runtime.comm import messages as m
from runtime.trainer import worker
from runtime.trainer.algorithms import grpo
from runtime.trainer.fsdp import FsdpTrainer, configure_torch
from runtime.types import Batch, Group, MicroBatch, Prompt, Sample, Share

VOCABULARY = 40
CPU = torch.device("cpu")


def make_model(folder: Path, **fields) -> Path:
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **{"tie_word_embeddings": True, "head_dim": 8, **fields},
    )
    model = Qwen3ForCausalLM(shape)
    with torch.no_grad():
        for p in model.parameters():  # far enough from uniform that a wrong neighbour shows
            p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"kept": "as it is"}')
    return folder


def make_trainer(model: Path, *, precision="float32", temperature=1.0, device=CPU, **optimizer) -> FsdpTrainer:
    """With a large eps: without, AdamW moves by a gradient's sign, and rounding decides that of a gradient near 0."""
    options = config.Trainer(
        precision=precision,
        optimizer=config.Optimizer(**{"learning_rate": 1e-2, "clip_norm": 0.1, "eps": 1e-3, **optimizer}),
    )
    return FsdpTrainer(model, options, device, temperature=temperature, bucket_bytes=1000)


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


def train(trainer: FsdpTrainer, batch: Batch, options: grpo.Config | None = None) -> dict[str, float]:
    algorithm = grpo.build(options or grpo.Config())
    share = batch.shares[trainer.rank]
    update, totals = tensors(share.updates[0], trainer.device), share.totals[0]
    return trainer.update(update, algorithm.losses, totals, algorithm.denominator, algorithm.needs & {"entropy"})


def weights_of(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


SCARCE = {"num_groups": 1, "num_samples": 1}
"""A batch with one sequence: with two ranks one of them has none."""


def train_three(trainer: FsdpTrainer, num_dp: int) -> list[dict[str, float]]:
    """Three updates, the last of which leaves a second rank without work."""
    return [train(trainer, batch_of(seed, num_dp=num_dp, **(SCARCE if seed == 2 else {}))) for seed in range(3)]


def scarce(num_dp: int) -> Batch:
    """Two updates of one sequence each: with two ranks, one has nothing in either."""
    algorithm = grpo.build(grpo.Config())
    return make_batch(make_groups(4, 1, 2), 0, algorithm, num_dp=num_dp, num_updates=2, max_tokens=64)


def obey(trainer: FsdpTrainer, share: Share) -> dict[str, float]:
    """The share trained by the program of a trainer rank, times aside."""
    said: list[m.Answer] = []
    commands = [m.StopTrainer(), m.Train(share=share)]
    port = SimpleNamespace(receive=lambda timeout_s: commands.pop(), answer=said.append)
    worker.serve(port, trainer, grpo.build(grpo.Config()), None, worker.Settings(device="cpu", timeout_s=1.0))
    (metrics,) = (answer.metrics for answer in said if isinstance(answer, m.Trained))
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


def two_ranks(rank: int, folder: Path, models: dict[str, Path]) -> None:
    """What each of two ranks runs; rank 0 writes what it saw into `folder`."""
    configure_torch(1, True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    seen: dict[str, list[dict[str, float]]] = {}
    for name, precision in (("tied", "float32"), ("untied", "float32"), ("tied", "bfloat16")):
        trainer = make_trainer(models[name], precision=precision)
        seen[f"{name}-{precision}"] = train_three(trainer, 2)
        weights = weights_of(trainer)
        trainer.save(folder / f"{name}-{precision}")
        trainer.export(folder / f"{name}-{precision}-hf")
        if rank == 0:
            save_file(weights, folder / f"{name}-{precision}.safetensors")
    trainer = make_trainer(models["tied"])
    trainer.restore(folder / "one-rank")
    restored = weights_of(trainer)
    seen["restored"] = [train(trainer, batch_of(7, num_dp=2))]
    weights = weights_of(trainer)
    if rank == 0:
        save_file(restored, folder / "restored.safetensors")
        save_file(weights, folder / "restored-next.safetensors")
    trainer = make_trainer(models["untied"])
    trainer.score(tensors(batch_of(0, num_dp=2).shares[rank].updates[0]), "policy", frozenset({"logprobs"}))
    weights = weights_of(trainer)
    if rank == 0:
        save_file(weights, folder / "scored.safetensors")
    seen["scarce"] = [obey(trainer, scarce(2).shares[rank])]
    dist.destroy_process_group()
    if rank == 0:
        alone = make_trainer(models["tied"], precision="bfloat16")  # one rank without a group makes its own
        seen["alone-bfloat16"] = train_three(alone, 1)
        (folder / "metrics.json").write_text(json.dumps(seen))
        dist.destroy_process_group()
