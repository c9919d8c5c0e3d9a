"""Samples that fail while a run goes on, as events.jsonl tells: how many, and why."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from launcher.lines import JsonLines
from runtime.load import load_run

EVERY_S: Final = 60.0
"""Between two words about the same reason."""
RECENT_BYTES: Final = 256 * 1024
MOST_REASONS: Final = 3
"""Told at a time."""
KNOWN_REASONS: Final = 10
"""So many are told as soon as they come: a reason may differ from sample to sample."""
REASON_CHARS: Final = 160
"""Of a reason where there are several."""
ALL_FAILED: Final = "all samples failed: "
"""Begins the reason for which runtime.buffer drops such a group."""


class Event(msgspec.Struct):
    """What counts here of a line."""

    kind: str = ""
    reason: str | None = None
    time: float = 0.0
    samples: int = 0
    prompt_id: str = ""

    @property
    def failed(self) -> int:
        """Samples that failed, by this event."""
        if self.kind == "group":
            return self.samples if (self.reason or "").startswith(ALL_FAILED) else 0
        return int(self.kind == "excluded" and bool(self.reason))

    @property
    def why(self) -> str:
        return (self.reason or "").removeprefix(ALL_FAILED)


class Failures:
    """Adds up lines of events.jsonl."""

    def __init__(self, run: Path, since: float = 0.0) -> None:
        """Of what is there already only the end is looked at.

        Args:
            since: what failed before this time does not count.
        """
        path = run / "events.jsonl"
        start = max(0, path.stat().st_size - RECENT_BYTES) if path.exists() else 0
        self._run, self._since, self._lines = run, since, JsonLines(path, start)
        self._counts, self._firsts, self._said = Counter[str](), dict[str, str](), dict[str, float]()

    def news(self) -> str:
        """What failed since it was last said; empty: nothing, or its reasons were said just now."""
        for line in self._lines.new():
            with contextlib.suppress(msgspec.ValidationError):
                self._add(msgspec.convert(line, Event))
        due = [alike for alike in self._counts if self._is_due(alike)]
        if not due:
            return ""
        told = [f"{self._counts.pop(alike)} samples failed, the first {self._firsts.pop(alike)}" for alike in due]
        self._said |= dict.fromkeys(due, time.monotonic())
        left_out = len(told) - MOST_REASONS
        return "; ".join(told[:MOST_REASONS] + ([f"{left_out} more reasons"] if left_out > 0 else []))

    def _is_due(self, alike: str) -> bool:
        said = self._said.get(alike)
        if said is None and len(self._said) >= KNOWN_REASONS:
            said = max(self._said.values())
        return said is None or time.monotonic() - said >= EVERY_S

    def _add(self, event: Event) -> None:
        if event.time > self._since and (number := event.failed):
            alike = _alike(event.why)
            self._counts[alike] += number
            if alike not in self._firsts:
                self._firsts[alike] = self._described(event)

    def _described(self, event: Event) -> str:
        name = event.prompt_id.partition(":")[0]
        config = load_run(self._run / "config.yaml")
        data = next((d for d in (*config.data, *config.evaluation.sets) if d.label == name), None)
        plugins = f" (environment {data.environment}, reward {data.reward})" if data else ""
        return f"of data set {name}{plugins}: {event.why}"


def summary(run: Path) -> str:
    """What of all that was sampled could not be scored, and the most common reasons; empty: everything could."""
    groups, of_groups, of_samples = 0, Counter[str](), Counter[str]()
    firsts: dict[str, str] = {}
    for event in _telling(run / "events.jsonl"):
        groups += event.kind == "group"
        if event.failed:
            alike = _alike(event.why)
            firsts.setdefault(alike, " ".join(event.why.split()))
            (of_groups if event.kind == "group" else of_samples)[alike] += 1
    told = []
    if of_groups:
        told.append(f"{of_groups.total()} of {groups} prompts gave nothing to train on: {_most(of_groups, firsts)}")
    if of_samples:
        others = " of other prompts" if of_groups else ""
        told.append(f"{of_samples.total()} samples{others} failed: {_most(of_samples, firsts)}")
    return "; ".join([*told, "events.jsonl has them all"]) if told else ""


def _telling(path: Path) -> Iterator[Event]:
    """Events that may be about samples that failed: most are not, and there may be a million."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if b'"group"' in line or b'"excluded"' in line:
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    yield msgspec.json.decode(line, type=Event)


def _most(counts: Counter[str], firsts: dict[str, str]) -> str:
    told = [f"{number} x {_short(firsts[alike])}" for alike, number in counts.most_common(MOST_REASONS)]
    left_out = counts.total() - sum(number for _, number in counts.most_common(MOST_REASONS))
    return ", ".join(told + ([f"{left_out} x something else"] if left_out else []))


def _alike(reason: str) -> str:
    """The same for reasons that differ in numbers only."""
    return re.sub(r"\d+", "#", reason)


def _short(reason: str) -> str:
    return reason if len(reason) <= REASON_CHARS else f"{reason[: REASON_CHARS - 3]}..."
