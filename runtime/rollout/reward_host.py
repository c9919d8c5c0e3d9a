"""The process that computes rewards: it owns the worker processes, bounds each reward and replaces who fails.

It is started before MPI_Init and never meets MPI, so it may fork a new worker at any time, which an agent may not.
One worker takes one job (the texts of a group) and sends each verdict as it is made; so a reward that hangs, crashes
its worker or raises fails its own text only, and the rest of the job goes on in a new worker.

    agent --job--> host --job--> worker            agent <--verdicts of the whole job-- host <--verdict-- worker
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import socket
import struct
import sys
import time
from collections import deque
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import msgspec

from runtime import plugins
from runtime.config import DataSet
from runtime.rollout.base import PlainReward

PR_SET_PDEATHSIG = 1
LARGEST: Final = 1e30
"""Of a reward: advantages, sums and spreads of such are finite, in float32 too."""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """A reward, or None and the reason why there is none."""

    reward: float | None
    reason: str = ""


def verdict(value: float, module: str) -> Verdict:
    """Of what the reward of a module gave."""
    if abs(value) <= LARGEST:
        return Verdict(value)
    return Verdict(None, f"the reward {module} gave {value}, which is no number from {-LARGEST:g} to {LARGEST:g}")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """First frame to the host; answered by an empty Verdicts once the workers run."""

    datasets: dict[str, DataSet]
    """Those with plain rewards, by name."""
    num_workers: int
    timeout_s: float


class Job(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    dataset: str
    answer: Any
    texts: tuple[str, ...]


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    verdicts: tuple[Verdict, ...] = ()


def send_frame(sock: socket.socket, message: msgspec.Struct) -> None:
    sock.sendall(frame(message))


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the socket: four bytes of length, then MessagePack."""
    body = msgspec.msgpack.encode(message)
    return struct.pack("!I", len(body)) + body


def read_frame(sock: socket.socket) -> bytes:
    """The next frame's body; empty where the other side is gone."""
    head = sock.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return b""
    return sock.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL)


class Worker:
    """One worker process and the job it is at."""

    def __init__(self, rewards: dict[str, PlainReward], agent: socket.socket) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, rewards, agent, os.getpid()))
        self._process.start()
        theirs.close()
        self.job: Job | None = None
        self.verdicts: list[Verdict] = []
        self.deadline = math.inf

    def begin(self, job: Job, verdicts: list[Verdict], timeout_s: float) -> None:
        """Go on with a job of which the first texts have verdicts already."""
        self.job, self.verdicts = job, verdicts
        self.deadline = time.monotonic() + timeout_s
        rest = msgspec.structs.replace(job, texts=job.texts[len(verdicts) :])
        self.pipe.send_bytes(msgspec.msgpack.encode(rest))

    def collect(self, timeout_s: float) -> None:
        """Take one verdict.

        Raises:
            EOFError: the process is gone.
        """
        self.verdicts.append(msgspec.msgpack.decode(self.pipe.recv_bytes(), type=Verdict))
        self.deadline = time.monotonic() + timeout_s

    def end(self) -> int | None:
        """Kill the process; its exit code."""
        self._process.kill()
        self._process.join(5.0)
        self.pipe.close()
        return self._process.exitcode

    def exit_code(self) -> int | None:
        self._process.join(1.0)
        return self._process.exitcode


class Host:
    """Deals jobs to workers until the agent closes its socket."""

    def __init__(self, agent: socket.socket, setup: Setup) -> None:
        self._agent, self._timeout_s = agent, setup.timeout_s
        self._rewards = {name: _build(dataset) for name, dataset in setup.datasets.items()}
        self._idle = [Worker(self._rewards, agent) for _ in range(setup.num_workers)]
        self._busy: list[Worker] = []
        self._waiting: deque[tuple[Job, list[Verdict]]] = deque()

    def end(self) -> None:
        for worker in [*self._idle, *self._busy]:
            worker.end()

    def _begin(self, worker: Worker, job: Job, verdicts: list[Verdict]) -> None:
        try:
            worker.begin(job, verdicts, self._timeout_s)
        except OSError:  # it died while it was idle: no reward did it
            worker.end()
            worker = Worker(self._rewards, self._agent)
            worker.begin(job, verdicts, self._timeout_s)
        self._busy.append(worker)

    def run(self) -> None:
        send_frame(self._agent, Verdicts(number=0))
        while True:
            while self._idle and self._waiting:
                self._begin(self._idle.pop(), *self._waiting.popleft())
            first = min((w.deadline for w in self._busy), default=math.inf)
            timeout_s = None if first == math.inf else max(0.0, first - time.monotonic())
            ready = wait([self._agent, *(w.pipe for w in self._busy)], timeout_s)
            if self._agent in ready:
                body = read_frame(self._agent)
                if not body:
                    return
                self._waiting.append((msgspec.msgpack.decode(body, type=Job), []))
            for worker in list(self._busy):
                self._look_at(worker, worker.pipe in ready)

    def _look_at(self, worker: Worker, spoke: bool) -> None:
        if spoke:
            try:
                worker.collect(self._timeout_s)
            except EOFError:
                self._replace(worker, f"the reward worker died (exit code {worker.exit_code()})")
                return
        elif time.monotonic() > worker.deadline:
            self._replace(worker, f"the reward took longer than {self._timeout_s:g} s")
            return
        assert worker.job is not None
        if len(worker.verdicts) == len(worker.job.texts):
            self._answer(worker.job, worker.verdicts)
            self._busy.remove(worker)
            self._idle.append(worker)

    def _replace(self, worker: Worker, reason: str) -> None:
        """Fail the text the worker was at; a new worker takes what is left of the job."""
        worker.end()
        self._busy.remove(worker)
        self._idle.append(Worker(self._rewards, self._agent))
        assert worker.job is not None
        verdicts = [*worker.verdicts, Verdict(None, reason)]
        if len(verdicts) == len(worker.job.texts):
            self._answer(worker.job, verdicts)
        else:
            self._waiting.appendleft((worker.job, verdicts))

    def _answer(self, job: Job, verdicts: list[Verdict]) -> None:
        send_frame(self._agent, Verdicts(number=job.number, verdicts=tuple(verdicts)))


def _build(dataset: DataSet) -> PlainReward:
    return plugins.build("reward", dataset.reward, dataset.reward_options, "reward", "reward_options")


def _work(pipe: Connection, rewards: dict[str, PlainReward], agent: socket.socket, host_pid: int) -> None:
    """A worker's life; it ends with its host."""
    agent.close()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    own = os.getpid()
    while os.getppid() == host_pid:  # the host may have died before the line above
        job = msgspec.msgpack.decode(pipe.recv_bytes(), type=Job)
        for text in job.texts:
            made = _verdict(rewards[job.dataset], text, job.answer)
            if os.getpid() != own:  # the reward forked, and this is the child
                os._exit(1)
            pipe.send_bytes(msgspec.msgpack.encode(made))


def _verdict(reward: PlainReward, text: str, answer: Any) -> Verdict:
    try:
        value = float(reward(text, answer))
    except Exception as e:  # whatever a user's reward raises fails this text only
        return Verdict(None, f"the reward raised {type(e).__name__}: {e}")
    return verdict(value, getattr(reward, "__module__", type(reward).__module__))


def main() -> None:
    # Slurm and terminals signal every process of a job; this one ends when its agent does.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    agent = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = sys.argv[2:]  # modules are found as the agent finds them; programs of a reward inherit nothing of it
    host = Host(agent, msgspec.msgpack.decode(read_frame(agent), type=Setup))
    try:
        host.run()
    finally:
        host.end()


if __name__ == "__main__":
    main()
