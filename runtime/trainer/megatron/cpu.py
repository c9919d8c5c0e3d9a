"""Lets the unchanged Megatron-Core run without a GPU, so that its parallel code is tested on any machine.

The only monkey patches of this project. Megatron-Core asks for CUDA by name in some eighty places; every patch below
redirects one way of asking to CPU tensors and gloo. All are undone on leaving, and nothing in megatron is edited. Where
a GPU can be used this refuses to start. It shows the arithmetic and the collectives, not kernels, streams or memory.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, cuda
from torch.overrides import TorchFunctionMode

from runtime.device import FIRST_DEVICE
from runtime.errors import ConfigError

GPU: Final = FIRST_DEVICE["nccl"]
CPU: Final = FIRST_DEVICE["gloo"]


class _OnCpu(TorchFunctionMode):
    """Calls of torch that name the GPU's device are made with the CPU's instead."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if _is_gpu(named.get("device")):
            named["device"] = CPU
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.record_stream:
            return None
        if func is torch.device and args and _is_gpu(args[0]):
            return torch.device(CPU)
        if func is Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], CPU, *args[2:])
        answer = func(*args, **named)
        if func is Tensor.type and len(args) == 1 and not named:
            # The optimizer sorts parameters by comparing this text with the names of GPU tensors.
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


def _is_gpu(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith(GPU)


class _Stream:
    """A CUDA stream or event where everything happens in order: nothing to wait for, nothing to record."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: self


def _new_nothing() -> Callable[..., None]:
    """A function of its own each time: torch refuses to know one by several names."""
    return lambda *args, **kwargs: None


def _get_random_state(*args: object, **kwargs: object) -> Tensor:
    return torch.get_rng_state()


def _set_random_state(state: Tensor, *args: object, **kwargs: object) -> None:
    torch.set_rng_state(state)


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Inside, megatron computes on CPU tensors. Entered once per process, before `model.start`.

    Raises:
        ConfigError: this machine has a GPU that torch can use.
    """
    if cuda.is_available():
        problem = "megatron is to run on the CPU of a machine with a GPU, which it would hide from everything else"
        raise ConfigError("trainer.kind", problem, "give the site its gpus_per_node, or use fsdp")
    with contextlib.ExitStack() as stack:
        _patch_torch(stack)
        _patch_megatron(stack)
        # jit_fuser is torch.compile on functions of a few operations: 20 s of compiling each.
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        stack.enter_context(_OnCpu())
        yield


def _patch_torch(stack: contextlib.ExitStack) -> None:
    """Devices, streams and random states of torch.cuda."""

    def put(name: str, value: object) -> None:
        stack.enter_context(mock.patch.object(cuda, name, value))

    # Megatron passes this on as the device of a new tensor: buffers of DDP, of p2p, of gathers, RoPE tables.
    put("current_device", lambda: CPU)
    # Overlap of copies and collectives; on a CPU there is one order.
    for name in ("Stream", "Event"):
        put(name, _Stream)
    put("current_stream", lambda *args: _Stream())
    put("default_stream", lambda *args: _Stream())
    put("stream", lambda stream: contextlib.nullcontext())
    for name in ("synchronize", "empty_cache", "set_device"):
        put(name, _new_nothing())
    # Dropout and recomputation keep a random state per tensor-parallel rank: it is the CPU's here.
    put("manual_seed", torch.manual_seed)
    put("get_rng_state", _get_random_state)
    put("set_rng_state", _set_random_state)


def _patch_megatron(stack: contextlib.ExitStack) -> None:
    """Places where Megatron-Core 0.16 needs Transformer Engine or a GPU tensor by mistake."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no Apex, no Transformer Engine: known
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def put(owner: object, name: str, value: object, create: bool = False) -> None:
        stack.enter_context(mock.patch.object(owner, name, value, create=create))

    put(random, "_get_cuda_rng_state", _get_random_state)
    put(random, "_set_cuda_rng_state", _set_random_state)
    # The router looks at a name that only exists with Transformer Engine.
    if not hasattr(moe_utils, "te_general_gemm"):
        put(moe_utils, "te_general_gemm", None, create=True)
    # The all-to-all takes its split sizes as numbers; they are made such only on their way from a GPU.
    put(token_dispatcher, "maybe_move_tensor_to_cpu", _to_numpy)
    put(token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)
    # It believes in Transformer Engine without having its classes, and isinstance(x, None) fails.
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        put(multi_latent_attention, "HAVE_TE", False)


def _to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
