"""The controller and the agents of a long run do not grow: memory at step 200 against memory at step 50."""

import json
from pathlib import Path

import pytest

from tests.tools import kill

CONFIG = Path(__file__).with_name("memory.yaml")
EARLY, LATE = 50, 200
LIMIT_S = 900.0
AT_MOST, NOISE = 0.03, 0.005


def agents(run: Path) -> dict[int, int]:
    """World rank -> pid of the controller and the other agents."""
    topology = json.loads((run / "topology.json").read_text())
    wanted = {str(slot["rank"]) for slot in topology["ranks"] if slot["role"] == "agent"}
    found = {}
    for pid in kill.processes_of(run):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = next((w.decode().partition("=")[2] for w in words if w.startswith(b"PMI_RANK=")), "")
        if rank in wanted and b"runtime.main" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            found[int(rank)] = pid
    assert len(found) == len(wanted), f"{len(found)} of {len(wanted)} agents found"
    return found


def used_kib(pid: int) -> int:
    """Proportional set size: pages shared with others count in part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def step_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text() if path.exists() else ""
    whole = lines[: lines.rfind("\n") + 1].splitlines()
    return json.loads(whole[-1])["step"] if whole else 0


@pytest.mark.bench
@pytest.mark.timeout(2 * LIMIT_S)
def test_controller_and_agents_do_not_grow(quickstart: Path, tmp_path: Path) -> None:
    run = kill.start(CONFIG, tmp_path)
    kill.wait(f"step {EARLY}", lambda: step_of(run) >= EARLY, LIMIT_S)
    pids = agents(run)
    early = {rank: used_kib(pid) for rank, pid in pids.items()}
    kill.wait(f"step {LATE}", lambda: step_of(run) >= LATE, LIMIT_S)
    late = {rank: used_kib(pid) for rank, pid in pids.items()}
    kill.wait_done(run)
    growth = sum(late.values()) / sum(early.values()) - 1
    each = ", ".join(f"rank {r}: {early[r] / 1024:.1f} to {late[r] / 1024:.1f} MiB" for r in sorted(early))
    print(f"\nmemory of controller and agents, step {EARLY} to {LATE}: {growth:+.2%} ({each})")
    assert growth < AT_MOST + NOISE
