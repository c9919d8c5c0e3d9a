"""Whether what a job was given is what a run needs, before anything is started in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from launcher import plan, slurm
from runtime import topology
from runtime.config import RunConfig
from runtime.errors import ConfigError
from runtime.load import Loaded, LoadedSite
from runtime.site import SiteConfig


def ranks_a_node(config: RunConfig, site: SiteConfig) -> int:
    """Ranks on the fullest node; each needs a CPU."""
    world = topology.make(config.cluster, config.rollout, site, plan.placeholders(config, site))
    return max(Counter(rank.node for rank in world.ranks).values())


def check(loaded: Loaded, site: LoadedSite, environment: Mapping[str, str]) -> list[str]:
    """For the scripts that people write. `environment`: the job's.

    Returns:
        Warnings.

    Raises:
        ConfigError: the job has too little.
    """
    job, needed = f"job {environment['SLURM_JOB_ID']}", topology.num_nodes(loaded.config.cluster)
    given = int(environment.get("SLURM_JOB_NUM_NODES", needed))
    if given < needed:
        problem = f"has {_count(given, 'node')}, the run needs {needed} ({loaded.where('cluster')})"
        raise ConfigError(job, problem, f"#SBATCH --nodes={needed} in the script, or sbatch --nodes={needed}")
    cpus, ranks = (
        slurm.per_node(environment.get("SLURM_JOB_CPUS_PER_NODE", "")),
        ranks_a_node(loaded.config, site.config),
    )
    if cpus and min(cpus) < ranks:
        problem = f"has {_count(min(cpus), 'CPU')} on a node that is to hold {ranks} ranks"
        fix = "#SBATCH --exclusive in the script, for whole nodes, or --cpus-per-task= with what your site allows"
        raise ConfigError(job, problem, fix)
    gpus, wanted = environment.get("SLURM_GPUS_ON_NODE", ""), site.config.gpus_per_node
    if gpus.isdecimal() and int(gpus) < wanted:
        problem = f"has {_count(int(gpus), 'GPU')} a node, {site.where('gpus_per_node')} is {wanted}"
        raise ConfigError(job, problem, f"#SBATCH --gpus-per-node={wanted} in the script, or lower gpus_per_node")
    spares = loaded.config.cluster.num_spare_nodes
    if given != needed + spares:
        wanted = f"the run uses {needed}" + (f" and wants {_count(spares, 'spare')}" if spares else "")
        options = f"--nodes={needed + spares}" + (" --no-kill" if spares else "")
        return [f"{job} holds {_count(given, 'node')}, {wanted}: sbatch {options} asks for as many"]
    return []


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
