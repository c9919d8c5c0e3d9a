"""The ledger tool accepts honest books and finds each way of cooking them."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.tools import ledger

NUM_PROMPTS, NUM_SAMPLES, MAX_VERSIONS, STEPS = 2, 3, 1, 3


def leased(lease: int, version: int) -> dict:
    return {"kind": "leased", "lease": lease, "prompt_id": f"p{lease}", "version": version, "step": version}


def group(lease: int, reason: str = "") -> dict:
    return {
        "kind": "group",
        "lease": lease,
        "prompt_id": f"p{lease}",
        "kept": not reason,
        "reason": reason,
        "samples": 4,
    }


def samples(lease: int, step: int, oldest: int) -> list[dict]:
    shared = {"lease": lease, "prompt_id": f"p{lease}", "step": step, "version": step, "oldest": oldest}
    lines = [
        {"kind": "trained", "index": i, "segment": k, "digest": f"{lease}{i}{k}", "reason": "", **shared}
        for i, k in [(0, 0), (1, 0), (1, 1), (2, 0)]
    ]
    lines[-1] |= {"kind": "excluded", "reason": "reward timed out"}
    return lines


def books() -> list[dict]:
    """Two attempts, three steps of two groups; lease 4 dropped, lease 7 ready and lease 8 running at the end."""
    return [
        {"kind": "attempt", "number": 0},
        {"kind": "pushed", "version": 0, "engines": [0]},
        *[leased(n, 0) for n in (0, 1, 2, 3)],
        *[group(n) for n in (1, 0)],
        *[line for n in (0, 1) for line in samples(n, 0, 0)],
        {"kind": "pushed", "version": 1, "engines": [0]},
        *[leased(n, 1) for n in (4, 5)],
        {"kind": "saved", "step": 1},
        {"kind": "attempt", "number": 1},
        {"kind": "pushed", "version": 1, "engines": [0]},
        *[leased(n, 0) for n in (2, 3)],
        *[group(n) for n in (2, 3)],
        *[line for n in (2, 3) for line in samples(n, 1, 0)],
        {"kind": "pushed", "version": 2, "engines": [0]},
        group(4, "equal rewards"),
        *[leased(n, 2) for n in (6, 7, 8)],
        *[group(n) for n in (5, 6, 7)],
        *[line for n, oldest in ((5, 1), (6, 2)) for line in samples(n, 2, oldest)],
        {"kind": "pushed", "version": 3, "engines": [0]},
        {"kind": "end", "report": "done", "ready": [7], "running": [8]},
    ]


def check(folder: Path, events: list[dict], steps: list[int] | None = None) -> list[str]:
    config = {
        "rollout": {"num_prompts": NUM_PROMPTS, "num_samples": NUM_SAMPLES},
        "staleness": {"max_versions": MAX_VERSIONS},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    lines = [{"step": 0, "eval/accuracy": 0.2}, *({"step": s, "samples": 6} for s in steps or range(1, STEPS + 1))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ledger.check(folder)


def test_honest_books_pass(tmp_path: Path) -> None:
    assert check(tmp_path, books()) == []


@pytest.mark.parametrize("number", range(len(books())))
def test_a_line_lost_is_found(number: int, tmp_path: Path) -> None:
    events = books()
    line = events.pop(number)
    harmless = line["kind"] == "saved" or line == {"kind": "attempt", "number": 0}
    again = line["kind"] in ("leased", "pushed") and line in events[:number]
    assert bool(check(tmp_path, events)) == (not harmless and not again)


@pytest.mark.parametrize("number", range(len(books())))
def test_a_line_doubled_is_found(number: int, tmp_path: Path) -> None:
    events = books()
    line = events[number]
    events.insert(number, copy.deepcopy(line))
    assert bool(check(tmp_path, events)) == (line["kind"] not in ("saved", "attempt", "pushed"))


def change(kind: str, nth: int, **fields: object) -> Callable[[list[dict]], None]:
    def mutate(events: list[dict]) -> None:
        [e for e in events if e["kind"] == kind][nth].update(fields)

    return mutate


MUTATIONS = {
    "another prompt's sample": change("trained", 0, prompt_id="p1"),
    "an index doubled": change("trained", 0, index=1),
    "an index nobody asked for": change("excluded", 0, index=3),
    "a segment skipped": change("trained", 2, segment=2),
    "a step skipped": lambda events: [e.update(step=7) for e in events if e.get("step") == 2],
    "a group over two steps": change("trained", 0, step=1),
    "left out without a reason": change("excluded", 0, reason=""),
    "dropped without a reason": lambda events: [e.update(reason="") for e in events if e.get("kept") is False],
    "a dropped group trained": change("group", 0, kept=False, reason="equal rewards"),
    "trained and still ready": change("end", 0, ready=[7, 0]),
    "ready but never finished": change("end", 0, ready=[7, 8], running=[]),
    "finished but still running": change("end", 0, ready=[], running=[7, 8]),
    "an unknown lease ready": change("end", 0, ready=[7, 99]),
    "a prompt leased twice": lambda events: [e.update(prompt_id="p0") for e in events if e.get("lease") == 8],
    "too old": lambda events: [e.update(oldest=0) for e in events if e.get("lease") == 6 and "oldest" in e],
    "tokens older than the lease": change("trained", -1, oldest=1),
    "tokens from the future": change("trained", 0, oldest=1),
    "a lease at an old version": change("leased", 5, version=0),
    "a version nobody pushed": change("trained", 0, version=2),
    "a push skipped": change("pushed", 3, version=5),
    "a push to no engine": change("pushed", 0, engines=[]),
    "an event after the end": lambda events: events.append(leased(9, 3)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_line_changed_is_found(name: str, tmp_path: Path) -> None:
    events = books()
    MUTATIONS[name](events)
    assert check(tmp_path, events)


@pytest.mark.parametrize("later", [0, 1])
def test_a_push_to_nobody_is_no_fault_while_the_engines_are_down(tmp_path: Path, later: int) -> None:
    """Or where they were lost in it, which is heard of after."""
    events = books()
    change("pushed", 0, engines=[])(events)
    first = next(i for i, e in enumerate(events) if e["kind"] == "pushed")
    events.insert(first + later, {"kind": "engine_down", "engine": 0, "reason": "killed"})
    assert not check(tmp_path, events)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_what_a_later_attempt_begins_without_is_named_once(tmp_path: Path, times: int) -> None:
    """A group that was ready and a lease that ran, of a data set that is gone."""
    events = books()
    end = events.pop() | {"ready": [], "running": []}
    dropped = [{"kind": "dropped", "lease": n, "prompt_id": f"p{n}", "reason": "it is gone"} for n in (7, 8)]
    assert bool(check(tmp_path, [*events, {"kind": "attempt", "number": 2}, *dropped * times, end])) == (times != 1)


@pytest.mark.parametrize("steps", [[1, 2], [1, 2, 2, 3], [1, 3, 2], [2, 3, 4]])
def test_metrics_must_match(steps: list[int], tmp_path: Path) -> None:
    assert check(tmp_path, books(), steps)
