"""A GRPO step against TRL's GRPOTrainer: same model, prompts, sizes, dtype and optimizer; start-up is left out.

Both sides compute on one thread: Sluice's trainer and engine have one each and, in sync mode, take turns. The sides are
measured in turn too, and a ratio is of two neighbours, so that what else the machine does meets both.
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
THREADS = 1
ROUNDS = 5
WARM_UP = 2
"""First step times of a start that do not count."""
AT_LEAST, NOISE = 1.0, 0.05


def trl_step_s(quickstart: Path) -> float:
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
        "threads": THREADS,
    }
    command = [str(TRL_PYTHON), str(ROOT / "tests/bench/trl_side.py"), json.dumps(sizes)]
    env = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["threads"] == THREADS
    assert told["mean_length"] == [sizes["max_new_tokens"]], "TRL's answers must have all their tokens"
    return statistics.median(told["step_s"][WARM_UP:])


def our_step_s(runs_dir: Path) -> float:
    """The same, of a whole run: from one line of metrics to the next."""
    run = kill.start(CONFIG, runs_dir)
    kill.wait_done(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    new_tokens = {line["tokens"] for line in lines}
    rollout = yaml.safe_load(CONFIG.read_text())["rollout"]
    expected = rollout["num_prompts"] * rollout["num_samples"] * rollout["sampling"]["max_new_tokens"]
    assert new_tokens == {expected}, "our answers must have all their tokens"
    return statistics.median([after["time"] - before["time"] for before, after in pairwise(lines)][WARM_UP:])


@pytest.mark.bench
@pytest.mark.timeout(3600)
def test_a_step_is_as_fast_as_trl(quickstart: Path, tmp_path: Path) -> None:
    assert TRL_PYTHON.exists(), "TRL's environment is missing: `make bench` makes it"
    rounds = [(trl_step_s(quickstart), our_step_s(tmp_path)) for _ in range(ROUNDS)]
    ratios = [trl / ours for trl, ours in rounds]
    ratio = statistics.median(ratios)
    trl, ours = (statistics.median(side) for side in zip(*rounds, strict=True))
    print(
        f"\nGRPO step: TRL {trl:.3f} s, Sluice {ours:.3f} s, {ratio:.2f} times as fast"
        f" (rounds: {', '.join(f'{r:.2f}' for r in ratios)}; {THREADS} thread)"
    )
    assert ratio > AT_LEAST - NOISE
