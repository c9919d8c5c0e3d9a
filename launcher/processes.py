"""Linux processes as the supervisor needs them: who is alive, whose child is whose, and how to leave none behind.

MPI's process manager gives every rank a session of its own, so signals to a process group do not reach them. What does
reach all of them: the supervisor is a subreaper, so every orphan below it becomes its child and can be found in /proc.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Called in a child between fork and exec: the kernel kills it when the parent's thread ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat after the name, from state on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def started(pid: int) -> int:
    """Clock ticks from boot to the start of a process: with its pid, its identity. 0: it is gone or a zombie."""
    fields = _stat(pid)
    return 0 if fields is None or fields[0] == "Z" else int(fields[19])


def descendants(pid: int) -> list[int]:
    """Every process below this one, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def name_of(pid: int) -> str:
    """Its command line, shortened."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        words = ""
    return f"{pid} {words[:120]}".strip()


def end_descendants(grace_s: float, limit_s: float) -> tuple[list[str], list[str]]:
    """Leave nothing below this process: wait `grace_s` for what ends by itself, then SIGKILL until all is gone.

    Returns:
        Names of the processes that had to be killed, and of those still there after `limit_s`.
    """
    start = time.monotonic()
    killed: dict[int, str] = {}
    while True:
        _reap()
        alive = [pid for pid in descendants(os.getpid()) if started(pid)]
        waited = time.monotonic() - start
        if not alive or waited > limit_s:
            return list(killed.values()), [name_of(pid) for pid in alive]
        if waited > grace_s:
            for pid in alive:
                killed.setdefault(pid, name_of(pid))
                signal_process(pid, signal.SIGKILL)
        time.sleep(0.05)


def _reap() -> None:
    """Collect every child that has ended, adopted ones included."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def signal_process(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False if the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def out_of_memory_kills() -> int:
    """Processes the kernel has killed on this machine because memory ran out; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def remove_stale_shared_memory(shm: Path = Path("/dev/shm"), min_age_s: float = 10.0) -> list[str]:
    """Delete what killed MPICH ranks of this user left in shared memory: segments that no process maps.

    Args:
        min_age_s: younger ones may belong to a rank that is just starting and has yet to map them.

    Returns:
        Names of the deleted files.
    """
    deleted = []
    old = [p for p in shm.glob("mpich_shm_*") if _is_ours(p) and _age_s(p) > min_age_s]
    mapped = "".join(_said(p / "maps") for p in Path("/proc").glob("[0-9]*")) if old else ""
    for path in old:
        if path.name not in mapped:
            path.unlink(missing_ok=True)
            deleted.append(path.name)
    return deleted


def remove_stale_topologies(tmp: Path = Path("/tmp"), manager: str = "hydra_pmi_proxy") -> list[str]:
    """Delete what killed process managers of MPICH left of this user: a file each, by which ranks know the machine.
    While one lives it may be its own.

    Returns:
        Names of the deleted files.
    """
    found = [path for path in tmp.glob("hydra_hwloc_xmlfile_*") if _is_ours(path)]
    if not found or any(_said(p / "comm").strip() == manager and _is_ours(p) for p in Path("/proc").glob("[0-9]*")):
        return []
    for path in found:
        path.unlink(missing_ok=True)
    return [path.name for path in found]


def _is_ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def _said(path: Path) -> str:
    """What the kernel says in a file of a process."""
    try:
        return path.read_text(errors="replace")
    except OSError:  # it ended, or is another user's
        return ""
