"""A GRPO step against TRL's GRPOTrainer: same model, prompts, sizes, dtype, optimizer and threads; start-up is left out.

Both sides compute on as many cores. In sync mode the trainer and the engine, with one torch thread each, take turns:
TRL has one thread. One step ahead they work at the same time: TRL has two. Sides are measured in turn, and a ratio is
of two neighbours, so that what else the machine does meets both.
"""

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
ROUNDS = 5
WARM_UP = 2
"""First step times of a start that do not count."""
AT_LEAST, NOISE = 1.0, 0.05
MODES = {"sync": (0, 1), "one-step-ahead": (1, 2)}
"""staleness.max_versions, and TRL's threads."""


def trl_step_s(quickstart: Path, threads: int) -> float:
    """Median of the seconds from the end of a step to the end of the next."""
    config = yaml.safe_load(CONFIG.read_text())
    sizes = {
        "model": str(quickstart),
        "data": str(quickstart / "train.jsonl"),
        "num_prompts": config["rollout"]["num_prompts"],
        "num_samples": config["rollout"]["num_samples"],
        "max_new_tokens": config["rollout"]["sampling"]["max_new_tokens"],
        "num_steps": config["num_steps"],
        "learning_rate": config["trainer"]["optimizer"]["learning_rate"],
        "threads": threads,
    }
    command = [str(TRL_PYTHON), str(ROOT / "tests/bench/trl_side.py"), json.dumps(sizes)]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["threads"] == threads
    assert told["mean_length"] == [sizes["max_new_tokens"]], "TRL's answers must have all their tokens"
    return statistics.median(told["step_s"][WARM_UP:])


def our_step_s(runs_dir: Path, max_versions: int) -> float:
    """The same, of a whole run: from one line of metrics to the next."""
    run = kill.start(CONFIG, runs_dir, [f"staleness.max_versions={max_versions}"])
    kill.wait_done(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    new_tokens = {line["tokens"] for line in lines}
    rollout = yaml.safe_load(CONFIG.read_text())["rollout"]
    expected = rollout["num_prompts"] * rollout["num_samples"] * rollout["sampling"]["max_new_tokens"]
    assert new_tokens == {expected}, "our answers must have all their tokens"
    return statistics.median([after["time"] - before["time"] for before, after in pairwise(lines)][WARM_UP:])


@pytest.mark.bench
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_as_fast_as_trl(quickstart: Path, tmp_path: Path, mode: str) -> None:
    assert TRL_PYTHON.exists(), "TRL's environment is missing: `make bench` makes it"
    max_versions, trl_threads = MODES[mode]
    rounds = [(trl_step_s(quickstart, trl_threads), our_step_s(tmp_path, max_versions)) for _ in range(ROUNDS)]
    ratios = [trl / ours for trl, ours in rounds]
    ratio = statistics.median(ratios)
    trl, ours = (statistics.median(side) for side in zip(*rounds, strict=True))
    print(
        f"\nGRPO step, {mode}: TRL {trl:.3f} s ({trl_threads} threads), Sluice {ours:.3f} s,"
        f" {ratio:.2f} times as fast (rounds: {', '.join(f'{r:.2f}' for r in sorted(ratios))})"
    )
    assert ratio > AT_LEAST - NOISE
