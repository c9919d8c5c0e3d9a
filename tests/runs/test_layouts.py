"""Whole runs on more than one trainer rank and engine: the same code, the same accounting."""

from pathlib import Path

from transformers import AutoModelForCausalLM

from tests.tools import kill, ledger

HERE = Path(__file__).parent


def test_two_trainer_ranks_and_four_engines_on_three_nodes_and_on_with_more_steps(runs_dir):
    overrides = ["cluster.num_rollout_nodes=2"]
    overrides += [f"site={HERE / 'two_slots.yaml'}", "checkpoint.export=true", "num_steps=3"]
    run = kill.start(HERE / "tiny.yaml", runs_dir, overrides)
    kill.wait_done(run)
    pushes = [e["engines"] for e in kill.events(run) if e["kind"] == "pushed"]
    assert pushes == [[0, 1, 2, 3]] * 4
    assert max(line["mismatch_max"] for line in kill.metrics(run)) < 1e-4, "every engine has the trainer's weights"
    kill.launcher("resume", str(run), "--set", "num_steps=4", "--detach")
    kill.wait(f"{run.name} to end", lambda: kill.status(run)["attempt"] == 1 and kill.status(run)["pid"] > 0, 60)
    kill.wait_done(run)
    assert [line["step"] for line in kill.metrics(run)] == [1, 2, 3, 4]
    assert ledger.check(run) == []
    exports = sorted((run / "hf").iterdir())
    assert [e.name for e in exports] == ["step-000003", "step-000004"]
    assert not list(exports[0].glob("*.jsonl")), "of the model folder only the tokenizer's files are copied"
    AutoModelForCausalLM.from_pretrained(exports[1])
