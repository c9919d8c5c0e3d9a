"""What goes over MPI: word of the mailbox to every rank, once, and then the commands to the trainer ranks.

These are one stream: each command is answered by every rank that it was sent to before the next is said.
"""

from __future__ import annotations

from runtime.types import Canary, GroupAddress, Manifest, Record, Share

# ---- rank 0 -> all, by broadcast ---------------------------------------------------------------------------------


class Bootstrap(Record, kw_only=True, frozen=True, tag="bootstrap"):
    """What a rank needs to take its place."""

    endpoint: str
    """Of the mailbox."""
    public_key: bytes
    token: bytes
    resume: str
    """Folder of the trainer ranks' shards to start from; empty: from the model."""


# ---- controller -> trainer ranks ---------------------------------------------------------------------------------


class Train(Record, frozen=True, kw_only=True, tag="train"):
    share: Share | None
    """None: this rank gets it from the leader of its data-parallel group."""


class OpenGroup(Record, frozen=True, kw_only=True, tag="open_group"):
    """Trainer rank 0: listen for a weight group; answered by Opened."""

    name: str
    world_size: int


class JoinGroup(Record, frozen=True, kw_only=True, tag="join_group"):
    """Trainer rank 0: if the others are all there, complete the group opened last; answered by Joined."""

    name: str


class CloseGroup(Record, frozen=True, kw_only=True, tag="close_group"):
    """Also: forget the version in this folder."""

    name: str


class Describe(Record, frozen=True, kw_only=True, tag="describe"):
    """Answered by Described."""


class Push(Record, frozen=True, kw_only=True, tag="push"):
    """Send all weights, and compute digests where an engine will compare them; answered by Pushed."""

    source: str
    """Name of the weight group, or of the folder to make."""
    version: int
    base: int = -1
    """Send what changed since this version, the one pushed last; -1: everything."""
    digests: bool = False
    canary: tuple[int, ...] = ()
    """Tokens to score besides; empty: none."""


class Lend(Record, frozen=True, kw_only=True, tag="lend"):
    """Share the next bucket of a push, which the first one begins; `canary` as in Push. Answered by Lent."""

    is_first: bool
    readers: int = 0
    """Engines that this rank shares it with; 0: it only takes part in gathering."""
    canary: tuple[int, ...] = ()


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


class Joined(Record, frozen=True, kw_only=True, tag="joined"):
    missing: tuple[int, ...] = ()
    """Ranks in the group that have not come so far; empty: it is complete."""


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
    """CloseGroup, TakeBack, Save, Export, Sleep, Wake and StopTrainer went well."""


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """A weight group could not be formed or broke; anything else ends the rank."""

    reason: str


OfWeights = Describe | OpenGroup | JoinGroup | CloseGroup | Push | Lend | TakeBack
Command = Train | OfWeights | Save | AskSaved | Export | Sleep | Wake | StopTrainer
Answer = Trained | Opened | Joined | Described | Pushed | Lent | Saved | Done | Failed
