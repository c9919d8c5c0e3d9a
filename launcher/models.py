"""Whether the models beside the policy are there that the algorithm asks for."""

from __future__ import annotations

from typing import Any

from launcher import files
from runtime.errors import ConfigError
from runtime.load import Loaded


def check(loaded: Loaded, algorithm: Any) -> list[str]:
    """
    Args:
        algorithm: as its plugin built it.

    Returns:
        Warnings.

    Raises:
        ConfigError: one is missing, or its folder is no model, or its vocabulary is another and must not be.
    """
    models, choice = loaded.config.models, loaded.config.algorithm
    needs = frozenset(algorithm.needs)
    wanted = {
        "critic": "critic" in algorithm.losses,
        "reference": "reference" in needs,
        "teacher": bool(needs & {"teacher", "divergence"}),
    }
    if wanted["teacher"] and models.teacher is None:
        problem = f"is not given, but {choice.name} learns from one"
        raise ConfigError(loaded.where("models", "teacher"), problem, "write its folder: teacher: {path: ...}")
    warnings = []
    for role, is_wanted in wanted.items():
        model = getattr(models, role)
        if model is None:
            continue
        if not is_wanted and role in loaded.config.rollout.engines:
            continue
        if not is_wanted:
            place = loaded.where("models", role)
            warnings.append(f"{place} is given, but {choice.name} with its options asks for none: it is not loaded")
        size = files.check_weights(model.path, loaded.where("models", role, "path")).get("vocab_size")
        own = files.check_weights(models.policy.path, loaded.where("models", "policy", "path")).get("vocab_size")
        if role == "teacher" and "divergence" in needs and size != own:
            raise ConfigError(
                loaded.where("models", role, "path"),
                f"its vocab_size is {size}, the policy's {own}, so their distributions cannot be compared",
                "choose models of one vocabulary, or an algorithm that compares sampled tokens only",
            )
    if models.judge is not None and "judge" not in loaded.config.rollout.engines:
        warnings.append(f"{loaded.where('models', 'judge')} is given, but no set of rollout.sets serves it")
    return warnings
