"""Which models stand beside the policy, and whether those are there that the algorithm asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from launcher.checks import folders
from runtime.config import Model
from runtime.errors import ConfigError
from runtime.load import Key, Loaded, near_match

ROUTED: Final = ".experts."
"""In the names of routed experts' tensors; shared experts are linear layers like others."""
OTHERS: Final = {"embed_tokens", "lm_head", "gate"}
"""Matrices that are no linear layers within a model: embedding, output layer, router."""


def check(loaded: Loaded, algorithm: Any) -> list[str]:
    """
    Args:
        algorithm: as its plugin built it.

    Returns:
        Warnings.

    Raises:
        ConfigError: one is missing, or its folder is no model, or its vocabulary is another and must not be; or the
            policy has no such layers as adapters are asked for on.
    """
    models, choice = loaded.config.models, loaded.config.algorithm
    needs, wanted = frozenset(algorithm.needs), roles(algorithm)
    _check_adapters(loaded)
    if wanted["teacher"]:
        _check_teachers(loaded, needs)
    warnings = [] if wanted["teacher"] else _untaught(loaded)
    for place, role, model in beside(loaded):
        if not wanted[role] and role in loaded.config.rollout.engines:
            continue
        if not wanted[role]:
            told = loaded.where(*place)
            warnings.append(f"{told} is given, but {choice.name} with its options asks for none: it is not loaded")
        size = folders.sizes(folders.check_weights(model.path, loaded.where(*place, "path"))).get("vocab_size")
        policy = folders.check_weights(models.policy.path, loaded.where("models", "policy", "path"))
        own = folders.sizes(policy).get("vocab_size")
        if role == "teacher" and "divergence" in needs and size != own:
            raise ConfigError(
                loaded.where(*place, "path"),
                f"its vocab_size is {size}, the policy's {own}, so their distributions cannot be compared",
                "choose models of one vocabulary, or an algorithm that compares sampled tokens only",
            )
        if wanted[role] and size and own and size < own and size < (folders.num_tokens(models.policy.path) or own):
            raise ConfigError(
                loaded.where(*place, "path"),
                f"its vocab_size is {size}, the policy's {own}: it cannot read every token that the policy writes",
                "choose a model with the policy's tokenizer",
            )
    if models.judge is not None and "judge" not in loaded.config.rollout.engines:
        warnings.append(f"{loaded.where('models', 'judge')} is given, but no set of rollout.sets serves it")
    return warnings


def roles(algorithm: Any) -> dict[str, bool]:
    """Of a model beside the policy -> whether the algorithm asks for it."""
    needs = frozenset(algorithm.needs)
    return {
        "critic": "critic" in algorithm.losses,
        "reference": "reference" in needs,
        "teacher": bool(needs & {"teacher", "divergence"}),
    }


def beside(loaded: Loaded) -> Iterator[tuple[tuple[Key, ...], str, Model]]:
    """Models on trainer ranks beside the policy that are given: (place in the config, role, model)."""
    models = loaded.config.models
    for role, model in (("critic", models.critic), ("reference", models.reference), ("teacher", models.teacher)):
        if model is not None:
            yield ("models", role), role, model
    for name, model in models.teachers.items():
        yield ("models", "teachers", name), "teacher", model


def _untaught(loaded: Loaded) -> list[str]:
    """Of data sets whose teacher is named in vain."""
    told = f"{loaded.config.algorithm.name} with its options learns from none: it is not asked"
    named = [(i, data.teacher) for i, data in enumerate(loaded.config.data) if data.teacher]
    return [f"{loaded.where('data', i, 'teacher')} is {name!r}, but {told}" for i, name in named]


def _check_adapters(loaded: Loaded) -> None:
    """
    Raises:
        ConfigError: adapters are asked for on layers that the policy lacks, or that can have none.
    """
    options = loaded.config.trainer.lora
    if options is None or not options.targets:
        return
    path = loaded.config.models.policy.path
    config = folders.sizes(folders.check_weights(path, loaded.where("models", "policy", "path")))
    tensors = folders.tensors(path)
    matrices = [name.removesuffix(".weight") for name, shape in tensors.items() if len(shape) == 2]
    of_experts = {name.rpartition(".")[2] for name in matrices if ROUTED in name}
    per_token = (config.get("vocab_size"), config.get("hidden_size"))
    others = OTHERS | {name.split(".")[-2] for name, shape in tensors.items() if shape == per_token and "." in name}
    known = {name.rpartition(".")[2] for name in matrices if ROUTED not in name} - others
    for i, target in enumerate(options.targets):
        if target in known:
            continue
        problem = f"{target!r} is no linear layer of {path}"
        if target in of_experts:
            problem = f"{target!r} is a layer of routed experts only, and those have no adapters"
        elif target in others:
            problem = f"{target!r} is the embedding, the output layer or the router of {path}, which have no adapters"
        fix = f"{near_match(target, sorted(known))}these can have one: {', '.join(sorted(known))}"
        raise ConfigError(loaded.where("trainer", "lora", "targets", i), problem, fix)


def _check_teachers(loaded: Loaded, needs: frozenset[str]) -> None:
    """
    Raises:
        ConfigError: there is none, or it is not clear which one answers learn from.
    """
    models, choice = loaded.config.models, loaded.config.algorithm
    if models.teacher is None and not models.teachers:
        problem = f"is not given, but {choice.name} learns from one"
        raise ConfigError(loaded.where("models", "teacher"), problem, "write its folder: teacher: {path: ...}")
    if models.teacher is not None and models.teachers:
        problem = "are given, and models.teacher too"
        raise ConfigError(loaded.where("models", "teachers"), problem, "leave one of the keys out")
    if models.teachers and "divergence" in needs:
        problem = f"with its options {choice.name} compares whole distributions, which it does with one teacher only"
        fix = "compare sampled tokens (distill: kind: sampled), or give one model as models.teacher"
        raise ConfigError(loaded.where("algorithm", "options"), problem, fix)
    names = ", ".join(models.teachers) or "none"
    for i, data in enumerate(loaded.config.data):
        if data.teacher not in models.teachers and (data.teacher or models.teachers):
            problem = f"{data.teacher!r} is none of models.teachers" if data.teacher else "is empty: there are several"
            fix = f"{near_match(data.teacher, [*models.teachers])}models.teachers has: {names}"
            raise ConfigError(loaded.where("data", i, "teacher"), problem, fix)
