"""Rewards, seen from the agent: plain functions go to worker processes, rewards that await something run here.

`RewardPool.start` is called before MPI_Init; see reward_host for why and for what happens to rewards that fail.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from runtime import plugins
from runtime.config import DataSet
from runtime.errors import SluiceError, WaitTimeout
from runtime.rollout.base import Ask, Reward
from runtime.rollout.reward_host import Job, Setup, Verdict, Verdicts, frame, read_frame, send_frame
from runtime.types import Prompt, Sample

START_S = 60.0

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
    def start(cls, datasets: Mapping[str, DataSet], num_workers: int, timeout_s: float) -> RewardPool:
        """Build the rewards of these data sets and start the processes of the plain ones.

        Raises:
            WaitTimeout: the workers did not start.
        """
        here = {name: reward for name, dataset in datasets.items() if (reward := _awaiting(dataset))}
        plain = {name: dataset for name, dataset in datasets.items() if name not in here}
        ours, theirs = socket.socketpair()
        host = subprocess.Popen(
            [sys.executable, "-m", "runtime.rollout.reward_host", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        ours.settimeout(START_S)
        send_frame(ours, Setup(datasets=plain, num_workers=num_workers, timeout_s=timeout_s))
        try:
            started = read_frame(ours)
        except TimeoutError:
            started = b""
        if not started:
            host.kill()
            raise WaitTimeout(f"the agent waited {START_S:g} s for its reward workers; they did not start, see the log")
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
            SluiceError: the host process ended.
        """
        reader, _ = self._attached()
        try:
            while True:
                (length,) = struct.unpack("!I", await reader.readexactly(4))
                made = msgspec.msgpack.decode(await reader.readexactly(length), type=Verdicts)
                future = self._waiting.pop(made.number)
                if not future.done():
                    future.set_result(made.verdicts)
        except asyncio.IncompleteReadError as e:
            raise SluiceError(f"the reward host ended (exit code {self._host.poll()}), see the log") from e

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
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                values = await reward.score(samples, texts, prompt, self._ask_of(prompt, limit))
        except TimeoutError:
            return [Verdict(None, f"the reward took longer than {self._timeout_s:g} s")] * len(samples)
        except Exception as e:  # whatever a user's reward raises fails this group only
            return [Verdict(None, f"the reward raised {type(e).__name__}: {e}")] * len(samples)
        if len(values) != len(samples):
            return [Verdict(None, f"the reward gave {len(values)} values for {len(samples)} samples")] * len(samples)
        return [_verdict(value) for value in values]

    def close(self) -> None:
        """End the processes; a second call does nothing."""
        self._socket.close()
        self._host.kill()
        self._host.wait(5.0)


def _verdict(value: float | None) -> Verdict:
    if value is None:
        return Verdict(None, "the reward gave none")
    return Verdict(float(value)) if math.isfinite(value) else Verdict(None, f"the reward gave {value}")


def _awaiting(dataset: DataSet) -> Reward | None:
    """The data set's reward where it is one that awaits something (a judge, a sandbox), None where it is plain."""
    reward = plugins.build("reward", dataset.reward, dataset.reward_options, "reward", "reward_options")
    return reward if hasattr(reward, "score") else None
