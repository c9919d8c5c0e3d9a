"""An optimizer update of each trainer against plain transformers: same model, sequences, optimizer and thread."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.trainer_setup import make_model

ROOT = Path(__file__).parents[2]
KINDS = ("transformers", "fsdp", "megatron")
ROUNDS = 4
WARM_UP = 2
AT_LEAST = {"fsdp": 1.0, "megatron": 0.8}
"""Times as fast as transformers; megatron's forward is slowed down by what lets it run without a GPU."""
NOISE = 0.05
SIZE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 32}
HEADS = {"vocab_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}


def measured(kind: str, model: Path) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "tests.bench.update_side", kind, str(model)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_an_update_is_as_fast_as_transformers(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", **SIZE, **HEADS)
    rounds = [{kind: measured(kind, model) for kind in KINDS} for _ in range(ROUNDS)]
    for told in rounds:
        for kind in KINDS:
            assert told[kind]["tokens"] == told["transformers"]["tokens"]
            assert told[kind]["grad_norm"] == pytest.approx(told["transformers"]["grad_norm"], rel=1e-3), kind
    times = {kind: [statistics.median(told[kind]["update_s"][WARM_UP:]) for told in rounds] for kind in KINDS}
    print(f"\nupdate of {rounds[0]['fsdp']['tokens'][-1]} tokens: transformers {min(times['transformers']):.3f} s")
    for kind, at_least in AT_LEAST.items():
        ratios = [plain / own for plain, own in zip(times["transformers"], times[kind], strict=True)]
        print(f"{kind}: {statistics.median(ratios):.2f} times as fast ({', '.join(f'{r:.2f}' for r in ratios)})")
        assert statistics.median(ratios) > at_least - NOISE, kind
