"""1 where the final answer is the expected one, else 0; spaces and line breaks do not count."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.rollout.base import PlainReward


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    after: str = ""
    """The final answer is what follows the last of these marks, such as "####"; without one the answer is wrong.
    Empty: the whole text."""
    ignore_case: bool = False


def build(options: Config) -> PlainReward:
    def normal(text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if options.ignore_case else text

    def reward(text: str, answer: Any) -> float:
        if options.after:
            _, mark, text = text.rpartition(options.after)
            if not mark:
                return 0.0
        return float(normal(text) == normal(str(answer)))

    return reward
