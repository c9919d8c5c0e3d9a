"""The decode loop: requests join and leave a batch between tokens.

It runs in a thread of its own; other threads hand it requests (`submit`) and functions to run between two tokens
(`call`): so everything that touches model, cache or requests happens in one thread, in one order.

    submit -> waiting -> (prefill) -> running, in slot i = its index -> done
                 ^                       |
                 +------ retract --------+         the cache of a retracted request is dropped and prefilled again

Running requests hold the first n slots; when one leaves, the last one moves into its place.

Deterministic mode decodes a constant number of rows (all slots, dummies in the free ones), and prefills and samples
first tokens one request at a time. Then no bit of an answer depends on order or neighbours: see `selftest`.
"""

from __future__ import annotations

import queue
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from runtime.rollout.embedded.errors import Refused
from runtime.rollout.embedded.model import SlotModel
from runtime.rollout.embedded.sampling import Params, sample

T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]
_PREFILL_TOKENS: Final[int] = 16384
"""Padded tokens of one prefill."""
_NO_PARAMS: Final[Params] = Params()


@dataclass(slots=True, eq=False)
class Request:
    id: str
    prompt: list[int]
    params: Params
    seed: int
    limit: int
    """New tokens at most."""
    done: Callable[[Request], None] = lambda _: None
    """Called once, in the decoder's thread."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, index of the first token it made)."""
    retractions: int = 0
    finish: dict[str, Any] | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


class _Prefilled(NamedTuple):
    logits: Tensor
    """[1, vocabulary] after the last token"""
    keys: list[Tensor]
    """Per layer [1, heads, tokens, head size]."""
    values: list[Tensor]


class Decoder:
    def __init__(self, model: SlotModel, *, deterministic: bool, full_width: bool = False) -> None:
        """
        Args:
            full_width: read all columns of the cache at every step, needed or not.
        """
        self.version: str | None = None
        """Stamped on new tokens; None: there are no weights to decode with."""
        self.paused: PauseMode | None = None
        self._model, self._deterministic, self._full_width = model, deterministic, full_width
        self._inbox: queue.SimpleQueue[Request | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._prompts: OrderedDict[tuple[int, ...], _Prefilled] = OrderedDict()

    # ---- from any thread

    def submit(self, request: Request) -> None:
        self._inbox.put(request)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the decoder's thread, between two tokens."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # who asked has gone away
                return
            try:
                future.set_result(function())
            except Refused as e:  # any other error is our own fault and ends the loop
                future.set_exception(e)

        self._inbox.put(run)
        return future

    def close(self) -> None:
        self._inbox.put(None)

    def run(self) -> None:
        """Decode until closed."""
        with torch.inference_mode():
            while self._take_in():
                if self.paused is None and self.version is not None:
                    self._admit()
                    self._step()

    # ---- through `call`

    def pause(self, mode: PauseMode) -> None:
        self.paused = mode
        if mode == "abort":
            self.abort(None, "generation was paused")
        elif mode == "retract":
            for request in self._running:
                request.retractions += 1
            self._waiting.extendleft(reversed(self._running))
            self._running.clear()

    def resume(self) -> None:
        self.paused = None

    def abort(self, request_id: str | None, why: str) -> None:
        """End one request, or all (None), with what it has."""
        for request in [r for r in (*self._running, *self._waiting) if request_id in (None, r.id)]:
            if request in self._running:
                self._leave(request)
            else:
                self._waiting.remove(request)
            request.finish = {"type": "abort", "message": why}
            request.done(request)

    @property
    def num_requests(self) -> int:
        return len(self._running) + len(self._waiting)

    def forget(self) -> None:
        """Drop all keys and values that no running request needs: the weights that made them are gone."""
        self._prompts.clear()
        if not self._running:
            self._model.cache.clear()

    # ---- the loop

    def _take_in(self) -> bool:
        """Take requests and run calls; waits while there is nothing to decode. False: closed."""
        while True:
            busy = self.paused is None and self.version is not None and self.num_requests > 0
            try:
                item = self._inbox.get(block=not busy)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Request):
                self._waiting.append(item)
            else:
                item()

    def _admit(self) -> None:
        while self._waiting and (free := self._model.slots - len(self._running)):
            batch = self._next_prefill(1 if self._deterministic else free)
            fresh = self._prefill(batch)
            logits = torch.cat([f.logits for f in fresh])
            for request, prefilled in zip(batch, fresh, strict=True):
                self._model.cache.write(len(self._running), prefilled.keys, prefilled.values)
                self._running.append(request)
            self._append(batch, logits)

    def _next_prefill(self, most: int) -> list[Request]:
        batch: list[Request] = []
        longest = 0
        while self._waiting and len(batch) < most:
            longest = max(longest, self._waiting[0].length)
            if batch and longest * (len(batch) + 1) > _PREFILL_TOKENS:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _prefill(self, batch: list[Request]) -> list[_Prefilled]:
        """What each request starts from. The samples of a group share their prompt: it is computed once."""
        sequences = [(*r.prompt, *r.tokens) for r in batch]
        new = [s for s in dict.fromkeys(sequences) if s not in self._prompts]
        if new:
            logits, computed = self._model.prefill(new)
            for i, sequence in enumerate(new):
                row, length = slice(i, i + 1), len(sequence)  # cloned: a view would keep the whole batch
                keys = [k[row, :, :length].clone() for k in computed.keys]
                values = [v[row, :, :length].clone() for v in computed.values]
                self._prompts[sequence] = _Prefilled(logits[row].clone(), keys, values)
        fresh = [self._prompts[s] for s in sequences]
        for sequence in sequences:
            self._prompts.move_to_end(sequence)
        while len(self._prompts) > self._model.slots:
            self._prompts.popitem(last=False)
        return fresh

    def _step(self) -> None:
        """One token for every running request."""
        if not self._running:
            return
        padding = [0] * (self._model.slots - len(self._running) if self._deterministic else 0)
        tokens = [r.tokens[-1] for r in self._running]
        positions = [r.length - 1 for r in self._running]
        logits = self._model.decode(tokens + padding, positions + padding, full_width=self._full_width)
        self._append(list(self._running), logits)

    def _append(self, batch: list[Request], logits: Tensor) -> None:
        """Sample the next token of each request of `batch`; rows of `logits` beyond it are dummies."""
        dummies = len(logits) - len(batch)
        tokens, logprobs = sample(
            logits,
            [r.params for r in batch] + [_NO_PARAMS] * dummies,
            [r.seed for r in batch] + [0] * dummies,
            [r.length for r in batch] + [0] * dummies,
        )
        assert self.version is not None, "decoding without weights"
        for request, token, logprob in zip(batch, tokens, logprobs, strict=False):
            if not request.versions or request.versions[-1][0] != self.version:
                request.versions.append((self.version, len(request.tokens)))
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.finish = self._finish(request, token)
        for request in batch:
            if request.finish is not None:
                self._leave(request)
                request.done(request)

    def _finish(self, request: Request, token: int) -> dict[str, Any] | None:
        params = request.params
        if token in params.stop_token_ids or (token in self._model.stop_ids and not params.ignore_eos):
            return {"type": "stop", "matched": token}
        if len(request.tokens) >= request.limit:
            return {"type": "length", "length": len(request.tokens)}
        return None

    def _leave(self, request: Request) -> None:
        """Free its slot; the last request moves in, so that running requests hold the first slots."""
        slot, last = self._running.index(request), len(self._running) - 1
        if slot != last:
            self._model.cache.move(last, slot, self._running[last].length)
            self._running[slot] = self._running[last]
        self._running.pop()
