"""Checkpoints that any other cut over any other number of ranks can read back.

A checkpoint holds the float32 masters and AdamW's moments, by parameter, in Megatron-Core's `fully_reshardable` form,
and how many updates were made. The model itself is made from the masters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from runtime.errors import ConfigError
from runtime.trainer import seals
from runtime.trainer.checkpoint import Writer
from runtime.trainer.megatron import shards
from runtime.trainer.megatron.optimizer import AdamW


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's own way of writing forks processes, which is undefined after MPI_Init; torch's writes in this one."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        write = partial(
            save_shards,
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
        return AsyncRequest(write, (), [])


def save(writer: Writer, folder: Path, optimizer: AdamW) -> Future[None]:
    """Copy this rank's shards and begin to write them; called by all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    wholes = [shards.gather(part, partial(optimizer.held, n)) for n, part in enumerate(optimizer.parts)]
    strategy = _Strategy("torch_dist", 1)
    request = dist_checkpointing.save(_state(optimizer, wholes), str(folder), strategy, async_sharded_save=True)
    assert request is not None and request.async_fn is not None
    return writer.begin(folder, partial(_write, request.async_fn, folder, strategy))


def _write(write: Callable[..., object], folder: Path, strategy: _Strategy, group: dist.ProcessGroup | None) -> None:
    """As Megatron ends it, but without its barrier, which would meet what the ranks do meanwhile."""
    write(process_group=group)
    if dist.get_rank() == 0:
        save_config(CheckpointingConfig(strategy.backend, strategy.version), str(folder))


def restore(folder: Path, optimizer: AdamW) -> None:
    """Read into the masters, the moments, the count of updates and the model; called by all ranks. Nothing is changed
    unless all is there.

    Raises:
        ConfigError: it is no such checkpoint, or one of another model, or damaged.
    """
    seals.check(folder, dist.get_rank(), dist.get_world_size())
    wholes = [
        {p: {key: torch.zeros(p.shape) for key in shards.KEYS} for p in shards.owned(part)} for part in optimizer.parts
    ]
    try:
        found: Any = dist_checkpointing.load(
            _state(optimizer, wholes), str(folder), TorchDistLoadShardedStrategy(), strict=StrictHandling.RAISE_ALL
        )
    except CheckpointingException as e:
        problem = " ".join(str(e).split())[:500]
        raise ConfigError(str(folder), f"no checkpoint of this model: {problem}", "resume from another one") from e
    for number, (part, whole) in enumerate(zip(optimizer.parts, wholes, strict=True)):
        read = found["optimizer"][number] if whole else []
        shards.scatter(part, partial(optimizer.held, number), dict(zip(whole, read, strict=True)))
    optimizer.count(found["updates"])
    optimizer.masters_to_model()


def _state(optimizer: AdamW, wholes: Sequence[shards.Whole]) -> dict[str, Any]:
    """What this rank writes, or what it wants to read."""
    chunks: list[Any] = optimizer.model.chunks
    named = {str(number): chunk.module.sharded_state_dict() for number, chunk in enumerate(chunks)}
    sharded, _ = extract_sharded_tensors_and_factories(named)
    where = {s.data: s for s in nested_values(sharded)}
    if optimizer.model.adapters:
        where |= optimizer.model.adapters.sharded()
    lists = {
        number: [
            {key: _like(where[parameter], key, value) for key, value in tensors.items()}
            for parameter, tensors in whole.items()
        ]
        for number, whole in enumerate(wholes)
        if whole  # what is empty would be said to differ between ranks
    }
    return {"updates": optimizer.updates, **({"optimizer": lists} if lists else {})}


def _like(model: ShardedTensor | ShardedTensorFactory, key: str, value: Tensor) -> ShardedTensor | ShardedTensorFactory:
    """A master or moment, placed as its parameter is; the owner is the only one of its data-parallel group."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{key}.{model.key}", "data": value}
    changes["replica_id"] = (*model.replica_id[:-1], 0)  # pyright: ignore[reportIndexIssue]
    if isinstance(model, ShardedTensor):
        changes["dtype"] = value.dtype
    return dataclasses.replace(model, **changes)
