"""Whether trainer ranks and model can be cut as `trainer.parallel` says, as far as the model's config.json tells."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from launcher.checks import models
from runtime import plugins, topology
from runtime.config import Model, Parallel, Teacher
from runtime.errors import ConfigError
from runtime.load import Key, Loaded

FAMILIES: Final = "runtime.trainer.megatron.families"
SIZES: Final = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "columns of an MLP",
}
"""Keys of config.json -> what tensor parallelism shares out evenly."""
EXPERTS: Final = ("num_experts", "n_routed_experts")


def check(loaded: Loaded, algorithm: Any, trainers: Sequence[int]) -> None:
    """
    Args:
        algorithm: as its plugin built it.
        trainers: world ranks of the trainer ranks.

    Raises:
        ConfigError: the trainer has no such sizes, or the ranks, the model's family or the model cannot be cut so.
    """
    if loaded.config.trainer.kind != "megatron":
        _check_uncut(loaded)
        return
    _check_cut(loaded, ("models", "policy"), loaded.config.models.policy, trainers)
    wanted = models.roles(algorithm)
    for place, role, model in models.beside(loaded):
        if wanted[role]:
            _check_cut(loaded, place, model, trainers)


def _check_cut(loaded: Loaded, place: tuple[Key, ...], given: Model, trainers: Sequence[int]) -> None:
    """All models are cut alike, their experts aside: see runtime.trainer.megatron.model.beside."""
    parallel, is_policy = loaded.config.trainer.parallel, place[-1] == "policy"
    whose = "" if is_policy else f"{'.'.join(map(str, place))} ({given.path}), which is cut as the policy is: "
    or_else = "" if is_policy else ", or choose another model for it"
    model = json.loads(Path(given.path, "config.json").read_bytes())
    known = plugins.files(FAMILIES)
    if model["model_type"] not in known:
        lacking = importlib.import_module(f"{FAMILIES}._missing").lacking(model["model_type"])
        problem = f"{whose}'megatron' has no models of type {model['model_type']!r}: {lacking}"
        fix = f"write trainer.kind: fsdp, or use a model of one of: {', '.join(known)}"
        raise ConfigError(loaded.where("trainer", "kind"), problem, fix)
    if not isinstance(model.get("intermediate_size", 0), int | None):
        problem = f"{whose}{given.path}/config.json: intermediate_size is not one number for all layers"
        raise ConfigError(loaded.where("trainer", "kind"), problem, "write trainer.kind: fsdp")
    sizes = {words: int(model[key]) for key, words in SIZES.items() if model.get(key)}
    num_experts = next((int(model[key]) for key in EXPERTS if model.get(key)), 0)
    own = given.expert if isinstance(given, Teacher) else 0
    if not is_policy:
        parallel = msgspec.structs.replace(parallel, expert=own or (parallel.expert if num_experts else 1))
    try:
        topology.leaders(trainers, parallel)
        topology.check_cut(parallel, sizes, model.get("num_hidden_layers"), num_experts)
    except ConfigError as e:
        where = (*place, "expert") if own and e.where.endswith(".expert") else e.where.split(".")
        raise ConfigError(loaded.where(*where), f"{whose}{e.problem}", f"{e.fix}{or_else}") from None


def _check_uncut(loaded: Loaded) -> None:
    for place, _, model in models.beside(loaded):
        if isinstance(model, Teacher) and model.expert:
            problem = f"is {model.expert}, but trainer.kind {loaded.config.trainer.kind} shards models alike"
            raise ConfigError(loaded.where(*place, "expert"), problem, "leave it out, or write trainer.kind: megatron")
    given, plain = loaded.config.trainer.parallel, Parallel()
    for key in Parallel.__struct_fields__:
        value: Any = getattr(given, key)
        if value != getattr(plain, key):
            problem = f"is {value}, but trainer.kind {loaded.config.trainer.kind} shards over all trainer ranks alike"
            fix = "leave trainer.parallel out, or write trainer.kind: megatron"
            raise ConfigError(loaded.where("trainer", "parallel", key), problem, fix)
