"""The trainer ranks, seen from the controller: one stream of commands, said in one order, each answer bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from runtime.comm.commands import (
    Answer,
    AskSaved,
    CloseGroup,
    Command,
    Describe,
    Described,
    Done,
    Export,
    Failed,
    Joined,
    JoinGroup,
    Lend,
    Lent,
    Opened,
    OpenGroup,
    Push,
    Pushed,
    Save,
    Saved,
    Sleep,
    StopTrainer,
    TakeBack,
    Train,
    Trained,
    Wake,
)
from runtime.errors import WaitTimeout
from runtime.types import Batch, GroupAddress, Manifest

TRANSFER_S = 300.0
"""Longest time one message may be on the wire: trainer ranks listen whenever no command is under way."""

ASK_S = 0.2
"""Between questions whether a checkpoint is written."""


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
        self._is_busy = False
        """A command is under way."""
        self._written: Callable[[], object] | None = None
        """To call when what was saved is written."""
        self._asked = 0.0

    # ---- training

    def begin(self, batch: Batch) -> None:
        """Deal a batch; `training()` says when it is trained."""
        shares = dict(zip(self._leaders, batch.shares, strict=True))
        self._say([Train(share=shares.get(rank)) for rank in self._ranks])

    def training(self) -> dict[str, float] | None:
        """Metrics of the batch begun last, or None while it is being trained."""
        if not self._collect():
            return None
        first = self._taken()[0]
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

    def join_group(self, name: str, timeout_s: float) -> tuple[int, ...]:
        """Ranks in the group that have not come; none: it is complete."""
        answer = self._do(JoinGroup(name=name), f"joining weight group {name}", timeout_s)
        if isinstance(answer, Failed):
            raise GroupBroken(answer.reason)
        assert isinstance(answer, Joined), answer
        return answer.missing

    def close_group(self, name: str, timeout_s: float) -> None:
        self._done(self._do(CloseGroup(name=name), f"closing weight group {name}", timeout_s))

    def push(self, command: Push, timeout_s: float) -> Pushed:
        answer = self._do(command, f"the push of version {command.version}", timeout_s)
        if isinstance(answer, Failed):
            raise GroupBroken(answer.reason)
        assert isinstance(answer, Pushed), answer
        return answer

    def lend(self, command: Lend, readers: Mapping[int, int], timeout_s: float) -> dict[int, Lent]:
        """The next bucket of a push, in shared memory.

        Args:
            readers: world rank -> how many engines it shares with; that of the others is 0.

        Returns:
            What each rank says, by world rank.
        """
        commands = [msgspec.structs.replace(command, readers=readers.get(rank, 0)) for rank in self._ranks]
        found: dict[int, Lent] = {}
        for rank, answer in zip(self._ranks, self._answers_to(commands, "the next bucket", timeout_s), strict=True):
            assert isinstance(answer, Lent), answer
            found[rank] = answer
        return found

    def take_back(self, timeout_s: float) -> None:
        self._done(self._do(TakeBack(), "trainer ranks to take their memory back", timeout_s))

    # ---- turns with engines

    def sleep(self, timeout_s: float) -> None:
        self._done(self._do(Sleep(), "trainer ranks to sleep", timeout_s))

    def wake(self, timeout_s: float) -> None:
        self._done(self._do(Wake(), "trainer ranks to wake", timeout_s))

    # ---- the rest

    def save(self, folder: Path, written: Callable[[], object], timeout_s: float) -> None:
        """Returns when the shards are copied; what was saved before is settled.

        Args:
            written: called once, by `tend` or `settle`, when the shards are on disk.
        """
        assert self._written is None, "one checkpoint at a time"
        self._done(self._do(Save(path=str(folder)), "saving", timeout_s))
        self._written, self._asked = written, time.monotonic()

    def tend(self) -> None:
        """Ask now and then whether what was saved is written by now; between commands."""
        if self._written is not None and not self._is_busy and time.monotonic() >= self._asked + ASK_S:
            self._look()

    def _look(self) -> None:
        assert self._written is not None
        answers = self._answers_to([AskSaved()] * len(self._ranks), "an answer", TRANSFER_S)
        self._asked = time.monotonic()
        if all(isinstance(answer, Saved) and answer.is_written for answer in answers):
            written, self._written = self._written, None
            written()

    def settle(self, timeout_s: float) -> None:
        """Wait until what was saved is written.

        Raises:
            WaitTimeout: it takes too long.
        """
        deadline = time.monotonic() + timeout_s
        while self._written is not None:
            if time.monotonic() > deadline:
                raise WaitTimeout(f"controller waited {timeout_s:.0f} s for trainer ranks to write their shards")
            self._look()
            self._idle()

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
        answers = self._answers_to([command] * len(self._ranks), what, timeout_s)
        return next((a for a in answers if isinstance(a, Failed)), answers[0])

    def _answers_to(self, commands: Sequence[Command], what: str, timeout_s: float) -> list[Answer]:
        """One command to each rank; their answers, in the order of ranks."""
        self._say(commands)
        deadline = time.monotonic() + timeout_s
        while not self._collect():
            if time.monotonic() > deadline:
                missing = [r for r in self._ranks if r not in self._answers]
                raise WaitTimeout(f"controller waited {timeout_s:.0f} s for {what}: no answer from ranks {missing}")
            self._idle()
        return self._taken()

    def _say(self, commands: Sequence[Command]) -> None:
        assert not self._is_busy, "a command is under way"
        self._is_busy = True
        self._world.deal(dict(zip(self._ranks, commands, strict=True)), TRANSFER_S)

    def _taken(self) -> list[Answer]:
        answers, self._answers, self._is_busy = self._answers, {}, False
        return [answers[rank] for rank in self._ranks]

    def _collect(self) -> bool:
        for rank in self._ranks:
            if rank not in self._answers and (answer := self._world.poll(rank, Answer, TRANSFER_S)) is not None:
                self._answers[rank] = answer
        return len(self._answers) == len(self._ranks)
