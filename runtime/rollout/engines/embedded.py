"""The embedded engine: the project's own small server over a transformers model, for CPUs and for exact repeats."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from runtime.rollout.base import Engine, Launch
from runtime.rollout.embedded.limits import lacks
from runtime.rollout.engines._dialect import DialectClient
from runtime.rollout.spawning import SOCKET_FD


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slots: Annotated[int, Meta(ge=1)] = 32
    """Requests decoded at a time; more wait."""
    max_length: Annotated[int, Meta(ge=0)] = 0
    """Longest prompt and answer together; 0: the model's max_position_embeddings. The cache is allocated for it, and
    on some machines deterministic mode reads all of it at every token: set it to what the task needs."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """torch threads; 0: the engine's share of its node. Deterministic mode uses 1."""

    def __post_init__(self) -> None:
        if self.max_length == 1:
            raise ValueError("max_length is 1, but a prompt and its answer have at least 2 tokens")


class EmbeddedKind:
    runs_on_gpu = False
    spans_nodes = False
    takes_handles = False
    splits = False

    def __init__(self, config: Config) -> None:
        self._config = config

    def command(self, launch: Launch) -> list[str]:
        config = self._config
        argv = [sys.executable, "-m", "runtime.rollout.embedded"]
        argv += ["--model", launch.model, "--socket-fd", SOCKET_FD, "--token-file", launch.token_file]
        argv += ["--slots", str(config.slots), "--max-length", str(config.max_length)]
        threads = 1 if launch.deterministic else config.threads or max(1, launch.threads)
        argv += ["--dtype", launch.dtype, "--threads", str(threads)]
        argv += ["--float32-output"] if launch.float32_output else []
        argv += ["--frozen"] if launch.is_frozen else []
        return [*argv, "--deterministic"] if launch.deterministic else argv

    def lacks(self, model: Mapping[str, Any]) -> str:
        return lacks(model)

    def takes_deltas(self, model: Mapping[str, Any]) -> bool:
        return True

    def check(self, where: str) -> list[str]:
        """It runs on what the project itself needs."""
        return []

    def check_sleep(self, where: str) -> None:
        """It is on no GPU."""

    def check_group(self, where: str) -> None:
        """It is on no GPU."""

    def client(self, *, url: str, token: str, timeout_s: float) -> Engine:
        return DialectClient(url=url, token=token, timeout_s=timeout_s)


def build(options: Config) -> EmbeddedKind:
    return EmbeddedKind(options)
