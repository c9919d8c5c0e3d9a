"""Whether weights can reach the engines of a run the way its config says, and whether both can share their GPUs."""

from __future__ import annotations

from typing import Any

from runtime import topology
from runtime.config import SiteConfig
from runtime.errors import ConfigError
from runtime.load import Loaded


def check(loaded: Loaded, site: SiteConfig, ranks: topology.Topology, kind: Any) -> None:
    """
    Args:
        kind: of the engines, as its plugin built it.

    Raises:
        ConfigError: they cannot.
    """
    config = loaded.config
    channel = config.sync.channel
    if config.cluster.mode == "colocated":
        _check_turns(loaded, site)
    trainer = next(rank.node for rank in ranks.ranks if rank.role == "trainer")
    if channel == "ipc" and site.scheduler != "local" and any(set(e.nodes) != {trainer} for e in ranks.engines):
        raise ConfigError(
            loaded.where("sync", "channel"),
            "'ipc' is memory of trainer rank 0's node, but there are engines on other nodes",
            "write broadcast or disk",
        )
    if channel == "delta" and not kind.takes_deltas:
        raise ConfigError(
            loaded.where("sync", "channel"),
            f"engine {config.rollout.engine!r} takes whole weights only, no 'delta'",
            "write broadcast or disk",
        )


def _check_turns(loaded: Loaded, site: SiteConfig) -> None:
    config = loaded.config
    if config.staleness.max_versions:
        raise ConfigError(
            loaded.where("staleness", "max_versions"),
            f"is {config.staleness.max_versions}, but in colocated mode sampling and training take turns",
            "write 0, or cluster.mode: split",
        )
    if config.sync.channel == "delta":
        raise ConfigError(
            loaded.where("sync", "channel"),
            "'delta', but in colocated mode engines give up their weights before each push",
            "write disk or ipc, which need no process group",
        )
    if site.gpus_per_node and not site.pretend_gpus and config.sync.channel == "broadcast":
        raise ConfigError(
            loaded.where("sync", "channel"),
            "'broadcast', but no process group has two members on one GPU, as colocated mode would need",
            "write disk, or ipc where there is one node",
        )
