"""1 where the last number in the text equals the expected one within a tolerance, else 0."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Final

import msgspec

from runtime.rollout.base import PlainReward

_NUMBER: Final = re.compile(r"(?<![\w.])[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    relative: Annotated[float, msgspec.Meta(ge=0.0)] = 1e-6
    """Allowed difference, as a part of the expected number."""
    absolute: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Allowed difference whatever the size of the expected number."""


def build(options: Config) -> PlainReward:
    def reward(text: str, answer: Any) -> float:
        numbers = _NUMBER.findall(text)
        if not numbers:
            return 0.0
        expected = float(str(answer).replace(",", ""))
        last = float(numbers[-1].replace(",", ""))
        return float(math.isclose(last, expected, rel_tol=options.relative, abs_tol=options.absolute))

    return reward
