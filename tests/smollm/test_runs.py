"""Whole runs on real weights: every trainer, every engine; each push is proved, or the run fails."""

import json
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.live import SGLANG
from tests.tools import kill, ledger

CONFIG = Path(__file__).with_name("step.yaml")
EMBEDDED = ["rollout.engine_options={max_length: 128}"]
OPTIONS = f"{{python: {SGLANG}, max_length: 128, server: {{max-total-tokens: 8192}}}}"
REAL = ["rollout.engine=sglang", f"rollout.engine_options={OPTIONS}", "limits.start_s=300"]
RUNS = {
    "fsdp and embedded in bfloat16": ["trainer.kind=fsdp", "trainer.precision=bfloat16", *EMBEDDED],
    "megatron and sglang in float32": ["trainer.kind=megatron", "trainer.precision=float32", *REAL],
}
MISMATCH = {"bfloat16": 0.1, "float32": 1e-4}


@pytest.mark.smollm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_real_weights_and_every_push_is_proved(smollm: Path, runs_dir: Path, name: str) -> None:
    run = kill.start(CONFIG, runs_dir, RUNS[name])
    kill.wait_done(run)
    assert ledger.check(run) == []
    lines = kill.metrics(run)
    assert [line["step"] for line in lines] == [1, 2] and all(line["grad_norm"] > 0 for line in lines)
    assert max(line["mismatch"] for line in lines) < MISMATCH[name.rpartition(" ")[2]]
    assert [e["engines"] for e in kill.events(run) if e["kind"] == "pushed"] == [[0], [0], [0]]
    start, end = load_file(smollm / "model.safetensors"), load_file(run / "hf/step-000002/model.safetensors")
    start = {key: tensor.to(end[key].dtype) for key, tensor in start.items()}
    assert end.keys() == start.keys()
    still = [key for key, tensor in start.items() if tensor.dim() > 1 and torch.equal(end[key], tensor)]
    assert not still, f"matrices that were not trained: {still}"
    timed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = {key: round(median(line[key] for line in timed), 2) for key in ("rollout_s", "train_s", "push_s")}
    print(f"\n{name}: mismatch {max(line['mismatch'] for line in lines):.1e}, {times}")
