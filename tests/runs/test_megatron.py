"""Whole runs with the megatron trainer: on one rank; and on two, as tensor parallel, killed, resumed as a pipeline."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.tools import kill, ledger

HERE = Path(__file__).parent
COMMON = ["trainer.kind=megatron", "deterministic=true", "num_steps=3", "checkpoint.interval=1"]
COMMON += ["checkpoint.export=true", "trainer.threads=1", "algorithm.options.kl=0.1"]
TWO_RANKS = ["trainer.parallel.tensor=2", f"site={HERE / 'two_slots.yaml'}"]


@pytest.fixture(scope="module")
def one_rank(runs_dir) -> Path:
    run = kill.start(HERE / "tiny.yaml", runs_dir, COMMON)
    kill.wait_done(run)
    return run


@pytest.fixture(scope="module")
def two_ranks(runs_dir) -> Path:
    run = kill.start(HERE / "tiny.yaml", runs_dir, [*COMMON, *TWO_RANKS])
    kill.kill_at(run, kill.Moment(phase="rollout", step=2))
    changes = ("--set", "trainer.parallel={tensor: 1, pipeline: 2}", "--accept-changes")
    kill.launcher("resume", str(run), *changes, "--detach")
    kill.wait_supervised(run)
    kill.wait_done(run)
    return run


@pytest.mark.parametrize("name", ["one_rank", "two_ranks"])
def test_every_sample_is_accounted_for_and_engine_and_trainer_agree(request, name):
    run = request.getfixturevalue(name)
    assert ledger.check(run) == []
    lines = kill.metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(line["mismatch"] for line in lines) < 1e-5
    assert max(line["mismatch_max"] for line in lines) < 1e-4
    (export,) = (run / "hf").iterdir()
    AutoModelForCausalLM.from_pretrained(export)


def test_both_trained_the_same(one_rank, two_ranks):
    """From the same seed: the same samples, and the same losses and norms but for the order of additions. So the
    reference is the start policy's also after the resume, in another layout."""
    assert kill.status(two_ranks)["attempt"] == 1
    # All but the digests: log-probs are in them.
    named = [[sample[:-1] for sample in kill.trained(run)] for run in (one_rank, two_ranks)]
    assert named[0] == named[1]
    for ours, theirs in zip(kill.metrics(one_rank), kill.metrics(two_ranks), strict=True):
        for key in ("loss", "grad_norm", "reward", "train_tokens", "learning_rate", "kl"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-6), key
