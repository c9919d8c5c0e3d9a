"""Checkpoints that any other cut over any other number of ranks can read back.

A checkpoint holds the float32 masters and AdamW's moments, by parameter, in Megatron-Core's `fully_reshardable` form,
and how many updates were made. The model itself is made from the masters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
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
from runtime.trainer.megatron import shards
from runtime.trainer.megatron.optimizer import AdamW


class _Writer(TorchDistSaveShardedStrategy):
    """Megatron's own way of writing forks processes, which is undefined after MPI_Init; torch's writes in this one."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save_shards(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(folder: Path, optimizer: AdamW) -> None:
    """Write this rank's shards; called by all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    wholes = [shards.gather(part) for part in optimizer.parts]
    dist_checkpointing.save(_state(optimizer, wholes), str(folder), _Writer("torch_dist", 1))


def restore(folder: Path, optimizer: AdamW) -> None:
    """Read into the masters, the moments, the count of updates and the model; called by all ranks. Nothing is changed
    unless all is there.

    Raises:
        ConfigError: it is no such checkpoint, or one of another model.
    """
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
        shards.scatter(part, dict(zip(whole, found["optimizer"][number], strict=True)))
    optimizer.count(found["updates"])
    optimizer.masters_to_model()


def _state(optimizer: AdamW, wholes: Sequence[shards.Whole]) -> dict[str, Any]:
    """What this rank writes, or what it wants to read."""
    chunks: list[Any] = optimizer.model.chunks
    named = {str(number): chunk.module.sharded_state_dict() for number, chunk in enumerate(chunks)}
    sharded, _ = extract_sharded_tensors_and_factories(named)
    where = {s.data: s for s in nested_values(sharded)}
    lists = {
        number: [
            {key: _like(where[parameter], key, value) for key, value in tensors.items()}
            for parameter, tensors in whole.items()
        ]
        for number, whole in enumerate(wholes)
    }
    return {"optimizer": lists, "updates": optimizer.updates}


def _like(model: ShardedTensor | ShardedTensorFactory, key: str, value: Tensor) -> ShardedTensor | ShardedTensorFactory:
    """A master or moment, placed as its parameter is; the owner is the only one of its data-parallel group."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{key}.{model.key}", "data": value}
    changes["replica_id"] = (*model.replica_id[:-1], 0)  # pyright: ignore[reportIndexIssue]
    if isinstance(model, ShardedTensor):
        changes["dtype"] = value.dtype
    return dataclasses.replace(model, **changes)
