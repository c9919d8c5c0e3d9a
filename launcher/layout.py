"""Whether trainer ranks and model can be cut as `trainer.parallel` says, as far as the model's config.json tells."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from runtime import plugins, topology
from runtime.config import Parallel
from runtime.errors import ConfigError
from runtime.load import Loaded

FAMILIES: Final = "runtime.trainer.megatron.families"
SIZES: Final = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "columns of an MLP",
}
"""Keys of config.json -> what tensor parallelism shares out evenly."""
EXPERTS: Final = ("num_experts", "n_routed_experts")


def check(loaded: Loaded, trainers: Sequence[int]) -> None:
    """
    Args:
        trainers: world ranks of the trainer ranks.

    Raises:
        ConfigError: the trainer has no such sizes, or the ranks, the model's family or the model cannot be cut so.
    """
    if loaded.config.trainer.kind != "megatron":
        _check_uncut(loaded)
        return
    models = loaded.config.models
    for given in (models.policy, models.critic, models.reference, models.teacher):
        if given is not None:
            _check_cut(loaded, given.path, trainers)


def _check_cut(loaded: Loaded, path: str, trainers: Sequence[int]) -> None:
    """All models are cut alike."""
    parallel = loaded.config.trainer.parallel
    model = json.loads(Path(path, "config.json").read_bytes())
    known = plugins.files(FAMILIES)
    if model["model_type"] not in known:
        lacking = importlib.import_module(f"{FAMILIES}._missing").lacking(model["model_type"])
        problem = f"'megatron' cannot train models of type {model['model_type']!r}: {lacking}"
        fix = f"write trainer.kind: fsdp, or use a model of one of: {', '.join(known)}"
        raise ConfigError(loaded.where("trainer", "kind"), problem, fix)
    sizes = {words: int(model[key]) for key, words in SIZES.items() if model.get(key)}
    num_experts = next((int(model[key]) for key in EXPERTS if model.get(key)), 0)
    try:
        topology.leaders(trainers, parallel)
        topology.check_cut(parallel, sizes, model.get("num_hidden_layers"), num_experts)
    except ConfigError as e:
        raise ConfigError(loaded.where(*e.where.split(".")), e.problem, e.fix) from None


def _check_uncut(loaded: Loaded) -> None:
    given, plain = loaded.config.trainer.parallel, Parallel()
    for key in Parallel.__struct_fields__:
        value: Any = getattr(given, key)
        if value != getattr(plain, key):
            problem = f"is {value}, but trainer.kind {loaded.config.trainer.kind} shards over all trainer ranks alike"
            fix = "leave trainer.parallel out, or write trainer.kind: megatron"
            raise ConfigError(loaded.where("trainer", "parallel", key), problem, fix)
