"""A GRPO step against TRL's, on the same model, prompts and sizes; start-up is left out."""

import json
import os
import statistics
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.tools import kill

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("step.yaml")
TRL_PYTHON = ROOT / ".venv-trl/bin/python"
THREADS = 1
ROUNDS = 3
WARM_UP = 2
"""First step times of a start that do not count."""
AT_LEAST, NOISE = 1.0, 0.05


def trl_steps(quickstart: Path) -> list[float]:
    """Seconds from the end of a step to the end of the next."""
    config = yaml.safe_load(CONFIG.read_text())
    sizes = {
        "model": str(quickstart),
        "data": str(quickstart / "train.jsonl"),
        "num_prompts": config["rollout"]["num_prompts"],
        "num_samples": config["rollout"]["num_samples"],
        "max_new_tokens": config["rollout"]["sampling"]["max_new_tokens"],
        "num_steps": config["num_steps"],
        "learning_rate": config["trainer"]["optimizer"]["learning_rate"],
        "threads": THREADS,
    }
    command = [str(TRL_PYTHON), str(ROOT / "tests/bench/trl_side.py"), json.dumps(sizes)]
    env = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["mean_length"] == [sizes["max_new_tokens"]], "TRL's answers must have all their tokens"
    return told["step_s"][WARM_UP:]


def our_steps(runs_dir: Path) -> list[float]:
    """The same, of a whole run: from one line of metrics to the next."""
    run = kill.start(CONFIG, runs_dir)
    kill.wait_done(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    new_tokens = {line["tokens"] for line in lines}
    rollout = yaml.safe_load(CONFIG.read_text())["rollout"]
    expected = rollout["num_prompts"] * rollout["num_samples"] * rollout["sampling"]["max_new_tokens"]
    assert new_tokens == {expected}, "our answers must have all their tokens"
    return [after["time"] - before["time"] for before, after in pairwise(lines)][WARM_UP:]


@pytest.mark.bench
@pytest.mark.timeout(3600)
def test_a_step_is_as_fast_as_trl(quickstart: Path, tmp_path: Path) -> None:
    assert TRL_PYTHON.exists(), "TRL's environment is missing: `make bench` makes it"
    trl, ours = [], []
    for _ in range(ROUNDS):
        trl += trl_steps(quickstart)
        ours += our_steps(tmp_path)
    ratio = statistics.median(trl) / statistics.median(ours)
    print(
        f"\nGRPO step: TRL {statistics.median(trl):.3f} s, Sluice {statistics.median(ours):.3f} s,"
        f" {ratio:.2f} times as fast ({ROUNDS} rounds, {THREADS} thread)"
    )
    assert ratio > AT_LEAST - NOISE
