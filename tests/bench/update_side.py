"""One side of test_update: seconds of optimizer updates of one kind, on the sequences that all sides train on.

    python -m tests.bench.update_side KIND MODEL        KIND: transformers, fsdp or megatron

Prints {"update_s": [...], "tokens": ..., "grad_norm": ...}.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from runtime.trainer.group import configure_torch
from runtime.types import MicroBatch
from tests.contract.trainer_setup import around, batch_of, make_trainer, tensors, train

UPDATES = 6
SIZES = {"num_groups": 4, "num_samples": 8, "longest": 160, "max_tokens": 1024}
OPTIMIZER = {"learning_rate": 1e-5, "clip_norm": 1.0, "eps": 1e-8}


def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[MicroBatch], total: int) -> float:
    """An update as one writes it with transformers: each micro-batch a padded rectangle."""
    optimizer.zero_grad()
    for batch in batches:

        def rows(values: torch.Tensor, starts: tuple[int, ...] = batch.starts) -> torch.Tensor:
            return pad_sequence([values[a:b] for a, b in pairwise(starts)], batch_first=True)

        tokens, mask = rows(batch.tokens.long()), rows(batch.loss_mask)
        logits = model(input_ids=tokens, attention_mask=rows(torch.ones_like(batch.tokens))).logits[:, :-1]
        logp = -cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view_as(tokens[:, 1:])
        loss = -(rows(batch.advantages)[:, 1:] * (logp - logp.detach()).exp() * mask[:, 1:]).sum() / total
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_norm"])
    optimizer.step()
    return float(norm)


def main(kind: str, path: Path) -> None:
    configure_torch(1, False)
    seen: list[tuple[float, float]] = []
    made = [batch_of(seed, **SIZES) for seed in range(UPDATES)]
    with around("megatron" if kind == "megatron" else "fsdp"):
        if kind == "transformers":
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-8, weight_decay=0.01, fused=True)
        else:
            trainer = make_trainer(path, kind=kind, **OPTIMIZER)
        for batch in made:
            begin = time.perf_counter()
            if kind == "transformers":
                (share,) = batch.shares
                norm = plain(model, optimizer, tensors(share.updates[0]), share.totals[0].tokens)
            else:
                norm = train(trainer, batch)["grad_norm"]
            seen.append((time.perf_counter() - begin, norm))
    tokens = [sum(len(b.tokens) for b in batch.shares[0].updates[0]) for batch in made]
    print(json.dumps({"update_s": [s for s, _ in seen], "grad_norm": [n for _, n in seen], "tokens": tokens}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
