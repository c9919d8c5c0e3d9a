"""The agent's side of the spawner: ask for engine processes, learn when one ends.

Make the Spawner before MPI_Init; `spawner.py` says why it is a process of its own. Engines get no MPI and no Slurm
variables: a child that inherits them and initialises MPI kills the whole step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from runtime.errors import EngineLost, WaitTimeout
from runtime.rollout import spawner

SOCKET_FD: Final[str] = spawner.SOCKET_FD
"""Stands in an engine's argv for the number of its listening socket."""
PORT: Final[str] = spawner.PORT
"""Stands there for the port it is to listen on, where no socket is passed to it: see `spawner._bind`."""
PEER_PORT: Final[str] = spawner.PEER_PORT
"""For one more port, where its own processes meet."""

START_S: Final[float] = 60.0
"""For the spawner to answer: it only forks, but a busy shared file system delays exec."""

_SCRUBBED: Final[tuple[str, ...]] = ("PMI", "OMPI", "MPI", "SLURM", "HYDRA")
"""Prefixes; PMI covers PMIX."""


_MAX_FOLDER: Final[int] = 64
"""Length of the path of an engine's folder for temporary files: that of a socket has 107 bytes at most, and in there
Python's multiprocessing needs 32 of them for one, torch 34."""


class Started(NamedTuple):
    pid: int
    port: int
    peer_port: int = 0


class Exited(NamedTuple):
    name: str
    code: int
    """Exit code; negative: the signal that ended it."""


def scrub(env: Mapping[str, str]) -> dict[str, str]:
    """An engine's environment: no MPI, no Slurm, no proxies (engines are spoken to on the fabric, directly)."""
    return {k: v for k, v in env.items() if not k.startswith(_SCRUBBED) and not k.lower().endswith("_proxy")}


def own_folder(env: Mapping[str, str], mark: str) -> tuple[str, dict[str, str]]:
    """A folder for an engine's temporary files where those of `env` are, and `env` with it; empty, as it is, where that
    cannot be or its path would be too long. What torch compiles is kept beside it, for the next engine."""
    folder = Path(env.get("TMPDIR") or "/tmp", f"{spawner.FOLDERS}{mark[:8]}")
    if not os.access(folder.parent, os.W_OK) or len(bytes(folder)) > _MAX_FOLDER:
        return "", dict(env)
    compiled = env.get("TORCHINDUCTOR_CACHE_DIR") or str(folder.with_name(f"torchinductor_{os.getuid()}"))
    # Not first: torch sets it again, and then setproctitle would no longer find where SGLang's names go.
    return str(folder), {**env, "TORCHINDUCTOR_CACHE_DIR": compiled, "TMPDIR": str(folder)}


class Spawner:
    """Starts and ends engine processes by name.

    `exits` has an Exited for every engine that ended, stopped or not. When the spawner process itself is lost, all its
    engines are ended and reported, and `start` raises.
    """

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-I", spawner.__file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=scrub(os.environ),
            start_new_session=True,
        )
        theirs.close()
        self.exits: asyncio.Queue[Exited] = asyncio.Queue()
        self._marks: dict[str, str] = {}
        self._folders: dict[str, str] = {}
        self._pids: dict[str, int] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._attaching = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: str, host: str) -> Started:
        """Start an engine that listens on (host, port chosen by the kernel).

        Args:
            argv: with SOCKET_FD, or PORT, where the listening socket, or the port to listen on, belongs.
            env: all of its environment, before `scrub`.
            log: file its output is appended to.

        Raises:
            EngineLost: it could not be started, or the spawner is gone.
        """
        assert name not in self._marks, f"{name} is running"
        mark = secrets.token_hex(16)
        answer = self._answers[name] = asyncio.get_running_loop().create_future()
        self._marks[name], self._ends[name] = mark, asyncio.Event()
        self._folders[name], own = own_folder(scrub(env), mark)
        request = {"argv": list(argv), "env": own, "log": log, "host": host, "mark": mark}
        request["folder"] = self._folders[name]
        try:
            await self._ask({"do": "start", "name": name, **request})
            event = await asyncio.wait_for(answer, START_S)
        except TimeoutError:
            self._process.kill()  # it hangs: its end ends all its engines, and is told to every waiter
            raise EngineLost(f"{name}: the spawner did not start it within {START_S:.0f} s") from None
        finally:
            self._answers.pop(name, None)
        if event["event"] != "started":
            del self._marks[name], self._ends[name], self._folders[name]
            raise EngineLost(f"{name}: cannot start {argv[0]}: {event['reason']}")
        self._pids[name] = event["pid"]
        return Started(event["pid"], event["port"], event["peer_port"])

    async def stop(self, name: str, grace_s: float) -> None:
        """TERM to the engine's whole tree, KILL after the grace; returns once it is gone. Its Exited comes too."""
        if (end := self._ends.get(name)) is None:
            return
        await self._ask({"do": "stop", "name": name, "grace_s": grace_s})
        try:
            await asyncio.wait_for(end.wait(), grace_s + START_S)
        except TimeoutError:
            raise WaitTimeout(f"{name} did not end {START_S:.0f} s after it was killed") from None

    def close(self) -> None:
        """End all engines, then the spawner; blocks for its grace at most."""
        if self._reading is not None:
            self._reading.cancel()
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(RuntimeError):  # the event loop may be closed before us
            if self._writer is not None:
                self._writer.close()
        self._link.close()
        try:
            self._process.wait(spawner.CLOSE_GRACE_S + 10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._kill_engines()

    async def _ask(self, request: dict[str, Any]) -> None:
        writer = await self._attach()
        if self._reading is None or self._reading.done():
            raise EngineLost(f"{request['name']}: the spawner of this agent is gone")
        writer.write(json.dumps(request).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # its end is read, and told, in _read
            await writer.drain()

    async def _attach(self) -> asyncio.StreamWriter:
        """The stream to the spawner, made on first use: there was no event loop before MPI_Init."""
        async with self._attaching:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(sock=self._link)
                self._reading = asyncio.create_task(self._read(reader))
            return self._writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                event = json.loads(line)
                if event["event"] == "exited":
                    self._ended(event["name"], event["code"])
                elif (answer := self._answers.get(event["name"])) is not None and not answer.done():
                    answer.set_result(event)
        await asyncio.to_thread(self._kill_engines)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result({"event": "refused", "reason": "the spawner of this agent is gone"})
        for name in list(self._marks):
            if name not in self._answers:
                self._ended(name, -9)

    def _ended(self, name: str, code: int) -> None:
        del self._marks[name], self._folders[name]
        self._pids.pop(name, None)
        self._ends.pop(name).set()
        self.exits.put_nowait(Exited(name, code))

    def _kill_engines(self) -> None:
        for name, pid in list(self._pids.items()):
            spawner.kill_tree(pid, self._marks[name])
            spawner.remove(self._folders[name])
