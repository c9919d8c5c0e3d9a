"""The program of test_packing: updates of one trainer on micro-batches as they are packed, and with every sequence
filled up to the longest of its micro-batch.

    python -m tests.bench.packing_side KIND MODEL        KIND: fsdp or megatron

Prints {"packed_s": [...], "padded_s": [...], "packed_tokens": ..., "padded_tokens": ...}; seconds of the processor, so
that neighbours on the machine do not count.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from runtime.trainer.algorithms import grpo
from runtime.trainer.group import configure_torch
from runtime.types import MicroBatch
from tests.bench.update_side import SIZES
from tests.contract.trainer_setup import around, batch_of, make_trainer, tensors

UPDATES = 5


def fill_up(batch: MicroBatch) -> MicroBatch:
    """Its sequences, each with tokens behind it that nothing is learned from, up to the length of the longest."""
    longest = max(b - a for a, b in pairwise(batch.starts))

    def filled(array: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(batch.starts) - 1, longest), array.dtype)
        for row, (a, b) in zip(rows, pairwise(batch.starts), strict=True):
            row[: b - a] = array[a:b]
        return rows.reshape(-1)

    arrays = ("tokens", "loss_mask", "weights", "advantages", "rollout_logprobs")
    return msgspec.structs.replace(
        batch,
        **{name: filled(getattr(batch, name)) for name in arrays},
        positions=np.tile(np.arange(longest, dtype=batch.positions.dtype), len(batch.starts) - 1),
        starts=tuple(range(0, longest * len(batch.starts), longest)),
    )


def main(kind: str, path: Path) -> None:
    configure_torch(1, False)
    told: dict[str, list[float]] = {"packed_s": [], "padded_s": []}
    tokens = {"packed": 0, "padded": 0}
    algorithm = grpo.build(grpo.Config())
    with around(kind):
        trainer = make_trainer(path, kind=kind, learning_rate=0.0)
        for seed in range(UPDATES):
            share = batch_of(seed, **SIZES).shares[0]
            norms = []
            for name, batches in (("packed", share.updates[0]), ("padded", tuple(map(fill_up, share.updates[0])))):
                tokens[name] += sum(len(batch.tokens) for batch in batches)
                given = tensors(batches)
                begin = time.process_time()
                norms.append(trainer.update(given, algorithm.losses, share.totals[0], "tokens")["grad_norm"])
                told[f"{name}_s"].append(time.process_time() - begin)
            assert abs(norms[0] / norms[1] - 1) < 1e-3, f"not the same gradients: {norms}"
    print(json.dumps({**told, **{f"{name}_tokens": n for name, n in tokens.items()}}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
