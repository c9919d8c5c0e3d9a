"""What a run was told to do, a line each, for people: a default that nobody meant is seen before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from runtime.config import DataSet, Engines, EvalSet, RunConfig, Trainer

SHOWN_CHARS: Final = 100
"""Of a plugin's options."""


def lines(config: RunConfig, num_trainers: int, rows: Mapping[str, int]) -> list[str]:
    """
    Args:
        num_trainers: trainer ranks.
        rows: of data files, by path, as far as they were counted.
    """
    rollout, every = config.rollout, config.checkpoint.interval
    saves = f"a checkpoint every {count(every, 'step')}" if every else "a checkpoint at the end"
    batch = f"{count(rollout.num_prompts, 'prompt')} x {count(rollout.num_samples, 'sample')}"
    told = [
        ("model", config.models.policy.path),
        ("algorithm", _chosen(config.algorithm.name, config.algorithm.options)),
        ("steps", f"{config.num_steps} of {batch}; {saves}"),
        ("trainer", _trainer(config.trainer, num_trainers)),
        ("engine", f"{_served(rollout)}; weights by {config.sync.channel}"),
        *_beside(config),
        *(("data", _data(data, rows)) for data in config.data),
        *(("evaluation", _evaluation(one, config.evaluation.interval, rows)) for one in config.evaluation.sets),
    ]
    return [f"{name:<11} {text}" for name, text in told]


def count(number: int, what: str) -> str:
    """ "1 engine" or "2 engines"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _chosen(name: str, options: Mapping[str, Any]) -> str:
    text = ", ".join(f"{key}: {value}" for key, value in options.items())
    text = text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
    return f"{name} ({text})" if text else name


def _trainer(trainer: Trainer, num_trainers: int) -> str:
    cut, parts = msgspec.structs.asdict(trainer.parallel), [f"{trainer.kind} over {count(num_trainers, 'rank')}"]
    if trainer.kind == "megatron":
        replicas = num_trainers // (cut["tensor"] * cut["pipeline"] * cut["context"])
        used = [f"{name} {size}" for name, size in cut.items() if size > 1]
        parts += [*used, *(["sequence_parallel"] if cut["sequence_parallel"] else []), f"data {replicas}"]
    parts += [trainer.precision, *([f"lora rank {trainer.lora.rank}"] if trainer.lora else [])]
    return ", ".join(parts)


def _served(engines: Engines) -> str:
    text = _chosen(engines.engine, engines.engine_options)
    return f"{text}, {count(len(engines.external), 'external server')}" if engines.external else text


def _beside(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Models beside the policy."""
    models, served = config.models, config.rollout.engines
    given = {name: getattr(models, name) for name in ("reference", "critic", "teacher", "judge")}
    given |= {f"teacher {name}": model for name, model in models.teachers.items()}
    for name, model in given.items():
        if model is not None:
            engine = f"; engine {_served(served[name])}" if name in served else ""
            yield name, f"{model.path}{engine}"


def _data(data: DataSet, rows: Mapping[str, int]) -> str:
    number = f", {count(rows[data.path], 'row')}" if data.path in rows else ""
    environment = _chosen(data.environment, data.environment_options)
    return f"{data.path}{number}; environment {environment}, reward {_chosen(data.reward, data.reward_options)}"


def _evaluation(one: EvalSet, every: int, rows: Mapping[str, int]) -> str:
    first = f"; the first {one.limit}" if one.limit else ""
    when = f"every {count(every, 'step')} and at the end" if every else "at the end"
    return f"{_data(one, rows)}{first}; {when}"
