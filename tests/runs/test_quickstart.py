"""The quickstart as a user runs it, and what it leaves; with `make learn` also over seeds and against its controls."""

import json
import subprocess
from pathlib import Path

import pytest

from runtime.data import content_hash
from tests.conftest import ROOT
from tests.tools import kill, ledger

CONFIG = ROOT / "configs/quickstart.yaml"
LIMIT_S = 500


def accuracies(run: Path) -> list[float]:
    return [line["eval/heldout/accuracy"] for line in kill.metrics(run) if "eval/heldout/accuracy" in line]


@pytest.fixture(scope="module")
def run(runs_dir) -> Path:
    command = ["make", "quickstart", f"SUBMIT_FLAGS=--set runs_dir={runs_dir}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30/30" in done.stdout, "the progress view shows every step"
    return max(runs_dir.iterdir(), key=lambda path: path.stat().st_mtime)


def prompts(path: Path) -> set[str]:
    return {content_hash(json.loads(line)["messages"]) for line in path.read_text().splitlines()}


def test_no_held_out_prompt_is_trained_on(quickstart):
    held_out, train = prompts(quickstart / "heldout.jsonl"), prompts(quickstart / "train.jsonl")
    assert len(held_out) >= 500
    assert not held_out & train


def test_it_learns(run):
    start, *_, end = accuracies(run)
    assert 0.15 <= start <= 0.35
    assert end >= 2 * start and end >= 0.6


def test_every_sample_is_accounted_for(run):
    assert ledger.check(run) == []


def test_engine_and_trainer_agree_on_log_probs(run):
    assert max(line["mismatch_max"] for line in kill.metrics(run) if "mismatch_max" in line) < 1e-4
    assert max(line["mismatch"] for line in kill.metrics(run) if "mismatch" in line) < 1e-5


def test_it_leaves_a_plot_metrics_samples_and_a_model(run):
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (run.stat().st_mode & 0o777) == 0o700
    shown = kill.launcher("samples", str(run), "--best", "-n", "1")
    assert "reward 1.000" in shown
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (export,) = (run / "hf").iterdir()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+34"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).endswith(";46")


def test_tensorboard_shows_every_step_once(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    board.Reload()
    tensors = board.Tensors("reward")
    assert [t.step for t in tensors] == list(range(1, 31))


CONTROL_LIMIT = 0.05
KIND_LIMIT = 0.1
CONTROLS = {
    "rewards shuffled": ["algorithm.name=tests.plugins.shuffled_grpo"],
    "learning rate 0": ["trainer.optimizer.learning_rate=0"],
}


def learn(runs_dir: Path, overrides: list[str]) -> tuple[float, float]:
    """(first, last) held-out accuracy of a whole quickstart run."""
    run = kill.start(CONFIG, runs_dir, overrides)
    kill.wait_done(run)
    start, *_, end = accuracies(run)
    print(f"{' '.join(overrides)}: {start:.3f} -> {end:.3f}")
    return start, end


@pytest.mark.learn
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", (0, 1, 2))
def test_every_seed_learns_with_either_trainer(runs_dir, seed):
    ends = []
    for kind in ("fsdp", "megatron"):
        start, end = learn(runs_dir, [f"seed={seed}", f"trainer.kind={kind}"])
        assert end >= 2 * start and end >= 0.6
        ends.append(end)
    assert abs(ends[0] - ends[1]) <= KIND_LIMIT


@pytest.mark.learn
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overrides", CONTROLS.values(), ids=CONTROLS)
def test_a_control_does_not_learn(runs_dir, overrides):
    start, end = learn(runs_dir, overrides)
    assert abs(end - start) <= CONTROL_LIMIT
