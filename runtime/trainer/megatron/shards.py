"""Masters and moments in the shape of their parameters, gathered from the ranks that share them out, and dealt back.

Each parameter has an owner in its data-parallel group, who holds it whole for saving or loading; beside that no rank
holds more than one bucket of Megatron's buffers. Megatron 0.16 has functions for this. They take the padding between
buckets for nothing, and where a bucket's parameters do not fill it the parameters of later ones come out shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

Whole = dict[nn.Parameter, dict[str, Tensor]]
"""Parameter of the model -> "param" (its master), "exp_avg" and "exp_avg_sq", float32, in its shape, on the CPU."""

KEYS: Final = ("param", "exp_avg", "exp_avg_sq")

Held = Callable[[Tensor], Mapping[str, Tensor]]
"""One of Megatron's masters -> what this rank has of it under each of KEYS: AdamW.held."""


def owned(part: DistributedOptimizer) -> list[nn.Parameter]:
    """The parameters that this rank owns: as many elements as any other rank of its group, give or take a parameter."""
    group = part.data_parallel_group
    loads, found = [0] * group.size(), []
    for buffer in part.buffers:
        for parameter in buffer.param_index_map:
            owner = min(range(group.size()), key=loads.__getitem__)
            loads[owner] += parameter.numel()
            if owner == group.rank():
                found.append(parameter)
    return found


def gather(part: DistributedOptimizer, held: Held) -> Whole:
    """What this rank owns; called by all ranks of the group."""
    found: Whole = {parameter: {} for parameter in owned(part)}
    group = part.data_parallel_group
    for buffer, bucket in _buckets(part):
        for key in KEYS:
            whole = torch.zeros_like(bucket.grad_data, dtype=torch.float32)
            shards = list(whole.chunk(group.size()))
            own = shards[group.rank()].clone()
            for main, at in _own(part, buffer, bucket):
                own[at] = held(main)[key]
            dist.all_gather(shards, own, group=group)
            for parameter in bucket.params_list:
                if parameter in found:
                    value = whole[_place(buffer, bucket, parameter)].view(parameter.shape)
                    found[parameter][key] = value.to("cpu", copy=True)
    return found


def scatter(part: DistributedOptimizer, held: Held, found: Whole) -> None:
    """The inverse: overwrite masters and moments by what the owners hold; called by all ranks of the group."""
    group = part.data_parallel_group
    for buffer, bucket in _buckets(part):
        for key in KEYS:
            whole = torch.zeros_like(bucket.grad_data, dtype=torch.float32)
            for parameter in bucket.params_list:
                if parameter in found:
                    whole[_place(buffer, bucket, parameter)] = found[parameter][key].flatten().to(whole.device)
            dist.all_reduce(whole, group=group)  # of each element all but one rank give zero
            own = whole.chunk(group.size())[group.rank()]
            for main, at in _own(part, buffer, bucket):
                held(main)[key].copy_(own[at])


def _buckets(part: DistributedOptimizer) -> Iterator[tuple[Any, Any]]:
    return ((buffer, bucket) for buffer in part.buffers for bucket in buffer.buckets)


def _place(buffer: Any, bucket: Any, parameter: nn.Parameter) -> slice:
    """Of a parameter in its bucket."""
    start, end, _ = buffer.param_index_map[parameter]
    return slice(start - bucket.offset, end - bucket.offset)


def _own(part: DistributedOptimizer, buffer: Any, bucket: Any) -> Iterator[tuple[Tensor, slice]]:
    """(Megatron's master of the part of a parameter that this rank holds, where that lies in its shard)"""
    group = part.data_parallel_group
    size = bucket.grad_data.numel() // group.size()
    first = group.rank() * size
    for parameter in bucket.params_list:
        place = _place(buffer, bucket, parameter)
        start, end = max(place.start, first) - first, min(place.stop, first + size) - first
        if start < end:
            number, order = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[number]["params"][order]
            assert main.numel() == end - start, f"{main.numel()} elements, not {end - start}"
            yield main, slice(start, end)
