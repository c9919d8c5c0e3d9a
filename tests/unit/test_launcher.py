"""The command line: start-up, what each command prints, and one whole detached submit."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from launcher import cli, commands, plan, processes, progress, runs
from launcher.show import ADVICE, outcome
from launcher.states import States
from runtime.errors import EXIT_CODES, ConfigError, ReportKind
from runtime.load import load_run
from runtime.site import SiteConfig

ROOT = Path(__file__).parents[2]


# ---- start-up ----------------------------------------------------------------------------------------------------


def test_help_is_instant_and_loads_nothing_heavy():
    took = []
    for _ in range(10):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "launcher", "--help"], cwd=ROOT, check=True, capture_output=True)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.25
    code = "import sys\ntry:\n import runpy; runpy.run_module('launcher', run_name='__main__', alter_sys=True)\n"
    code += "except SystemExit: print(*sys.modules, file=sys.stderr)"
    told = subprocess.run([sys.executable, "-c", code, "--help"], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in told.stderr.split()}
    assert "argparse" in loaded
    assert not loaded & {"torch", "numpy", "mpi4py", "yaml", "msgspec", "rich", "submitit"}


def test_a_module_of_the_users_that_hides_ours_is_named(tmp_path):
    (tmp_path / "runtime.py").touch()
    command = [sys.executable, "-m", "launcher", "status"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert told.returncode == 2 and told.stderr.startswith(f"error: {tmp_path}/runtime.py: hides")


@pytest.mark.parametrize("command", ["submit", "plan", "status", "logs", "cancel", "resume", "samples"])
def test_every_command_has_examples(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert f"python -m launcher {command}" in capsys.readouterr().out.partition("example")[2]


def test_arguments_argparse_refuses(capsys):
    for argv in ([], ["submt"], ["submit"], ["logs", "-n", "0"], ["samples", "--best", "--worst"]):
        with pytest.raises(SystemExit) as end:
            cli.main(argv)
        assert end.value.code == 2
    assert "is not at least 1" in capsys.readouterr().err


def test_exit_codes_cover_all_reports():
    assert set(EXIT_CODES) == set(get_args(ReportKind))


def test_plan_prints_everything_and_changes_nothing(here, capsys):
    before = sorted(here.rglob("*"))
    assert cli.main(["plan", "run.yaml", "--set", "cluster.num_rollout_nodes=2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in ("agent, controller", "trainer", "local-2", "2 engines", "-m mpi4py -m runtime.main", "HF_HUB_OFF"):
        assert words in out
    assert cli.main(["submit", "run.yaml", "--dry-run"]) == 0
    assert "mpiexec" in (out := capsys.readouterr().out) and out.endswith("\n\nchecked, nothing was started\n")
    assert sorted(here.rglob("*")) == before


# ---- run folders -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(here):
    """A run that ended after three of its four steps."""
    config = load_run("run.yaml")
    where = SiteConfig(name="local")
    folder = runs.create(config, where)
    lines = [{"step": 0, "eval/held/accuracy": 0.25, "time": time.time()}]
    for step in (1, 2, 3):
        numbers = {"step": step, "version": step, "reward": step / 4, "samples_per_s": 9.5, "tokens_per_s": 99.0}
        lines.append({**numbers, "lag": 0.0, "step_s": 2.0, "time": time.time()})
    lines.append({"step": 3, "eval/held/accuracy": 0.5, "time": time.time()})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for attempt in (0, 1):
        (folder / f"attempts/{attempt}").mkdir()
        for name in ("rank-0", "rank-1", "engine-0"):
            text = "".join(f"{name} attempt {attempt} line {i}\n" for i in range(30))
            (folder / f"attempts/{attempt}/{name}.log").write_text(text)
    report = {"kind": "preempted", "message": "told to stop", "rank": 0, "step": 3, "role": "agent"}
    (folder / "attempts/1/report.json").write_text(json.dumps(report))
    for step in (2, 3):
        common = {"step": step, "version": step - 1, "index": 0, "answer": "x", "status": "done", "versions": []}
        rows = [
            {**common, "prompt_id": f"train:{i}", "prompt": f"{i}+1", "text": f"says {i}\nmore", "reward": reward}
            for i, reward in enumerate((0.5, None, 1.0))
        ]
        (folder / f"samples/step-{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs.write_status(folder, runs.Status(state="ended", attempt=1, pid=1))
    return folder


def test_status(run, capsys):
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    for words in (str(run), "ended, attempt 1", "3/4", "0.750", "0.500", "preempted, rank 0, step 3: told to stop"):
        assert words in out
    assert "`python -m launcher resume`" in out
    assert cli.main(["status", "all"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 2 and run.name in listed[1] and "ended" in listed[1]
    assert listed[1].endswith("preempted: told to stop")


def test_the_time_of_a_run_ends_with_it(run, capsys, monkeypatch):
    submitted = time.mktime(time.strptime("-".join(run.name.split("-")[-3:-1]), "%y%m%d-%H%M%S"))

    def times(state, after_s):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: submitted + 65.0)
            runs.write_status(run, runs.Status(state=state, attempt=1, pid=os.getpid(), host="elsewhere"))
            patch.setattr(time, "time", lambda: submitted + after_s)
            assert cli.main(["status"]) == cli.main(["status", "all"]) == 0
        out = capsys.readouterr().out
        return {out.split(", time ")[1].split()[0], out.splitlines()[-1].split()[4]}

    assert times("running", 65.0) == times("ended", 125.0) == {"1m05s"}
    assert times("running", 125.0) == {"2m05s"}


def test_a_broken_run_folder_hides_no_other(run, capsys):
    broken, vanishing = Path("runs/broken-261130-000000-aaaa"), Path("runs/vanishing-261130-000000-bbbb")
    for folder in (broken, vanishing):
        folder.mkdir()
    (broken / "status.json").touch()
    (vanishing / "status.json").write_bytes((run / "status.json").read_bytes())
    assert cli.main(["status", "all"]) == 0
    listed = capsys.readouterr().out
    assert run.name in listed and listed.count("unreadable") == 2
    assert cli.main(["status"]) == 0
    assert str(run) in capsys.readouterr().out


def test_commands_to_go_on_with_name_runs_of_other_folders(run, capsys, monkeypatch):
    monkeypatch.chdir("runs")
    assert cli.main(["status", str(run)]) == 0
    assert f"`python -m launcher resume {run}` starts it from the beginning" in capsys.readouterr().out
    (run / "checkpoints/step-000002").mkdir()
    (run / "checkpoints/step-000002/COMPLETE").touch()
    assert cli.main(["status", str(run)]) == 0
    assert f"`python -m launcher resume {run}` goes on from the last checkpoint" in capsys.readouterr().out


def test_advice_for_every_kind():
    assert set(get_args(ReportKind)) <= set(ADVICE)


def test_runs_are_found_by_folder_name_and_id(run, capsys):
    root = Path("runs")
    identity = runs.run_id(run)
    for name in ("", "tiny", "ti", run.name, str(run), f"runs/{run.name}", identity, identity[:8]):
        assert runs.find(name, root) == run
    with pytest.raises(ConfigError, match="no such run"):
        runs.find("other", root)
    with pytest.raises(ConfigError, match="there are no runs"):
        runs.find("", Path("elsewhere"))
    other = runs.create(msgspec.structs.replace(load_run("run.yaml"), name="tiger"), SiteConfig(name="x"))
    assert runs.find("", root) == other, "the newest"
    assert runs.find("tiny", root) == run
    longer = runs.create(msgspec.structs.replace(load_run("run.yaml"), name="tiny-2"), SiteConfig(name="x"))
    assert runs.find("tiny", root) == run and runs.find("tiny-2", root) == longer
    with pytest.raises(ConfigError, match="give more of the name"):
        runs.find("ti", root)
    assert cli.main(["status", "none"]) == 2


def test_logs(run, capsys):
    def logs(*argv: str) -> str:
        assert cli.main(["logs", *argv]) == 0
        return capsys.readouterr().out

    assert logs("--rank", "1", "-n", "2").splitlines() == [
        "==> attempts/1/rank-1.log <==", "rank-1 attempt 1 line 28", "rank-1 attempt 1 line 29"
    ]  # fmt: skip
    assert "engine-0 attempt 0 line 29" in logs("tiny", "--engine", "0", "--attempt", "0")
    everything = logs()
    assert all(f"==> attempts/1/{name}.log <==" in everything for name in ("engine-0", "rank-0", "rank-1"))
    followed = logs("-f", "--rank", "0")
    assert "line 29" in followed, "the run has ended, so following ends too"
    assert cli.main(["logs", "--attempt", "9"]) == 2
    assert "it has attempts 0 to 1" in capsys.readouterr().err
    assert cli.main(["logs", "--rank", "7"]) == 2
    assert "logs there: engine-0.log, rank-0.log, rank-1.log" in capsys.readouterr().err


def test_samples(run, capsys):
    def order(*argv: str) -> list[str]:
        assert cli.main(["samples", *argv]) == 0
        out = capsys.readouterr().out
        return [line.split()[0] for line in out.splitlines() if line.startswith("train:")]

    assert order() == ["train:0", "train:1", "train:2"]
    assert order("--best") == ["train:2", "train:0", "train:1"]
    assert order("--worst", "-n", "2") == ["train:1", "train:0"]
    assert cli.main(["samples", "tiny", "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert "step 2: 3 of 3" in out and "  says 1\n  more" in out and "reward failed" in out
    assert cli.main(["samples", "--step", "9"]) == 2
    assert "it has steps 2 to 3" in capsys.readouterr().err


def test_samples_of_any_letters(run):
    """A line of JSON may hold what Python takes for the end of a line, and a terminal may know ASCII only."""
    row = {"step": 4, "version": 3, "prompt_id": "train:9", "index": 0, "prompt": "\u2028?", "text": "\x85é\u2029"}
    file = run / "samples/step-000004.jsonl"
    file.write_text(json.dumps(row | {"reward": 1.0, "status": "done", "answer": "x"}, ensure_ascii=False) + "\n{")
    (run / "samples/step-000004-mine.jsonl").write_text("")
    (run / "hf/step-000003-mine").mkdir(parents=True)
    command = [sys.executable, "-m", "launcher"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([*command, "samples"], env=env, check=True, capture_output=True, text=True).stdout
    assert "step 4: 1 of 1 samples" in shown and "\\xe9" in shown
    assert "model " not in outcome(run, "ended")
    with Path("/dev/full").open("w") as full:
        told = subprocess.run([*command, "status"], env=env, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (told.returncode, told.stderr.splitlines()[0]) == (2, "error: standard output: No space left on device")


def test_a_run_of_another_machine_is_left_to_it(run, capsys, monkeypatch):
    """Its supervisor's pid is that of somebody else here."""
    monkeypatch.setattr(commands, "KILL_LIMIT_S", 0.2)
    ours = subprocess.Popen(["sleep", "60"])
    try:
        elsewhere = runs.Status(state="running", pid=ours.pid, pid_started=processes.started(ours.pid), host="login2")
        runs.write_status(run, elsewhere)
        assert cli.main(["cancel"]) == 2
        assert (
            f"is running on login2\n  fix: cancel it there: python -m launcher cancel {run}" in capsys.readouterr().err
        )
        commands.stop(run, "running", 0.0)
        assert ours.poll() is None
        runs.write_status(run, elsewhere)
        long_ago = msgspec.structs.replace(runs.read_status(run), updated=time.time() - 100)
        (run / "status.json").write_bytes(msgspec.json.encode(long_ago))
        assert States().of(run) == "cancelled", "that machine is gone, or has another name now"
    finally:
        ours.kill()


def test_resume_refuses_other_changes_with_a_diff(run, capsys):
    argv = ["resume", "tiny", "--set", "rollout.num_prompts=5", "--set", "num_steps=9"]
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert "-  num_prompts: 4" in err and "+  num_prompts: 5" in err and "--accept-changes" in err
    assert "num_steps: 9" not in "".join(line for line in err.splitlines() if line.startswith(("+", "-")))
    assert load_run(run / "config.yaml").num_steps == 4, "nothing was changed"
    text = (run / "config.yaml").read_text()
    (run / "attempts/1/config.yaml").write_text(text)
    (run / "config.yaml").write_text(text.replace("num_prompts: 4", "num_prompts: 6"))
    assert cli.main(["resume", "tiny"]) == 2, "an edit of the run's own config is a change too"
    assert "+  num_prompts: 6" in capsys.readouterr().err
    (run / "config.yaml").write_text(text)
    with Path("train.jsonl").open("a") as data:
        data.write('{"prompt": "1+1", "answer": "2"}\n')
    assert cli.main(["resume", "tiny"]) == 2, "other rows would be drawn"
    assert "train.jsonl is not what the run was trained on so far" in capsys.readouterr().err


def test_resume_of_a_finished_run_says_how_to_go_on(run, capsys):
    (run / "attempts/1/report.json").write_text('{"kind": "done", "message": "all steps"}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward": 1.0}\n')
    assert cli.main(["resume"]) == 2
    assert "has done all its 4 steps" in (err := capsys.readouterr().err) and "--set num_steps=" in err
    assert cli.main(["resume", "--set", "num_steps=3"]) == 2
    assert "has done 4 steps, and num_steps is 3" in capsys.readouterr().err


def test_resume_refuses_a_run_under_way(run, capsys, monkeypatch):
    monkeypatch.setattr(commands, "LOCK_LIMIT_S", 0.2)
    with runs.held(run):  # as another resume or a supervisor does
        assert cli.main(["resume", "--set", "num_steps=9"]) == 2
    assert "is under way, or another resume" in capsys.readouterr().err
    assert load_run(run / "config.yaml").num_steps == 4, "nothing was changed"
    runs.write_status(run, runs.Status(state="queued"))
    assert cli.main(["resume"]) == 2
    assert "is starting" in capsys.readouterr().err, "there is no queue"


def test_a_folder_that_cannot_be_written_to_is_said_to_be_so(run, capsys, monkeypatch):
    def refuse(path, data):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(runs, "write_atomic", refuse)
    assert cli.main(["resume", "--set", "num_steps=9"]) == 2
    assert "config.yaml: Read-only file system\n  fix: let it be writable" in capsys.readouterr().err


def test_a_queued_run_that_never_starts_counts_as_died(run):
    runs.write_status(run, runs.Status(state="queued"))
    assert States().of(run) == "queued"
    assert runs.local_state(runs.read_status(run), start_limit_s=0.0) == "died"


def test_plain_view_has_one_line_a_step(run, capsys):
    assert progress.follow(run, 4, progress.PlainView(), States()) == "ended"
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["step", "reward", "held-out", "samples/s", "tokens/s", "lag", "time", "left"]
    assert lines[1] == ["1/4", "0.250", "0.250", "9.5", "99", "0.00", "6s"]
    assert lines[3] == ["3/4", "0.750", "0.250", "9.5", "99", "0.00", "2s"]
    assert len(lines) == 4, "how it ended is the caller's to tell"


def test_terminal_view_draws(run, capsys):
    with progress.open_view(terminal=True) as view:
        assert progress.follow(run, 4, view, States()) == "ended"
    out = capsys.readouterr().out
    assert "held-out" in out and "3/4" in out


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0s"), (59.4, "59s"), (190, "3m10s"), (7500, "2h05m"), (273600, "3d04h")]
)
def test_durations(seconds, text):
    assert progress.duration(seconds) == text


# ---- whole submits: the real path through submitit and mpiexec ---------------------------------------------------


def start(*argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "launcher", "submit", "run.yaml", "--set", "limits.stop_s=3", *argv]
    env = plan.clean_env({"PATH": "/usr/bin:/bin"}, {"PYTHONPATH": str(ROOT)})
    # a shell's background jobs, and what they start, ignore Ctrl-C
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed
    )


def hold() -> None:
    """Let ranks wait for ever where they load the tokenizer, before they find out that it is none."""
    file = Path("model/tokenizer.json")
    file.unlink()
    os.mkfifo(file)


def wait_for_world(limit_s: float = 60.0) -> tuple[Path, list[int]]:
    """The newest run, and its processes, once mpiexec runs."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        for folder in runs.all_runs(Path("runs").absolute()):
            pid = runs.read_status(folder).pid
            family = processes.descendants(pid) if pid else []
            if len(family) > 2:
                hold()
                return folder, [pid, *family]
        time.sleep(0.05)
    raise AssertionError(f"no world after {limit_s} s")


def test_a_detached_run_outlives_its_shell_until_it_is_cancelled(here, capsys):
    shell = start("--detach")
    out, _ = shell.communicate(timeout=60)
    assert shell.returncode == 0
    folder, family = wait_for_world()
    assert f"run folder: {folder}" in out
    assert (folder / "job/id").read_text().isdigit()
    assert cli.main(["cancel"]) == 0
    assert States().of(folder) == "cancelled"
    assert runs.read_report(folder, 0) is not None
    assert not [pid for pid in family[1:] if processes.started(pid)]
    assert cli.main(["status"]) == 0
    assert "advice" in capsys.readouterr().out


def test_ctrl_c_cancels_a_followed_run(here):
    shell = start()
    folder, _ = wait_for_world()
    shell.send_signal(signal.SIGINT)
    out, _ = shell.communicate(timeout=60)
    assert "stopping: the run saves and ends" in out
    assert f"{folder.name}: cancelled" in out
    assert shell.returncode == EXIT_CODES["preempted"]
