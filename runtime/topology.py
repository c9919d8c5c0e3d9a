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

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from runtime.config import Cluster, Rollout, SiteConfig
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
