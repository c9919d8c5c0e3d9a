"""The trainer ranks, seen from the controller: one stream of commands, said in one order, each answer bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from runtime.comm.messages import (
    Answer,
    CloseGroup,
    Command,
    Describe,
    Described,
    Done,
    Export,
    Failed,
    JoinGroup,
    Opened,
    OpenGroup,
    Push,
    Pushed,
    Save,
    StopTrainer,
    Train,
    Trained,
)
from runtime.errors import WaitTimeout
from runtime.types import Batch, GroupAddress, Manifest

TRANSFER_S = 300.0
"""Longest time one message may be on the wire: trainer ranks listen whenever no command is under way."""


class World(Protocol):
    """What the learner needs of comm.world.World."""

    def deal(self, messages: Mapping[int, msgspec.Struct], timeout_s: float) -> None: ...

    def poll(self, source: int, kind: Any, timeout_s: float) -> Any | None: ...


class GroupBroken(Exception):
    """A weight group could not be formed, or broke in a push; the caller forms another."""


class Learner:
    """Talks to every trainer rank. `idle` is called while it waits, so that nothing else stands still."""

    def __init__(self, world: World, ranks: Sequence[int], leaders: Sequence[int], idle: Callable[[], None]) -> None:
        """
        Args:
            ranks: world ranks of the trainer ranks.
            leaders: those of them that are handed a share each, in the order of shares.
        """
        self._world, self._ranks, self._leaders, self._idle = world, tuple(ranks), tuple(leaders), idle
        self._answers: dict[int, Answer] = {}

    # ---- training

    def begin(self, batch: Batch) -> None:
        """Deal a batch; `training()` says when it is trained."""
        shares = dict(zip(self._leaders, batch.shares, strict=True))
        self._say([Train(share=shares.get(rank)) for rank in self._ranks])

    def training(self) -> dict[str, float] | None:
        """Metrics of the batch begun last, or None while it is being trained."""
        if not self._collect():
            return None
        answers, self._answers = self._answers, {}
        first = answers[self._ranks[0]]
        assert isinstance(first, Trained), first
        return first.metrics

    # ---- weights

    def manifest(self, timeout_s: float) -> Manifest:
        answer = self._do(Describe(), "the manifest", timeout_s)
        assert isinstance(answer, Described)
        return answer.manifest

    def open_group(self, name: str, world_size: int, timeout_s: float) -> GroupAddress:
        answer = self._do(OpenGroup(name=name, world_size=world_size), f"weight group {name}", timeout_s)
        assert isinstance(answer, Opened)
        return answer.address

    def join_group(self, name: str, timeout_s: float) -> None:
        self._done(self._do(JoinGroup(name=name), f"joining weight group {name}", timeout_s))

    def close_group(self, name: str, timeout_s: float) -> None:
        self._done(self._do(CloseGroup(name=name), f"closing weight group {name}", timeout_s))

    def push(self, group: str, version: int, timeout_s: float) -> dict[str, str]:
        """Digests of what was sent."""
        answer = self._do(Push(group=group, version=version), f"the push of version {version}", timeout_s)
        if isinstance(answer, Failed):
            raise GroupBroken(answer.reason)
        assert isinstance(answer, Pushed), answer
        return answer.digests

    # ---- the rest

    def save(self, folder: Path, timeout_s: float) -> None:
        self._done(self._do(Save(path=str(folder)), "saving", timeout_s))

    def export(self, folder: Path, timeout_s: float) -> None:
        self._done(self._do(Export(path=str(folder)), "the export", timeout_s))

    def stop(self, timeout_s: float) -> None:
        self._done(self._do(StopTrainer(), "the end", timeout_s))

    def _done(self, answer: Answer) -> None:
        if isinstance(answer, Failed):
            raise GroupBroken(answer.reason)
        assert isinstance(answer, Done), answer

    def _do(self, command: Command, what: str, timeout_s: float) -> Answer:
        """One command to all ranks; the first rank's answer, or the first failure."""
        self._say([command] * len(self._ranks))
        deadline = time.monotonic() + timeout_s
        while not self._collect():
            if time.monotonic() > deadline:
                missing = [r for r in self._ranks if r not in self._answers]
                raise WaitTimeout(f"controller waited {timeout_s:.0f} s for {what}: no answer from ranks {missing}")
            self._idle()
        answers, self._answers = self._answers, {}
        failed = next((a for a in answers.values() if isinstance(a, Failed)), None)
        return failed or answers[self._ranks[0]]

    def _say(self, commands: Sequence[Command]) -> None:
        assert not self._answers, "a command is under way"
        self._world.deal(dict(zip(self._ranks, commands, strict=True)), TRANSFER_S)

    def _collect(self) -> bool:
        for rank in self._ranks:
            if rank not in self._answers and (answer := self._world.poll(rank, Answer, TRANSFER_S)) is not None:
                self._answers[rank] = answer
        return len(self._answers) == len(self._ranks)
