"""Rewards, seen from the agent: plain functions go to worker processes, rewards that await something run here.

`RewardPool.start` is called before MPI_Init; see reward_host for why and for what happens to rewards that fail.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from runtime import plugins
from runtime.config import DataSet
from runtime.errors import PeerLost, SluiceError, WaitTimeout
from runtime.rollout import watchdog
from runtime.rollout.base import Ask, Reward
from runtime.rollout.reward_host import Job, Setup, Verdict, Verdicts, frame, read_frame, send_frame, verdict
from runtime.types import Prompt, Sample

START_S = 60.0
NOWHERE: Final[Mapping[str, str]] = MappingProxyType({})

AskOf = Callable[[Prompt, asyncio.Timeout], Ask]


class RewardPool:
    """Scores groups; one of these an agent."""

    def __init__(
        self, here: dict[str, Reward], host: subprocess.Popen[bytes], sock: socket.socket, timeout_s: float
    ) -> None:
        self._here, self._host, self._socket, self._timeout_s = here, host, sock, timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._waiting: dict[int, asyncio.Future[tuple[Verdict, ...]]] = {}
        self._next = 1
        self._ask_of: AskOf | None = None

    @classmethod
    def start(
        cls, datasets: Mapping[str, DataSet], num_workers: int, timeout_s: float, places: Mapping[str, str] = NOWHERE
    ) -> RewardPool:
        """Build the rewards of these data sets and start the processes of the plain ones.

        Args:
            places: where the data sets stand in the config, for errors.

        Raises:
            ConfigError: a reward cannot be built.
            WaitTimeout: the workers did not start in time.
            PeerLost: the host process was killed.
            SluiceError: it ended.
        """
        built = {name: _awaiting(dataset, places.get(name, name)) for name, dataset in datasets.items()}
        here = {name: reward for name, reward in built.items() if reward}
        plain = {name: dataset for name, dataset in datasets.items() if name not in here}
        ours, theirs = socket.socketpair()
        host = subprocess.Popen(
            [sys.executable, "-m", "runtime.rollout.reward_host", str(theirs.fileno()), *sys.path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        ours.settimeout(START_S)
        try:
            send_frame(ours, Setup(datasets=plain, num_workers=num_workers, timeout_s=timeout_s))
            started = read_frame(ours)
        except TimeoutError:
            host.kill()
            raise WaitTimeout(f"the reward workers did not start within {START_S:g} s, see the log") from None
        except ConnectionError:
            started = b""
        if not started:
            raise _lost(host)
        return cls(here, host, ours, timeout_s)

    async def attach(self, ask_of: AskOf) -> None:
        """Use the pool from this event loop.

        Args:
            ask_of: what a reward asks other models with, as long as it has time.
        """
        self._ask_of = ask_of
        self._streams = await asyncio.open_connection(sock=self._socket)

    async def listen(self) -> None:
        """Take in verdicts, as long as the agent runs.

        Raises:
            PeerLost: the host process was killed.
            SluiceError: it ended.
        """
        reader, _ = self._attached()
        try:
            while True:
                (length,) = struct.unpack("!I", await reader.readexactly(4))
                made = msgspec.msgpack.decode(await reader.readexactly(length), type=Verdicts)
                future = self._waiting.pop(made.number)
                if not future.done():
                    future.set_result(made.verdicts)
        except (asyncio.IncompleteReadError, ConnectionError) as e:
            raise _lost(self._host) from e

    async def score(self, samples: Sequence[Sample], texts: Sequence[str], prompt: Prompt) -> list[Verdict]:
        """One verdict a sample; `texts` are their sampled texts."""
        reward = self._here.get(prompt.dataset)
        if reward is not None:
            return await self._score_here(reward, samples, texts, prompt)
        _, writer = self._attached()
        job = Job(number=self._next, dataset=prompt.dataset, answer=prompt.answer, texts=tuple(texts))
        self._next += 1
        self._waiting[job.number] = asyncio.get_running_loop().create_future()
        writer.write(frame(job))
        return list(await self._waiting[job.number])

    def _attached(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self._streams is not None, "attach comes first"
        return self._streams

    async def _score_here(
        self, reward: Reward, samples: Sequence[Sample], texts: Sequence[str], prompt: Prompt
    ) -> list[Verdict]:
        assert self._ask_of is not None, "attach comes first"
        limit = asyncio.timeout(self._timeout_s)
        try:
            with watchdog.running(f"the reward {type(reward).__module__}, prompt {prompt.id}"):
                async with limit:
                    values = await reward.score(samples, texts, prompt, self._ask_of(prompt, limit))
            verdicts = [_verdict(value, type(reward).__module__) for value in values]
        except (Exception, SystemExit) as e:  # whatever a user's reward raises fails this group only
            problem = f"raised {type(e).__name__}: {e}"
            if limit.expired():
                problem = f"took longer than {self._timeout_s:g} s"
            return [Verdict(None, f"the reward {problem}")] * len(samples)
        if len(verdicts) != len(samples):
            return [Verdict(None, f"the reward gave {len(verdicts)} values for {len(samples)} samples")] * len(samples)
        return verdicts

    def close(self) -> None:
        """End the processes; a second call does nothing."""
        self._socket.close()
        self._host.kill()
        self._host.wait(5.0)


def _lost(host: subprocess.Popen[bytes]) -> SluiceError:
    """Why the host is gone, whose socket is closed."""
    if host.wait(5.0) == -signal.SIGKILL:
        return PeerLost("the reward host was killed (SIGKILL): for want of memory, or with the ranks of its node")
    return SluiceError(f"the reward host ended (exit code {host.poll()}), see the log")


def _verdict(value: float | None, module: str) -> Verdict:
    return Verdict(None, "the reward gave none") if value is None else verdict(float(value), module)


def _awaiting(dataset: DataSet, place: str) -> Reward | None:
    """The data set's reward where it is one that awaits something (a judge, a sandbox), None where it is plain."""
    places = f"{place}.reward", f"{place}.reward_options"
    reward = plugins.build("reward", dataset.reward, dataset.reward_options, *places)
    return reward if hasattr(reward, "score") else None
