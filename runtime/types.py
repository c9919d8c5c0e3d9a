"""The types that travel between controller, agents and trainer ranks.

All are frozen. Every [T] array at t speaks of tokens[t]: logprobs[t] = log p(tokens[t] | tokens[<t]), 0 at the start
of a sequence. Token streams are flat, with a loss mask that is True where the policy sampled the token. Text is never
tokenised again: what the engine sampled is what is trained on.

Example: prompt tokens 7 8 9, sampled 4 2 by policy version 3 (2 ends the answer), rewarded 1.0:

    Sample(prompt_id="arith:9f3c:0", index=0, tokens=[7, 8, 9, 4, 2], loss_mask=[0, 0, 0, 1, 1],
           logprobs=[0, 0, 0, -0.4, -0.1], versions=((3, 3),), reward=1.0, status="done")

Arrays are numpy; the trainer turns a MicroBatch into tensors when it receives it (`MicroBatch.map`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

if TYPE_CHECKING:
    Array = Any
else:
    Array = np.ndarray  # what the codec decodes to
"""A numpy array on the controller and agents, a torch tensor on a trainer rank."""

Status = Literal["done", "truncated", "aborted", "failed"]
Purpose = Literal["train", "eval"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the types below; they are encoded by `comm.codec` without pickle."""


class Prompt(Record, frozen=True, kw_only=True):
    """One draw of a task. `id` is unique in a run: data set, content hash, epoch ("heldout:1b2f...:0")."""

    id: str
    messages: tuple[dict[str, str], ...] = ()
    """Chat messages; the agent applies the model's chat template. Empty where `tokens` are given."""
    tokens: tuple[int, ...] = ()
    answer: Any = None
    dataset: str
    metadata: dict[str, Any] = {}


class SamplingParams(Record, frozen=True, kw_only=True):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    ignore_eos: bool = False
    seed: int | None = None


class Completion(Record, frozen=True, kw_only=True):
    """What one `generate` call returned: n new tokens after a prefix."""

    tokens: np.ndarray
    """[n] int32"""
    logprobs: np.ndarray
    """[n] float32, of the distribution that was sampled from"""
    versions: tuple[tuple[int, int], ...]
    """Spans ((start, version), ...): tokens[start:] were made by that policy version, up to the next start."""
    finish: Literal["stop", "length", "abort"]


class Sample(Record, frozen=True, kw_only=True):
    """One answer to a prompt, prompt included."""

    prompt_id: str
    index: int
    """Which of the group's samples."""
    segment: int = 0
    """Pieces of one answer (compaction, sub-agents) share prompt_id and index, and one denominator."""
    tokens: np.ndarray
    """[T] int32"""
    loss_mask: np.ndarray
    """[T] bool, True where sampled by the policy"""
    logprobs: np.ndarray
    """[T] float32, by the engine; 0 where the mask is False"""
    versions: tuple[tuple[int, int], ...]
    """Spans over tokens, as in Completion."""
    reward: float | None = None
    """None: the reward or the environment failed; the sample is in the group but not in its statistics."""
    status: Status = "done"
    reason: str = ""
    trainable: bool = True


class Group(Record, frozen=True, kw_only=True):
    """All the answers to one prompt."""

    lease: int
    """Number of the lease that made it."""
    prompt: Prompt
    samples: tuple[Sample, ...]
    version: int
    """Policy version it was leased at."""

    @property
    def oldest_version(self) -> int:
        return min((v for s in self.samples for _, v in s.versions), default=self.version)


class Lease(Record, frozen=True, kw_only=True):
    """A prompt handed to an agent."""

    number: int
    prompt: Prompt
    version: int
    """Policy version it starts with."""
    num_samples: int
    params: SamplingParams
    purpose: Purpose = "train"
    journal: tuple[tuple[Completion, ...], ...] = ()
    """Per sample, the completions already made: the environment runs again and `generate` answers from here."""


class MicroBatch(Record, frozen=True, kw_only=True):
    """Whole sequences, packed one after another. S sequences, T tokens. T may be 0 on a rank that got no work."""

    tokens: Array
    """[T] int32"""
    positions: Array
    """[T] int32, from 0 in each sequence"""
    starts: tuple[int, ...]
    """[S+1]; sequence s is tokens[starts[s]:starts[s+1]]"""
    loss_mask: Array
    """[T] bool"""
    weights: Array
    """[T] float32 numerators; a loss is sum(weights * per-token loss) / totals of the update"""
    advantages: Array
    """[T] float32"""
    rollout_logprobs: Array
    """[T] float32"""
    extras: dict[str, Array] = {}
    """[T, ...]: old, reference, values, returns, ..."""
    per_seq: dict[str, Array] = {}
    """[S]: group, answer, reward, teacher (its number), ..."""

    def map(self, fn: Callable[[Array], Array]) -> MicroBatch:
        """The same with `fn` applied to every array."""
        arrays = ("tokens", "positions", "loss_mask", "weights", "advantages", "rollout_logprobs")
        return msgspec.structs.replace(
            self,
            **{name: fn(getattr(self, name)) for name in arrays},
            extras={k: fn(v) for k, v in self.extras.items()},
            per_seq={k: fn(v) for k, v in self.per_seq.items()},
        )

    def with_extras(self, extras: Mapping[str, Array]) -> MicroBatch:
        return msgspec.structs.replace(self, extras={**self.extras, **extras})


class Totals(Record, frozen=True, kw_only=True):
    """Denominators of one update, over all data-parallel ranks."""

    tokens: int
    """Trainable tokens."""
    answers: int
    """Answers with at least one trainable token."""
    groups: int

    def of(self, denominator: str) -> float:
        """The divisor called `denominator` ("tokens", "answers", "groups", or "fixed" which is 1); at least 1."""
        return 1.0 if denominator == "fixed" else float(max(1, getattr(self, denominator)))


class Share(Record, frozen=True, kw_only=True):
    """One data-parallel rank's part of a batch: updates[u] is a list of micro-batches, as many on every rank."""

    step: int
    updates: tuple[tuple[MicroBatch, ...], ...]
    totals: tuple[Totals, ...]


class Batch(Record, frozen=True, kw_only=True):
    """What one policy version is trained on."""

    step: int
    shares: tuple[Share, ...]
    """[dp]"""
    oldest_version: int
    metrics: dict[str, float] = {}


class Manifest(Record, frozen=True, kw_only=True):
    """What a push carries: known without moving a weight."""

    kind: Literal["full", "delta"] = "full"
    base: int = -1
    """Version that a delta starts from."""
    via: Literal["group", "folder"] = "group"
    """How it travels: see comm.weights."""
    names: tuple[str, ...]
    """Hugging Face names, in the order they are sent."""
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bucket_bytes: int

    def since(self, base: int) -> Manifest:
        """The same weights as a delta from that version; -1: whole."""
        return self if base < 0 else msgspec.structs.replace(self, kind="delta", base=base)


class Canary(Record, frozen=True, kw_only=True):
    """A prompt, and what the trainer's model makes of it: an engine with the same weights makes the same of it."""

    tokens: tuple[int, ...]
    logprobs: np.ndarray
    """[T] float32, at temperature 1; 0 at the first token"""


class GroupAddress(Record, frozen=True, kw_only=True):
    """How members of a weight group find each other: rank 0 is a trainer rank, the rest engines."""

    name: str
    host: str
    port: int
    world_size: int
    backend: str
    """gloo or nccl"""


class RunState(Record, frozen=True, kw_only=True):
    """All that the controller needs to go on after a checkpoint."""

    step: int = 0
    version: int = 0
    taken: int = 0
    """Batches taken from the buffer so far: the one in training counts too."""
    evaluated: int = -1
    """Step at which the policy was evaluated last."""
    failed: int = 0
    """Groups dropped since the last step, as all their samples failed."""
    next_lease: int = 0
    data: dict[str, Any] = {}
    """Of the data source: epoch, cursor."""
    ready: tuple[Group, ...] = ()
    """Groups finished but not trained."""
    running: tuple[Lease, ...] = ()
    """Leases under way, with their journals."""
    offsets: dict[str, int] = {}
    """Log file -> length in bytes to cut it back to."""
