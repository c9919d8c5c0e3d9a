"""Low-rank adapters (LoRA, arXiv 2106.09685): a linear layer's weight W, which stays as it is, plus alpha / rank * B A.

Adapters go by the names of Hugging Face's linear layers and are written as PEFT writes them, so that what loads
adapters from PEFT loads these. A starts as PEFT starts it, drawn for each layer by its name; B starts as zeros.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from runtime.config import Lora
from runtime.errors import ConfigError
from runtime.trainer.checkpoint import placed

LAYERS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Have adapters where no targets are named."""

FOLDER: Final = "adapter"
"""Where an export holds the adapters beside the merged model."""


class LoraLinear(nn.Module):
    """A linear layer with an adapter, under the names that it had."""

    def __init__(self, layer: nn.Linear, name: str, options: Lora) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = scale(options)
        place = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.lora_A = nn.Parameter(start(name, options.rank, layer.in_features).to(**place))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, options.rank, **place))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias) + linear(linear(x, self.lora_A), self.lora_B) * self.scale


def scale(options: Lora) -> float:
    return options.alpha / options.rank


def start(name: str, rank: int, columns: int) -> Tensor:
    """[rank, columns] float32: the A that the layer called `name` starts with, however it is cut."""
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (2 * torch.rand(rank, columns, generator=random) - 1) / columns**0.5


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """[out, in] float32: the weight of a layer that does what the layer and its adapter do."""
    return weight.float() + scale * (b.float() @ a.float())


def attach(model: nn.Module, options: Lora) -> dict[str, LoraLinear]:
    """Freeze the model and give its targets adapters; returns them by the name of the weight they add to.

    Raises:
        ConfigError: it has no such layers.
    """
    model.requires_grad_(False)
    found: dict[str, LoraLinear] = {}
    for name, layer in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if is_target(last, options) and isinstance(layer, nn.Linear):
            found[f"{name}.weight"] = LoraLinear(layer, name, options)
            setattr(model.get_submodule(parent), last, found[f"{name}.weight"])
    check(options, {name.split(".")[-2] for name in found})
    return found


def is_target(layer: str, options: Lora) -> bool:
    return layer in (options.targets or LAYERS)


def check(options: Lora, found: set[str]) -> None:
    """
    Args:
        found: layers that were given adapters.

    Raises:
        ConfigError: none, or not all that the options name.
    """
    missing = sorted(set(options.targets) - found) or ([] if found else [*LAYERS])
    if missing:
        problem = f"this model has no linear layer {missing[0]!r} that can have an adapter"
        raise ConfigError("trainer.lora.targets", problem, f"these can: {', '.join(sorted(found)) or 'none'}")


def export(folder: Path, source: Path, options: Lora, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write a folder that PEFT loads, whole or not at all.

    Args:
        source: Hugging Face folder of the model that the adapters belong to.
        weights: (name of the layer, "lora_A" or "lora_B" and "weight", dotted; full tensor)
    """
    state = {f"base_model.model.{name}": tensor.cpu().contiguous() for name, tensor in weights}
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": options.rank,
        "lora_alpha": options.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in state}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with placed(folder) as beside:
        save_file(state, beside / "adapter_model.safetensors", metadata={"format": "pt"})
        (beside / "adapter_config.json").write_text(json.dumps(about, indent=2))
