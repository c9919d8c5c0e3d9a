"""Whole runs on more than one trainer rank and engine: the same code, the same accounting."""

from pathlib import Path

from transformers import AutoModelForCausalLM

from tests.tools import kill, ledger

HERE = Path(__file__).parent


def test_two_trainer_ranks_and_four_engines_on_three_nodes_and_on_with_more_steps(runs_dir):
    overrides = ["cluster.num_rollout_nodes=2"]
    overrides += [f"site={HERE / 'two_slots.yaml'}", "checkpoint.export=true", "num_steps=3"]
    overrides += ["algorithm={name: ppo, options: {kl: 0.05}}", "trainer.critic_optimizer.learning_rate=1e-3"]
    run = kill.start(HERE / "tiny.yaml", runs_dir, overrides)
    kill.wait_done(run)
    pushes = [e["engines"] for e in kill.events(run) if e["kind"] == "pushed"]
    assert pushes == [[0, 1, 2, 3]] * 4
    assert max(line["mismatch_max"] for line in kill.metrics(run)) < 1e-4, "every engine has the trainer's weights"
    kill.launcher("resume", str(run), "--set", "num_steps=4", "--detach")
    kill.wait(f"{run.name} to end", lambda: kill.status(run)["attempt"] == 1 and kill.status(run)["pid"] > 0, 60)
    kill.wait_done(run)
    lines = kill.metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    distances = [line["kl"] for line in lines]
    assert distances[0] < 1e-8 < distances[1] < distances[3], "from the start policy, after the resume too"
    values = [line["critic_value"] for line in lines]
    assert 0 == values[0] < values[1] < values[2] < values[3], "the critic went on from where it was"
    assert all(line["critic_learning_rate"] == 1e-3 and line["value_loss"] > 0 for line in lines)
    assert all("explained_variance" in line for line in lines)
    assert ledger.check(run) == []
    exports = sorted((run / "hf").iterdir())
    assert [e.name for e in exports] == ["step-000003", "step-000004"]
    assert not list(exports[0].glob("*.jsonl")), "of the model folder only the tokenizer's files are copied"
    AutoModelForCausalLM.from_pretrained(exports[1])
