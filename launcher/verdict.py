"""What happened to a world that left no exit report: from the exit codes its process manager printed."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Final, Literal

import msgspec

from launcher import plan, runs, srun
from launcher.runs import Report
from runtime import topology
from runtime.errors import PMI_ADVICE

_WRONG_PMI: Final = (
    "Runtime environment uses unsupported PMI version",  # MPICH under --mpi=pmix
    "OMPI was not built with SLURM's PMI support",  # OpenMPI under --mpi=pmi2 or none
)

ORDERS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""How ranks are told to stop; they die of it before they can hear it."""

_MPI_ABORT: Final = re.compile(r"Abort\(\d+\) on node \d+.*: Fatal error in internal_(?!Init).*")
"""MPICH's, when the connection to a peer breaks."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor saw of an attempt."""

    code: int = 0
    """Exit code of the process manager; negative: it was killed by that signal."""
    log: str = "mpiexec.log"
    """Where its words are, in attempts/<n>."""
    order: Literal["", "stop", "timeout"] = ""
    """What the world was told."""
    early: bool = False
    """It was told so before it had begun."""
    overdue_s: float = 0.0
    """It did not stop within so many seconds and was killed."""
    twice: bool = False
    """So soon as it was told to stop a second time."""
    stuck_s: float = 0.0
    """It had not begun after so many seconds and was killed."""
    oom_killed: bool = False
    """The kernel killed something on this machine for lack of memory in that time."""


def judge(folder: Path, seen: Evidence) -> Report:
    """The report of an attempt whose runtime wrote none. `folder` is attempts/<n>."""
    ranks, number, code = _first_loss(folder / seen.log)
    rank = ranks[0] if len(ranks) == 1 else None
    told = "timeout" if seen.order == "timeout" else "preempted"
    if seen.overdue_s and not seen.early:
        after = f"told to stop, but not at a boundary after {seen.overdue_s:.0f} s, so it was killed"
        message = "told to stop twice, so it was killed before it could save" if seen.twice else after
        return Report(kind=told, message=message)
    if seen.stuck_s:
        message = f"the ranks did not find each other within {seen.stuck_s:.0f} s (limits.start_s)"
        return Report(kind="peer_lost", message=f"{message}; see {seen.log} and the ranks' logs")
    if seen.order and (seen.early or number in ORDERS or -seen.code in (0, *ORDERS)):
        return Report(kind=told, message="told to stop before there was anything to save")
    if ended := _ended_by_slurm(folder):
        return ended
    if number == signal.SIGKILL and seen.oom_killed:
        message = f"{_who(ranks)} was killed: the machine ran out of memory"
        return Report(kind="out_of_memory", message=message, rank=rank)
    if seen_less := _not_launched(folder):
        return seen_less
    if advice := said_in_init(folder) or ("" if ranks or number else _not_started(folder)):
        return Report(kind="config", message=advice, rank=rank)
    if failed := _mpi_failure(folder):
        return Report(kind="peer_lost", message=f"MPI failed, as it does when a peer is gone: {failed}")
    if number:
        hint = "; somebody or something killed it, check memory use" if number == signal.SIGKILL else ""
        return Report(kind="peer_lost", message=f"{_who(ranks)} was killed by {_name(number)}{hint}", rank=rank)
    if seen.code < 0:
        return Report(kind="peer_lost", message=f"{Path(seen.log).stem} was killed by {_name(-seen.code)}")
    if seen.code == 0:
        return Report(kind="bug", message="the world ended with exit code 0 but without a report")
    last = runs.last_line(folder / (seen.log if rank is None else f"rank-{rank}.log"))
    said = f"; its last line: {last}" if last else ""
    return Report(kind="bug", message=f"{_who(ranks)} ended with exit code {code or seen.code}{said}", rank=rank)


def unspoken(folder: Path) -> Report:
    """The report of an attempt under Slurm whose supervisor ended before it could write one."""
    last = runs.last_line(folder / srun.STEP_LOG)
    said = f"; srun's last words: {last}" if last else ""
    message = f"the supervisor was killed with its job (a lost node? scancel?){said}"
    return _ended_by_slurm(folder) or Report(kind="node_failed", message=message)


def _ended_by_slurm(folder: Path) -> Report | None:
    """What srun says where Slurm itself ended the step."""
    for words, kind in _SLURM_ENDS:
        if found := words.search(_text(folder / srun.STEP_LOG)):
            return Report(kind=kind, message=f"Slurm ended the ranks: {found.group(0)}")
    return None


_SLURM_ENDS: Final = (
    (re.compile(r"Node failure on \S+|.*DUE TO NODE FAILURE"), "node_failed"),
    (re.compile(r".*DUE TO TIME LIMIT"), "timeout"),
    (re.compile(r".*DUE TO PREEMPTION"), "preempted"),
)


def launch_failed(folder: Path) -> bool:
    """Whether srun said that some ranks will never begin: it may leave the others waiting for them."""
    return any(words.search(_text(folder / srun.STEP_LOG)) for words in _LAUNCH_FAILED)


_IN_VAIN: Final = re.compile(r"tasks? ([\d,-]+) launch failed: (.+)")
_LAUNCH_FAILED: Final = (_IN_VAIN, re.compile(r"Task launch for \S+ failed on node"))
"""srun's words, the second of a node that is gone."""

_NO_PROGRAM: Final = re.compile(r"execve\(\): .+|No module named '?(?:mpi4py|runtime)\b.*")
"""Slurm's and Python's, in a rank's log."""


def _not_launched(folder: Path) -> Report | None:
    """Where ranks could not begin on a node: it sees less than the supervisor's does, which has the run's folder and
    runs the same Python. A run that was under way goes on elsewhere."""
    if not (found := _no_launch(folder)):
        return None
    world = topology.load(folder.parents[1] / "topology.json")
    node, words = found
    first = world.nodes[0]
    message = f"ranks could not be started on {node}: {words}"
    if node == first:
        return Report(kind="config", node=node, message=f"{message}\n  fix: change slurm.srun_args of the site")
    shared = f"{folder.parents[1]} (runs_dir), this Python ({sys.prefix}) and this code ({plan.PROJECT})"
    fix = f"all nodes must see {shared}, as {first} does; if they should, {node} has lost a file system: leave it out "
    fix += f"(slurm.sbatch_args: [--exclude={node}])"
    kind = "node_failed" if runs.last_step(folder.parents[1]) else "config"
    return Report(kind=kind, node=node, message=f"{message}\n  fix: {fix}")


def _no_launch(folder: Path) -> tuple[str, str] | None:
    """(node, what was said) of the first rank that could not begin."""
    nodes = _text(folder / srun.HOST_FILE).split()
    if found := _IN_VAIN.search(_text(folder / srun.STEP_LOG)):
        return nodes[int(re.split("[,-]", found[1])[0])], found[2].strip()
    for rank, node in enumerate(nodes):
        if found := _NO_PROGRAM.search(_text(folder / f"rank-{rank}.log")):
            return node, found.group(0)
    return None


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _not_started(folder: Path) -> str:
    """What to change where srun refused to start ranks; empty: it did not, or for no known reason."""
    lines = _text(folder / srun.STEP_LOG).splitlines()
    said = [line for line in lines if line.startswith("srun: ") and "lacks support" not in line]
    for words, fix in _SRUN_FIXES:
        if found := next((line for line in said if re.search(words, line, re.IGNORECASE)), ""):
            return f"srun refused to start the ranks: {found.removeprefix('srun: ').removeprefix('error: ')}; {fix}"
    return ""


_SRUN_FIXES: Final = (
    ("unrecognized option|invalid option|requires an argument|ambiguous", "change slurm.srun_args of the site"),
    (
        "generic resource|gres",
        "gpus_per_node, slurm.gpu_request and slurm.gpu_type of the site must fit what the job got "
        "(#SBATCH --gpus-per-node in a script of your own)",
    ),
    (
        "processors|node configuration|cpu",
        "each rank needs a CPU: raise slurm.cpus_per_node of the site, or "
        "--cpus-per-task in a script of your own, or ask for whole nodes (--exclusive)",
    ),
    ("mpi", "slurm.mpi of the site must be one of those that `srun --mpi=list` prints"),
    ("memory", "lower slurm.memory of the site"),
    ("invalid|specification", "change slurm.srun_args or slurm.network of the site"),
)
"""Words of srun's -> what to change."""


def said_in_init(folder: Path) -> str:
    """What ranks mean that ended inside MPI_Init, where they cannot report; empty: nothing known."""
    for log in sorted(folder.glob("rank-*.log")):
        text = log.read_text(errors="replace")
        if any(words in text for words in _WRONG_PMI):
            return PMI_ADVICE
    return ""


def _mpi_failure(folder: Path) -> str:
    """The words of an MPI library that ended its rank once the world ran; empty: none did."""
    for log in sorted(folder.glob("rank-*.log")):
        if found := _MPI_ABORT.search(log.read_text(errors="replace")):
            return found.group(0)
    return ""


def _first_loss(log: Path) -> tuple[list[int], int, int]:
    """(ranks, signal, exit code) of the rank that ended badly first, as far as mpiexec said.

    mpiexec kills the ranks that are left and shows SIGKILL for some of those too, in no order. So a rank that ended in
    another way was first; one that was itself killed is only known to be among those that show it.
    """
    text = _text(log)
    if log.name == srun.STEP_LOG:
        return _first_srun_loss(text)
    # A code is a wait status: the low byte holds the signal, the next one the exit code.
    codes = [int(c) for part in re.findall(r"Exit codes: (.*)", text) for c in re.findall(r"-?\d+(?=,|\s|$)", part)]
    bad = [rank for rank, status in enumerate(codes) if status]
    by_themselves = [rank for rank in bad if codes[rank] != signal.SIGKILL]
    ranks = by_themselves[:1] or bad
    if ranks:
        return ranks, codes[ranks[0]] & 0x7F, codes[ranks[0]] >> 8 & 0xFF
    killed = re.search(r"EXIT STRING: .*\(signal (\d+)\)", text)
    return [], int(killed.group(1)) if killed else 0, 0


_SRUN_END: Final = re.compile(
    r"^srun: error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(.+))", re.MULTILINE
)


def _first_srun_loss(text: str) -> tuple[list[int], int, int]:
    """The same from srun's words. It speaks in the order of events, but those it killed itself are in no order."""
    for tasks, code, words in _SRUN_END.findall(text):
        first, _, last = tasks.split(",")[0].partition("-")
        ranks = list(range(int(first), int(last or first) + 1))
        number = 0 if code else _SRUN_WORDS.get(words.split(" (")[0].strip(), signal.SIGKILL)
        return ranks, number, int(code or 0)
    return [], 0, 0


_SRUN_WORDS: Final = {text: number for number in signal.Signals if (text := signal.strsignal(number))}


def _who(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"one of the ranks {', '.join(map(str, ranks))}" if ranks else "a rank"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
