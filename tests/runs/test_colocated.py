"""A whole run whose trainer rank and engine take turns; the engine is killed in its sleep."""

import os
import signal
from pathlib import Path

from tests.tools import kill, ledger

CONFIG = Path(__file__).with_name("tiny.yaml")
COLOCATED = ["cluster.mode=colocated", "sync.channel=ipc", "num_steps=3", "checkpoint.interval=0"]
SLOW = ["trainer.max_tokens=16", "trainer.num_updates=8"]
"""So that the batch is still in training when the engine is killed."""


def test_an_engine_killed_in_its_sleep_is_started_in_its_turn_and_nothing_is_lost(runs_dir):
    run = kill.start(CONFIG, runs_dir, [*COLOCATED, *SLOW])
    kill.wait_phase(run, kill.Moment(phase="rollout"))
    (engine,) = (
        pid
        for pid in kill.processes_of(run)
        if b"runtime.rollout.embedded" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    kill.wait_phase(run, kill.Moment(phase="train", step=1))
    os.kill(engine, signal.SIGKILL)
    kill.wait_done(run)
    assert ledger.check(run) == []
    assert [line["step"] for line in kill.metrics(run)] == [1, 2, 3]
    story = [(e["kind"], e.get("phase", e.get("version"))) for e in kill.events(run)]
    down = story.index(("engine_down", None))
    assert story[down - 1] == ("phase", "train"), "it was asleep"
    after = [kind for kind in story[down:] if kind[0] in ("phase", "engine_ready", "pushed")]
    push = [("phase", "push"), ("pushed", 2)]
    assert after[:6] == [*push, ("phase", "rollout"), ("engine_ready", None), *push], "it is started in its turn"
    assert not list((run / "weights").glob("*")), "nothing is left of what was pushed"
