"""From a run and a site to what will be started: nodes, ranks, engines, the exact command and its environment. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec

from launcher import srun, summary
from runtime import topology
from runtime.config import RunConfig
from runtime.site import SiteConfig
from runtime.topology import RankSlot, Topology

PROJECT: Final = Path(__file__).parents[1]
"""Where the packages launcher and runtime are found."""

_LEFTOVERS: Final = (
    "PMI",
    "PMIX",
    "OMPI_",
    "PRTE_",
    "SLURM",
    "SRUN_",
    "HYDRA_",
    "HYDI_",
    "MPIEXEC_",
    "MPI_LOCAL",
    "SUBMITIT_",
)
"""Beginnings of variables of another MPI world or job: a rank that inherits them joins the wrong world or none, and
srun places ranks by them."""
_KEPT: Final = ("SLURM_CONF", "SLURM_CLUSTERS")
"""What the commands of Slurm find their cluster by."""


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    topology: Topology
    command: tuple[str, ...]
    """Starts the world of one attempt."""
    env: dict[str, str]
    """What is set beside the environment of the supervisor."""
    log: str
    """Where the command's own words go, in attempts/<n>."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the world is started with; `launcher.machine` finds it out."""

    python: str
    mpiexec: str = ""
    """Only where there is no scheduler."""
    gpus: tuple[int, ...] = ()


def placeholders(config: RunConfig, site: SiteConfig) -> tuple[str, ...]:
    """Names of nodes: on one machine a node is a group of processes; on a cluster the scheduler will choose."""
    kind = "local" if site.scheduler == "local" else "node"
    return tuple(f"{kind}-{i}" for i in range(topology.num_nodes(config.cluster)))


def make(
    config: RunConfig, site: SiteConfig, run: Path, attempt: int, machine: Machine, nodes: Sequence[str] = ()
) -> JobPlan:
    """What attempt number `attempt` of a run starts. `nodes`: those of the job, where they are known."""
    world = topology.make(config.cluster, config.rollout, site, nodes or placeholders(config, site))
    env = {
        "PYTHONPATH": str(PROJECT),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Ranks and engines share cores. Threads that spin while they wait for each other hold the cores that others
        # need: an SGLang of two threads on two busy cores decoded ten times slower.
        "OMP_WAIT_POLICY": "passive",
    }
    folder = run / "attempts" / str(attempt)
    program = (machine.python, "-m", "mpi4py", "-m", "runtime.main", "--run-dir", str(run), "--attempt", str(attempt))
    if site.scheduler == "slurm":
        env |= {"SLURM_HOSTFILE": str(folder / srun.HOST_FILE), **_mpich_env(site), **site.env}
        return JobPlan(topology=world, command=srun.step(world, site, folder, program), env=env, log=srun.STEP_LOG)
    # MPICH listens on every interface unless told
    env |= {"UCX_NET_DEVICES": site.fabric_interface or "lo"}
    # SGLang leaves cuMem off unless told, and on one machine no rank of NCCL with it maps the memory of one without.
    env |= {"NCCL_CUMEM_ENABLE": "0"} if site.gpus_per_node else {}
    env |= site.env
    return JobPlan(topology=world, command=_mpiexec(world, site, folder, machine, program), env=env, log="mpiexec.log")


def _mpich_env(site: SiteConfig) -> dict[str, str]:
    """libfabric for MPICH: the addresses that UCX tells peers are longer than Slurm's PMI takes, which then mixes
    them up ("value not properly terminated") or lets MPI_Init hang. MPI carries no weights here."""
    if site.slurm.mpi != "pmi2":
        return {}
    env = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
    return env | ({"FI_TCP_IFACE": site.fabric_interface} if site.fabric_interface else {})


def _mpiexec(
    world: Topology, site: SiteConfig, folder: Path, machine: Machine, program: Sequence[str]
) -> tuple[str, ...]:
    """One section of mpiexec's arguments for each stretch of ranks with the same environment."""
    log = str(folder).replace("%", "%%") + "/rank-%r.log"
    argv = [machine.mpiexec, "-hosts", "localhost", "-launcher", "fork", "-rmk", "user", "-bind-to", "none"]
    argv += ["-print-all-exitcodes", "-outfile-pattern", log, "-errfile-pattern", log]
    for number, (env, ranks) in enumerate(groupby(world.ranks, key=lambda rank: _rank_env(rank, site, machine.gpus))):
        argv += [":"] if number else []
        argv += ["-n", str(len(list(ranks)))]
        for name, value in env.items():
            argv += ["-env", name, value]
        argv += program
    return tuple(argv)


def _rank_env(rank: RankSlot, site: SiteConfig, gpus: Sequence[int]) -> dict[str, str]:
    """Each node sees its own part of the machine's GPUs."""
    if not site.gpus_per_node:
        return {}
    first = rank.node * site.gpus_per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus[first : first + site.gpus_per_node]))}


def clean_env(inherited: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a world: the inherited one without leftovers of other worlds, and what a plan adds."""
    env = {k: v for k, v in inherited.items() if k in _KEPT or not k.startswith(_LEFTOVERS)}
    path = [added.get("PYTHONPATH", ""), env.get("PYTHONPATH", "")]
    return {**env, **added, "PYTHONPATH": ":".join(filter(None, path))}


def describe(
    plan: JobPlan, config: RunConfig, site: SiteConfig, script: str = "", rows: Mapping[str, int] | None = None
) -> str:
    """For people: what was configured, nodes, ranks, roles, engines, the commands.

    Args:
        script: of the batch job, as it is submitted.
        rows: of data files, by path, as far as they were counted.
    """
    world, count = plan.topology, summary.count
    sizes = (count(len(world.nodes), "node"), count(world.world_size, "rank"), count(len(world.engines), "engine"))
    lines = [
        f"run {config.name} on site {site.name}: {', '.join(sizes)}",
        "",
        *summary.lines(config, sum(rank.role == "trainer" for rank in world.ranks), rows or {}),
        "",
        "rank   node     role               device",
        *_ranks(world),
        "",
        "engine  model    nodes     devices",
        *_engines(world),
    ]
    lines += ["", "environment", *(f"  {name}={shlex.quote(value)}" for name, value in plan.env.items())]
    lines += ["", "command", *_wrapped(plan.command)]
    return "\n".join([*lines, "", "batch script", script] if script else lines)


def _ranks(world: Topology) -> Iterator[str]:
    """A line for each stretch of ranks that are alike on a node."""
    for (node, role), alike in groupby(world.ranks, key=lambda rank: (rank.node, rank.role)):
        ranks = list(alike)
        first, last = ranks[0], ranks[-1]
        does = "agent, controller" if first.rank == world.controller else role
        device = (
            "-" if role == "agent" else "cpu" if first.device is None else f"gpu {_span(first.device, last.device)}"
        )
        yield f"{_span(first.rank, last.rank):>5}  {world.nodes[node]:<8} {does:<18} {device}"


def _engines(world: Topology) -> Iterator[str]:
    """A line for each stretch of engines that are alike on a node, or on several."""
    for key, alike in groupby(world.engines, key=lambda one: (one.nodes, one.model, one.kind, one.url, len(one.gpus))):
        (on, model, kind, url, width), engines = key, list(alike)
        gpus = [gpu for engine in engines for gpu in engine.gpus]
        device = url or (_span(min(gpus), max(gpus)) if gpus else "cpu")
        device += f", {width} each" if gpus and len(engines) > 1 else ""
        does = "" if kind == "regular" else f", {kind}"
        ids, nodes = _span(engines[0].id, engines[-1].id), ",".join(world.nodes[node] for node in on)
        yield f"{ids:>6}  {model:<8} {nodes:<9} {device}{does}"


def _span(first: int, last: int | None) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _wrapped(command: Sequence[str]) -> list[str]:
    """A shell command that can be pasted, one section a line."""
    parts: list[list[str]] = [[]]
    for word in command:
        if word == ":" or (word == "-n" and parts[-1] != [":"]):
            parts.append([])
        parts[-1].append(shlex.quote(word))
    texts = [" ".join(part) for part in parts if part]
    return [f"  {text} \\" for text in texts[:-1]] + [f"  {texts[-1]}"]
