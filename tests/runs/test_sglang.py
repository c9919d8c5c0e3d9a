"""A whole run with the real SGLang."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.comm.weights.handles import SHARED
from tests.contract.live import SGLANG
from tests.tools import kill, ledger

CONFIG = Path(__file__).with_name("tiny.yaml")
OPTIONS = f"rollout.engine_options={{python: {SGLANG}, max_length: 64, server: {{max-total-tokens: 8192}}}}"


def done(runs_dir: Path, overrides: Sequence[str] = ()) -> Path:
    """A run of three steps that loses nothing and agrees with the trainer."""
    common = ["rollout.engine=sglang", OPTIONS, "num_steps=3", "limits.start_s=300", "limits.attempts=0"]
    run = kill.start(CONFIG, runs_dir, [*common, *overrides])
    kill.wait_done(run)
    assert ledger.check(run) == []
    assert [line["step"] for line in kill.metrics(run)] == [1, 2, 3]
    assert max(line["mismatch_max"] for line in kill.metrics(run)) < 1e-4
    return run


def test_a_run_with_sglang_loses_nothing_and_agrees_with_the_trainer(runs_dir):
    run = done(runs_dir)
    worst = max(line["mismatch"] for line in kill.metrics(run))
    assert worst < 1e-5, "log-probs of the same tokens, by engine and trainer"
    kill.wait(f"the processes of {run.name} to end", lambda: not kill.processes_of(run), 10)
    token = (run / "secrets/engines-0-1").read_text()
    assert token and token not in (run / "attempts/0/engine-0.log").read_text()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_engines_that_take_turns_with_two_trainer_ranks_map_their_memory(runs_dir):
    overrides = [f"site={CONFIG.with_name('two_slots.yaml')}", "cluster.mode=colocated"]
    overrides += ["sync.channel=ipc", "checkpoint.interval=0"]
    run = done(runs_dir, overrides)
    assert [e["engines"] for e in kill.events(run) if e["kind"] == "pushed"] == [[0, 1]] * 4
    left = [file for file in SHARED.glob("torch_*") if not Path("/proc", file.name.split("_")[1]).exists()]
    assert not left, "the trainer ranks' memory"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_engine_that_stands_on_two_nodes_takes_deltas(runs_dir):
    overrides = ["rollout.gpus_per_engine=2", "cluster.num_rollout_nodes=2", "sync.channel=delta"]
    run = done(runs_dir, overrides)
    assert "all of version" not in "".join(log.read_text() for log in run.glob("attempts/0/*.log")), "a delta failed"
    assert (run / "attempts/0/engine-0-node1.log").is_file()
    kill.wait(f"the processes of {run.name} to end", lambda: not kill.processes_of(run), 10)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_prompts_are_computed_by_an_engine_of_their_own(runs_dir):
    overrides = [f"site={CONFIG.with_name('two_slots.yaml')}", "rollout.prefill_per_node=1", "sync.pause=abort"]
    run = done(runs_dir, overrides)
    assert [e["engines"] for e in kill.events(run) if e["kind"] == "pushed"] == [[0, 1]] * 4
    assert not [e for e in kill.events(run) if e["kind"] == "engine_down"]
    kill.wait(f"the processes of {run.name} to end", lambda: not kill.processes_of(run), 10)
