"""Rewards and the processes they run in: what is scored, and what fails alone."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from runtime import plugins
from runtime.config import DataSet
from runtime.errors import SluiceError
from runtime.rollout.scoring import RewardPool
from runtime.types import Prompt

TIMEOUT_S = 0.5


def reward(name, **options):
    module = plugins.find("reward", name, "test")
    return module.build(plugins.options(module, options, "test"))


@pytest.mark.parametrize(
    ("options", "text", "answer", "expected"),
    [
        ({}, "85", "85", 1.0),
        ({}, " 8  5\n", "8 5", 1.0),
        ({}, "85", 85, 1.0),
        ({}, "85.", "85", 0.0),
        ({}, "", "85", 0.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_case": True}, "Paris", "paris", 1.0),
        ({"after": "####"}, "7+8=15, carry 1 #### 85", "85", 1.0),
        ({"after": "####"}, "#### 84 no, #### 85", "85", 1.0),
        ({"after": "####"}, "85", "85", 0.0),
    ],
)
def test_exact_match(options, text, answer, expected):
    assert reward("exact_match", **options)(text, answer) == expected


@pytest.mark.parametrize(
    ("options", "text", "answer", "expected"),
    [
        ({}, "so it is 1,234.50 in all.", "1234.5", 1.0),
        ({}, "3-5", 5, 1.0),
        ({}, "it is -5", -5, 1.0),
        ({}, "2e3", 2000, 1.0),
        ({}, "first 85, then 86", 85, 0.0),
        ({}, "none", 85, 0.0),
        ({"absolute": 0.01}, "3.141", 3.1416, 1.0),
        ({"absolute": 0.0001}, "3.141", 3.1416, 0.0),
        ({"relative": 0.01}, "1001", 1000, 1.0),
    ],
)
def test_numeric(options, text, answer, expected):
    assert reward("numeric", **options)(text, answer) == expected


def dataset(play):
    return DataSet(path="none", reward="tests.unit.plays", reward_options={"play": play})


def prompt(dataset, answer):
    return Prompt(id=f"{dataset}:0", dataset=dataset, answer=answer)


def with_pool(scenario, num_workers=2):
    pool = RewardPool.start({"plain": dataset("plain"), "judge": dataset("judge")}, num_workers, TIMEOUT_S)

    async def main():
        await pool.attach()
        listening = asyncio.create_task(pool.listen())
        try:
            return await asyncio.wait_for(scenario(pool), 30)
        finally:
            listening.cancel()

    try:
        return asyncio.run(main())
    finally:
        pool.close()


async def plain(pool, *texts, answer="ok"):
    return await pool.score([], texts, prompt("plain", answer))


def test_failures_stay_with_their_text():
    """A reward that raises, gives no number, hangs or kills its worker fails its text; its neighbours have theirs."""

    async def scenario(pool):
        return await plain(pool, "ok", "raise this", "ok", "hang", "ok", "exit", "no", "nan")

    verdicts = with_pool(scenario)
    assert [v.reward for v in verdicts] == [1.0, None, 1.0, None, 1.0, None, 0.0, None]
    assert [v.reason for v in verdicts if v.reason] == [
        "the reward raised ValueError: cannot judge 'raise this'",
        "the reward took longer than 0.5 s",
        "the reward worker died (exit code 7)",
        "the reward is nan",
    ]


def test_a_hanging_reward_holds_up_nobody_else():
    async def scenario(pool):
        hanging = asyncio.create_task(plain(pool, "hang"))
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        groups = await asyncio.gather(*(plain(pool, *["ok", "no"] * 4) for _ in range(50)))
        took = time.monotonic() - begun
        return groups, took, await hanging

    groups, took, hanging = with_pool(scenario)
    assert all([v.reward for v in g] == [1.0, 0.0] * 4 for g in groups)
    assert took < TIMEOUT_S
    assert hanging[0].reward is None


def test_answers_belong_to_their_jobs():
    """Many jobs at once, over two workers that finish in any order."""

    async def scenario(pool):
        jobs = [plain(pool, "0", str(i), "1", answer=str(i)) for i in range(200)]
        return await asyncio.gather(*jobs)

    for i, verdicts in enumerate(with_pool(scenario)):
        assert [v.reward for v in verdicts] == [float(i == 0), 1.0, float(i == 1)]


def test_awaiting_rewards_run_in_the_agent():
    async def scenario(pool):
        return [await pool.score([None] * 2, ["abc", ""], prompt("judge", a)) for a in ("", "raise", "hang")]

    good, raised, hung = with_pool(scenario)
    assert [v.reward for v in good] == [3.0, None]
    assert {v.reason for v in raised} == {"the reward raised RuntimeError: the judge is out"}
    assert {v.reason for v in hung} == {"the reward took longer than 0.5 s"}


def descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children] + [d for c in children for d in descendants(c)]


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def assert_all_end(pids, limit_s=5.0):
    deadline = time.monotonic() + limit_s
    while left := [p for p in pids if alive(p)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


def started_pool():
    """A pool of two workers, and its processes, the host first."""
    before = set(descendants(os.getpid()))
    pool = RewardPool.start({"plain": dataset("plain")}, 2, TIMEOUT_S)
    processes = sorted(set(descendants(os.getpid())) - before)
    assert len(processes) == 3
    return pool, processes


def test_a_lost_host_ends_the_agent_and_leaves_nobody():
    pool, processes = started_pool()

    async def scenario():
        await pool.attach()
        listening = asyncio.create_task(pool.listen())
        waiting = asyncio.create_task(plain(pool, "hang"))
        await asyncio.sleep(0.1)
        os.kill(processes[0], signal.SIGKILL)
        with pytest.raises(SluiceError, match="reward host ended"):
            await asyncio.wait_for(listening, 5)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(scenario())
    pool.close()
    assert_all_end(processes)


def test_a_lost_agent_leaves_nobody():
    """Of an agent that is killed nothing is heard but that its socket closes; one worker hangs meanwhile."""
    pool, processes = started_pool()

    async def scenario():
        await pool.attach()
        waiting = asyncio.create_task(plain(pool, "hang"))
        await asyncio.sleep(0.1)
        for pid in processes:  # as Slurm does before it kills
            os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert all(alive(p) for p in processes)
        waiting.cancel()

    asyncio.run(scenario())
    pool._socket.shutdown(socket.SHUT_RDWR)
    assert_all_end(processes)
    pool.close()


def test_a_reward_that_cannot_be_built_fails_the_start():
    broken = DataSet(path="none", reward="tests.unit.plays", reward_options={"play": "plain", "other": 1})
    with pytest.raises(SluiceError, match="other"):
        RewardPool.start({"plain": broken}, 1, TIMEOUT_S)
