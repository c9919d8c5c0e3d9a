"""The world as one Slurm step. Pure.

Everything is said to srun: what it would inherit from the batch job (SLURM_NTASKS and friends) makes it fail, or place
ranks elsewhere without a word, so `plan.clean_env` takes that away.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime.site import SiteConfig, Slurm
from runtime.topology import Topology

STEP_LOG = "srun.log"
HOST_FILE = "hosts"
"""In attempts/<n>: the node of each rank, one a line."""


def host_file(world: Topology) -> str:
    """What SLURM_HOSTFILE holds: with --distribution=arbitrary, rank i runs on the node in line i."""
    return "".join(f"{world.nodes[rank.node]}\n" for rank in world.ranks)


def step(world: Topology, site: SiteConfig, attempt_dir: Path, program: Sequence[str]) -> tuple[str, ...]:
    """The srun command that starts every rank where the topology says."""
    slurm = site.slurm
    log = str(attempt_dir).replace("%", "%%") + "/rank-%t.log"
    argv = ["srun", f"--nodes={len(world.nodes)}", f"--ntasks={world.world_size}", "--distribution=arbitrary"]
    # Agents need the CPUs of their whole node for engines and rewards, so tasks are not bound to a part of them; a
    # number of CPUs a task would be the same on every node, and too small on one of them.
    argv += ["--whole", "--cpu-bind=none", f"--mem={slurm.memory}"]
    argv += gpu_request(slurm, site.gpus_per_node, step=True)
    argv += [f"--mpi={slurm.mpi}"] if slurm.mpi else []
    argv += [f"--network={slurm.network}"] if slurm.network else []
    # --overlap: the step of a lost node may linger and would hold the others; -K1: one rank's death ends the step.
    argv += ["--overlap", "--kill-on-bad-exit=1", "--wait=30", "--export=ALL", "--unbuffered", "--input=none"]
    argv += [f"--output={log}", f"--error={log}", *slurm.srun_args]
    return (*argv, *program)


def gpu_request(slurm: Slurm, num: int, *, step: bool) -> list[str]:
    """How a cluster wants GPUs of a node spelt. A step that does not say takes what the job has, or is refused."""
    if not num:
        return ["--gres=none"] if step else []
    match slurm.gpu_request:
        case "gpus-per-node":
            return [f"--gpus-per-node={num}"]
        case "gres":
            return [f"--gres=gpu:{num}"]
        case "gres-typed":
            return [f"--gres=gpu:{slurm.gpu_type}:{num}"]
        case "none":
            return []
