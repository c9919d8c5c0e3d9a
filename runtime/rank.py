"""This process's place in an attempt, why the attempt must end early, and what happens when it goes wrong."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from runtime import device, plugins, report, topology
from runtime.comm.network import address_of, fabric_interface
from runtime.config import RunConfig
from runtime.errors import EXIT_CODES, ConfigError
from runtime.load import load_run, load_site
from runtime.site import SiteConfig
from runtime.topology import RankSlot, Topology

logger = logging.getLogger("main")

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class Stop:
    """Why the run must end early; empty: go on.

    The supervisor sends SIGUSR1 to stop and SIGUSR2 near the end of the walltime. SIGTERM comes from the scheduler, for
    a preemption or because a peer died: `is_sure` is False until somebody finds out which.
    """

    def __init__(self) -> None:
        self._reason = ""
        self.is_sure = True

    def __call__(self) -> str:
        return self._reason

    def listen(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the launcher's to pass on
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _frame: self._set(signal.Signals(number)))

    def _set(self, number: signal.Signals) -> None:
        if not self._reason:
            self._reason = "timeout" if number == signal.SIGUSR2 else "preempted"
            self.is_sure = number != signal.SIGTERM


class Rank:
    """This process's place in the attempt."""

    def __init__(self, run_dir: Path, attempt: int, number: int) -> None:
        self.run_dir, self.attempt = run_dir, attempt
        self.attempt_dir = run_dir / "attempts" / str(attempt)
        self.config: RunConfig = load_run(run_dir / "config.yaml")
        plugins.look_in(self.config.code_dir)
        self.site: SiteConfig = load_site(str(run_dir / "site.yaml"))
        self.topology: Topology = topology.load(run_dir / "topology.json")
        if number >= self.topology.world_size:
            raise ConfigError(
                "MPI world",
                f"this is rank {number}, but the topology has {self.topology.world_size} ranks",
                "start as many ranks as `plan` prints",
            )
        self.slot: RankSlot = self.topology.ranks[number]
        own = self.topology.nodes[self.slot.node]
        others = [node for node in self.topology.nodes if node != own and self.site.scheduler != "local"]
        self.interface = fabric_interface(self.site.fabric_interface, own, others)
        """Network interface whose address peers are told."""

    def check_place(self) -> None:
        """What this rank can check before it loads anything; says where it landed.

        Raises:
            ConfigError: it sees other GPUs than its node was to have.
        """
        node, wanted = self.topology.nodes[self.slot.node], self.site.gpus_per_node
        seen = device.num_visible(os.environ)
        shown = " ".join(f"{name}={os.environ[name]}" for name in device.VARIABLES if name in os.environ)
        logger.info(
            "rank %d of %d, %s, local rank %d on %s (host %s), fabric %s %s, %s",
            self.slot.rank,
            self.topology.world_size,
            self.role,
            self.slot.local_rank,
            node,
            socket.gethostname(),
            self.interface,
            address_of(self.interface),
            shown or "no list of visible GPUs",
        )
        if wanted and seen is not None and seen != wanted:
            raise ConfigError(
                "site: gpus_per_node",
                f"{wanted}, but rank {self.slot.rank} on {node} sees {seen} ({shown})",
                "ask for GPUs by the node, not by the task; slurm.gpu_request and slurm.srun_args say how",
            )

    @property
    def role(self) -> str:
        return "control" if self.slot.rank == self.topology.controller else self.slot.role


def rank_of(environment: Mapping[str, str]) -> int:
    """World rank before MPI is there to be asked: the spawner must start before MPI_Init."""
    return next((int(environment[name]) for name in RANK_VARIABLES if name in environment), 0)


class Guard:
    """The edge of the process: the first exception in any thread is reported and ends all ranks."""

    def __init__(self, attempt_dir: Path, rank: int) -> None:
        self._attempt_dir, self._rank = attempt_dir, rank
        self.role = self.node = ""
        self.abort: Callable[[int], None] = _die
        """Ends all ranks."""

    def watch_threads(self) -> None:
        threading.excepthook = lambda args: self.end(args.exc_value or args.exc_type())

    def end(self, error: BaseException) -> None:
        """Does not return."""
        text = "".join(traceback.format_exception(error))
        kind = report.kind_of(error)
        is_ours = kind == "config" and error.__cause__ is None  # else it came of an exception in a user's code
        logger.error("%s", str(error) if is_ours else text)
        message = str(error) if kind != "bug" else f"{type(error).__name__}: {error}"
        try:
            report.write(
                self._attempt_dir,
                report.Report(
                    kind=kind, message=message, rank=self._rank, role=self.role, node=self.node, traceback=text
                ),
            )
        except OSError:  # disk full, folder gone: the supervisor judges by what is left
            logger.exception("no report could be written")
        finally:
            self.abort(EXIT_CODES[kind])


def _die(_code: int) -> None:
    """Before the MPI world exists only a death by signal is sure to end the other ranks."""
    os.kill(os.getpid(), signal.SIGKILL)
