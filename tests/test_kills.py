"""A run that is killed anywhere and resumed leaves, bit for bit, what an undisturbed run leaves."""

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.tools import kill, ledger
from tests.tools.kill import Moment

CONFIG = Path(__file__).with_name("kills.yaml")
NUM_STEPS = 16
NUM_KILLS = 20
SEED = 7
TRIES = 8


@pytest.fixture(scope="module")
def undisturbed(runs_dir: Path) -> tuple[Path, float]:
    """(run, seconds from its start to its end)"""
    run = kill.start(CONFIG, runs_dir)
    started = time.monotonic()
    kill.wait_done(run)
    assert ledger.check(run) == []
    lines = [line for line in kill.metrics(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert sum(line["grad_norm"] > 0 for line in lines) > NUM_STEPS // 2, "equal weights prove nothing unless they move"
    return run, time.monotonic() - started


def kill_in(run: Path, phase: str, step: int, length_s: float, rng: random.Random) -> None:
    """Kill at a moment drawn uniformly over a phase; a kill that came too late for it is resumed and drawn again, then
    over the first such phase after the start: later rollout phases are over at once where engines ran ahead."""
    for _ in range(TRIES):
        met = kill.kill_at(run, Moment(phase=phase, step=step, after_s=rng.uniform(0.0, length_s)))
        if met == phase:
            return
        step = 0
        kill.resume(run)
    raise AssertionError(f"none of {TRIES} kills met {run.name} in {phase}")


def ends_equal(run: Path, undisturbed: Path) -> None:
    """A resumed run comes to its end, is whole, and equals the undisturbed one."""
    kill.wait_done(run)
    assert ledger.check(run) == []
    assert kill.differences(run, undisturbed) == []


@pytest.mark.timeout(900)
def test_one_run_killed_five_times(runs_dir: Path, undisturbed: tuple[Path, float]) -> None:
    """Once in each phase, each time further on."""
    lengths, rng = kill.phase_lengths(undisturbed[0]), random.Random(SEED)
    run = kill.start(CONFIG, runs_dir)
    for phase, step in zip(kill.PHASES, (2, 4, 6, 8, 10), strict=True):
        kill_in(run, phase, step, lengths[phase], rng)
        kill.resume(run)
    ends_equal(run, undisturbed[0])


@pytest.mark.kills
@pytest.mark.timeout(3 * 3600)
def test_twenty_runs_killed_once(runs_dir: Path, undisturbed: tuple[Path, float]) -> None:
    """At times drawn uniformly over the run; then in each phase that was met less than twice, until it was."""
    rng = random.Random(SEED)
    lengths = kill.phase_lengths(undisturbed[0])
    met: Counter[str] = Counter()
    while met.total() < NUM_KILLS:
        after_s = rng.uniform(0.0, undisturbed[1])
        run = kill.start(CONFIG, runs_dir)
        phase = kill.kill_at(run, Moment(after_s=after_s))
        if kill.report(run).get("kind") == "done":  # this run was quicker than the undisturbed one
            continue
        print(f"killed after {after_s:.1f} s, in {phase or 'the start'}")
        met[phase] += 1
        kill.resume(run)
        ends_equal(run, undisturbed[0])
    for missing in [phase for phase in kill.PHASES for _ in range(met[phase], 2)]:
        run = kill.start(CONFIG, runs_dir)
        kill_in(run, missing, rng.randrange(1, NUM_STEPS - 3), lengths[missing], rng)
        print(f"killed in {missing}")
        kill.resume(run)
        ends_equal(run, undisturbed[0])
