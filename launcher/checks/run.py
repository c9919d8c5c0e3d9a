"""Everything about a run that can be checked before anything is started or written.

A mistake is a ConfigError; what may be meant so is a warning. What stands alone, such as a plugin or a file, is looked
at first, and of it every mistake is told; of how it fits together, the first. Each of these looks at one thing:

files       data rows, folders that are written to
folders     those of models
models      which models stand beside the policy, and whether those are there that the algorithm asks for
layout      how trainer ranks cut their models
engines     whether engines can be had, the policy's and those that rewards ask
widths      how engines cut their models, and what is left idle
channels    how weights reach the engines
allocation  what a job was given, once it is there
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from launcher import machine, plan, script, slurm
from launcher.checks import allocation, channels, engines, files, folders, layout, models, widths
from runtime import device, plugins, topology
from runtime.config import Cluster, DataSet, RunConfig, Sampling
from runtime.errors import Collector, ConfigError
from runtime.load import Key, Loaded
from runtime.site import SiteConfig, Slurm

NODES_OWN: Final = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that nodes seldom share."""
MOST_DEVICES: Final = 10**6
"""Of a run: each has a rank or a part of an engine."""
MOST_SLOTS: Final = 4
"""A core; with more, ranks and engines mostly wait for each other."""
SAFE_HEARTBEAT_S: Final = 30.0
SIZES: Final = ("--nodes", "--ntasks", "--ntasks-per-node")


class Parts(msgspec.Struct):
    """What stands alone."""

    algorithm: Any = None
    kinds: dict[str, Any] = {}
    """Model -> of its engines, as their plugin built it."""
    prompts: dict[tuple[Key, ...], set[bytes]] = {}
    """Place of a data set -> content hashes."""


def check_run(loaded: Loaded, site: SiteConfig) -> list[str]:
    """Check a run on a site.

    Returns:
        Warnings.

    Raises:
        ConfigError: the mistakes found.
    """
    plugins.look_in(loaded.config.code_dir)
    parts = _parts(loaded)
    algorithm, kinds = parts.algorithm, parts.kinds
    _check_mode(loaded)
    ranks = _check_topology(loaded, site)
    unseen = engines.check(loaded, site, kinds)
    unused = models.check(loaded, algorithm)
    layout.check(loaded, algorithm, ranks.trainers)
    channels.check(loaded, site, ranks, kinds["policy"])
    unseen += widths.check(loaded, site, ranks, kinds)
    warnings = [*_unheeded(loaded, site), *unseen, *unused, *_sizes(loaded, algorithm), *_lengths(loaded)]
    warnings += _uncorrected(loaded)
    return [*warnings, *_check_prompts(loaded, parts.prompts)]


def _parts(loaded: Loaded) -> Parts:
    config, found, told = loaded.config, Parts(), Collector()
    choice, places = config.algorithm, (loaded.where("algorithm", key) for key in ("name", "options"))
    with told.going_on():
        found.algorithm = plugins.build("algorithm", choice.name, choice.options, *places)
    for model, path in engines.places(loaded).items():
        with told.going_on():
            found.kinds[model] = engines.kind(loaded, model, path)
    with told.going_on():
        files.check_folder(config.runs_dir, loaded.where("runs_dir"))
    with told.going_on():
        folders.check_model(config.models.policy.path, loaded.where("models", "policy", "path"))
    with told.going_on():
        _check_sets(loaded)
    for path, data in _datasets(config):
        with told.going_on():
            _check_environment(loaded, path, data)
        with told.going_on():
            _check_reward(loaded, path, data)
    longest = _longest(config) if not told.found else 0
    most_bytes = files.prompt_bytes(longest) if longest else files.MOST_BYTES
    for path, data in _datasets(config):
        with told.going_on():
            found.prompts[path] = files.check_data(data.path, loaded.where(*path, "path"), most_bytes)
    with told.going_on():
        _check_sampling(loaded)
    told.tell()
    return found


def _unheeded(loaded: Loaded, site: SiteConfig) -> list[str]:
    """What a site says in vain."""
    return [*_lost_gpus(site), *_lost_slots(site), *_unused_places(loaded, site)]


def _lost_slots(site: SiteConfig) -> list[str]:
    cores = len(os.sched_getaffinity(0))
    if site.scheduler != "local" or site.gpus_per_node or site.cpu_slots_per_node <= MOST_SLOTS * cores:
        return []
    slots = f"cpu_slots_per_node is {site.cpu_slots_per_node}"
    return [f"site {site.name}: {slots}, each a process of its own, but this machine has {cores} cores"]


def _lost_gpus(site: SiteConfig) -> list[str]:
    if not site.gpus_per_node or site.pretend_gpus:
        return []
    built = device.built_for()
    if built not in ("cpu", None):
        return []
    problem = f"the torch of {sys.executable} is built for CPUs only" if built else f"{sys.executable} has no torch"
    return [f"site {site.name}: gpus_per_node is {site.gpus_per_node}, but {problem}: see docs/install.md"]


def _unused_places(loaded: Loaded, site: SiteConfig) -> list[str]:
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


def _check_environment(loaded: Loaded, path: tuple[Key, ...], data: DataSet) -> None:
    places = (loaded.where(*path, key) for key in ("environment", "environment_options"))
    plugins.build("environment", data.environment, data.environment_options, *places)


def _check_reward(loaded: Loaded, path: tuple[Key, ...], data: DataSet) -> None:
    place, of_options = (loaded.where(*path, key) for key in ("reward", "reward_options"))
    plugins.build("reward", data.reward, data.reward_options, place, of_options)
    options = plugins.options(plugins.find("reward", data.reward, place), data.reward_options, of_options)
    with plugins.calling(f"`asks` of {data.reward!r}", place):
        asked = msgspec.convert(getattr(options, "asks", ()), tuple[str, ...])
    for model in asked:
        engines.check_asked(loaded, model, data.reward, place)


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
    config, num_nodes = loaded.config, topology.num_asked(loaded.config.cluster)
    if num_nodes * (site.gpus_per_node or site.cpu_slots_per_node) > MOST_DEVICES:
        key = "gpus_per_node" if site.gpus_per_node else "cpu_slots_per_node"
        problem = f"asks for {num_nodes} nodes, and the site has {key}: {getattr(site, key)}, which is too many devices"
        raise ConfigError(loaded.where("cluster"), problem, "lower one of them")
    _check_texts(site)
    try:
        made = topology.make(config.cluster, config.rollout, site, plan.placeholders(config, site))
    except ConfigError as e:
        raise ConfigError(loaded.where(*e.where.split(".")), e.problem, e.fix) from None
    if site.scheduler == "slurm":
        _check_slurm(site, loaded)
    else:
        _check_machine(site, config.cluster)
    return made


def _check_texts(site: SiteConfig) -> None:
    """No batch script, command line or environment holds what cannot be seen."""
    for name, value in msgspec.structs.asdict(site.slurm).items():
        for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
            allowed = r"[^\0]*" if name == "setup" else r"[^\x00-\x1f\x7f\x85\u2028\u2029]*"
            if not re.fullmatch(allowed, text):
                problem = f"{text!r} holds a line break or another character that cannot be seen"
                raise ConfigError(f"site {site.name}: slurm.{name}", problem, "leave it out")
    further = {f"env.{key}": value for key, value in site.env.items()} | {"fabric_interface": site.fabric_interface}
    for name, text in further.items():
        if "\0" in text:
            raise ConfigError(f"site {site.name}: {name}", f"{text!r} holds a NUL", "leave it out")


def _check_slurm(site: SiteConfig, loaded: Loaded) -> None:
    if site.slurm.gpu_request == "gres-typed" and not site.slurm.gpu_type:
        raise ConfigError(f"site {site.name}: slurm.gpu_type", "is empty", "gres-typed needs it, as in gpu_type: h100")
    _check_arguments(site)
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


def _check_arguments(site: SiteConfig) -> None:
    """Each is one word to sbatch and srun, but srun may also be given the words of a command that starts ranks."""
    place, as_in = f"site {site.name}: slurm", "write it as in --constraint=gpu"
    for argument in site.slurm.sbatch_args:
        name = argument.partition("=")[0]
        if not re.fullmatch(r"--[a-z][\w-]+", name):
            raise ConfigError(f"{place}.sbatch_args", f"{argument!r} is no long option", as_in)
        if name in SIZES:
            fix = "change cluster.num_train_nodes or cluster.num_rollout_nodes"
            raise ConfigError(f"{place}.sbatch_args", f"{argument!r}: the run says how many nodes", fix)
    for argument in site.slurm.srun_args:
        if re.match(r"-[^=]*\s", argument):
            raise ConfigError(f"{place}.srun_args", f"{argument!r} is several words in one", as_in)


def _check_machine(site: SiteConfig, cluster: Cluster) -> None:
    if site.slurm != Slurm():
        problem = "is local, the default, but there is a section slurm"
        fix = "write scheduler: slurm, or leave the section out"
        raise ConfigError(f"site {site.name}: scheduler", problem, fix)
    there = {folder.name for folder in Path("/sys/class/net").glob("*")}
    if site.fabric_interface and there and site.fabric_interface not in there:
        problem = f"this machine has no network interface {site.fabric_interface!r}"
        fix = f"name one of: {', '.join(sorted(there))}; or leave it out"
        raise ConfigError(f"site {site.name}: fabric_interface", problem, fix)
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


def _check_sampling(loaded: Loaded) -> None:
    config = loaded.config
    if config.rollout.sampling.temperature == 0:
        place = loaded.where("rollout", "sampling", "temperature")
        raise ConfigError(place, "is 0: greedy answers cannot be trained on", "use e.g. 1.0")
    size = config.rollout.num_prompts * config.rollout.num_samples
    if config.trainer.num_updates > size:
        raise ConfigError(
            loaded.where("trainer", "num_updates"),
            f"{config.trainer.num_updates} optimizer steps, but a batch has only {size} samples",
            "lower it, or raise rollout.num_prompts",
        )


def _advantages(loaded: Loaded, algorithm: Any, rewards: list[float]) -> list[float]:
    """Of one group, which the controller asks for when its first batch is full."""
    place, name = loaded.where("algorithm", "name"), loaded.config.algorithm.name
    with plugins.calling(f"`advantages` of {name!r}", place):
        found = [float(advantage) for advantage in algorithm.advantages(rewards)]
    if len(found) != len(rewards) or not all(map(math.isfinite, found)):
        problem = f"`advantages` of {name!r} gives {found[:8]} for {len(rewards)} rewards {rewards[:8]}"
        raise ConfigError(place, problem, "give one finite number for each")
    return found


def _sizes(loaded: Loaded, algorithm: Any) -> list[str]:
    config, warnings = loaded.config, []
    rollout, choice = config.rollout, config.algorithm
    has_teacher = bool(algorithm.needs & {"teacher", "divergence"})
    is_alone, others = rollout.num_samples == 1, [0.0] * (rollout.num_samples - 1)
    tried = [_advantages(loaded, algorithm, [best, *others]) for best in ((0.0, 1.0) if is_alone else (1.0,))]
    if is_alone and not has_teacher and not any(advantage for group in tried for advantage in group):
        place = loaded.where("rollout", "num_samples")
        warnings.append(f"{place} is 1: {choice.name} compares the answers to one prompt, so nothing will be learned")
    if rollout.sampling.top_p < 1.0 or rollout.sampling.top_k > 0:
        place = loaded.where("rollout", "sampling")
        warnings.append(
            f"{place} has top_p or top_k: engines then sample from a cut distribution, but the trainer's log-probs are "
            "those of the whole one; leave them off in training"
        )
    if rollout.environment_timeout_s >= config.limits.rollout_s:
        warnings.append(
            f"{loaded.where('limits', 'rollout_s')} is {config.limits.rollout_s:g}: if all environments hang, "
            f"the attempt ends before rollout.environment_timeout_s ({rollout.environment_timeout_s:g}) fails samples"
        )
    if config.limits.heartbeat_s < SAFE_HEARTBEAT_S:
        place = loaded.where("limits", "heartbeat_s")
        told = f"under {SAFE_HEARTBEAT_S:g} s healthy ranks may be declared lost"
        warnings.append(f"{place} is {config.limits.heartbeat_s:g}: {told}")
    return warnings


def _lengths(loaded: Loaded) -> list[str]:
    """Of answers that engines have no room for."""
    config, warnings = loaded.config, []
    if not (longest := _longest(config)):
        return []
    tried: list[tuple[tuple[Key, ...], Sampling]] = [(("rollout",), config.rollout.sampling)]
    tried += [(("evaluation", "sets", i), one.sampling) for i, one in enumerate(config.evaluation.sets)]
    given = "max_length" in config.rollout.engine_options
    limit = "rollout.engine_options.max_length" if given else "the policy's max_position_embeddings"
    for path, sampling in tried:
        if sampling.max_new_tokens >= longest:
            place = loaded.where(*path, "sampling", "max_new_tokens")
            told = f"{limit} is {longest}, prompt and answer together: longer answers are cut to what a prompt leaves"
            warnings.append(f"{place} is {sampling.max_new_tokens}, but {told}")
    return warnings


def _uncorrected(loaded: Loaded) -> list[str]:
    """Of answers by older versions, which the algorithm takes as if they were the newest one's."""
    config, choice = loaded.config, loaded.config.algorithm
    module = plugins.find("algorithm", choice.name, loaded.where("algorithm", "name"))
    options = plugins.options(module, choice.options, loaded.where("algorithm", "options"))
    if not config.staleness.max_versions or getattr(options, "correction", "") != "none":
        return []
    place = f"{loaded.where('staleness', 'max_versions')} is {config.staleness.max_versions}"
    return [f"{place}, but nothing corrects for it: write algorithm.options.correction: tis (docs/recipes.md)"]


def _longest(config: RunConfig) -> int:
    """Tokens of a prompt and its answer, as far as one knows."""
    model = json.loads(Path(config.models.policy.path, "config.json").read_bytes())
    return folders.longest(model, config.rollout.engine_options)


def _check_sets(loaded: Loaded) -> None:
    config = loaded.config
    evaluation = loaded.tree.at(("evaluation",)).value
    if config.evaluation.interval and "sets" not in evaluation:  # an empty list says that none are wanted
        problem = f"is {config.evaluation.interval}, but there are no evaluation.sets"
        raise ConfigError(loaded.where("evaluation", "interval"), problem, "give a set, or leave this out")
    if not config.data:
        raise ConfigError(loaded.where("data"), "is empty", "give at least one data set")
    names: set[str] = set()
    for path, data in _datasets(config):
        name = data.label
        if name in names:
            raise ConfigError(loaded.where(*path, "name"), f"two data sets are called {name!r}", "give one a `name`")
        names.add(name)


def _check_prompts(loaded: Loaded, prompts: Mapping[tuple[Key, ...], set[bytes]]) -> list[str]:
    config, warnings = loaded.config, []
    train = set().union(*(found for path, found in prompts.items() if path[0] == "data"))
    if len(train) < config.rollout.num_prompts:
        place = loaded.where("rollout", "num_prompts")
        warnings.append(f"{place} is {config.rollout.num_prompts}, but there are only {len(train)} different prompts")
    for path, data in _datasets(config)[len(config.data) :]:
        shared = len(prompts[path] & train)
        if shared:
            warnings.append(
                f"{loaded.where(*path)}: {shared} of {len(prompts[path])} prompts of {data.label!r} "
                "are in the training data too, so its accuracy is not held-out"
            )
    return warnings
