"""The one place that asks whether a node has NVIDIA GPUs, AMD GPUs or none. Importable without torch.

Trainer ranks see all GPUs of their node and use the one the topology gives them by its index: hiding the others breaks
peer-to-peer transport in some RCCL builds. An engine is a program of its own and sees only its GPUs, through exactly
one environment variable; where the scheduler has narrowed the list already, an index counts within that list.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    import torch

Platform = Literal["cuda", "rocm", "cpu"]

VISIBLE: Final[dict[Platform, str]] = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
"""The variable that narrows what a process sees. ROCR_VISIBLE_DEVICES, which Slurm sets on AMD, acts below it and is
left alone: HIP indices count within it."""

VARIABLES: Final = ("ROCR_VISIBLE_DEVICES", *VISIBLE.values())
"""Every variable that narrows what a process sees."""

FIRST_DEVICE: Final = {"gloo": "cpu", "nccl": "cuda"}
"""torch.distributed backend -> torch's name of the first kind of device it serves."""


def platform(root: Path = Path("/")) -> Platform:
    """What the GPU drivers of this machine say; nothing is loaded for the answer."""
    if (root / "dev/kfd").exists():
        return "rocm"
    return "cuda" if (root / "dev/nvidiactl").exists() else "cpu"


def built_for() -> Platform | None:
    """What the torch of this Python, which a run's ranks use too, was built for, by what lies on disk; None: it has no
    torch."""
    found = importlib.util.find_spec("torch")  # loads nothing
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("version.py").read_text()
    named = re.search(r"^(cuda|hip)\b.*= *['\"]", text, re.MULTILINE)
    return "cpu" if named is None else "cuda" if named[1] == "cuda" else "rocm"


def pretended(environment: Mapping[str, str]) -> Platform:
    """Where GPUs are only pretended: the platform whose variable the scheduler set."""
    return "rocm" if "ROCR_VISIBLE_DEVICES" in environment else "cuda"


def normalise(environment: MutableMapping[str, str]) -> None:
    """Leave one list of visible devices. Schedulers set several, and each is applied within the one below it: with
    ROCR_VISIBLE_DEVICES=1 and CUDA_VISIBLE_DEVICES=1 no GPU is left."""
    if "ROCR_VISIBLE_DEVICES" in environment:
        for name in VISIBLE.values():
            environment.pop(name, None)


def num_visible(environment: Mapping[str, str]) -> int | None:
    """GPUs that the environment shows this process; None: it does not say."""
    for name in VARIABLES:
        if name in environment:
            return len([gpu for gpu in environment[name].split(",") if gpu.strip()])
    return None


def torch_device(index: int | None) -> str:
    """torch's name of a device of the topology; ROCm builds of torch say cuda too."""
    return "cpu" if index is None else f"cuda:{index}"


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def backend(device: torch.device) -> str:
    """The torch.distributed backend for tensors on a device; nccl is RCCL in ROCm builds."""
    return "nccl" if is_gpu(device) else "gloo"


def select(device: torch.device) -> None:
    """Make it this process's own: collectives and allocations that name no device go there."""
    if is_gpu(device):
        importlib.import_module("torch").cuda.set_device(device)


def release_memory(device: torch.device) -> None:
    """Give memory that torch keeps for later back to the device."""
    if is_gpu(device):
        importlib.import_module("torch").cuda.empty_cache()


def free_memory(device: torch.device) -> int | None:
    """Bytes of it that no process has; None: it is no GPU."""
    return importlib.import_module("torch").cuda.mem_get_info(device)[0] if is_gpu(device) else None


def release_shared(device: torch.device) -> None:
    """Give memory that was shared, and that nobody maps any more, back to torch."""
    if is_gpu(device):
        importlib.import_module("torch").cuda.ipc_collect()


def uuid(device: torch.device) -> str:
    """Which GPU it is, for processes that see others."""
    return str(importlib.import_module("torch").cuda.get_device_properties(device).uuid)


def visible(gpus: Sequence[int], environment: Mapping[str, str], kind: Platform) -> dict[str, str]:
    """The environment with which a process sees these GPUs of its node and no others.

    Args:
        gpus: indices among the GPUs that `environment` shows.
        environment: of the process that starts it.

    Raises:
        ValueError: fewer GPUs are visible than an index needs.
    """
    result = {name: value for name, value in environment.items() if name not in VISIBLE.values()}
    if kind == "cpu":
        return result
    # ROCm builds honour CUDA_VISIBLE_DEVICES as well: two lists at once would be applied one inside the other.
    shown = environment.get(VISIBLE[kind]) or environment.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else None
    if names is not None and max(gpus, default=-1) >= len(names):
        raise ValueError(f"GPU {max(gpus)} is asked for, but {VISIBLE[kind]}={shown} shows {len(names)}")
    return result | {VISIBLE[kind]: ",".join(str(gpu) if names is None else names[gpu] for gpu in gpus)}
