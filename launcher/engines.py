"""Whether the engines of a run can be had: the policy's, and those of the models that rewards ask."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

from launcher import files
from runtime import plugins
from runtime.config import Asked, Engines, SiteConfig
from runtime.errors import ConfigError
from runtime.load import Key, Loaded

DETERMINISTIC: Final = "embedded"
ASKED: Final = get_args(Asked)


def places(loaded: Loaded) -> dict[str, tuple[Key, ...]]:
    """Where in the config the engines of each model stand.

    Raises:
        ConfigError: in two places.
    """
    made: dict[str, tuple[Key, ...]] = {"policy": ("rollout",)}
    for i, one in enumerate(loaded.config.rollout.sets):
        path = ("rollout", "sets", i)
        if one.model in made:
            problem = f"there are two sets of the {one.model}"
            raise ConfigError(loaded.where(*path, "model"), problem, "leave one out, or raise its engines_per_node")
        made[one.model] = path
    return made


def kinds(loaded: Loaded) -> dict[str, Any]:
    """Of the engines of each model, as its plugin built it."""
    made = {}
    for model, path in places(loaded).items():
        engines = loaded.config.rollout.engines[model]
        keys = loaded.where(*path, "engine"), loaded.where(*path, "engine_options")
        made[model] = plugins.build("engine", engines.engine, engines.engine_options, *keys)
    return made


def check(loaded: Loaded, site: SiteConfig, kinds: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a kind does not run here or not as is wanted, a model is missing, or an address cannot be used.
    """
    config = loaded.config
    for model, path in places(loaded).items():
        engines, kind = config.rollout.engines[model], kinds[model]
        starts = is_started(loaded, model)
        _check_model(loaded, model, starts=starts)
        _check_external(loaded, engines, path)
        if not starts:
            continue
        place = loaded.where(*path, "engine_options")
        kind.check(place)
        if not site.gpus_per_node or site.pretend_gpus:
            continue
        if config.cluster.mode == "colocated":
            kind.check_sleep(place)
        if not kind.runs_on_gpu:
            raise ConfigError(
                loaded.where(*path, "engine"),
                f"{engines.engine!r} runs on CPUs, but site {site.name!r} gives it {site.gpus_per_node} GPUs a node",
                "write gpus_per_node: 0 in the site file, or pretend_gpus: true for a rehearsal on CPUs",
            )


def check_asked(loaded: Loaded, model: str, reward: str, where: str) -> None:
    """
    Args:
        model: that a reward asks.

    Raises:
        ConfigError: no engine serves it.
    """
    if any(one.model == model for one in loaded.config.rollout.sets):
        return
    fix = f"write rollout.sets: [{{model: {model}}}] and models.{model}: {{path: ...}}"
    if model not in ASKED:
        fix = f"ask one of: {', '.join(ASKED)}"
    raise ConfigError(where, f"{reward!r} asks the {model}, but no engines serve it", fix)


def is_started(loaded: Loaded, model: str) -> bool:
    """Whether the run starts engines of this model."""
    config = loaded.config
    if model != "policy":
        return not config.rollout.engines[model].external
    return config.cluster.mode == "colocated" or config.cluster.num_rollout_nodes > 0


def _check_model(loaded: Loaded, model: str, *, starts: bool) -> None:
    given, place = getattr(loaded.config.models, model), loaded.where("models", model)
    if given is None:
        problem = f"is not given, but rollout.sets has engines of the {model}"
        raise ConfigError(place, problem, f"write its folder: {model}: {{path: ...}}")
    place = loaded.where("models", model, "path")
    (files.check_model if starts or model == "policy" else files.check_tokenizer)(given.path, place)


def check_repeats(loaded: Loaded) -> None:
    """
    Raises:
        ConfigError: the run is to repeat itself, and an engine does not.
    """
    if loaded.config.deterministic:
        for model, path in places(loaded).items():
            _check_deterministic(loaded, loaded.config.rollout.engines[model], path)


def _check_deterministic(loaded: Loaded, engines: Engines, path: tuple[Key, ...]) -> None:
    if engines.engine != DETERMINISTIC:
        raise ConfigError(
            loaded.where(*path, "engine"),
            f"{engines.engine!r} does not repeat its log-probs bit for bit, which `deterministic: true` needs",
            f"write {'.'.join(map(str, path))}.engine: {DETERMINISTIC}, or deterministic: false",
        )
    if engines.external:
        problem = (
            "nobody knows whether engines that somebody else runs repeat theirs, which `deterministic: true` needs"
        )
        raise ConfigError(loaded.where(*path, "external"), problem, "leave them out, or write deterministic: false")


def _check_external(loaded: Loaded, engines: Engines, path: tuple[Key, ...]) -> None:
    if engines.external and path == ("rollout",) and loaded.config.cluster.mode == "colocated":
        problem = "in colocated mode the policy's engines take turns with trainer ranks, which these do not"
        raise ConfigError(loaded.where(*path, "external"), problem, "write cluster.mode: split")
    if not engines.token_file:
        return
    file, place = Path(engines.token_file), loaded.where(*path, "token_file")
    try:
        mode, text = file.stat().st_mode, file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(place, f"{file} cannot be read: {e}", "write the engines' token into it") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(place, f"others can read {file}", f"chmod 600 {file}")
    if not text.strip():
        raise ConfigError(place, f"{file} is empty", "write the engines' token into it")
