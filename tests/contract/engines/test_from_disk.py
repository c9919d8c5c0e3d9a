"""An SGLang of two ranks that keeps prefixes and began with the weights of an export."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

from runtime.comm.weights.delta import Kept
from runtime.comm.weights.folder import FolderSender
from runtime.comm.weights.handles import Lender
from runtime.errors import EngineLost
from tests.contract.engines.asking import params, post, reference
from tests.contract.live import off, perturbed, session_of

CPU = torch.device("cpu")


def test_pushed_weights_are_those_that_a_fresh_sglang_reads_from_the_export(from_disk, runner, exported):
    """To the bit, in each of its ranks, whichever way they came."""
    live, wanted = from_disk, exported[0]
    other = perturbed(wanted, 0, 0.0)
    for tensor in other.parameters():
        tensor.view(-1)[::7] += 0.01

    async def scenario():
        assert (await live.engine.describe()).num_ranks == 2
        folder = FolderSender(kept=Kept())
        ways = {
            "broadcast": lambda version: live.push(wanted, version),
            "delta": lambda version: live.push(wanted, version, base=version - 1),
            "disk": lambda version: live.push_through_folder(folder, wanted, version),
            "ipc": lambda version: live.push_by_handles([Lender(CPU), Lender(CPU)], wanted, version),
            "delta through a folder": lambda version: live.push_through_folder(folder, wanted, version, version - 1),
        }
        for i, (way, push) in enumerate(ways.items(), 1):
            if way == "delta through a folder":
                await live.push_through_folder(folder, other, 2 * i)
            else:
                await live.push(other, 2 * i)
            assert await live.engine.checksums() != live.checksums_from_disk
            await push(2 * i + 1)
            assert await live.engine.checksums() == live.checksums_from_disk, way
            assert await off(live, wanted) == "", way
        await live.engine.pause("retract")
        with pytest.raises(EngineLost, match="the delta is of version 1, this engine holds"):
            await live.send(dict(other.named_parameters()), 99, base=1)
        await live.engine.resume()
        await live.rejoin()
        assert await live.engine.checksums() == live.checksums_from_disk, "nothing of it was taken"
        await live.push(wanted, 100)
        nowhere = mock.patch.object(tempfile, "TemporaryDirectory", lambda prefix: contextlib.nullcontext("/nowhere"))
        with nowhere, pytest.raises(EngineLost, match=r"cannot say whether it took a delta: .*/nowhere/answer"):
            await live.push(other, 101, base=100)
        await live.rejoin()
        await live.push(wanted, 102)
        assert await live.engine.checksums() == live.checksums_from_disk, "of the same process"
        tokens = (await live.engine.generate([5, 6, 7], params(8))).tokens
        scored = await live.engine.score([5, 6, 7, *tokens], 3)
        np.testing.assert_allclose(scored, reference(wanted, [5, 6, 7], tokens), atol=1e-4)

    runner.run(scenario())


@contextlib.contextmanager
def slowed(pid):
    """This process runs for a small part of the time."""
    over = threading.Event()

    def stop_and_go():
        while not over.wait(0.002):
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.1)
            os.kill(pid, signal.SIGCONT)

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(stop_and_go)
        try:
            yield
        finally:
            over.set()
            going.result()


def test_a_folder_was_read_when_the_slowest_rank_has_read_it(from_disk, runner, model):
    """It is deleted then, and SGLang itself answers when its first rank is done."""
    name = b"sglang::scheduler_TP1"
    last = next(p for p in session_of(from_disk.pid) if name in Path(f"/proc/{p}/cmdline").read_bytes())

    async def scenario():
        other = perturbed(model, 3)
        with slowed(last):
            await from_disk.push_through_folder(FolderSender(), other, 3)
        assert await off(from_disk, other) == ""

    runner.run(scenario())


def test_prefixes_that_old_weights_computed_are_not_reused(from_disk, runner, model):
    """Also while a request keeps its cache, so that nothing can be flushed."""
    prompt = list(range(60, 100))

    async def scenario():
        engine, other = from_disk.engine, perturbed(model, 2)
        await engine.generate(prompt, params(1))
        asked = {"input_ids": prompt, "extra_key": engine._prefixes, "sampling_params": {"max_new_tokens": 1}}
        body = msgspec.json.encode(asked)
        assert json.loads((await post(from_disk, "/generate", body))[1])["meta_info"]["cached_tokens"] >= 30
        running = asyncio.create_task(engine.generate([5, 6], params(60)))
        await asyncio.sleep(0.2)
        await from_disk.push(other, 2, "in_place")
        c = await engine.generate(prompt, params(8))
        np.testing.assert_allclose(c.logprobs, reference(other, prompt, c.tokens), atol=1e-4)
        assert [version for _, version in (await running).versions] == [1, 2], "it was no longer running"

    runner.run(scenario())


def test_a_cache_of_old_weights_is_found_out(from_disk, runner, model):
    async def scenario():
        other = perturbed(model, 2)
        assert await off(from_disk, model) == ""
        before = from_disk.engine._prefixes
        await from_disk.push(other, 2, "in_place")
        from_disk.engine._prefixes = before  # as if the server did not know what an extra_key is
        assert "keeps what old weights computed" in await off(from_disk, other)
        await from_disk.push(other, 3)
        assert await off(from_disk, other) == ""

    runner.run(scenario())
