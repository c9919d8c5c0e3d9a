"""What a plan says of a run before its table of ranks."""

from pathlib import Path

from launcher import cli


def test_what_was_configured_and_what_it_is_by_default(here, capsys):
    kl, parallel = ("--set", "algorithm.options={kl: 0.1}"), "{kind: megatron, parallel: {tensor: 2}, lora: {rank: 8}}"
    Path("site.yaml").write_text("name: slots\ncpu_slots_per_node: 4\n")
    Path("train.jsonl").write_text(Path("train.jsonl").read_text() + "\n")
    changes = (f"trainer={parallel}", "evaluation.interval=2", "evaluation.sets.0.limit=5", "checkpoint.interval=0")
    Path("model/config.json").write_text('{"model_type": "qwen3", "num_attention_heads": 4}')
    sets = [word for change in changes for word in ("--set", change)]
    assert cli.main(["plan", "run.yaml", "--site", "site.yaml", *kl, *sets]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "run tiny on site slots: 2 nodes, 6 ranks, 4 engines"
    assert [line.replace(f"{here}/", "") for line in out.split("\n\n")[1].splitlines()] == [
        "model       model",
        "algorithm   grpo (kl: 0.1)",
        "steps       4 of 4 prompts x 2 samples; a checkpoint at the end",
        "trainer     megatron over 4 ranks, tensor 2, data 2, bfloat16, lora rank 8",
        "engine      embedded; weights by broadcast",
        "data        train.jsonl, 10 rows; environment single_turn, reward exact_match",
        "evaluation  held.jsonl, 10 rows; environment single_turn, reward exact_match; the first 5; "
        "every 2 steps and at the end",
    ]
    assert "\n  1-4  local-0  trainer            cpu\n" in out
    judge = "rollout.sets=[{model: judge, external: ['http://far:30000']}]"
    further = ("models.judge={path: model}", judge, "rollout.engine_options={slots: 3}", "data.0.reward=numeric")
    assert cli.main(["plan", "run.yaml", *(word for change in further for word in ("--set", change))]) == 0
    lines = capsys.readouterr().out.replace(f"{here}/", "").splitlines()
    for line in (
        "steps       4 of 4 prompts x 2 samples; a checkpoint every 10 steps",
        "trainer     fsdp over 1 rank, bfloat16",
        "engine      embedded (slots: 3); weights by broadcast",
        "judge       model; engine embedded, 1 external server",
        "data        train.jsonl, 10 rows; environment single_turn, reward numeric",
    ):
        assert line in lines
