"""A whole run whose trainer ranks take turns with the policy's engine and a judge's; the first is killed in its
sleep."""

import os
import signal
from pathlib import Path

from tests.tools import kill, ledger

CONFIG = Path(__file__).with_name("tiny.yaml")
COLOCATED = ["cluster.mode=colocated", "sync.channel=ipc", "num_steps=3", "checkpoint.interval=0"]
COLOCATED += ["trainer.precision=bfloat16", "trainer.float32_output=true"]
JUDGE = [f"site={CONFIG.with_name('two_slots.yaml')}", "models.judge.path=models/quickstart"]
JUDGE += ["rollout.sets=[{model: judge, engine_options: {max_length: 64}}]", "data.0.reward=judge"]
JUDGE += ["data.0.reward_options={template: '{prompt}', pattern: ';(.*)', max_new_tokens: 16}"]
SLOW = ["trainer.max_tokens=16", "trainer.num_updates=8"]
"""So that the batch is still in training when the engine is killed."""


def test_an_engine_killed_in_its_sleep_is_started_in_its_turn_and_nothing_is_lost(runs_dir):
    run = kill.start(CONFIG, runs_dir, [*COLOCATED, *JUDGE, *SLOW])
    kill.wait_phase(run, kill.Moment(phase="rollout"))
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in kill.processes_of(run)}
    engines = [pid for pid, line in lines.items() if b"runtime.rollout.embedded" in line]
    (engine,) = (pid for pid in engines if b"--frozen" not in lines[pid])
    assert len(engines) == 2
    assert [pid for pid in engines if b"--float32-output" in lines[pid]] == [engine], "a judge is nobody's trainer's"
    kill.wait_phase(run, kill.Moment(phase="train", step=1))
    os.kill(engine, signal.SIGKILL)
    kill.wait_done(run)
    assert ledger.check(run) == []
    assert [line["step"] for line in kill.metrics(run)] == [1, 2, 3]
    assert all(line["failed"] == 0 for line in kill.metrics(run)), "the judge woke up whenever it was asked"
    assert 1e-5 < max(line["mismatch"] for line in kill.metrics(run)) < 0.01, "in bfloat16"
    story = [(e["kind"], e.get("phase", e.get("version"))) for e in kill.events(run)]
    down = story.index(("engine_down", None))
    assert story[down - 1] == ("phase", "train"), "it was asleep"
    after = [kind for kind in story[down:] if kind[0] in ("phase", "engine_ready", "pushed")]
    push = [("phase", "push"), ("pushed", 2)]
    assert after[:6] == [*push, ("phase", "rollout"), ("engine_ready", None), *push], "it is started in its turn"
    assert not list((run / "weights").glob("*")), "nothing is left of what was pushed"
