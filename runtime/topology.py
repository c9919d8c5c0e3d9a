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
from pathlib import Path
from typing import Literal

import msgspec

from runtime.config import Cluster, Parallel, Rollout, SiteConfig
from runtime.errors import ConfigError

Role = Literal["agent", "trainer"]


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
    kind: Literal["regular", "prefill", "decode"] = "regular"
    nodes: tuple[int, ...]
    """The first is the node whose agent starts it."""
    gpus: tuple[int, ...]
    """GPU indices on each of its nodes; empty on a CPU."""


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
        """The engines that the agent of this node starts."""
        return tuple(e for e in self.engines if e.nodes[0] == node)


def load(file: Path) -> Topology:
    """The topology that the supervisor wrote for this attempt."""
    return msgspec.json.decode(file.read_bytes(), type=Topology)


def num_nodes(cluster: Cluster) -> int:
    """Nodes a run asks for, without spares."""
    return cluster.num_train_nodes + (cluster.num_rollout_nodes if cluster.mode == "split" else 0)


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
    width = rollout.gpus_per_engine
    if width > slots:
        what = "GPUs" if site.gpus_per_node else "CPU slots"
        raise ConfigError(
            "rollout.gpus_per_engine",
            f"{width}, but a node of site {site.name!r} has {slots} {what}",
            f"use at most {slots}",
        )
    first = cluster.num_train_nodes if cluster.mode == "split" else 0
    count = cluster.num_rollout_nodes if cluster.mode == "split" else cluster.num_train_nodes
    return tuple(
        EngineSlot(
            id=(node - first) * (slots // width) + i,
            model="policy",
            nodes=(node,),
            gpus=tuple(range(i * width, (i + 1) * width)) if site.gpus_per_node else (),
        )
        for node in range(first, first + count)
        for i in range(slots // width)
    )
