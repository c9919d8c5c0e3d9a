"""Whether the engines' models can be cut and filled as the config says, and whether GPUs are left idle by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.checks import engines, folders
from runtime import topology
from runtime.errors import ConfigError
from runtime.load import Loaded
from runtime.site import SiteConfig


def check(loaded: Loaded, site: SiteConfig, ranks: topology.Topology, kinds: Mapping[str, Any]) -> list[str]:
    """
    Args:
        kinds: of the engines of each model, as their plugins built them.

    Returns:
        Warnings.

    Raises:
        ConfigError: an engine's ranks cannot share its model out evenly, which it refuses once it has its GPUs.
    """
    warnings = []
    for model, path in engines.places(loaded).items():
        if not engines.is_started(loaded, model):
            continue
        given, folder = loaded.config.rollout.engines[model], getattr(loaded.config.models, model).path
        config = folders.sizes(json.loads(Path(folder, "config.json").read_bytes()))
        if kinds[model].spans_nodes:  # it cuts its model
            _check_cut(config, given.gpus_per_engine, loaded.where(*path, "gpus_per_engine"))
        longest, asked = config.get("max_position_embeddings"), folders.longest({}, given.engine_options)
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if longest and asked > longest and rope.get("rope_type", rope.get("type", "default")) == "default":
            place = loaded.where(*path, "engine_options", "max_length")
            warnings.append(
                f"{place} is {asked}, but {folder} was made for {longest} tokens (max_position_embeddings): the "
                "embedded engine stops there, SGLang does not start"
            )
    return [*warnings, *_idle(loaded, site, ranks), *_wide(loaded, site)]


def _check_cut(config: Mapping[str, Any], ranks: int, place: str) -> None:
    heads, kv_heads = (config.get(key) or 0 for key in ("num_attention_heads", "num_key_value_heads"))
    what = ""
    if heads % ranks:
        what = f"{heads} attention heads"
    elif kv_heads and kv_heads % ranks and ranks % kv_heads:  # fewer heads than ranks are repeated
        what = f"{kv_heads} key-value heads"
    if what:
        raise ConfigError(
            place, f"{ranks} does not divide the model's {what}, which its ranks share out", "use a factor"
        )


def _idle(loaded: Loaded, site: SiteConfig, ranks: topology.Topology) -> list[str]:
    used: dict[int, set[int]] = {}
    for engine in ranks.engines:
        for node in engine.nodes if not engine.url else ():
            used.setdefault(node, set()).update(engine.gpus)
    idle = max((site.gpus_per_node - len(gpus) for gpus in used.values()), default=0)
    if not site.gpus_per_node or not idle:
        return []
    return [
        f"{loaded.where('rollout', 'gpus_per_engine')} is {loaded.config.rollout.gpus_per_engine}: {idle} of the "
        f"{site.gpus_per_node} GPUs of a node with engines are used by none"
    ]


def _wide(loaded: Loaded, site: SiteConfig) -> list[str]:
    """Tensor parallelism talks in every layer, which only GPUs of one node do fast."""
    tensor = loaded.config.trainer.parallel.tensor
    if not 0 < site.gpus_per_node < tensor:
        return []
    place = loaded.where("trainer", "parallel", "tensor")
    return [f"{place} is {tensor}, but a node has {site.gpus_per_node} GPUs: over the network it is slow"]
