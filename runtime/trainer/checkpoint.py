"""What a trainer rank writes: checkpoints that any number of ranks can read back, and Hugging Face folders.

A checkpoint holds, by parameter name, the float32 masters and AdamW's state, as shards written by
torch.distributed.checkpoint, which puts them together again for another number of ranks.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from transformers import AutoConfig, AutoModelForCausalLM

MOMENTS: Final = ("exp_avg", "exp_avg_sq", "step")

TOKENIZER_FILES: Final = ("*token*.json", "*.jinja", "vocab.*", "merges.txt", "*.model", "*.tiktoken")
"""What of a model folder goes into an export as it is."""


def initialise(optimizer: torch.optim.AdamW) -> None:
    """Give AdamW the state it would make at its first step, so that saving never depends on a step having been made."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}


def _state(model: nn.Module, optimizer: torch.optim.AdamW, counters: Tensor) -> dict[str, Tensor]:
    state = {"counters": counters}
    for name, p in model.named_parameters():
        state[f"model.{name}"] = p.detach()
        state |= {f"{moment}.{name}": optimizer.state[p][moment] for moment in MOMENTS}
    return state


def save(folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, counters: Tensor) -> None:
    """Write this rank's shards; called by all ranks.

    Args:
        counters: [n] int64, equal on all ranks.
    """
    state = _state(model, optimizer, counters)
    save_shards(state, checkpoint_id=folder, no_dist=not dist.is_initialized())


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, counters: Tensor) -> None:
    """Read into the parameters, the optimizer's state and `counters`, in place; called by all ranks."""
    state = _state(model, optimizer, counters)
    load_shards(state, checkpoint_id=folder, no_dist=not dist.is_initialized())


def export(folder: Path, source: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Write a folder that from_pretrained loads, whole or not at all; called by the one rank that holds the weights.

    Args:
        source: the folder the run started from: its config tells the architecture, its tokenizer files are copied.
        weights: full tensors of `dtype` under Hugging Face names; tied ones once.
    """
    state = {name: tensor.cpu().contiguous() for name, tensor in weights}
    # Not the trained model itself: fully_shard made a class of its own of that, whose name would go into config.json.
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)
    with whole(folder, source) as beside:
        plain.save_pretrained(beside, state_dict=state)


@contextlib.contextmanager
def whole(folder: Path, source: Path) -> Iterator[Path]:
    """A folder to write a model into; at the end it gets the tokenizer of `source` and becomes `folder`, unless
    something was raised."""
    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    yield beside
    for file in {file for pattern in TOKENIZER_FILES for file in source.glob(pattern)}:
        shutil.copyfile(file, beside / file.name)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)
