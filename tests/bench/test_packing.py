"""Packed micro-batches against padded ones: one trainer, the same sequences, within one process."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.test_update import HEADS, SIZE
from tests.contract.trainer_setup import make_model

ROOT = Path(__file__).parents[2]
WARM_UP = 1
OF_THE_TOKENS = 0.8
"""What of the tokens that packing saves must be saved in time."""


@pytest.mark.bench
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_packing_saves_what_padding_costs(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / "model", **SIZE, **HEADS)
    command = [sys.executable, "-m", "tests.bench.packing_side", kind, str(model)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    tokens = told["padded_tokens"] / told["packed_tokens"]
    ratios = [b / a for a, b in zip(told["packed_s"][WARM_UP:], told["padded_s"][WARM_UP:], strict=True)]
    faster = statistics.median(ratios)
    print(f"\n{kind}: {tokens:.2f} times the tokens with padding; packed {faster:.2f} times as fast")
    assert faster > OF_THE_TOKENS * tokens
