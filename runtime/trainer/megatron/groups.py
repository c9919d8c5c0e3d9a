"""How trainer ranks are cut over one model, and Megatron's process groups for it."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from runtime import topology
from runtime.config import Parallel


def start(parallel: Parallel, seed: int) -> None:
    """Make Megatron's process groups; torch.distributed's default group exists, and every rank of it calls this.

    Raises:
        ConfigError: the ranks cannot be cut so.
    """
    p = parallel
    topology.leaders(range(dist.get_world_size()), p)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tensor,
        pipeline_model_parallel_size=p.pipeline,
        virtual_pipeline_model_parallel_size=p.virtual_pipeline if p.virtual_pipeline > 1 else None,
        context_parallel_size=p.context,
        expert_model_parallel_size=p.expert,
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


def tensor_and_context() -> dist.ProcessGroup:
    """Ranks of one pipeline stage that train on the same sequences."""
    return _made(parallel_state.get_tensor_and_context_parallel_group())


def experts() -> dist.ProcessGroup:
    return _made(parallel_state.get_expert_model_parallel_group())


def collection(expert: int) -> ProcessGroupCollection:
    """The groups of a model; all ranks call it alike.

    Args:
        expert: ranks that share out its experts. Others than `start` was told are for models that are only run.
    """
    found = ProcessGroupCollection.use_mpu_process_groups()
    if expert != experts().size():
        # As Megatron's own: neighbours, and no tensor parallelism within an expert.
        found.ep = found.tp_ep = _made(dist.new_subgroups(expert)[0])
    return found


def data() -> dist.ProcessGroup:
    """Ranks that hold the same part of the model and train on other sequences."""
    return _made(parallel_state.get_data_parallel_group())


def _made(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group
