"""How trainer ranks are cut over one model, and Megatron's process groups for it."""

from __future__ import annotations

import msgspec
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from runtime.errors import ConfigError


class Parallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one model is cut over trainer ranks; what is left of them is data-parallel."""

    tp: int = 1
    """tensor"""
    pp: int = 1
    """pipeline stages"""
    vpp: int = 1
    """model chunks of each stage (interleaved pipelining)"""
    cp: int = 1
    """context: ranks that share each sequence"""
    ep: int = 1
    """experts; taken from the data- and context-parallel and, with experts whole, the tensor-parallel ranks"""
    sequence_parallel: bool = False
    """Norms and residuals cut over the tensor-parallel ranks by tokens."""


def start(parallel: Parallel, seed: int) -> None:
    """Make Megatron's process groups; torch.distributed's default group exists, and every rank of it calls this.

    Raises:
        ConfigError: the ranks cannot be cut so.
    """
    world, p = dist.get_world_size(), parallel
    if world % (p.tp * p.pp * p.cp):
        sizes = f"tp {p.tp} * pp {p.pp} * cp {p.cp}"
        raise ConfigError("trainer.parallel", f"{sizes} does not divide {world} trainer ranks", "choose factors of it")
    if (world // p.pp) % p.ep:
        problem = f"ep {p.ep} does not divide the {world // p.pp} trainer ranks of a pipeline stage"
        raise ConfigError("trainer.parallel.ep", problem, "choose a factor of it")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(seed)


def stop() -> None:
    """Undo `start`; models made since are of no use after it."""
    parallel_state.destroy_model_parallel()


def tensor() -> dist.ProcessGroup:
    return _made(parallel_state.get_tensor_model_parallel_group())


def pipeline() -> dist.ProcessGroup:
    return _made(parallel_state.get_pipeline_model_parallel_group())


def context() -> dist.ProcessGroup:
    return _made(parallel_state.get_context_parallel_group())


def experts() -> dist.ProcessGroup:
    return _made(parallel_state.get_expert_model_parallel_group())


def data() -> dist.ProcessGroup:
    """Ranks that hold the same part of the model and train on other sequences."""
    return _made(parallel_state.get_data_parallel_group())


def _made(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group
