"""Everything about a run that can be checked before anything is started or written.

The first mistake is a ConfigError; what may be meant so is a warning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from launcher import allocation, channels, engines, files, layout, models, plan, script, slurm
from launcher import site as machine
from runtime import plugins, topology
from runtime.config import Cluster, DataSet, RunConfig, SiteConfig, Slurm
from runtime.errors import ConfigError
from runtime.load import Key, Loaded

NODES_OWN: Final = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that nodes seldom share."""
SIZES: Final = ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node")


def everything(loaded: Loaded, site: SiteConfig) -> list[str]:
    """Check a run on a site.

    Returns:
        Warnings.

    Raises:
        ConfigError: the first mistake found.
    """
    config = loaded.config
    _check_plugins(loaded)
    _check_mode(loaded)
    algorithm, kinds = _algorithm(loaded), engines.kinds(loaded)
    ranks = _check_topology(loaded, site)
    files.check_runs_dir(config.runs_dir, loaded.where("runs_dir"))
    engines.check(loaded, site, kinds)
    unused = models.check(loaded, algorithm)
    layout.check(loaded, ranks.trainers)
    channels.check(loaded, site, ranks, kinds["policy"])
    return [*_unheeded(loaded, site), *unused, *_sizes(loaded, algorithm), *_check_data(loaded)]


def _unheeded(loaded: Loaded, site: SiteConfig) -> list[str]:
    """What a site says in vain."""
    spares = loaded.config.cluster.num_spare_nodes
    if site.scheduler == "local":
        place = loaded.where("cluster", "num_spare_nodes")
        return [f"{place} is {spares}, but one machine has no nodes to lose: it is not used"] if spares else []
    own = next((folder for folder in NODES_OWN if Path(loaded.config.runs_dir).is_relative_to(folder)), "")
    place = loaded.where("runs_dir")
    return [f"{place} is in {own}, which most clusters keep apart on each node: all must see it"] if own else []


def _datasets(config: RunConfig) -> list[tuple[tuple[Key, ...], DataSet]]:
    """Training and evaluation sets with their place in the config."""
    train = [(("data", i), dataset) for i, dataset in enumerate(config.data)]
    return [*train, *((("evaluation", "sets", i), dataset) for i, dataset in enumerate(config.evaluation.sets))]


def _check_plugins(loaded: Loaded) -> None:
    config = loaded.config
    wanted: list[tuple[str, str, dict, tuple[Key, ...], str, str]] = [
        ("algorithm", config.algorithm.name, config.algorithm.options, ("algorithm",), "name", "options"),
    ]
    for model, path in engines.places(loaded).items():
        given = config.rollout.engines[model]
        wanted.append(("engine", given.engine, given.engine_options, path, "engine", "engine_options"))
    for path, data in _datasets(config):
        wanted += [
            ("environment", data.environment, data.environment_options, path, "environment", "environment_options"),
            ("reward", data.reward, data.reward_options, path, "reward", "reward_options"),
        ]
    for kind, name, options, path, name_key, options_key in wanted:
        module = plugins.find(kind, name, loaded.where(*path, name_key))
        made = plugins.options(module, options, loaded.where(*path, options_key))
        for model in getattr(made, "asks", ()) if kind == "reward" else ():
            engines.check_asked(loaded, model, name, loaded.where(*path, name_key))


def _algorithm(loaded: Loaded) -> Any:
    choice, places = loaded.config.algorithm, (loaded.where("algorithm", key) for key in ("name", "options"))
    return plugins.build("algorithm", choice.name, choice.options, *places)


def _check_mode(loaded: Loaded) -> None:
    config = loaded.config
    if not engines.is_started(loaded, "policy") and not config.rollout.external:
        raise ConfigError(
            loaded.where("cluster", "num_rollout_nodes"),
            f"is 0, but {config.algorithm.name} trains on answers that engines give",
            "give at least 1, or addresses of external engines",
        )
    engines.check_repeats(loaded)


def _check_topology(loaded: Loaded, site: SiteConfig) -> topology.Topology:
    config = loaded.config
    try:
        made = topology.make(config.cluster, config.rollout, site, plan.placeholders(config, site))
    except ConfigError as e:
        raise ConfigError(loaded.where(*e.where.split(".")), e.problem, e.fix) from None
    if site.scheduler == "slurm":
        _check_slurm(site, loaded)
    else:
        _check_machine(site, config.cluster)
    return made


def _check_slurm(site: SiteConfig, loaded: Loaded) -> None:
    if site.slurm.gpu_request == "gres-typed" and not site.slurm.gpu_type:
        raise ConfigError(f"site {site.name}: slurm.gpu_type", "is empty", "gres-typed needs it, as in gpu_type: h100")
    for argument in site.slurm.sbatch_args:
        if argument.partition("=")[0] in SIZES:
            fix = "change cluster.num_train_nodes or cluster.num_rollout_nodes"
            raise ConfigError(f"site {site.name}: slurm.sbatch_args", f"{argument!r}: the run says how many nodes", fix)
    cpus, ranks = site.slurm.cpus_per_node, allocation.ranks_a_node(loaded.config, site)
    if 0 < cpus < ranks:
        problem = f"is {cpus}, but a node is to hold {ranks} ranks, and each needs a CPU"
        raise ConfigError(f"site {site.name}: slurm.cpus_per_node", problem, "raise it, or write 0 for whole nodes")
    walltime, early = slurm.seconds(site.slurm.time) or 0.0, script.early_s(loaded.config)
    if walltime <= early:
        raise ConfigError(
            f"site {site.name}: slurm.time",
            f"{site.slurm.time} is no longer than the {early} s kept for saving before the walltime ends",
            f"ask for more, or lower {loaded.where('limits', 'stop_s')}",
        )


def _check_machine(site: SiteConfig, cluster: Cluster) -> None:
    if site.slurm != Slurm():
        problem = "is local, the default, but there is a section slurm"
        fix = "write scheduler: slurm, or leave the section out"
        raise ConfigError(f"site {site.name}: scheduler", problem, fix)
    needed = site.gpus_per_node * topology.num_nodes(cluster)
    there = len(machine.visible_gpus()) if needed else 0
    if needed > there:
        raise ConfigError(
            f"site {site.name}: gpus_per_node",
            f"{_nodes(cluster)} nodes with {site.gpus_per_node} GPUs each need {needed} GPUs, this machine has {there}",
            "lower gpus_per_node in the site file (0 runs on the CPU) or cluster.num_*_nodes",
        )
    machine.find_mpiexec()


def _nodes(cluster: Cluster) -> str:
    return f"{cluster.num_train_nodes} training, {cluster.num_rollout_nodes} rollout"


def _sizes(loaded: Loaded, algorithm: Any) -> list[str]:
    config, warnings = loaded.config, []
    rollout, choice = config.rollout, config.algorithm
    has_teacher = bool(algorithm.needs & {"teacher", "divergence"})
    if rollout.num_samples == 1 and not has_teacher and not any(algorithm.advantages([r])[0] for r in (0.0, 1.0)):
        place = loaded.where("rollout", "num_samples")
        warnings.append(f"{place} is 1: {choice.name} compares the answers to one prompt, so nothing will be learned")
    if rollout.sampling.top_p < 1.0 or rollout.sampling.top_k > 0:
        place = loaded.where("rollout", "sampling")
        warnings.append(
            f"{place} has top_p or top_k: engines then sample from a cut distribution, but the trainer's log-probs are "
            "those of the whole one; leave them off in training"
        )
    if rollout.sampling.temperature == 0:
        place = loaded.where("rollout", "sampling", "temperature")
        raise ConfigError(place, "is 0: greedy answers cannot be trained on", "use e.g. 1.0")
    size = rollout.num_prompts * rollout.num_samples
    if config.trainer.num_updates > size:
        raise ConfigError(
            loaded.where("trainer", "num_updates"),
            f"{config.trainer.num_updates} optimizer steps, but a batch has only {size} samples",
            "lower it, or raise rollout.num_prompts",
        )
    return warnings


def _check_data(loaded: Loaded) -> list[str]:
    config = loaded.config
    if not config.data:
        raise ConfigError(loaded.where("data"), "is empty", "give at least one data set")
    held_out = _datasets(config)[len(config.data) :]
    names: set[str] = set()
    for path, data in _datasets(config):
        name = files.dataset_name(data)
        if name in names:
            raise ConfigError(loaded.where(*path, "name"), f"two data sets are called {name!r}", "give one a `name`")
        names.add(name)
    prompts = {path: files.check_data(data.path, loaded.where(*path, "path")) for path, data in _datasets(config)}
    train = set().union(*(found for path, found in prompts.items() if path[0] == "data"))
    warnings = []
    if len(train) < config.rollout.num_prompts:
        place = loaded.where("rollout", "num_prompts")
        warnings.append(f"{place} is {config.rollout.num_prompts}, but there are only {len(train)} different prompts")
    for path, data in held_out:
        shared = len(prompts[path] & train)
        if shared:
            warnings.append(
                f"{loaded.where(*path)}: {shared} of {len(prompts[path])} prompts of {files.dataset_name(data)!r} "
                "are in the training data too, so its accuracy is not held-out"
            )
    return warnings
