"""Whether what a job was given is what a run needs, before anything is started in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from launcher import plan, slurm
from runtime import topology
from runtime.config import RunConfig, SiteConfig
from runtime.errors import ConfigError
from runtime.load import Loaded, LoadedSite


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
    if given > needed:
        return [
            f"{job} holds {given} nodes, the run uses {needed}: sbatch --nodes={needed} would leave the rest to others"
        ]
    return []


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
