"""Writes a Hugging Face folder tensor by tensor, so that no rank ever holds a whole model beside its own part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from runtime.trainer import checkpoint
from runtime.trainer.megatron.convert import Listed
from runtime.trainer.megatron.weight_files import INDEX

GENERATION: Final = "generation_config.json"

FILE_BYTES: Final = 4 << 30
"""A file of weights is at most so large, or holds a single tensor."""


def export(
    folder: Path, source: Path, hf: PretrainedConfig, listed: Sequence[Listed], weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a folder that from_pretrained loads, whole or not at all; called by one rank.

    Args:
        source: the folder the run started from, for its tokenizer.
        listed: what `weights` gives, in its order.
    """
    files = split(listed, FILE_BYTES)
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    given = iter(weights)
    with checkpoint.whole(folder, source) as beside:
        for name, items in zip(names, files, strict=True):
            state = {key: tensor.cpu().contiguous() for key, tensor in (next(given) for _ in items)}
            assert list(state) == [item.name for item in items]
            save_file(state, beside / name, metadata={"format": "pt"})
        for key, _ in given:
            raise AssertionError(f"{key} is not listed")
        if len(files) > 1:
            homes = {item.name: name for name, items in zip(names, files, strict=True) for item in items}
            about = {"metadata": {"total_size": sum(map(_bytes, listed))}, "weight_map": homes}
            (beside / INDEX).write_text(json.dumps(about, indent=2))
        _config(hf, listed).save_pretrained(beside)
        if (source / GENERATION).is_file():
            shutil.copyfile(source / GENERATION, beside / GENERATION)


def split(listed: Sequence[Listed], file_bytes: int) -> list[list[Listed]]:
    """The tensors of each file, in order; at least one file."""
    files: list[list[Listed]] = [[]]
    room = file_bytes
    for item in listed:
        if files[-1] and _bytes(item) > room:
            files.append([])
            room = file_bytes
        files[-1].append(item)
        room -= _bytes(item)
    return files


def _bytes(item: Listed) -> int:
    return torch.Size(item.shape).numel() * item.dtype.itemsize


def _config(hf: PretrainedConfig, listed: Sequence[Listed]) -> PretrainedConfig:
    told = type(hf).from_dict(hf.to_dict())
    told.dtype = listed[0].dtype
    told.architectures = told.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf.model_type]]
    return told
