"""What this machine offers to a run on the local site: GPUs and an MPI process manager. Asks files, not torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from launcher.plan import Machine
from runtime.errors import ConfigError
from runtime.site import SiteConfig


def here(site: SiteConfig) -> Machine:
    """What a plan needs to know of where it is made: of this machine, or only of the environment on a cluster."""
    if site.scheduler == "slurm":
        return Machine(python=sys.executable)
    return Machine(python=sys.executable, mpiexec=find_mpiexec(), gpus=visible_gpus())


def visible_gpus() -> tuple[int, ...]:
    """Numbers of the GPUs a run may use: all, or those CUDA_VISIBLE_DEVICES names.

    Raises:
        ConfigError: it names them by something other than numbers.
    """
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return tuple(range(num_gpus()))
    names = [name.strip() for name in mask.split(",") if name.strip()]
    if not all(name.isdecimal() for name in names):
        raise ConfigError("CUDA_VISIBLE_DEVICES", f"is {mask!r}", "name GPUs by number, as in 0,1")
    return tuple(int(name) for name in names if int(name) < num_gpus())


def num_gpus(dev: Path = Path("/dev")) -> int:
    """GPUs the kernel shows: NVIDIA's device files, or AMD's render nodes where its compute driver is loaded."""
    nvidia = [p for p in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    if nvidia or not (dev / "kfd").exists():
        return len(nvidia)
    return len(list((dev / "dri").glob("renderD*")))


def find_mpiexec() -> str:
    """MPICH's mpiexec: the one beside this Python (the pip wheel `mpich` puts it there), or the one on PATH.

    Raises:
        ConfigError: there is none, or PATH has another MPI's.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    if os.access(beside, os.X_OK):
        return str(beside)
    fix = f"run: {sys.executable} -m pip install mpich"
    found = shutil.which("mpiexec.hydra") or shutil.which("mpiexec")
    if found is None:
        raise ConfigError("mpiexec", f"is neither beside {sys.executable} nor on PATH", fix)
    said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    if "HYDRA" not in said:
        raise ConfigError("mpiexec", f"{found} is not MPICH's (its --version does not name HYDRA)", fix)
    return found
