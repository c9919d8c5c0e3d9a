"""Samples that fail are seen while the run goes on; what a run folder says of evaluation sets and of turns."""

import json

import pytest

from launcher import cli, commands, failures, progress, runs, show
from launcher.failures import Failures
from launcher.lines import JsonLines
from runtime.load import load_run

ROUND = {"version": 0, "step": 0, "time": 5.0}


def write(run, *events):
    with (run / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps({**ROUND, **event}) + "\n" for event in events))


def dropped(reason, n=2, **more):
    return {"kind": "group", "lease": 1, "prompt_id": "train:3:0:ab", "samples": n, "reason": reason, **more}


def excluded(reason):
    return {"kind": "excluded", "prompt_id": "held:4:0:cd", "index": 1, "reason": reason}


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(failures, "EVERY_S", 0.0)


def test_failing_samples_are_told_with_the_first_reason_and_whose_it_is(run, at_once):
    write(run, {"kind": "leased"}, dropped("equal rewards"), {"kind": "trained", "reason": ""}, excluded(""))
    seen = Failures(run)
    assert seen.news() == ""
    raised = "all samples failed: the reward raised KeyError: 'x"
    write(run, dropped(f"{raised}1'", 4), excluded("the environment is out"), dropped(f"{raised}2'", 2))
    first = "of data set train (environment single_turn, reward exact_match): the reward raised KeyError: 'x1'"
    second = "of data set held (environment single_turn, reward exact_match): the environment is out"
    assert seen.news() == f"6 samples failed, the first {first}; 1 samples failed, the first {second}"
    assert seen.news() == "", "it was said"
    write(run, excluded("later"))
    assert seen.news().startswith("1 samples failed, the first of data set held ")
    assert Failures(run, since=5.0).news() == "", "not what an earlier attempt said"


def test_a_reason_is_told_once_a_minute_and_another_at_once(run, monkeypatch):
    seen = Failures(run)
    write(run, excluded("refused 607 tokens"))
    assert seen.news()
    write(run, excluded("refused 612 tokens"))
    assert seen.news() == ""
    write(run, excluded("another"))
    assert seen.news().endswith(": another")
    monkeypatch.setattr(failures, "EVERY_S", 0.0)
    assert seen.news().endswith(": refused 612 tokens"), "nothing is lost meanwhile"
    monkeypatch.setattr(failures, "EVERY_S", 60.0)
    write(run, *(excluded("a" * (1 + i)) for i in range(20)))
    assert seen.news().endswith("; 17 more reasons")
    write(run, excluded("b"))
    assert seen.news() == "", "reasons that are all different are no flood"


def test_what_a_run_could_not_score_is_summed_up_at_its_end(run, capsys):
    (run / runs.JOB_ID).unlink()
    runs.write_status(run, runs.Status(state="ended", attempt=0))
    write(run, {"kind": "group", "reason": ""}, dropped("equal rewards"), {"kind": "trained", "reason": ""})
    assert "failed " not in show.outcome(run, "ended")
    write(
        run,
        *(dropped(f"all samples failed: refused {i} tokens") for i in (607, 88, 9)),
        dropped("all samples failed: x"),
    )
    write(run, excluded("late\nagain"), excluded(""))
    told = "4 of 6 prompts gave nothing to train on: 3 x refused 607 tokens, 1 x x; 1 samples of other prompts failed: "
    told = f"failed   {told}1 x late again; events.jsonl has them all"
    assert told in show.outcome(run, "ended").splitlines()
    assert cli.main(["status", run.name]) == 0
    assert told in capsys.readouterr().out.splitlines()


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again_in_its_folder(run, capsys, monkeypatch):
    monkeypatch.setattr(commands, "_launch", lambda *_: 0)
    monkeypatch.setattr(commands, "_try_out", lambda *_: "")
    (run / "attempts/0").mkdir()
    (run / runs.JOB_ID).unlink()
    every = load_run(run / "config.yaml").checkpoint.interval

    def resumed(steps, kind="preempted"):
        lines = (json.dumps({"step": step, "reward": 0.5}) for step in range(1, steps + 1))
        (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        (run / "attempts/0/report.json").write_text(json.dumps({"kind": kind, "message": "told"}))
        runs.write_status(run, runs.Status(state="ended", attempt=0))
        return cli.main(["resume", run.name, "--set", "num_steps=99"]), "".join(capsys.readouterr())

    (run / f"checkpoints/step-{every:06d}").mkdir()
    anew = f"fix: `python -m launcher submit {run / 'config.yaml'}` begins anew, as another run"
    for steps, kind in ((2 * every, "preempted"), (2, "done")):
        code, said = resumed(steps, kind)
        assert code == 2 and f"has {steps} recorded steps, but no complete checkpoint to go on from" in said
        assert anew in said and load_run(run / "config.yaml").num_steps != 99, "nothing was changed"
    code, said = resumed(2 * every - 1)
    assert code == 0
    assert f"{run.name}: it starts from the beginning, as no checkpoint was made yet" in said.splitlines()
    (run / f"checkpoints/step-{every:06d}/COMPLETE").touch()
    code, said = resumed(2 * every)
    assert code == 0 and "beginning" not in said


def test_what_is_told_of_states_is_true(run):
    """On one machine nothing is queued; and what waits for its start is of no attempt yet."""
    (run / runs.JOB_ID).unlink()
    (run / runs.SCRIPT).unlink(missing_ok=True)
    runs.write_status(run, runs.Status(state="queued", attempt=3))
    assert progress.said_state(run, "queued") == "starting"
    (run / runs.SCRIPT).touch()
    assert progress.said_state(run, "queued") == "queued" and progress.said_state(run, "starting") == "starting"
    runs.write_status(run, runs.Status(state="starting", attempt=4))
    assert progress.said_state(run, "starting") == "starting, attempt 4"


def test_only_models_of_the_runs_own_steps_are_its(run):
    for step in (2, 4):
        (run / f"hf/step-{step:06d}").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 3, "reward": 0.5}\n')
    assert f"model    {run}/hf/step-000002" in show.outcome(run, "ended").splitlines()


def test_who_follows_a_run_and_who_asks_for_its_state_sees_them(run, capsys):
    class Ends:
        trouble = ""

        def __init__(self):
            self.states = iter(("running", "ended"))

        def of(self, _):
            return next(self.states)

    write(run, *[dropped("all samples failed: the reward took longer than 30 s")] * 3)
    assert progress.follow(run, 4, progress.PlainView(), Ends()) == "ended"
    words = "6 samples failed, the first of data set train (environment single_turn, reward exact_match): the reward"
    assert words in capsys.readouterr().out
    (run / runs.JOB_ID).unlink()
    runs.write_status(run, runs.Status(state="running", attempt=0))
    assert cli.main(["status", run.name]) == 0
    assert "failed   3 of 3 prompts gave nothing to train on: 3 x the reward took " in capsys.readouterr().out


def test_each_evaluation_set_is_named(run, capsys):
    (run / runs.JOB_ID).unlink()
    runs.write_status(run, runs.Status(state="ended", attempt=0))
    metrics = [{"eval/easy/accuracy": 0.25, "eval/hard/accuracy": 0.0, "eval/easy/reward": 0.9}]
    metrics += [{"step": 1, "reward": 0.5}, {"eval/easy/accuracy": 0.75, "eval/hard/accuracy": 0.125}]
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": 0, **line}) + "\n" for line in metrics))
    lines = show.outcome(run, "ended").splitlines()
    told = [line for line in lines if line.startswith("held-out")]
    assert told == ["held-out 0.250 -> 0.750 on easy", "held-out 0.000 -> 0.125 on hard"]
    assert cli.main(["status", run.name]) == 0
    assert "held-out accuracy 0.750 on easy, 0.125 on hard" in capsys.readouterr().out


def test_the_turns_of_a_sample_are_told_apart(run, capsys):
    row = {"prompt_id": "train:0", "index": 0, "version": 0, "prompt": "7+8", "answer": "15", "status": "done"}
    turns = [("policy", "16;"), ("environment", "Wrong.\nAgain."), ("policy", "15;")]
    row |= {
        "reward": None,
        "reason": "no, why",
        "text": "16;15;",
        "turns": [{"by": by, "text": text} for by, text in turns],
    }
    (run / "samples").mkdir(exist_ok=True)
    (run / "samples/step-000001.jsonl").write_text(json.dumps(row) + "\n")
    assert cli.main(["samples", run.name]) == 0
    shown = "prompt:\n  7+8\nsampled:\n  16;\nenvironment:\n  Wrong.\n  Again.\nsampled:\n  15;\n"
    assert f"{shown}reason: no, why\nanswer: 15" in capsys.readouterr().out
    row["messages"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7+8"}]
    (run / "samples/step-000001.jsonl").write_text(json.dumps(row) + "\n")
    assert cli.main(["samples", run.name]) == 0
    assert "prompt, system:\n  Be brief.\nprompt, user:\n  7+8\nsampled:\n  16;" in capsys.readouterr().out


def test_a_file_of_lines_is_followed_over_cuts(tmp_path):
    file = tmp_path / "x.jsonl"
    lines = JsonLines(file)
    assert list(lines.new()) == []
    file.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert [line["a"] for line in lines.new()] == [1, 2]
    with file.open("a") as more:
        more.write(": 3}\nnoise\n[4]\n")
    assert [line["a"] for line in lines.new()] == [3]
    file.write_text('{"a": 5}\n')
    assert [line["a"] for line in lines.new()] == [5]
