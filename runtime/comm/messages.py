"""Every message between controller, agents and trainer ranks, and the one codec all of them use.

A message is a header (MessagePack, typed, unknown kinds refused) and flat arrays beside it: frames[0] is the header,
frames[1:] the arrays in the order the header names them. The mailbox sends the frames as one zmq multipart message,
`comm.world` as MPI messages, `state` as one file. Nothing is unpickled anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from runtime.types import Completion, Group, GroupAddress, Lease, Manifest, Record, Share

T = TypeVar("T")
Frame = bytes | memoryview | bytearray

# ---- start: rank 0 -> all, by MPI broadcast ----------------------------------------------------------------------


class Bootstrap(Record, kw_only=True, frozen=True, tag="bootstrap"):
    """What a rank needs to take its place."""

    endpoint: str
    """Of the mailbox."""
    public_key: bytes
    token: bytes
    resume: str
    """Folder of the trainer ranks' shards to start from; empty: from the model."""


# ---- proof of a push ---------------------------------------------------------------------------------------------


class Canary(Record, frozen=True, kw_only=True):
    """A prompt, and what the trainer's model makes of it: an engine with the same weights makes the same of it."""

    tokens: tuple[int, ...]
    logprobs: np.ndarray
    """[T] float32, at temperature 1; 0 at the first token"""


# ---- controller -> agent -----------------------------------------------------------------------------------------


class Work(Record, frozen=True, kw_only=True, tag="work"):
    """Run these leases; each ends in a Finished."""

    leases: tuple[Lease, ...]


class Connect(Record, frozen=True, kw_only=True, tag="connect"):
    """Let these engines join a weight group; answered by a Reply."""

    request: int
    address: GroupAddress
    ranks: dict[int, int]
    """Engine id -> its rank in the group."""


class Receive(Record, frozen=True, kw_only=True, tag="receive"):
    """Pause these engines and let them receive a push; answered by a Reply."""

    request: int
    source: str
    """Name of a weight group they are in, or the folder of a version."""
    manifest: Manifest
    version: int
    engines: tuple[int, ...]


class Take(Record, frozen=True, kw_only=True, tag="take"):
    """Let these engines take one bucket of a push from memory that trainer ranks share; the first one pauses them.
    Answered by a Reply."""

    request: int
    version: int
    handles: dict[int, tuple[str, ...]]
    """Engine id -> one for each rank of it, see comm.weights.handles."""
    is_first: bool
    is_last: bool


class Commit(Record, frozen=True, kw_only=True, tag="commit"):
    """Compare checksums with the digests, continue generation, compare the canary; answered by a Reply."""

    request: int
    version: int
    digests: dict[str, str]
    """Empty: do not compare. Only engines that can do so compare them."""
    canary: Canary | None = None
    """None: do not compare."""
    engines: tuple[int, ...]


class Disconnect(Record, frozen=True, kw_only=True, tag="disconnect"):
    """Leave a weight group; answered by a Reply."""

    request: int
    group: str
    engines: tuple[int, ...]


class SleepEngines(Record, frozen=True, kw_only=True, tag="sleep_engines"):
    """Let these engines give back their memory, weights included; one that is down stays down. Answered by a Reply."""

    request: int
    engines: tuple[int, ...]


class WakeEngines(Record, frozen=True, kw_only=True, tag="wake_engines"):
    """Let sleeping engines have memory again; answered by a Reply."""

    request: int
    engines: tuple[int, ...]
    serve: bool
    """False: for weights. True: for the rest, and those that are down are started."""


class Restart(Record, frozen=True, kw_only=True, tag="restart"):
    """End and start again these engines; each reports an EngineReady."""

    engines: tuple[int, ...]
    reason: str


class AskJournal(Record, frozen=True, kw_only=True, tag="ask_journal"):
    """Answered by a Journal."""

    request: int


class StopAgent(Record, frozen=True, kw_only=True, tag="stop"):
    """End engines and yourself."""


# ---- agent -> controller -----------------------------------------------------------------------------------------


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """First message of an agent."""

    node: int
    rank: int


class EngineReady(Record, frozen=True, kw_only=True, tag="engine_ready"):
    """An engine answers; one of the policy holds no weights of this run yet."""

    engine: int
    model: str
    can: tuple[str, ...]
    """As in rollout.base.Description."""
    num_ranks: int = 1
    """Of a weight group that it takes."""


class EngineBegun(Record, frozen=True, kw_only=True, tag="engine_begun"):
    """The first node's process of an engine that stands on several was started. Passed on to the agents of the others,
    which end what they have of it and start their parts."""

    engine: int
    start: int
    """Which of its starts, as the first node's agent counts them."""
    address: str
    """Where its processes meet."""


class PartDown(Record, frozen=True, kw_only=True, tag="part_down"):
    """A part on another node than the first ended. Passed on to the first node's agent: the engine is lost."""

    engine: int
    start: int
    reason: str


class EngineDown(Record, frozen=True, kw_only=True, tag="engine_down"):
    """An engine died, hung or failed; its agent is starting it again, its generate calls wait. Passed on to the agents
    of its other nodes, which end their parts."""

    engine: int
    reason: str
    restarts: int
    """Restarts of this slot since a group was last finished."""


class Finished(Record, frozen=True, kw_only=True, tag="finished"):
    """One lease is done."""

    group: Group
    purpose: str
    seconds: float
    """From lease to finish, on the agent's clock."""


class Journal(Record, frozen=True, kw_only=True, tag="journal"):
    request: int
    journals: dict[int, tuple[tuple[Completion, ...], ...]]
    """Lease number -> per sample, the completions made so far."""


class Reply(Record, frozen=True, kw_only=True, tag="reply"):
    """An order was carried out; failures name engines and why."""

    request: int
    failures: dict[int, str] = {}
    """Engine id -> why it did not."""
    mismatched: dict[int, str] = {}
    """Commit only: engine id -> how its weights differ from the trainer's."""


class Fault(Record, frozen=True, kw_only=True, tag="fault"):
    """An agent met something it cannot handle: the attempt ends."""

    node: int
    kind: str
    message: str
    traceback: str


Order = Connect | Receive | Take | Commit | Disconnect | SleepEngines | WakeEngines
ToAgent = Work | Order | Restart | AskJournal | StopAgent | EngineBegun | EngineDown | PartDown
FromAgent = Hello | EngineBegun | EngineReady | EngineDown | PartDown | Finished | Journal | Reply | Fault

# ---- controller -> trainer ranks (MPI): one stream of commands, each answered by every rank it was sent to ---------


class Train(Record, frozen=True, kw_only=True, tag="train"):
    share: Share | None
    """None: this rank gets it from the leader of its data-parallel group."""


class OpenGroup(Record, frozen=True, kw_only=True, tag="open_group"):
    """Trainer rank 0: listen for a weight group; answered by Opened."""

    name: str
    world_size: int


class JoinGroup(Record, frozen=True, kw_only=True, tag="join_group"):
    """Trainer rank 0: wait, bounded, until the group opened last is complete."""

    name: str


class CloseGroup(Record, frozen=True, kw_only=True, tag="close_group"):
    """Also: forget the version in this folder."""

    name: str


class Describe(Record, frozen=True, kw_only=True, tag="describe"):
    """Answered by Described."""


class Push(Record, frozen=True, kw_only=True, tag="push"):
    """Send all weights; answered by Pushed."""

    source: str
    """Name of the weight group, or of the folder to make."""
    version: int
    base: int = -1
    """Send what changed since this version, the one pushed last; -1: everything."""
    canary: tuple[int, ...] = ()
    """Tokens to score besides; empty: none."""


class Lend(Record, frozen=True, kw_only=True, tag="lend"):
    """Share the next bucket of a push; answered by Lent."""

    is_first: bool
    """Begin a push."""
    readers: int = 0
    """Engines that this rank shares it with; 0: it only takes part in gathering."""
    canary: tuple[int, ...] = ()
    """Tokens to score besides; empty: none."""


class TakeBack(Record, frozen=True, kw_only=True, tag="take_back"):
    """The push is over: what was shared is free again."""


class Save(Record, frozen=True, kw_only=True, tag="save"):
    """Copy this rank set's shards, and begin to write them into a folder."""

    path: str


class AskSaved(Record, frozen=True, kw_only=True, tag="ask_saved"):
    """Answered by Saved."""


class Export(Record, frozen=True, kw_only=True, tag="export"):
    """Write a Hugging Face folder."""

    path: str


class Sleep(Record, frozen=True, kw_only=True, tag="sleep"):
    """Give the device's memory to engines."""


class Wake(Record, frozen=True, kw_only=True, tag="wake"):
    """Take it back."""


class StopTrainer(Record, frozen=True, kw_only=True, tag="stop"):
    pass


# ---- trainer ranks -> controller ---------------------------------------------------------------------------------


class Trained(Record, frozen=True, kw_only=True, tag="trained"):
    metrics: dict[str, float]


class Opened(Record, frozen=True, kw_only=True, tag="opened"):
    address: GroupAddress


class Described(Record, frozen=True, kw_only=True, tag="described"):
    manifest: Manifest


class Pushed(Record, frozen=True, kw_only=True, tag="pushed"):
    digests: dict[str, str]
    canary: Canary | None = None


class Lent(Record, frozen=True, kw_only=True, tag="lent"):
    handle: str
    """Of this rank's memory, see comm.weights.handles; empty: it shares none."""
    canary: Canary | None = None


class Saved(Record, frozen=True, kw_only=True, tag="saved"):
    is_written: bool
    """Whether what Save began is on disk."""


class Done(Record, frozen=True, kw_only=True, tag="done"):
    """JoinGroup, CloseGroup, TakeBack, Save, Export, Sleep, Wake and StopTrainer went well."""


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """A weight group could not be formed or broke; anything else ends the rank."""

    reason: str


OfWeights = Describe | OpenGroup | JoinGroup | CloseGroup | Push | Lend | TakeBack
Command = Train | OfWeights | Save | AskSaved | Export | Sleep | Wake | StopTrainer
Answer = Trained | Opened | Described | Pushed | Lent | Saved | Done | Failed

# ---- codec -------------------------------------------------------------------------------------------------------


def encode(message: msgspec.Struct) -> list[Frame]:
    """A message as frames: the header, then each array's bytes (no copy where the array is contiguous)."""
    arrays: list[Frame] = []

    def hook(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            flat = np.ascontiguousarray(value)
            arrays.append(flat.reshape(-1).view(np.uint8).data)
            return (len(arrays), flat.dtype.str, value.shape)
        if isinstance(value, np.generic):
            return value.item()
        raise NotImplementedError(f"no wire form for {type(value).__name__}")

    header = msgspec.msgpack.encode(message, enc_hook=hook)
    return [header, *arrays]


def decode(frames: Sequence[Frame], kind: Any) -> Any:
    """The message in these frames.

    Args:
        frames: what `encode` gave, after transport.
        kind: the type, or union of types, that may be in there.

    Raises:
        msgspec.ValidationError: not of that type, or array sizes that do not match the frames.
    """

    def hook(wanted: type, value: Any) -> Any:
        if wanted is not np.ndarray:
            raise NotImplementedError(f"no wire form for {wanted}")
        number, dtype, shape = value
        if not 0 < number < len(frames):
            raise ValueError(f"array {number} of {len(frames) - 1}")
        flat = np.frombuffer(frames[number], dtype=np.dtype(dtype))
        return flat.reshape(shape)

    return msgspec.msgpack.decode(frames[0], type=kind, dec_hook=hook)
