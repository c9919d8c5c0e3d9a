"""SGLang on a GPU: weights through the device's IPC handles and over NCCL, and memory that is really given back.

SGLANG_PYTHON names the interpreter of an environment with SGLang for this GPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.comm.weights.folder import FolderSender
from runtime.comm.weights.handles import Lender
from runtime.rollout.engines import sglang
from runtime.rollout.spawning import Spawner
from tests.contract.live import MAX_LENGTH, Kind, Live, make_model, manifest_of, off, perturbed

GPU = torch.device("cuda:0")
PYTHON = os.environ.get("SGLANG_PYTHON", "")
os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as launcher.plan has it for one machine; NCCL reads it once
TOKENS = 1 << 20
CACHE_BYTES = TOKENS * 2 * 2 * 2 * 64 * 2
"""Of keys and values: 2 layers with 2 heads of 64, in bfloat16."""

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]
with_sglang = pytest.mark.skipif(not PYTHON, reason="needs SGLang for a GPU: SGLANG_PYTHON names its interpreter")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return make_model(folder, head_dim=64).bfloat16()


def start(runner: asyncio.Runner, folder: Path, gpu: int) -> Iterator[Live]:
    """An engine on this GPU; weights come from the first."""
    server = {"max-total-tokens": TOKENS, "max-running-requests": 16, "disable-cuda-graph": True}
    kind = sglang.build(sglang.Config(python=PYTHON, max_length=MAX_LENGTH, server=server))
    spawner = Spawner()
    live = Live(f"gpu{gpu}", Kind(kind=kind, deterministic=False), spawner, folder, gpu=gpu)
    try:
        runner.run(live.start())
        yield live
        runner.run(live.close())
    finally:
        spawner.close()


@pytest.fixture(scope="module")
def live(runner: asyncio.Runner, folder: Path) -> Iterator[Live]:
    yield from start(runner, folder, 0)


def test_memory_that_nobody_took_is_given_back() -> None:
    weights = {str(i): torch.full((1 << 20,), float(i), device=GPU) for i in range(8)}
    lender, used = Lender(GPU), torch.cuda.memory_allocated()
    for _ in range(50):
        lender.begin(manifest_of(weights, 1 << 22), iter(weights.items()))
        for _ in weights:
            assert lender.lend(1)
        lender.take_back()
        assert torch.cuda.memory_allocated() == used


@with_sglang
def test_handles_of_the_gpu_bring_the_bytes_and_leave_nothing(
    live: Live, runner: asyncio.Runner, model: torch.nn.Module
) -> None:
    async def scenario() -> None:
        lender, sender, other = Lender(GPU), FolderSender(), perturbed(model, 2).bfloat16()
        await live.push_through_folder(sender, model, 1)
        wanted = await live.engine.checksums()
        free = []
        for version in range(2, 22, 2):
            await live.push_by_handles([lender], other, version)
            assert await live.engine.checksums() != wanted
            await live.push_by_handles([lender], model, version + 1)
            assert await live.engine.checksums() == wanted
            assert await off(live, model) == ""
            free.append(torch.cuda.mem_get_info(GPU)[0])
        assert abs(free[-1] - free[1]) < 1 << 25

    runner.run(scenario())


@with_sglang
def test_an_engine_that_sleeps_has_given_its_memory_back(
    live: Live, runner: asyncio.Runner, model: torch.nn.Module
) -> None:
    async def scenario() -> None:
        await live.push_by_handles([Lender(GPU)], model, 50)
        for version in (51, 52):
            awake = torch.cuda.mem_get_info(GPU)[0]
            await live.engine.pause("abort")
            await live.engine.sleep()
            assert torch.cuda.mem_get_info(GPU)[0] - awake > 0.95 * CACHE_BYTES
            await live.engine.wake(serve=False)
            await live.take([Lender(GPU)], model, version)
            await live.engine.wake(serve=True)
            await live.engine.resume()
            assert abs(torch.cuda.mem_get_info(GPU)[0] - awake) < 0.05 * CACHE_BYTES
            assert await off(live, model) == ""

    runner.run(scenario())


@with_sglang
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: no process group has two members on one")
def test_a_weight_group_over_nccl_brings_the_bytes(
    runner: asyncio.Runner, folder: Path, model: torch.nn.Module
) -> None:
    sglang.build(sglang.Config(python=PYTHON)).check_group("SGLANG_PYTHON")

    async def scenario(live: Live) -> None:
        await live.push_through_folder(FolderSender(), model, 1)
        wanted = await live.engine.checksums()
        await live.join()
        for version in (2, 4):
            await live.push(perturbed(model, version).bfloat16(), version)
            assert await live.engine.checksums() != wanted
            await live.push(model, version + 1)
            assert await live.engine.checksums() == wanted
            await live.rejoin()
        assert await off(live, model) == ""

    for live in start(runner, folder, 1):
        runner.run(scenario(live))
