"""Every message between controller and agents, which the mailbox carries; see `comm.codec` for how.

Those that name a request are answered under its number.
"""

from __future__ import annotations

from runtime.types import Canary, Completion, Group, GroupAddress, Lease, Manifest, Record

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
    is_given_up: bool = False
    """It is somebody else's, and left out until its server is started anew."""


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
