"""Run folders whose files were cut, emptied or overwritten: every command says what is the matter, or what is left."""

import json
import time
from pathlib import Path

import pytest

from launcher import cli, commands, runs
from runtime.load import load_run
from runtime.site import SiteConfig

RESUME = ("resume", "--set", "num_steps=9")
READERS = {
    "config.yaml": (("status",), ("cancel",)),
    "site.yaml": (RESUME,),
    "status.json": (("status",), ("status", "all"), ("cancel",)),
    "data.json": (RESUME,),
    "metrics.jsonl": (("status",), ("status", "all")),
    "events.jsonl": (("status",),),
    "attempts/1/report.json": (("status",), ("cancel",)),
    "attempts/1/config.yaml": (RESUME,),
    "samples/step-000002.jsonl": (("samples", "--best"),),
    "job/id": (("status",),),
}
"""A file -> commands that read it."""


def mangled(data: bytes) -> bytes:
    """Each value of each JSON line once of every other type, and once gone."""
    lines: list[str] = []
    for line in data.splitlines():
        if line.startswith(b"{"):
            row = json.loads(line)
            for key in row:
                lines += [json.dumps({**row, key: new}) for new in (None, "x", [5], {}, -1, 1e308, True, 10**30)]
                lines.append(json.dumps({k: v for k, v in row.items() if k != key}))
    return "".join(f"{line}\n" for line in lines).encode()


DAMAGES = {
    "half": lambda data: data[: len(data) // 2],
    "binary": lambda data: bytes(range(256)),
    "deep": lambda data: b"[" * 3_000 + b"\n",
    "mangled": mangled,
}


@pytest.fixture
def run(here, monkeypatch):
    """A run that was killed in its second attempt."""
    monkeypatch.setattr(commands, "_launch", lambda *_: 0)
    folder = runs.create(load_run("run.yaml"), SiteConfig(name="local"))
    now = time.time()
    steps = [{"step": i, "reward": i / 4, "step_s": 2.0, "time": now, "eval/held/accuracy": 0.5} for i in (1, 2)]
    failed = {
        "kind": "group",
        "samples": 2,
        "reason": "all samples failed: x",
        "prompt_id": "train:0:0:ab",
        "time": now,
    }
    sample = {"step": 2, "version": 1, "prompt_id": "train:1", "index": 0, "prompt": "1+1", "text": "2", "turns": []}
    sample |= {"answer": "2", "reward": 1.0, "status": "done", "reason": ""}
    for attempt in (0, 1):
        (folder / f"attempts/{attempt}").mkdir()
        (folder / f"attempts/{attempt}/rank-0.log").write_text("a line\n")
        (folder / f"attempts/{attempt}/config.yaml").write_bytes((folder / "config.yaml").read_bytes())
    (folder / "attempts/1/report.json").write_text('{"kind": "preempted", "message": "told", "rank": 0, "step": 2}')
    (folder / "topology.json").write_text("{}")
    (folder / "job/id").write_text("77")
    for name, lines in (("metrics", steps), ("events", [failed]), ("samples/step-000002", [sample])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs.write_status(folder, runs.Status(state="running", attempt=1, pid=999_999, pid_started=3))
    return folder


@pytest.mark.parametrize("damage", [*DAMAGES, "a folder"])
def test_no_command_ends_with_a_traceback(run, capsys, damage):
    for name, readers in READERS.items():
        if damage == "deep" and name.endswith(".yaml"):
            continue  # slow, and test_load has it
        file, kept = run / name, (run / name).read_bytes()
        file.unlink()
        if damage in DAMAGES:
            file.write_bytes(DAMAGES[damage](kept))
        elif damage == "a folder":
            file.mkdir()
        for command in readers:
            code = cli.main(command)
            err = capsys.readouterr().err
            assert code in (0, 2) and (code == 0 or "fix: " in err), (name, command, err)
        if file.is_dir():
            file.rmdir()
        file.write_bytes(kept)


def test_what_is_left_of_a_damaged_run_is_shown(run, capsys):
    """The lines around a damaged one count."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward": "x"}\n{"step": null, "reward": 1.0}\n{"step": 4, "rew\n')
        file.write('{"step": 3, "reward": null, "step_s": 1e308}\n')
    with (run / "samples/step-000002.jsonl").open("a") as file:
        file.write('{"prompt_id": 5}\n')
    assert cli.main(["status"]) == 0
    assert (
        "step     3/4" in (out := capsys.readouterr().out)
        and "reward   -" in out
        and "1 of 1 prompts gave nothing" in out
    )
    assert cli.main(["samples"]) == 0
    assert "step 2: 1 of 1 samples" in capsys.readouterr().out
    assert runs.last_step(run) == 3


def test_a_disk_that_fails_is_no_bug_of_ours(run, capsys):
    """As reads of a network's file system do, which name no file."""
    (run / "attempts/1/rank-0.log").unlink()
    (run / "attempts/1/rank-0.log").symlink_to("/proc/self/mem")
    assert cli.main(["logs"]) == 2
    assert "error: a disk or file system: Input/output error\n  fix: try again" in capsys.readouterr().err
    assert Path(run).is_dir()
