"""Whether weights can reach the engines of a run the way its config says, and whether both can share their GPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from launcher.checks import files
from runtime import plugins, topology
from runtime.errors import ConfigError
from runtime.load import Loaded
from runtime.site import SiteConfig


def check(loaded: Loaded, site: SiteConfig, ranks: topology.Topology, kind: Any) -> None:
    """
    Args:
        kind: of the engines, as its plugin built it.

    Raises:
        ConfigError: they cannot.
    """
    config = loaded.config
    channel = config.sync.channel
    if any(len(engine.nodes) > 1 for engine in ranks.engines) and not kind.spans_nodes:
        raise ConfigError(
            loaded.where("rollout", "gpus_per_engine"),
            f"{config.rollout.gpus_per_engine} are on several nodes, and an engine {config.rollout.engine!r} is on one",
            "use what one node has",
        )
    if config.cluster.mode == "colocated":
        _check_turns(loaded, site)
    if config.sync.folder and config.sync.via == "folder" and site.scheduler == "local":
        files.check_folder(config.sync.folder, loaded.where("sync", "folder"))
    if channel == "ipc":
        _check_ipc(loaded, site, ranks, kind)
    if channel == "delta":
        _check_delta(loaded, kind)
    if _has_gpus(site) and config.sync.via == "group" and config.cluster.num_rollout_nodes:
        place = loaded.where("rollout", "engine_options")
        plugins.ask(kind, "check_group", place, where=place)


def _check_delta(loaded: Loaded, kind: Any) -> None:
    rollout, model = loaded.config.rollout, Path(loaded.config.models.policy.path, "config.json")
    when = "where somebody else starts it" if rollout.external else ""
    given = json.loads(model.read_bytes())
    if not plugins.ask(kind, "takes_deltas", given, where=loaded.where("rollout", "engine"), answer=bool):
        when = "with these options, or of this model"
    if when:
        problem = f"engine {rollout.engine!r} takes whole weights only {when}, no 'delta'"
        raise ConfigError(loaded.where("sync", "channel"), problem, "write broadcast or disk")


def _check_ipc(loaded: Loaded, site: SiteConfig, ranks: topology.Topology, kind: Any) -> None:
    place = loaded.where("sync", "channel")
    if _has_gpus(site) and loaded.config.cluster.mode == "split":
        raise ConfigError(
            place,
            "'ipc' is memory of the trainer rank on the engine's GPU, but in split mode engines have their own",
            "write broadcast or disk, or cluster.mode: colocated",
        )
    lending = {rank.node for rank in ranks.ranks if rank.role == "trainer"}
    whose = "the trainer ranks' nodes"
    if not kind.takes_handles:
        lending, whose = {min(lending)}, "trainer rank 0's node"
    engines = [e for e in ranks.engines if e.model == "policy"]
    if any(e.url or (site.scheduler != "local" and not lending.issuperset(e.nodes)) for e in engines):
        problem = f"'ipc' is memory of {whose}, but there are engines on other nodes"
        raise ConfigError(place, problem, "write broadcast or disk")


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
    if _has_gpus(site):
        _check_memory(site)
    if _has_gpus(site) and config.sync.channel == "broadcast":
        raise ConfigError(
            loaded.where("sync", "channel"),
            "'broadcast', but no process group has two members on one GPU, as colocated mode would need",
            "write ipc or disk",
        )


def _check_memory(site: SiteConfig) -> None:
    """Whether the memory of torch can be shared, and given back for a while."""
    environment = {**os.environ, **site.env}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in environment.get(name, ""):
            problem = "has expandable segments, with which engines cannot give their memory back in colocated mode"
            raise ConfigError(f"site {site.name}: env.{name}", problem, "leave them out there and in your shell")


def _has_gpus(site: SiteConfig) -> bool:
    return bool(site.gpus_per_node) and not site.pretend_gpus
