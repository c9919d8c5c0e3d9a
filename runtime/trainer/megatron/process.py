"""What a process needs around models of Megatron-Core: a group of ranks, the groups it is cut into, and without a GPU
the shim. Entered once, before the first model."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from runtime.config import Parallel
from runtime.device import backend, is_gpu, select
from runtime.trainer.megatron import groups
from runtime.trainer.megatron.cpu import megatron_on_cpu

SEED: Final = 1
"""Of Megatron's random states; nothing draws from them, since there is no dropout."""


@contextlib.contextmanager
def ready(device: torch.device, parallel: Parallel) -> Iterator[None]:
    """Inside, models can be built; every trainer rank enters it.

    Raises:
        ConfigError: the ranks cannot be cut so.
    """
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter
    if parallel.tensor > 1 or parallel.context > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # lets communication start before what follows it
    select(device)
    if torch.are_deterministic_algorithms_enabled():
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine insists
    with contextlib.ExitStack() as stack:
        if not is_gpu(device):
            stack.enter_context(megatron_on_cpu())
        if not dist.is_initialized():
            dist.init_process_group(backend(device), store=HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        groups.start(parallel, SEED)
        stack.callback(groups.stop)
        yield
