"""Which rank is what, and which devices are whose: a pure function of (cluster, rollout, site, nodes).

Nodes come in order: training nodes first, then rollout nodes. On every node local rank 0 is the agent, which holds no
GPU; a training node has one trainer rank a device beside it. World rank 0, the agent of the first node, is the
controller. In split mode engines stand on rollout nodes; colocated, on the training nodes.

    2 training nodes with 2 GPUs, 1 rollout node:
    rank   0      1        2        3      4        5        6
    node   0      0        0        1      1        1        2
    role   agent  trainer  trainer  agent  trainer  trainer  agent        (rank 0 is also the controller)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Literal

import msgspec

from runtime.config import Cluster, EngineSet, Parallel, Rollout
from runtime.errors import ConfigError
from runtime.site import SiteConfig

Role = Literal["agent", "trainer"]
Kind = Literal["regular", "prefill", "decode"]


class RankSlot(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    node: int
    local_rank: int
    role: Role
    device: int | None
    """GPU index on its node; None on a CPU and for agents."""


class EngineSlot(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    model: str
    """The policy, or whose engines rewards ask."""
    kind: Kind = "regular"
    """prefill: it computes prompts alone, and what follows is for the decode engines of its node; regular: both."""
    nodes: tuple[int, ...]
    """The first is the node whose agent starts it, or speaks to it."""
    gpus: tuple[int, ...]
    """GPU indices on each of its nodes; empty on a CPU."""
    url: str = ""
    """Of one that somebody else runs."""

    @property
    def is_frozen(self) -> bool:
        """Its model is never changed."""
        return self.model != "policy"


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[str, ...]
    ranks: tuple[RankSlot, ...]
    engines: tuple[EngineSlot, ...]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def controller(self) -> int:
        return 0

    @property
    def trainers(self) -> tuple[int, ...]:
        """World ranks of the trainer ranks; the position in here is the trainer's own rank."""
        return tuple(r.rank for r in self.ranks if r.role == "trainer")

    def agent_of(self, node: int) -> int:
        return next(r.rank for r in self.ranks if r.node == node and r.role == "agent")

    def engines_of(self, node: int) -> tuple[EngineSlot, ...]:
        """The engines that the agent of this node starts, or speaks to."""
        return tuple(e for e in self.engines if e.nodes[0] == node)

    def parts_of(self, node: int) -> tuple[EngineSlot, ...]:
        """Those, and the engines of other nodes' agents that stand on this node too."""
        return tuple(e for e in self.engines if node in e.nodes)

    def lenders(self, engine: EngineSlot) -> tuple[int, ...]:
        """World ranks of the trainer ranks on its devices, in the order of its ranks. Without GPUs it is the first one
        of each of its nodes, and of all where there is none."""
        trainers = [r for r in self.ranks if r.role == "trainer"]

        def on(node: int, device: int | None) -> int:
            here = [r for r in trainers if r.node == node] or trainers
            return next((r for r in here if r.device == device), here[0]).rank

        return tuple(on(node, gpu) for node in engine.nodes for gpu in engine.gpus or (None,))


def load(file: Path) -> Topology:
    """The topology that the supervisor wrote for this attempt."""
    return msgspec.json.decode(file.read_bytes(), type=Topology)


def num_nodes(cluster: Cluster) -> int:
    """Nodes a run uses."""
    return cluster.num_train_nodes + (cluster.num_rollout_nodes if cluster.mode == "split" else 0)


def num_asked(cluster: Cluster) -> int:
    """Nodes of a job: those in use, and spares."""
    return num_nodes(cluster) + cluster.num_spare_nodes


def leaders(trainers: Sequence[int], parallel: Parallel) -> tuple[int, ...]:
    """World ranks of the trainer ranks that are handed a share, one for each data-parallel rank; each hands it on to
    the ranks that train on it together. Megatron counts tensor first, then context, data, pipeline: of 8 trainer ranks
    with tensor 2 and pipeline 2

        trainer rank   0  1  2  3  4  5  6  7
        share          0  0  1  1  0  0  1  1      ranks 0 and 2 lead

    Raises:
        ConfigError: the trainer ranks cannot be cut so.
    """
    p, count = parallel, len(trainers)
    if count % (p.tensor * p.pipeline * p.context):
        sizes = f"tensor {p.tensor} * pipeline {p.pipeline} * context {p.context}"
        problem = f"{sizes} does not divide the {count} trainer ranks"
        raise ConfigError("trainer.parallel", problem, "choose factors, or change cluster.num_train_nodes")
    of_stage = count // p.pipeline
    if of_stage % p.expert:
        problem = f"{p.expert} does not divide the {of_stage} trainer ranks of a pipeline stage"
        raise ConfigError("trainer.parallel.expert", problem, "choose a factor of it")
    return tuple(trainers[: of_stage : p.tensor * p.context])


def check_cut(parallel: Parallel, sizes: Mapping[str, int], num_layers: int | None, num_experts: int) -> None:
    """Whether a model can be cut so.

    Args:
        sizes: what tensor parallelism shares out evenly, by the words for it: {"attention heads": 32, ...}.
        num_layers: None: not known.
        num_experts: of a layer; 0: none.

    Raises:
        ConfigError: it cannot.
    """
    p = parallel
    for what, size in sizes.items():
        if size % p.tensor:
            problem = f"{p.tensor} does not divide the model's {size} {what}"
            raise ConfigError("trainer.parallel.tensor", problem, "use a factor")
    if p.virtual_pipeline > 1 and p.pipeline == 1:
        problem = f"{p.virtual_pipeline} model chunks, but pipeline is 1"
        raise ConfigError("trainer.parallel.virtual_pipeline", problem, "set it to 1, or pipeline to 2 or more")
    if num_layers is not None and (places := p.pipeline * p.virtual_pipeline) > num_layers:
        problem = f"pipeline * virtual_pipeline is {places}, but the model has {num_layers} layers"
        raise ConfigError("trainer.parallel.pipeline", problem, "use fewer")
    if p.sequence_parallel and p.tensor == 1:
        raise ConfigError("trainer.parallel.sequence_parallel", "there is nothing to cut with tensor 1", "leave it out")
    if not num_experts and p.expert > 1:
        raise ConfigError("trainer.parallel.expert", f"{p.expert}, but the model has no experts", "set it to 1")
    if num_experts % p.expert:
        problem = f"{p.expert} does not divide the model's {num_experts} experts"
        raise ConfigError("trainer.parallel.expert", problem, "use a factor")
    if num_experts and p.tensor > 1 and not p.sequence_parallel:
        problem = "a model with experts and tensor above 1 needs it"
        raise ConfigError("trainer.parallel.sequence_parallel", problem, "set it to true")


def make(cluster: Cluster, rollout: Rollout, site: SiteConfig, nodes: Sequence[str]) -> Topology:
    """The topology of a run on these nodes.

    Args:
        nodes: node names, at least `num_nodes(cluster)`; further ones are spares.

    Raises:
        ConfigError: too few nodes, or an engine wider than its node.
    """
    needed = num_nodes(cluster)
    if len(nodes) < needed:
        raise ConfigError("cluster", f"{needed} nodes are needed, {len(nodes)} are there", "lower num_*_nodes")
    slots = site.gpus_per_node or site.cpu_slots_per_node
    gpus = range(site.gpus_per_node)
    ranks: list[RankSlot] = []
    for node in range(needed):
        trains = node < cluster.num_train_nodes
        for local in range(1 + (slots if trains else 0)):
            role: Role = "trainer" if local else "agent"
            device = local - 1 if local and gpus else None
            ranks.append(RankSlot(rank=len(ranks), node=node, local_rank=local, role=role, device=device))
    return Topology(nodes=tuple(nodes[:needed]), ranks=tuple(ranks), engines=_engines(cluster, rollout, site, slots))


def _engines(cluster: Cluster, rollout: Rollout, site: SiteConfig, slots: int) -> tuple[EngineSlot, ...]:
    """On each node the policy's engines have the first slots, and those of other models, set by set, the last ones.

    External engines of the policy are dealt out to the agents of these nodes, as orders to one come from one agent;
    those of other models are asked by all. Without such nodes the first training node's agent has them.
    """
    first = cluster.num_train_nodes if cluster.mode == "split" else 0
    count = cluster.num_rollout_nodes if cluster.mode == "split" else cluster.num_train_nodes
    nodes = range(first, first + count)
    holders = nodes or range(1)
    own = [one for one in rollout.sets if not one.external]
    room, width = _room(rollout, own, site, slots, count) if nodes else (0, 1)
    span = max(1, width // slots)  # nodes that one of the policy's engines stands on
    kinds = _kinds(rollout.prefill_per_node, span * room // width) if nodes else ()
    if own and not nodes:
        fix = "raise cluster.num_rollout_nodes, or give external addresses"
        raise ConfigError("rollout.sets", f"the {own[0].model}'s engines need rollout nodes, and there are none", fix)
    made: list[EngineSlot] = []

    def add(
        model: str, node: int, gpus: range = range(0), url: str = "", span: int = 1, kind: Kind = "regular"
    ) -> None:
        here, on = tuple(gpus) if site.gpus_per_node else (), tuple(range(node, node + span))
        made.append(EngineSlot(id=len(made), model=model, kind=kind, nodes=on, gpus=here, url=url))

    for node in nodes[::span]:
        for i, kind in enumerate(kinds):
            add("policy", node, range(i * width, min((i + 1) * width, slots)), span=span, kind=kind)
    for i, url in enumerate(rollout.external):
        add("policy", holders[i % len(holders)], url=url)
    for node in nodes:
        at = slots
        for one in own:
            for _ in range(one.engines_per_node):
                add(one.model, node, range(at - one.gpus_per_engine, at))
                at -= one.gpus_per_engine
    for one in rollout.sets:
        for node, url in product(holders, one.external):
            add(one.model, node, url=url)
    return tuple(made)


def _kinds(num_prefill: int, count: int) -> tuple[Kind, ...]:
    """Of the policy's engines of a node, of which there are `count`."""
    if not num_prefill:
        return ("regular",) * count
    if num_prefill >= count:
        problem = f"{num_prefill}, but a node has {count} of the policy's engines, and one must be left to decode"
        raise ConfigError("rollout.prefill_per_node", problem, "lower it, or rollout.gpus_per_engine")
    return ("prefill",) * num_prefill + ("decode",) * (count - num_prefill)


def _room(rollout: Rollout, sets: Sequence[EngineSet], site: SiteConfig, slots: int, num_nodes: int) -> tuple[int, int]:
    """Slots of a node that are the policy's, and how many an engine of it takes: some of a node, or all of several.

    Args:
        slots: of a node.
    """
    taken, width = sum(one.gpus_per_engine * one.engines_per_node for one in sets), rollout.gpus_per_engine
    if width > slots - taken:
        what = f"{'GPU' if site.gpus_per_node else 'CPU slot'}{'' if slots == 1 else 's'}"
        has = f"but a node of site {site.name!r} has {slots} {what}"
        if not taken and (width % slots or num_nodes % (width // slots)):
            whole = [str(slots * n) for n in range(2, num_nodes + 1) if num_nodes % n == 0][:8]
            fix = f"use at most {slots}" + (f", or for engines over whole nodes {' or '.join(whole)}" if whole else "")
            raise ConfigError("rollout.gpus_per_engine", f"{width}, {has}", fix)
        if not taken:
            return slots, width
        problem = f"take {taken}, {has}, and an engine of the policy needs {width}"
        raise ConfigError("rollout.sets", problem, "lower engines_per_node or gpus_per_engine, or use larger nodes")
    return slots - taken, width
