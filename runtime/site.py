"""Where a run runs: the tree that a site's YAML is read into, by `runtime.load`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from runtime.config import Name, NonNegative, Positive, Section


class Slurm(Section, frozen=True, kw_only=True):
    """What sbatch and srun are told on a cluster. Empty: nothing, so the cluster's own default holds."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    time: Annotated[str, Meta(pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")] = "01:00:00"
    """Walltime of one job, [days-]hours:minutes:seconds; a run goes on over as many jobs as it takes."""
    cpus_per_node: NonNegative = 0
    """0: whole nodes are asked for (--exclusive)."""
    memory: Annotated[str, Meta(pattern=r"^\d+[KMGTkmgt]?$")] = "0"
    """Of each node, as in 480G; 0: all of it."""
    gpu_request: Literal["gpus-per-node", "gres", "gres-typed", "none"] = "gpus-per-node"
    """How the cluster wants GPUs spelt: --gpus-per-node=4, --gres=gpu:4, --gres=gpu:h100:4, or not at all."""
    gpu_type: str = ""
    """For gres-typed."""
    mpi: str = ""
    """srun --mpi: pmi2 for MPICH, pmix for OpenMPI; empty on Cray."""
    network: str = ""
    """srun and sbatch --network, as Slingshot may need it."""
    srun_args: tuple[str, ...] = ()
    """As `sbatch_args`; also the words of a command that starts ranks, such as apptainer, exec, /project/sluice.sif."""
    sbatch_args: tuple[str, ...] = ()
    """Further options, each as in --reservation=course."""
    modules: tuple[str, ...] = ()
    """`module load` these before anything else."""
    setup: tuple[str, ...] = ()
    """Lines of bash before the supervisor starts."""
    requeue: bool = True
    """Go on in a further job after preemption or the walltime."""


class SiteConfig(Section, frozen=True, kw_only=True):
    """What a cluster's scheduler, network and GPUs need; one YAML per site in configs/site."""

    name: Name
    scheduler: Literal["local", "slurm"] = "local"
    slurm: Slurm = field(default_factory=Slurm)
    gpus_per_node: NonNegative = 0
    """0: trainer ranks and engines run on the CPU."""
    pretend_gpus: bool = False
    """Ask for GPUs and deal them out as if they were used, but compute on the CPU: a rehearsal."""
    cpu_slots_per_node: Positive = 1
    """Where there are no GPUs: trainer ranks (or engine slots) a node holds."""
    fabric_interface: str = ""
    """Network interface whose address peers use. Empty: loopback on one machine, else the one whose routes lead to the
    other nodes."""
    env: dict[str, str] = {}
    """Environment of every rank and engine."""
