"""The small process that starts, watches and ends the engines of one agent.

An agent is an MPI rank, and forking after MPI_Init is undefined on many fabrics: so the agent starts this process
before it, and asks it for engines over a socket pair, one JSON object a line (`spawning` is the agent's side).
It holds no standard stream of its rank, runs in its own session, and lives exactly as long as that socket: when the
agent closes it, or dies, every engine tree is ended and this process leaves.

An engine tree is its session, plus whatever carries its mark: an environment variable that children inherit, also
those that leave the session. (The mark alone is not enough: a process that sets its title overwrites its environment.)
Engines die with this process (PDEATHSIG), and their orphans are reaped here (subreaper). SGLang's processes leave files
in shared memory, as they are killed at every end; what a tree was seen to have open of them is deleted with it. So is
the folder that each engine has for temporary files: SGLang leaves sockets there. Where all of a node's processes were
killed at once nobody was left to do it, and the next spawner there does.

Standard library only and run as a file: it starts in 30 ms, stays small and imports nothing of the project.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MARK: Final[str] = "SLUICE_ENGINE_MARK"
SOCKET_FD: Final[str] = "{socket_fd}"
PORT: Final[str] = "{port}"
PEER_PORT: Final[str] = "{peer_port}"
BACKLOG: Final[int] = 1024
CLOSE_GRACE_S: Final[float] = 2.0
"""From TERM to KILL for all engines once the agent is gone."""
LEFT: Final[tuple[str, ...]] = ("/dev/shm/sglang_loads_", "/dev/shm/sgl_shm_")
"""How the names of what SGLang leaves begin: its schedulers' loads, and queues between ranks of 25 MB each. Whose they
are no name tells, nor does anything once the tree is gone, so one looks at it before."""
FOLDERS: Final[str] = "sluice-"
"""How the names of engines' folders begin; eight hexadecimal digits follow."""
NAMES: Final[str] = "left-in-shared-memory"
"""File in such a folder with the paths of those files, a line each."""
YOUNG_S: Final[float] = 60.0
"""Age up to which a folder may be one that is just being made."""
LOOK_S: Final[float] = 1.0
"""Age of an engine when it is looked at first, and the least time to the next look."""
LOOK_SHARE: Final[float] = 0.25
"""The next look comes after this share of its age, as such files come early."""
LOOK_MOST_S: Final[float] = 30.0
"""Between two looks: all processes of a node are gone through, some 30 us each."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def tree(pid: int, mark: str) -> list[int]:
    """The living processes of the engine that was started as `pid` with this mark."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, _, _, session = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            if state not in b"ZX" and (int(session) == pid or needle in (entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def kill_tree(pid: int, mark: str, limit_s: float = 5.0) -> bool:
    """SIGKILL an engine tree, again for what was forked meanwhile; False if some of it outlives the limit."""
    end = time.monotonic() + limit_s
    while pids := tree(pid, mark):
        if time.monotonic() > end:
            return False
        _signal(pids, signal.SIGKILL)
        time.sleep(0.005)
    return True


def left_by(pids: list[int]) -> set[Path]:
    """What these processes have open of the files that SGLang leaves."""
    held = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(fd.readlink())
    return {path for path in held if str(path).startswith(LEFT)}


def _bind(host: str) -> socket.socket:
    """A socket on a port that the kernel chose. While it is bound and does not listen, a server that sets SO_REUSEADDR,
    as servers do, may take the port; the kernel gives it to nobody else."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, 0))
    return bound


def _filled(part: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        part = part.replace(word, value)
    return part


def remove(folder: str) -> None:
    """With all that is in it, and what its engine left elsewhere; empty: there is none."""
    if folder:
        with contextlib.suppress(OSError):
            for path in Path(folder, NAMES).read_text().splitlines():
                Path(path).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _hold(folder: str) -> int:
    """Make it; the descriptor by which it is held as long as this process lives, -1 for none."""
    if not folder:
        return -1
    sweep(Path(folder).parent)
    Path(folder).mkdir(0o700)
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody sweeps there either
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held


def sweep(folders: Path) -> None:
    """Remove engines' folders in here that no spawner holds: it was killed together with all that it would end."""
    for path in folders.glob(FOLDERS + 8 * "[0-9a-f]"):
        with contextlib.suppress(OSError):
            about = path.lstat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < YOUNG_S:
                continue
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(str(path))
            finally:
                os.close(held)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass
class _Child:
    name: str
    mark: str
    process: subprocess.Popen[bytes]
    held: list[socket.socket]
    """Bound and not listening, so that its ports are no one else's for as long as it lives."""
    begun: float
    look_at: float
    """On the monotonic clock, both."""
    folder: str
    """For its temporary files; empty: they are among those of others."""
    lock: int
    """Descriptor by which this process holds the folder; -1: there is none."""
    leaves: set[Path] = field(default_factory=set)
    kill_at: float | None = None
    """When a stopped engine that is still there is killed, on the monotonic clock."""

    def look(self, pids: list[int]) -> None:
        """What these, its processes, have open now will be deleted with it."""
        found = left_by(pids) - self.leaves
        self.leaves |= found
        if found and self.folder:
            with contextlib.suppress(OSError), Path(self.folder, NAMES).open("a") as file:
                file.writelines(f"{path}\n" for path in sorted(found))

    def clear(self) -> None:
        """Delete what it left."""
        for path in self.leaves:
            with contextlib.suppress(OSError):
                path.unlink()
        remove(self.folder)
        if self.lock >= 0:
            os.close(self.lock)


class _Server:
    """The loop: requests from the agent, dead children, and the clock of stopped engines."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._libc = ctypes.CDLL(None)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._children: dict[str, _Child] = {}
        self._input = b""
        self._wake, wake_end = socket.socketpair()
        wake_end.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(wake_end.fileno())
        self._wake_end = wake_end
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Slurm and terminals signal every process of a job; the agent decides when its engines end.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the agent is gone, then end every engine."""
        while self._turn():
            pass
        self._selector.unregister(self._link)
        for child in self._children.values():
            self._stop(child, CLOSE_GRACE_S)
        while self._children:
            self._turn()

    def _turn(self) -> bool:
        """Wait for one event; False once the agent is gone."""
        times = [t for c in self._children.values() for t in (c.look_at, c.kill_at) if t is not None]
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        there = True
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._link:
                there = self._read()
            else:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
        self._reap()
        for child in list(self._children.values()):
            if child.kill_at is not None and time.monotonic() >= child.kill_at:
                child.kill_at = None
                kill_tree(child.process.pid, child.mark)
            if time.monotonic() >= child.look_at:
                child.look(tree(child.process.pid, child.mark))
                child.look_at += min(max(LOOK_S, LOOK_SHARE * (child.look_at - child.begun)), LOOK_MOST_S)
        return there

    def _read(self) -> bool:
        try:
            data = self._link.recv(1 << 16)
        except ConnectionResetError:
            return False
        if not data:
            return False
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["do"] == "start":
                self._start(request)
            elif request["name"] in self._children:
                self._stop(self._children[request["name"]], request["grace_s"])
        return True

    def _start(self, request: dict[str, Any]) -> None:
        name = request["name"]
        try:
            child, port, peer = self._spawn(request)
        except OSError as e:
            self._say({"event": "refused", "name": name, "reason": str(e)})
            return
        self._children[name] = child
        self._say({"event": "started", "name": name, "pid": child.process.pid, "port": port, "peer_port": peer})

    def _spawn(self, request: dict[str, Any]) -> tuple[_Child, int, int]:
        """The process, and the ports that are its own."""
        with contextlib.ExitStack() as stack:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            stack.callback(os.close, log)
            held = [_bind(request["host"]) for _ in range(2)]
            main, peer = (s.getsockname()[1] for s in held)
            words, passed = {PORT: str(main), PEER_PORT: str(peer)}, ()
            if any(SOCKET_FD in part for part in request["argv"]):
                listener = stack.enter_context(held.pop(0))
                listener.listen(BACKLOG)
                words, passed = words | {SOCKET_FD: str(listener.fileno())}, (listener.fileno(),)
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(remove, request["folder"])
            if (lock := _hold(request["folder"])) >= 0:
                undo.callback(os.close, lock)
            process = subprocess.Popen(
                [_filled(part, words) for part in request["argv"]],
                env={**request["env"], MARK: request["mark"]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=passed,
                start_new_session=True,
                preexec_fn=self._before_exec,  # this process has one thread
            )
            undo.pop_all()  # it is the engine's now
        now, folder = time.monotonic(), request["folder"]
        return _Child(request["name"], request["mark"], process, held, now, now + LOOK_S, folder, lock), main, peer

    def _before_exec(self) -> None:
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # stop orders stay ignored: engines do not save
            signal.signal(number, signal.SIG_DFL)

    def _stop(self, child: _Child, grace_s: float) -> None:
        pids = tree(child.process.pid, child.mark)
        child.look(pids)
        _signal(pids, signal.SIGTERM)
        child.kill_at = time.monotonic() + grace_s

    def _reap(self) -> None:
        """Take in dead children: of an engine, also end what it left; of others, just the zombie."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = next((c for c in self._children.values() if c.process.pid == pid), None)
            if child is None:
                continue
            del self._children[child.name]
            for held in child.held:
                held.close()
            child.process.returncode = os.waitstatus_to_exitcode(status)
            child.look(tree(child.process.pid, child.mark))  # of its ranks, which may outlive it
            kill_tree(child.process.pid, child.mark)
            child.clear()
            self._say({"event": "exited", "name": child.name, "code": child.process.returncode})

    def _say(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the agent is gone: the next read says so
            self._link.sendall(json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    _Server(socket.socket(fileno=int(sys.argv[1]))).run()
