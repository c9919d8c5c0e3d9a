"""What a trainer rank runs: one stream of commands from the controller, each answered before the next is taken.

All trainer ranks get the same commands in the same order and call the trainer alike, so that its collectives meet.
Weight groups are rank 0's: the others only take part in gathering what it sends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

import msgspec
import numpy as np
import torch

from runtime import device
from runtime.comm import commands as c
from runtime.comm.weights.handles import Lender
from runtime.errors import OutOfMemory, PeerLost, SluiceError, WaitTimeout
from runtime.trainer.base import Algorithm, Trainer
from runtime.types import Canary, GroupAddress, Manifest, MicroBatch, Share

if TYPE_CHECKING:
    from torch import Tensor

GROUP_ERRORS: Final = (PeerLost, WaitTimeout)
"""How a weight group fails: a member is gone or late. The controller decides what follows."""


SCORED: Final = {
    "old": ("policy", "logprobs"),
    "reference": ("reference", "logprobs"),
    "values": ("critic", "values"),
    "teacher": ("teacher", "logprobs"),
}
"""What of a MicroBatch's extras an algorithm may need -> the model that gives it, and which of its scores it is."""


GIB: Final = 1 << 30
KEPT_FREE: Final = 0.5
"""Share of the memory that was free before there were engines which must be free again when they sleep: the rest is
for what a process keeps on a device as long as it lives, and for engines that take little."""


class CommandPort(Protocol):
    """The controller, seen from a trainer rank."""

    def receive(self, timeout_s: float) -> c.Command:
        """The next command; raises WaitTimeout."""
        ...

    def answer(self, answer: c.Answer) -> None: ...


class Sender(Protocol):
    """Rank 0's side of a weight channel, as comm.weights has it. A name is a group's, or a version's folder."""

    def push(
        self, name: str, manifest: Manifest, weights: Iterator[tuple[str, Tensor]], *, digests: bool
    ) -> dict[str, str]: ...

    def close(self, name: str) -> None: ...


class GroupSender(Sender, Protocol):
    """Of a channel over groups."""

    def open(self, name: str, world_size: int) -> GroupAddress: ...

    def missing(self, name: str) -> tuple[int, ...]: ...

    def join(self, name: str) -> None: ...


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    timeout_s: float
    """Longest silence of the controller."""


def serve(port: CommandPort, trainer: Trainer, algorithm: Algorithm, sender: Sender | None, settings: Settings) -> None:
    """Obey commands until StopTrainer.

    Args:
        sender: None on trainer ranks other than 0.

    Raises:
        WaitTimeout: no command came in time.
    """
    worker = _Worker(trainer, algorithm, sender, torch.device(settings.device))
    while True:
        command = port.receive(settings.timeout_s)
        port.answer(worker.obey(command))
        if isinstance(command, c.StopTrainer):
            return


class _Worker:
    def __init__(self, trainer: Trainer, algorithm: Algorithm, sender: Sender | None, device: torch.device) -> None:
        self.trainer, self.algorithm, self.sender, self.device = trainer, algorithm, sender, device
        self.lender = Lender(device)
        self.saving: Future[None] | None = None
        """What writes the last checkpoint, until it is known to be written."""
        self.room: int | None = None
        """Bytes of the device that were free when this rank first slept, before there were engines."""

    def obey(self, command: c.Command) -> c.Answer:
        if self.saving and (self.saving.done() or isinstance(command, c.Save | c.StopTrainer)):
            self.saving.result()  # ends this rank where writing failed
            self.saving = None
        match command:
            case c.Train(share=share):
                return c.Trained(metrics=self._train(share))
            case c.Describe():
                return c.Described(manifest=self.trainer.manifest())
            case c.Save(path=path):
                self.saving = self.trainer.save(Path(path))
            case c.AskSaved():
                return c.Saved(is_written=self.saving is None)
            case c.Export(path=path):
                self.trainer.export(Path(path))
            case c.Push():
                return self._push(command)
            case c.Lend():
                return self._lend(command)
            case c.TakeBack():
                self.lender.take_back()
            case c.OpenGroup() | c.JoinGroup() | c.CloseGroup():
                return self._weight_group(command)
            case c.Sleep():
                self.trainer.sleep()
                self.room = self.room or device.free_memory(self.device)
            case c.Wake():
                self._check_room()
                self.trainer.wake()
            case c.StopTrainer():
                pass
        return c.Done()

    def _check_room(self) -> None:
        """
        Raises:
            OutOfMemory: engines say that they sleep, and keep most of the device.
        """
        free = device.free_memory(self.device)
        if free is not None and self.room and free < KEPT_FREE * self.room:
            had = f"{free / GIB:.1f} GiB of {self.device} are free, and {self.room / GIB:.1f} were before they started"
            raise OutOfMemory(
                f"engines that sleep have not given their memory back: {had}; SGLang's torch_memory_saver is said "
                "not to do it on ROCm 7.2, and to do it on 7.0: take another, or write cluster.mode: split"
            )

    def _train(self, given: Share | None) -> dict[str, float]:
        begin = time.perf_counter()
        share = self.trainer.hand_on(given)
        updates = [[self._to_device(batch) for batch in update] for update in share.updates]
        batches = [batch for update in updates for batch in update]
        refined, metrics = self.algorithm.refine(self._scored(batches, len(updates)), self.trainer.all_sum)
        rest = iter(refined)
        want = self.algorithm.needs & {"entropy", "divergence"}
        results = [
            self.trainer.update(
                [next(rest) for _ in update], self.algorithm.losses, totals, self.algorithm.denominator, want
            )
            for update, totals in zip(updates, share.totals, strict=True)
        ]
        return {
            **_over_updates(results),
            **metrics,
            "train_tokens": float(sum(totals.tokens for totals in share.totals)),
            "update_s": time.perf_counter() - begin,
        }

    def _scored(self, batches: list[MicroBatch], num_updates: int) -> list[MicroBatch]:
        """With what the algorithm needs of each model as it is at the start of the batch."""
        if not batches:
            return batches
        needs = self.algorithm.needs
        for extra, (module, what) in SCORED.items():
            if extra not in needs or (extra == "old" and num_updates == 1 and "old_in_refine" not in needs):
                continue
            scores = self.trainer.score(batches, module, frozenset({what}))
            batches = [b.with_extras({extra: getattr(s, what)}) for b, s in zip(batches, scores, strict=True)]
        return batches

    def _to_device(self, batch: MicroBatch) -> MicroBatch:
        # A received array is a view of read-only bytes: torch wants memory of its own.
        return batch.map(lambda array: torch.from_numpy(np.array(array)).to(self.device))

    def _push(self, command: c.Push) -> c.Answer:
        scored = self._score(command.canary) if command.canary else None
        manifest = self.trainer.manifest().since(command.base)
        weights, made = self.trainer.weights(), {}
        try:
            if self.sender is not None:
                made = self.sender.push(command.source, manifest, weights, digests=command.digests)
        except GROUP_ERRORS as e:
            return c.Failed(reason=_reason(e))
        finally:
            for _ in weights:  # the other ranks gather to the end, so this one does too, whatever became of the push
                pass
        return c.Pushed(digests=made, canary=scored)

    def _lend(self, command: c.Lend) -> c.Lent:
        scored = self._score(command.canary) if command.canary else None
        if command.is_first:
            self.lender.begin(self.trainer.manifest(), self.trainer.weights())
        return c.Lent(handle=self.lender.lend(command.readers), canary=scored)

    def _score(self, tokens: tuple[int, ...]) -> Canary:
        size = len(tokens)
        nothing = np.zeros(size, dtype=np.float32)
        batch = MicroBatch(
            tokens=np.array(tokens, dtype=np.int32),
            positions=np.arange(size, dtype=np.int32),
            starts=(0, size),
            loss_mask=np.ones(size, dtype=bool),
            weights=nothing,
            advantages=nothing,
            rollout_logprobs=nothing,
        )
        (scores,) = self.trainer.score([self._to_device(batch)], "policy", frozenset({"logprobs"}), temperature=1.0)
        assert scores.logprobs is not None
        return Canary(tokens=tokens, logprobs=scores.logprobs.float().cpu().numpy())

    def _weight_group(self, command: c.OpenGroup | c.JoinGroup | c.CloseGroup) -> c.Answer:
        if self.sender is None:
            return c.Done()
        sender = cast("GroupSender", self.sender)  # the controller opens groups only where the channel has them
        try:
            match command:
                case c.OpenGroup(name=name, world_size=world_size):
                    return c.Opened(address=sender.open(name, world_size))
                case c.JoinGroup(name=name):
                    if not (missing := sender.missing(name)):
                        sender.join(name)
                    return c.Joined(missing=missing)
                case c.CloseGroup(name=name):
                    sender.close(name)
        except GROUP_ERRORS as e:
            return c.Failed(reason=_reason(e))
        return c.Done()


def _reason(error: SluiceError) -> str:
    return f"{type(error).__name__}: {error}"


def _over_updates(results: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a batch: means over its updates; maxima, counts and the last learning rate as they are called."""

    def one(name: str, values: list[float]) -> float:
        if name.endswith("_max"):
            return max(values)
        if name.endswith("skipped_updates"):
            return sum(values)
        return values[-1] if name.endswith("learning_rate") else sum(values) / len(values)

    names: Mapping[str, float] = results[0] if results else {}
    return {name: one(name, [result[name] for result in results]) for name in names}
