"""Whether the engines of a run can be had: the policy's, and those of the models that rewards ask."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args
from urllib.parse import urlsplit

from launcher.checks import folders
from runtime import plugins
from runtime.config import Asked, Engines
from runtime.errors import ConfigError
from runtime.load import Key, Loaded
from runtime.site import SiteConfig

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


def kind(loaded: Loaded, model: str, path: tuple[Key, ...]) -> Any:
    """Of the engines of a model, as its plugin built it. `path`: where they stand in the config."""
    engines = loaded.config.rollout.engines[model]
    keys = loaded.where(*path, "engine"), loaded.where(*path, "engine_options")
    return plugins.build("engine", engines.engine, engines.engine_options, *keys)


def check(loaded: Loaded, site: SiteConfig, kinds: Mapping[str, Any]) -> list[str]:
    """
    Returns:
        Warnings.

    Raises:
        ConfigError: a kind does not run here or not as is wanted, a model is missing, or an address cannot be used.
    """
    config, warnings = loaded.config, []
    _check_addresses(loaded)
    for model, path in places(loaded).items():
        engines, kind = config.rollout.engines[model], kinds[model]
        starts = is_started(loaded, model)
        _check_model(loaded, model, starts=starts)
        _check_external(loaded, engines, path)
        if not starts:
            continue
        _check_served(loaded, model, kind)
        place = loaded.where(*path, "engine_options")
        warnings += plugins.ask(kind, "check", place, where=place, answer=list[str])
        if not site.gpus_per_node or site.pretend_gpus:
            continue
        if config.cluster.mode == "colocated":
            plugins.ask(kind, "check_sleep", place, where=place)
        if not kind.runs_on_gpu:
            raise ConfigError(
                loaded.where(*path, "engine"),
                f"{engines.engine!r} runs on CPUs, but site {site.name!r} gives it {site.gpus_per_node} GPUs a node",
                f"write {'.'.join(map(str, path))}.engine: sglang; or in the site file gpus_per_node: 0, or "
                "pretend_gpus: true for a rehearsal on CPUs",
            )
    _check_split(loaded, kinds["policy"])
    return warnings


def _check_split(loaded: Loaded, kind: Any) -> None:
    """Whether prompts can be computed by engines of their own, where they are to be."""
    config, place = loaded.config, loaded.where("rollout", "prefill_per_node")
    if not config.rollout.prefill_per_node:
        return
    if not kind.splits:
        problem = f"an engine {config.rollout.engine!r} does all of an answer itself"
        raise ConfigError(place, problem, "write rollout.engine: sglang, or leave this out")
    if config.cluster.mode == "colocated":
        problem = "in colocated mode engines sleep, and those that hand prompts over cannot"
        raise ConfigError(place, problem, "write cluster.mode: split, or leave this out")
    if config.rollout.external:
        problem = "prompts are handed over between engines that the run starts, but there are external ones too"
        raise ConfigError(place, problem, "leave rollout.external or this out")
    if config.sync.pause != "abort":
        problem = f"{config.sync.pause!r}, but a decode engine cannot have the prompts of what it runs computed anew"
        raise ConfigError(loaded.where("sync", "pause"), problem, "write abort, or leave rollout.prefill_per_node out")
    options = loaded.where("rollout", "engine_options")
    plugins.ask(kind, "check_split", options, where=options)


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
    (folders.check_model if starts or model == "policy" else folders.check_tokenizer)(given.path, place)


def _check_served(loaded: Loaded, model: str, kind: Any) -> None:
    place, name = loaded.where("models", model, "path"), loaded.config.rollout.engines[model].engine
    folder = Path(getattr(loaded.config.models, model).path)
    given = json.loads((folder / "config.json").read_bytes())
    if what := plugins.ask(kind, "lacks", given, where=place, answer=str):
        raise ConfigError(place, f"{folder}: engine {name!r} {what}", "use another engine, such as sglang")


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


def _check_addresses(loaded: Loaded) -> None:
    """Whether there can be such servers, and each is named once: two engines at one would undo each other's pushes."""
    found: dict[tuple[str | None, int], str] = {}
    for model, path in places(loaded).items():
        for i, url in enumerate(loaded.config.rollout.engines[model].external):
            place = loaded.where(*path, "external", i)
            try:
                parts = urlsplit(url)
                host, port = parts.hostname, parts.port
            except ValueError as e:
                raise ConfigError(place, f"{url} is no address: {e}", "give it as in http://10.0.0.7:30000") from None
            if not port:
                raise ConfigError(place, f"{url}: there is no port {port}", "give the port that the server listens on")
            if (before := found.setdefault((host, port), place)) != place:
                raise ConfigError(place, f"{url} is there already: {before}", "name each server once")


def _check_external(loaded: Loaded, engines: Engines, path: tuple[Key, ...]) -> None:
    if engines.external and path == ("rollout",) and loaded.config.cluster.mode == "colocated":
        problem = "in colocated mode the policy's engines take turns with trainer ranks, which these do not"
        raise ConfigError(loaded.where(*path, "external"), problem, "write cluster.mode: split")
    if not engines.token_file:
        return
    file, place = Path(engines.token_file), loaded.where(*path, "token_file")
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):  # what a pipe gives is gone when the agents want it
            raise ConfigError(place, f"{file} is no file", "write the engines' token into one")
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(place, f"{file} cannot be read: {e}", "write the engines' token into it") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(place, f"others can read {file}", f"chmod 600 {file}")
    if len(words := text.split()) != 1:
        problem = f"{file} is empty" if not words else f"{file} holds {len(words)} words, and a token is one"
        raise ConfigError(place, problem, "write the engines' token into it, and nothing else")
