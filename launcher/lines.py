"""Files of JSON lines that grow while they are read, and that a crash or somebody's editor may have damaged: what is no
line of their kind is passed over."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class JsonLines:
    """Follows such a file; starts again when it was cut back or replaced."""

    def __init__(self, path: Path, start: int = 0) -> None:
        """
        Args:
            start: byte to begin at; what is left of the line there is passed over.
        """
        self._path = path
        self._offset = start

    def new(self) -> Iterator[dict[str, Any]]:
        """The complete lines added since the last call that are JSON objects."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size < self._offset:
            self._offset = 0
        if size == self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].splitlines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


class Metrics(JsonLines):
    """metrics.jsonl: `step` is an integer; a step of training has a `reward`, which is None where all failed."""

    def new(self) -> Iterator[dict[str, Any]]:
        """Lines with the numbers in them, all else left out."""
        for line in super().new():
            numbers = {key: value for key, value in line.items() if _is_number(value)}
            if isinstance(numbers.get("step"), int):
                yield {"reward": None, **numbers} if "reward" in line else numbers


def _is_number(value: Any) -> bool:
    """One that can be shown and added up."""
    return type(value) is int or (type(value) is float and math.isfinite(value))
