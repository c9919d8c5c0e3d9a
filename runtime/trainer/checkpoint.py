"""What a trainer rank writes: checkpoints that any number of ranks can read back, and Hugging Face folders.

A checkpoint holds, by parameter name, the float32 masters of what is trained and AdamW's state, as shards written by
torch.distributed.checkpoint, which puts them together again for another number of ranks.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.device import backend, select
from runtime.errors import ConfigError, SluiceError
from runtime.trainer import seals

MOMENTS: Final = ("exp_avg", "exp_avg_sq", "step")

ROOM: Final = "make room for it; `resume` goes on from the checkpoint before"

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
        if not p.requires_grad:
            continue
        state[f"model.{name}"] = p.detach()
        state |= {f"{moment}.{name}": optimizer.state[p][moment] for moment in MOMENTS}
    return state


class Writer:
    """Writes checkpoints in a thread, one after the other, while the ranks go on. Ranks that write together agree in
    a group of their own, so that what they say there meets nothing else.

    Args:
        device: this rank's. A thread begins on the first GPU, and torch, which waits for the thread's GPU even where
            all tensors are on the host, would take memory there.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=select, initargs=(device,))
        self._group: dist.ProcessGroup | None = None

    def begin(self, folder: Path, write: Callable[[dist.ProcessGroup | None], object]) -> Future[None]:
        """Called by all ranks.

        Args:
            write: (group, None where there are no ranks but this one); what it writes must not change meanwhile.

        Returns:
            Done when the checkpoint is written, by all ranks; or it raises a SluiceError that says why it was not.
        """
        if dist.is_initialized() and self._group is None:
            made = dist.new_group(backend=backend(torch.device("cpu")))
            assert isinstance(made, dist.ProcessGroup), "all ranks are in it"
            self._group = made
        return self._thread.submit(_write, folder, write, self._group)


def _write(folder: Path, write: Callable[[dist.ProcessGroup | None], object], group: dist.ProcessGroup | None) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a single rank is told that it is one
            write(group)
        seals.write(folder, *place(group))
    except CheckpointException as e:
        rank, (cause, _) = next(iter(e.failures.items()))
        problem = f"rank {rank} could not write its part: {cause!r}"
        if isinstance(cause, OSError):
            raise ConfigError(str(folder), problem, ROOM) from e
        raise SluiceError(f"{folder}: {problem}") from e


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(rank, number of ranks)"""
    return (0, 1) if group is None else (group.rank(), group.size())


def save(
    writer: Writer, folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, counters: Tensor
) -> Future[None]:
    """Copy this rank's shards and begin to write them; called by all ranks.

    Args:
        counters: [n] int64, equal on all ranks.
    """
    state = {name: tensor.to("cpu", copy=True) for name, tensor in _state(model, optimizer, counters).items()}
    return writer.begin(
        folder,
        lambda group: save_shards(state, checkpoint_id=folder, process_group=group, no_dist=group is None),
    )


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, counters: Tensor) -> None:
    """Read into the parameters, the optimizer's state and `counters`, in place; called by all ranks.

    Raises:
        ConfigError: it is damaged, or one of another model.
    """
    seals.check(folder, *place(dist.group.WORLD if dist.is_initialized() else None))
    state = _state(model, optimizer, counters)
    try:
        load_shards(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as e:
        _, (cause, _) = next(iter(e.failures.items()))
        fix = "go on with the model, trainer.kind and trainer.lora it was written with, or start a new run"
        raise ConfigError(str(folder), f"no checkpoint of this model: {str(cause)[:500]}", fix) from None


def export(folder: Path, source: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Write a folder that from_pretrained loads, whole or not at all; called by the one rank that holds the weights.

    Args:
        source: the folder the run started from: its config tells the architecture, its tokenizer files are copied.
        weights: full tensors of `dtype` as the model names and holds them; tied ones once.
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
    with placed(folder) as beside:
        yield beside
        for file in {file for pattern in TOKENIZER_FILES for file in source.glob(pattern)}:
            shutil.copyfile(file, beside / file.name)


@contextlib.contextmanager
def placed(folder: Path) -> Iterator[Path]:
    """A new folder, which becomes `folder` at the end, unless something was raised.

    Raises:
        ConfigError: what belongs there cannot be written.
    """
    beside = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    except SafetensorError as e:  # what an OSError would say is in its words only
        raise ConfigError(str(folder), f"cannot be written: {e}", "make room for it, then `resume`") from e
    finally:
        shutil.rmtree(beside, ignore_errors=True)
