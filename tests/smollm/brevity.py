"""A reward that any model's answers differ in: shorter is better. Of use where only training itself is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


def build(options: Config) -> Callable[[str, Any], float]:
    return lambda text, answer: -len(text) / 100
