"""This process's place in an attempt, why the attempt must end early, and what happens when it goes wrong."""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from runtime import report, topology
from runtime.config import RunConfig, SiteConfig
from runtime.errors import EXIT_CODES
from runtime.load import load_run, load_site
from runtime.topology import RankSlot, Topology

logger = logging.getLogger("main")

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class Stop:
    """Why the run must end early; empty: go on. Set by signals: SIGTERM is a preemption, SIGUSR2 the walltime."""

    def __init__(self) -> None:
        self._reason = ""

    def __call__(self) -> str:
        return self._reason

    def listen(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the launcher's to pass on
        for number, reason in ((signal.SIGTERM, "preempted"), (signal.SIGUSR2, "timeout")):
            signal.signal(number, lambda _number, _frame, reason=reason: self._set(reason))

    def _set(self, reason: str) -> None:
        self._reason = self._reason or reason


class Rank:
    """This process's place in the attempt."""

    def __init__(self, run_dir: Path, attempt: int, number: int) -> None:
        self.run_dir, self.attempt = run_dir, attempt
        self.attempt_dir = run_dir / "attempts" / str(attempt)
        self.config: RunConfig = load_run(run_dir / "config.yaml")
        self.site: SiteConfig = load_site(str(run_dir / "site.yaml"))
        nodes = [f"local-{i}" for i in range(topology.num_nodes(self.config.cluster))]
        self.topology: Topology = topology.make(self.config.cluster, self.config.rollout, self.site, nodes)
        self.slot: RankSlot = self.topology.ranks[number]

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
        self.role = ""
        self.abort: Callable[[int], None] = _die
        """Ends all ranks."""

    def watch_threads(self) -> None:
        threading.excepthook = lambda args: self.end(args.exc_value or args.exc_type())

    def end(self, error: BaseException) -> None:
        """Does not return."""
        text = "".join(traceback.format_exception(error))
        kind = report.kind_of(error)
        logger.error("%s", str(error) if kind == "config" else text)
        message = str(error) if kind != "bug" else f"{type(error).__name__}: {error}"
        try:
            report.write(
                self._attempt_dir,
                report.Report(kind=kind, message=message, rank=self._rank, role=self.role, traceback=text),
            )
        except OSError:  # disk full, folder gone: the supervisor judges by what is left
            logger.exception("no report could be written")
        finally:
            self.abort(EXIT_CODES[kind])


def _die(_code: int) -> None:
    """Before the MPI world exists only a death by signal is sure to end the other ranks."""
    os.kill(os.getpid(), signal.SIGKILL)
