"""What Slurm's refusals mean: which key of the site or the run asked for what is not to be had."""

from __future__ import annotations

import re
from typing import Final

from launcher import script
from runtime.errors import ConfigError
from runtime.load import Loaded, LoadedSite


class Refused(ConfigError):
    """Slurm takes no such job."""


_KEYS: Final = (
    ("option", "sbatch_args"),
    ("partition", "partition"),
    ("account", "account"),
    ("qos", "qos"),
    ("feature", "constraint"),
    ("time ?limit", "time"),
    ("no such file", ""),
)
"""Words of Slurm's -> the key of the section `slurm` that is to blame; the first that fits."""
_SIZE: Final = re.compile(
    "node count|node configuration|nodes? .*available|generic resource|gres|memory|PartitionConfig", re.I
)
FIX: Final = "change the site file, or --set-site partition=... and the like; `plan` prints the batch script"


def refused(said: str, loaded: Loaded, site: LoadedSite) -> Refused:
    """The error for what sbatch said of the job of a run."""
    if _SIZE.search(said):
        problem = f"no such nodes: asked for {script.asked(loaded.config, site.config)}; {said}"
        fix = (
            "change cluster.num_train_nodes or cluster.num_rollout_nodes of the run, or gpus_per_node, slurm.gpu_type, "
            "slurm.cpus_per_node, slurm.memory or slurm.partition of the site; "
            "`sinfo -o '%P %D %c %m %G'` shows what is there"
        )
        return Refused(f"{loaded.where('cluster')}, {site.where('slurm')}", problem, fix)
    key = next((key for words, key in _KEYS if re.search(words, said, re.IGNORECASE)), None)
    if key == "":
        return Refused(f"site {site.config.name}", f"this machine has no Slurm: {said}", "submit from a login node")
    if key is None:
        return Refused(f"site {site.config.name}", f"the job was not accepted: {said}", FIX)
    value = getattr(site.config.slurm, key)
    return Refused(
        site.where("slurm", key), f"{value!r} is not accepted: {said}", f"--set-site {key}=..., or change it there"
    )
