"""A whole run with the real SGLang."""

from pathlib import Path

import pytest

from tests.contract.live import SGLANG
from tests.tools import kill, ledger

CONFIG = Path(__file__).with_name("tiny.yaml")
OPTIONS = f"rollout.engine_options={{python: {SGLANG}, max_length: 64, server: {{max-total-tokens: 8192}}}}"


@pytest.mark.timeout(600)
def test_a_run_with_sglang_loses_nothing_and_agrees_with_the_trainer(runs_dir):
    overrides = ["rollout.engine=sglang", OPTIONS, "num_steps=3", "limits.start_s=300", "limits.attempts=0"]
    run = kill.start(CONFIG, runs_dir, overrides)
    kill.wait_done(run)
    assert ledger.check(run) == []
    lines = kill.metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(line["mismatch"] for line in lines) < 1e-5, "log-probs of the same tokens, by engine and trainer"
    assert max(line["mismatch_max"] for line in lines) < 1e-4
    kill.wait(f"the processes of {run.name} to end", lambda: not kill.processes_of(run), 10)
    token = (run / "secrets/engines-0-1").read_text()
    assert token and token not in (run / "attempts/0/engine-0.log").read_text()
