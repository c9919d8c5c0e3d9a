"""The live view of a run: a table that redraws itself on a terminal, else one plain line a step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from launcher import runs
from launcher.failures import Failures
from launcher.states import States

POLL_S: Final = 0.2
TITLES: Final = ("step", "reward", "held-out", "samples/s", "tokens/s", "lag", "time left")
ROWS: Final = 12
"""Steps the terminal view shows."""


class Progress:
    """What the lines of metrics.jsonl add up to."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.step = 0
        self.held_out: dict[str, tuple[float, float]] = {}
        """Evaluation set -> its first and its newest accuracy."""
        self._seconds: deque[float] = deque(maxlen=20)

    def add(self, line: dict[str, Any]) -> dict[str, Any] | None:
        """Take in one line; returns it if it is a step."""
        for key, value in line.items():
            if key.startswith("eval/") and key.endswith("/accuracy"):
                name = key.removeprefix("eval/").removesuffix("/accuracy")
                self.held_out[name] = (self.held_out.get(name, (value,))[0], value)
        if "reward" not in line:
            return None
        self.step = line["step"]
        self._seconds.append(float(line.get("step_s", 0.0)))
        return line

    @property
    def accuracy(self) -> float | None:
        """The newest one; the mean where there are several evaluation sets."""
        newest = [last for _, last in self.held_out.values()]
        return sum(newest) / len(newest) if newest else None

    @property
    def seconds_left(self) -> float | None:
        if not self._seconds:
            return None
        return max(0, self.num_steps - self.step) * sum(self._seconds) / len(self._seconds)

    def cells(self, line: dict[str, Any]) -> tuple[str, ...]:
        """A step as the columns of TITLES."""
        return (
            f"{self.step}/{self.num_steps}",
            number(line.get("reward"), ".3f"),
            number(self.accuracy, ".3f"),
            number(line.get("samples_per_s"), ".1f"),
            number(line.get("tokens_per_s"), ".0f"),
            number(line.get("lag"), ".2f"),
            duration(self.seconds_left),
        )


class View(Protocol):
    def step(self, cells: tuple[str, ...]) -> None: ...

    def note(self, text: str) -> None: ...


class PlainView:
    """One line a step, the titles before the first."""

    def __init__(self) -> None:
        self._titled = False

    def step(self, cells: tuple[str, ...]) -> None:
        if not self._titled:
            print(_columns(TITLES), flush=True)
            self._titled = True
        print(_columns(cells), flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)


def follow(run: Path, num_steps: int, view: View, states: States, since: float = 0.0) -> str:
    """Show a run until it ends or its supervisor is gone; returns the state it ended in.

    Args:
        since: steps before this time are taken in but not shown; nor is a step shown twice after a restart.
    """
    lines, progress, said, shown = runs.metrics(run), Progress(num_steps), "", since
    failures = Failures(run, since)
    attempt = runs.last_attempt(run) + 1
    while True:
        state = states.of(run)
        over = state in (*runs.FINAL, "died")
        for line in lines.new():
            step = progress.add(line)
            if step is not None and float(line.get("time", 0.0)) > shown:
                view.step(progress.cells(step))
                shown = float(line["time"])
        if news := failures.news():
            view.note(f"[{_clock()}] {news}")
        if over:  # how it ended is the caller's to tell
            return state
        goes_on = state == "queued" or runs.read_status(run).attempt > attempt
        if goes_on and (report := runs.read_report(run, attempt)):
            view.note(
                f"[{_clock()}] attempt {attempt} ended: {report.kind}: {(report.message.splitlines() or [''])[0]}"
            )
            attempt += 1
        text = said_state(run, state)
        if state == "queued" and (job := states.job(run)):
            text += f", job {runs.job_id(run)}" + (f" ({job.reason})" if job.reason not in ("", "None") else "")
        if states.trouble:
            text += "; Slurm does not answer"
        if text != said and (state != "queued" or told_as(run, state) == state):  # else nothing is to be told yet
            view.note(f"[{_clock()}] {text}")
            said = text
        time.sleep(POLL_S)


def said_state(run: Path, state: str) -> str:
    """A state as people are told it, with the attempt that it is of: what waits for its start is of none yet."""
    status = runs.read_status(run)
    is_of_attempt = status.state != "queued" and status.attempt >= 0
    return told_as(run, state) + (f", attempt {status.attempt}" if is_of_attempt else "")


def told_as(run: Path, state: str) -> str:
    """A state as people are told it: where there is no scheduler, there is no queue."""
    return "starting" if state == "queued" and not (run / runs.SCRIPT).exists() else state


def _clock() -> str:
    return time.strftime("%H:%M:%S")


@contextmanager
def open_view(terminal: bool) -> Iterator[View]:
    """The view that fits the output."""
    if not terminal:
        yield PlainView()
        return
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    rows: deque[tuple[str, ...]] = deque(maxlen=ROWS)

    class TerminalView:
        def __init__(self, live: Live) -> None:
            self._live, self._note = live, ""

        def step(self, cells: tuple[str, ...]) -> None:
            rows.append(cells)
            self._draw()

        def note(self, text: str) -> None:
            self._note = text
            self._draw()

        def _draw(self) -> None:
            table = Table(box=None, pad_edge=False)
            for title in TITLES:
                table.add_column(title, justify="right")
            for row in rows:
                table.add_row(*row)
            self._live.update(Group(table, Text(self._note, style="dim")))

    with Live(refresh_per_second=4) as live:
        yield TerminalView(live)


def _columns(cells: tuple[str, ...]) -> str:
    return "  ".join(f"{cell:>9}" for cell in cells)


def number(value: Any, form: str) -> str:
    return "-" if value is None else format(float(value), form)


def duration(seconds: float | None) -> str:
    """Short: 42s, 3m10s, 2h05m, 3d04h."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    s = round(seconds)
    for big, small, unit, sub in ((86400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if s >= big:
            return f"{s // big}{unit}{s % big // small:02d}{sub}"
    return f"{s}s"
