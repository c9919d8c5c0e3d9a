"""GRPO that goes wrong once, in a place and in a way that can be chosen; it writes down when."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from runtime.trainer.algorithms import grpo


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    where: str
    """controller or trainer"""
    how: str
    """raise, thread, memory, exit or leave"""
    calls: int
    """Goes wrong at this call of its function, counted from 1."""
    stamp: str
    """File for the time at which it went wrong."""


def go_wrong(config: Config) -> None:
    Path(config.stamp).write_text(str(time.time()))
    if config.how == "thread":
        threading.Thread(target=lambda: 1 / 0, name="helper").start()
        time.sleep(60)
    elif config.how == "memory":
        raise MemoryError("no room for the logits")
    elif config.how == "exit":
        os._exit(3)
    elif config.how == "leave":
        raise SystemExit(4)
    raise RuntimeError(f"broken in the {config.where}")


def build(options: Config) -> grpo.Grpo:
    calls = 0

    def count(where: str) -> None:
        nonlocal calls
        if where == options.where:
            calls += 1
            if calls == options.calls:
                go_wrong(options)

    class Faulty(grpo.Grpo):
        def advantages(self, rewards: Sequence[float | None]) -> list[float]:
            count("controller")
            return super().advantages(rewards)

        def refine(self, share, all_sum):
            count("trainer")
            return super().refine(share, all_sum)

    return Faulty(grpo.Config())
