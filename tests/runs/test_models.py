"""A whole run whose rewards ask a judge and a teacher, with engines that somebody else runs: of the policy, and of the
teacher. Judge and policy are each killed once."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT
from tests.tools import kill, ledger

HERE = Path(__file__).parent
POLICY, EXTERNAL_POLICY, JUDGE, TEACHER = range(4)
"""Engine ids."""


class Elsewhere:
    """An engine of another job, always on the same port."""

    def __init__(self, folder: Path, token: Path, *options: str) -> None:
        self._command = [sys.executable, "-m", "runtime.rollout.embedded", "--model", str(folder), *options]
        self._command += ["--token-file", str(token), "--dtype", "float32", "--max-length", "64"]
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self._port))
            listener.listen(64)
            self._port = listener.getsockname()[1]
            fd = listener.fileno()
            self._process = subprocess.Popen([*self._command, "--socket-fd", str(fd)], pass_fds=[fd], cwd=ROOT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def elsewhere(quickstart, tmp_path):
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    made = [Elsewhere(quickstart, token), Elsewhere(quickstart, token, "--frozen")]
    yield token, *made
    for engine in made:
        engine.kill()


def answers(folder: Path, questions: set[str]) -> dict[str, float]:
    """What the model of that folder says by itself."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = {}
    for question in questions:
        message = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt")
        ids = prompt["input_ids"]
        with torch.inference_mode():
            made = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
        found[question] = float(re.findall(";(\\d+)", tokenizer.decode(made, skip_special_tokens=True))[-1])
    return found


def pids_of_engine(run: Path, engine: int) -> list[int]:
    """By its model's way of loading: the judge alone is frozen."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in kill.processes_of(run)}
    engines = [pid for pid, line in lines.items() if b"runtime.rollout.embedded" in line]
    return [pid for pid in engines if (b"--frozen" in lines[pid]) == (engine == JUDGE)]


def is_whole_again(run: Path) -> bool:
    """Whether every engine is up, those that were killed for the second time, and the policy's were pushed to since."""
    events = kill.events(run)
    ready = [e["engine"] for e in events if e["kind"] == "engine_ready"]
    pushed = [e["engines"] for e in events if e["kind"] == "pushed"][-1:]
    return sorted(ready) == sorted([*range(4), EXTERNAL_POLICY, JUDGE]) and pushed == [[POLICY, EXTERNAL_POLICY]]


def test_judges_are_asked_and_engines_of_others_used_whoever_is_killed(runs_dir, quickstart, elsewhere):
    token, policy, teacher = elsewhere
    options = "template: '{prompt}', pattern: ';(\\d+)', max_new_tokens: 16"
    data = [
        f"{{path: {quickstart}/{file}, name: {model}, reward: judge, reward_options: {{model: {model}, {options}}}}}"
        for model, file in (("judge", "train.jsonl"), ("teacher", "heldout.jsonl"))
    ]
    run = kill.start(
        HERE / "tiny.yaml",
        runs_dir,
        [
            f"site={HERE / 'two_slots.yaml'}",
            "num_steps=1000",
            f"data=[{', '.join(data)}]",
            f"models.judge.path={quickstart}",
            f"models.teacher.path={quickstart}",
            f"rollout.external=[{policy.url}]",
            f"rollout.token_file={token}",
            "rollout.sets=[{model: judge, engine_options: {max_length: 64}}, "
            f"{{model: teacher, external: [{teacher.url}], token_file: {token}}}]",
        ],
    )
    kill.wait_phase(run, kill.Moment(phase="rollout", step=1))
    (judge,) = pids_of_engine(run, JUDGE)
    os.kill(judge, signal.SIGKILL)
    policy.kill()
    policy.start()
    kill.wait("both engines to be back and a step with them", lambda: is_whole_again(run), 150)
    os.kill(kill.status(run)["pid"], signal.SIGTERM)
    kill.wait(f"{run.name} to end", lambda: kill.status(run)["state"] == "ended", 60)
    assert ledger.check(run) == []
    assert all(line["failed"] == 0 for line in kill.metrics(run)), "a judge that is away costs nothing"
    events = kill.events(run)
    assert {e["engine"] for e in events if e["kind"] == "engine_down"} == {EXTERNAL_POLICY, JUDGE}
    pushes = [e["engines"] for e in events if e["kind"] == "pushed"]
    assert pushes[0] == [POLICY, EXTERNAL_POLICY] and set().union(*pushes) == {POLICY, EXTERNAL_POLICY}
    assert max(line["mismatch_max"] for line in kill.metrics(run)) < 1e-4
    rows = [json.loads(line) for file in (run / "samples").iterdir() for line in file.read_text().splitlines()]
    expected = answers(quickstart, {row["prompt"] for row in rows})
    assert [row["reward"] for row in rows] == [expected[row["prompt"]] for row in rows]
    assert {row["prompt_id"].partition(":")[0] for row in rows} == {"judge", "teacher"}
