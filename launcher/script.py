"""From a run and a site to the batch script of its job: sbatch options and the lines before the supervisor. Pure.

`launcher.submit` renders it through submitit; `plan` and `submit --dry-run` print it.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

import msgspec

from launcher import plan, srun
from runtime import topology
from runtime.config import RunConfig
from runtime.site import SiteConfig, Slurm

EXPORTED: Final = "HOME,USER,LOGNAME,SHELL,PATH,LANG,LD_LIBRARY_PATH,MODULEPATH,MODULESHOME,LMOD_CMD,TMPDIR"
"""What a job inherits of the submitting shell. A list, because Slurm stores it and may show it to others: tokens in
the environment stay out of it."""

EARLY_MARGIN_S: Final = 60
"""Beside limits.stop_s: to save, end the world and ask for the next job before the walltime."""


_EACH_COUNTS: Final = """trap '((${#BASH_SOURCE[@]} > 1)) || failed "slurm.setup: $(sed -n "${LINENO}p" "$0")"' ERR"""
"""Of several lines in one entry each command counts, but not those of a file that they source."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A batch script, before it is text."""

    job_name: str
    options: dict[str, str | bool]
    """sbatch's, without the dashes; True: an option without a value."""
    setup: tuple[str, ...]
    """Lines of bash."""
    command: str


def make(config: RunConfig, site: SiteConfig, run: Path, python: str) -> Script:
    """The script of a run's job."""
    slurm = site.slurm
    options: dict[str, str | bool] = {
        "nodes": str(topology.num_asked(config.cluster)),
        "ntasks-per-node": "1",
        "time": slurm.time,
        "mem": slurm.memory,
        "signal": f"B:USR1@{early_s(config)}",
        "open-mode": "append",
        "output": str(run / "job" / "%j.log"),
        "export": EXPORTED,
        "requeue" if slurm.requeue else "no-requeue": True,
    }
    options |= {"no-kill": True} if config.cluster.num_spare_nodes else {}
    options |= {"cpus-per-task": str(slurm.cpus_per_node)} if slurm.cpus_per_node else {"exclusive": True}
    named = ("partition", "account", "qos", "constraint", "network")
    options |= {name: value for name in named if (value := getattr(slurm, name))}
    for argument in (*srun.gpu_request(slurm, site.gpus_per_node, step=False), *slurm.sbatch_args):
        name, equals, value = argument.removeprefix("--").partition("=")
        options[name] = value if equals else True
    path = f"export PYTHONPATH={shlex.quote(str(plan.PROJECT))}"
    supervisor = f"exec {shlex.quote(python)} -m launcher.supervisor {shlex.quote(str(run))}"
    return Script(
        job_name=config.name,
        options=options,
        setup=(*_setup(slurm, f"{path}; {supervisor}"), path),
        command=supervisor,
    )


def asked(config: RunConfig, site: SiteConfig) -> str:
    """The size of a run's job, for people."""
    slurm, gpus = site.slurm, srun.gpu_request(site.slurm, site.gpus_per_node, step=False)
    nodes = f"{topology.num_asked(config.cluster)} nodes" + (
        f" of partition {slurm.partition}" if slurm.partition else ""
    )
    cpus = f"{slurm.cpus_per_node} CPUs" if slurm.cpus_per_node else "all CPUs"
    memory = "all memory" if slurm.memory == "0" else f"{slurm.memory} of memory"
    return f"{nodes}, each with {', '.join([*gpus, cpus, memory])}"


def early_s(config: RunConfig) -> int:
    """Seconds before the walltime at which the run is told to save; Slurm may say so up to a minute earlier."""
    return round(config.limits.stop_s) + EARLY_MARGIN_S


def _setup(slurm: Slurm, supervisor: str) -> list[str]:
    """The site's own lines; one that fails ends the job with a report that names it."""
    if not (slurm.modules or slurm.setup):
        return []
    lines = [f'failed() {{ {supervisor} "$1"; }}']
    if slurm.modules:
        # a batch shell is no login shell, so the command may not be defined yet
        lines.append("command -v module >/dev/null || source /etc/profile")
    lines += [f"module load {shlex.quote(m)} || failed {shlex.quote(f'slurm.modules: {m}')}" for m in slurm.modules]
    for text in slurm.setup:  # it may be a part of a longer construct, or end in a comment
        *before, last = text.strip().splitlines() or [""]
        check = f"(($? == 0)) || failed {shlex.quote(f'slurm.setup: {last.strip()}')}"
        lines += [_EACH_COUNTS, text, check, "trap - ERR"] if before else [text, check]
    return lines
