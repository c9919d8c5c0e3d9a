"""How an agent starts its engines: what holds for all of them, what is said of each, and what starts a process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from runtime.rollout.base import Launch
from runtime.rollout.spawning import Exited, Started
from runtime.topology import Kind

GRACE_S = 5.0
"""From TERM to KILL."""


class Spawner(Protocol):
    """What an agent needs of spawning.Spawner."""

    exits: asyncio.Queue[Exited]

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: str, host: str) -> Started: ...

    async def stop(self, name: str, grace_s: float) -> None: ...


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the engines of this agent are started and watched."""

    host: str
    """Address they listen on."""
    log_dir: str
    token_file: str
    dtype: str
    """Of the weights, as the trainer sends them."""
    float32_output: bool = False
    """The policy's compute logits in float32, as the trainer does."""
    threads: int
    deterministic: bool
    pause: str
    """sync.pause"""
    call_s: float
    """Bound of one completion."""
    order_s: float
    """Bound of an order: to join a group, to take weights, to compare them."""
    start_s: float
    """Bound from the start of its process to its first answer."""
    silence_s: float
    """An engine that has not answered for so long hangs."""
    restarts: int
    """Of one slot, without a finished group in between."""
    sleeps: bool = False
    """It takes turns with trainer ranks, and begins asleep: not started."""


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    id: int
    model: str
    """Role of its model, such as policy."""
    path: str
    """Folder of the model."""
    kind: Kind = "regular"
    num_gpus: int = 0
    """0: it runs on a CPU."""
    num_ranks: int = 1
    """That its model is cut over, where it can be."""
    num_nodes: int = 1
    node_rank: int = 0
    """Above 0: this is a part of an engine that the agent of its first node keeps."""
    env: dict[str, str]
    """All of its environment, visible devices included."""
    url: str = ""
    """Of one that somebody else runs."""
    token_file: str = ""
    """What it wants as bearer token; empty: nothing."""

    @property
    def is_frozen(self) -> bool:
        """Nothing is pushed to it."""
        return self.model != "policy"

    def launch(self, s: EngineSettings, address: str = "") -> Launch:
        return Launch(
            model=self.path,
            dtype=s.dtype,
            float32_output=s.float32_output and not self.is_frozen,
            host=s.host,
            token_file=s.token_file,
            num_gpus=self.num_gpus,
            num_ranks=self.num_ranks,
            num_nodes=self.num_nodes,
            node_rank=self.node_rank,
            address=address,
            threads=s.threads,
            deterministic=s.deterministic,
            sleeps=s.sleeps,
            is_frozen=self.is_frozen,
            kind=self.kind,
        )
