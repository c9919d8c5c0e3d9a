"""What an agent tells the engines that it starts."""

import pytest

from launcher import runs
from runtime import roles, topology
from runtime.comm.network import SOCKET_VARIABLES
from runtime.rank import Rank
from runtime.site import SiteConfig


@pytest.mark.parametrize("own", [{}, {"NCCL_SOCKET_IFNAME": "hsn"}])
def test_engines_find_each_other_and_trainer_ranks_over_the_sites_interface(run, config, monkeypatch, own):
    """As trainer ranks do, unless the site's environment says otherwise."""
    for name in SOCKET_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    site = SiteConfig(name="x", scheduler="slurm", fabric_interface="hsn0", env=own)
    world = topology.make(config.cluster, config.rollout, site, ["a", "b", "c"])
    runs.write_config(run, config, site)
    runs.write_topology(run, world)
    for node in (1, 2):
        (start,) = roles._engine_starts(Rank(run, 0, world.agent_of(node)))
        told = {name: start.env.get(name) for name in SOCKET_VARIABLES}
        assert told == {"GLOO_SOCKET_IFNAME": "hsn0", "NCCL_SOCKET_IFNAME": "hsn0", **own}
