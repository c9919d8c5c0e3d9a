"""Prompts from JSON-lines files: an endless, restorable stream that never holds a file in memory.

An epoch is one permutation over the rows of all data sets, drawn from (seed, epoch); so the stream is a pure function
of the files, the seed and one number, the count of prompts drawn so far.

A row: {"messages": [{"role": "user", "content": "37+48"}], "answer": "85", "metadata": {"level": 2}}
or:    {"prompt": "37+48", "answer": "85"}          (one user message)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from runtime.config import DataSet
from runtime.errors import ConfigError
from runtime.types import Prompt


class Row(msgspec.Struct, frozen=True, kw_only=True):
    messages: tuple[dict[str, str], ...] = ()
    prompt: str = ""
    answer: Any = None
    metadata: dict[str, Any] = {}


def content_hash(messages: Sequence[dict[str, str]]) -> str:
    """Names a prompt by what the policy sees, so that train and held-out sets can be shown to be disjoint."""
    return hashlib.blake2b(msgspec.json.encode(messages, order="sorted"), digest_size=8).hexdigest()


class Rows:
    """Random access to the rows of one file, by byte offset."""

    def __init__(self, name: str, path: Path) -> None:
        """
        Raises:
            ConfigError: it is gone or empty, though it was not when the run was submitted.
        """
        self.name, self.path = name, path
        try:
            blob = path.read_bytes()
        except OSError as e:
            raise ConfigError(str(path), f"cannot be read: {e.strerror}", "put it back, then resume") from None
        ends = np.flatnonzero(np.frombuffer(blob, dtype=np.uint8) == ord("\n"))
        starts = np.concatenate([[0], ends + 1]).astype(np.int64)
        self._starts = np.array([s for s, e in zip(starts, [*ends, len(blob)], strict=True) if blob[s:e].strip()])
        if not len(self._starts):
            raise ConfigError(str(path), "is empty", "put the prompts back, then resume")
        self._file = path.open("rb")

    def __len__(self) -> int:
        return len(self._starts)

    def prompt(self, row: int, epoch: int) -> Prompt:
        """Row number `row` as it is drawn in `epoch`.

        Raises:
            ConfigError: the line is no valid row.
        """
        self._file.seek(int(self._starts[row]))
        try:
            r = msgspec.json.decode(self._file.readline(), type=Row)
        except msgspec.DecodeError as e:
            raise ConfigError(f"{self.path}: row {row + 1}", str(e), 'write {"messages": [...], "answer": ...}') from e
        messages = r.messages or ({"role": "user", "content": r.prompt},)
        return Prompt(
            id=f"{self.name}:{row}:{epoch}:{content_hash(messages)}",
            messages=messages,
            answer=r.answer,
            dataset=self.name,
            metadata=r.metadata,
        )


def read_all(dataset: DataSet, limit: int = 0) -> list[Prompt]:
    """An evaluation set: every row (or the first `limit`) in file order."""
    rows = Rows(dataset.label, Path(dataset.path))
    return [rows.prompt(i, 0) for i in range(min(limit or len(rows), len(rows)))]


class DataSource:
    """The training prompts of a run; implements next, state and restore."""

    def __init__(self, datasets: Sequence[DataSet], seed: int) -> None:
        self._sets = [Rows(d.label, Path(d.path)) for d in datasets]
        self._shuffle = np.repeat([d.shuffle for d in datasets], [len(s) for s in self._sets])
        self._where = [(s, row) for s in self._sets for row in range(len(s))]
        self._seed = seed
        self._drawn = 0
        self._order_of: tuple[int, np.ndarray] | None = None

    def next(self, n: int) -> list[Prompt]:
        return [self._draw() for _ in range(n)]

    def _draw(self) -> Prompt:
        epoch, at = divmod(self._drawn, len(self._where))
        self._drawn += 1
        rows, row = self._where[self._order(epoch)[at]]
        return rows.prompt(row, epoch)

    def _order(self, epoch: int) -> np.ndarray:
        """The epoch's permutation: rows of sets that are shuffled trade places, the others stay."""
        if self._order_of is None or self._order_of[0] != epoch:
            order = np.arange(len(self._where))
            moving = np.flatnonzero(self._shuffle)
            generator = np.random.Generator(np.random.Philox(key=[self._seed & (2**64 - 1), epoch]))
            order[moving] = moving[generator.permutation(len(moving))]
            self._order_of = (epoch, order)
        return self._order_of[1]

    @property
    def names(self) -> frozenset[str]:
        """Of its data sets."""
        return frozenset(one.name for one in self._sets)

    @property
    def state(self) -> dict[str, int]:
        return {"drawn": self._drawn}

    def restore(self, state: dict[str, int]) -> None:
        self._drawn = state["drawn"]
