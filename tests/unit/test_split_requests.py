"""A request that a prefill and a decode engine answer together: who is asked, and whose loss it is when it fails."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from runtime.errors import EngineLost
from runtime.rollout.engines import _sglang_client
from runtime.rollout.engines._sglang_client import SGLangClient
from runtime.rollout.pool import Pool, Running
from runtime.types import Manifest, SamplingParams


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(_sglang_client, "WORD_S", 0.1)


@dataclass
class Server:
    """Speaks as much of the dialect as a request for two needs."""

    mode: str
    does: list = field(default_factory=list)
    """What it does at each request; after these it answers."""
    asked: list = field(default_factory=list)
    given_up: int = 0
    version: str = "default"

    async def start(self):
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/pause_generation", self.pause)
        app.router.add_get("/model_info", self.info)
        app.router.add_get("/server_info", self.info)
        app.router.add_post("/update_weights_from_disk", self.update)
        self.paused = asyncio.Event()
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def say(self, what, status=200):
        return web.json_response(what, status=status)

    async def info(self, _):
        return await self.say({"disaggregation_mode": self.mode, "disaggregation_bootstrap_port": 4321})

    async def pause(self, _):
        self.paused.set()
        return await self.say({})

    async def update(self, request):
        self.asked.append(await request.json())
        return await self.say({})

    async def generate(self, request):
        self.asked.append(await request.json())
        match self.does.pop(0) if self.does else "answers":
            case "fails":
                return await self.say("KV transfer failed", 500)
            case "refuses":
                return await self.say("too long", 400)
            case "breaks":
                request.transport.abort()
            case "hangs":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.given_up += 1
            case "fails when paused":
                await self.paused.wait()
                return await self.say("aborted", 500)
            case "aborts when paused":
                await self.paused.wait()
                return await self.say({"meta_info": {"finish_reason": {"type": "abort"}}})
            case "answers when paused":
                await self.paused.wait()
            case "aborts":
                return await self.say({"meta_info": {"finish_reason": {"type": "abort"}}})
        made = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-1.0, 7, None]],
            "weight_version": self.version,
        }
        made["input_token_logprobs"] = [[None, 5, None], [-2.0, 6, None]]
        return await self.say({"meta_info": made})


@contextlib.asynccontextmanager
async def split(prefills, decode):
    """The client of a decode engine, and what its pool knows of each prefill engine."""
    pool, running = Pool(5.0), []
    async with contextlib.AsyncExitStack() as stack:

        async def client(server, **prefills):
            await server.start()
            stack.push_async_callback(server.runner.cleanup)
            engine = SGLangClient(url=server.url, token="", timeout_s=5, **prefills)
            stack.push_async_callback(engine.close)
            await engine.describe()
            return engine

        for i, server in enumerate(prefills):
            running.append(Running(i, await client(server), asyncio.get_running_loop().create_future()))
            pool.admit(running[-1])
        yield await client(decode, prefills=pool), running


@pytest.mark.parametrize(
    ("prefill", "decode", "outcome", "is_lost"),
    [
        ([], [], [7], False),
        (["fails"], ["hangs"], [7], True),
        (["breaks"], ["hangs"], [7], True),
        (["aborts"], ["hangs"], [7], True),
        (["hangs"], ["fails"], [7], True),
        ([], ["fails"], [7], True),
        (["hangs"], ["breaks"], EngineLost, False),
        (["fails"], ["breaks"], EngineLost, False),
        (["refuses"], ["hangs"], ValueError, False),
        (["hangs"], ["refuses"], ValueError, False),
    ],
)
def test_a_request_for_two_fails_for_the_one_whose_fault_it_is(prefill, decode, outcome, is_lost):
    async def scenario():
        first, second, other = Server("prefill", [*prefill]), Server("prefill"), Server("decode", [*decode])
        async with split([first, second], other) as (engine, running):
            other.version = engine._stamp(3)
            if isinstance(outcome, list):
                params = SamplingParams(max_new_tokens=1, seed=1)
                made = await engine.generate([5, 6], params)
                if is_lost:
                    assert (len(made.tokens), made.versions, made.finish) == (0, (), "abort")
                    made = await engine.generate([5, 6], params)
                assert (made.tokens.tolist(), made.finish, made.versions) == (outcome, "length", ((0, 3),))
            else:
                with pytest.raises(outcome):
                    await engine.generate([5, 6], SamplingParams(max_new_tokens=1, seed=1))
            assert [r.is_lost for r in running] == [is_lost, False] and [r.load for r in running] == [0, 0]
            keys = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "input_ids", "sampling_params")
            prompts, answers = (
                [[a[key] for key in keys] for a in s] for s in (first.asked + second.asked, other.asked)
            )
            assert prompts == answers and len(answers) == 1 + is_lost
            assert len({a[2] for a in answers}) == len(answers), "a number of its own each time"
            assert all(a[:2] == ["127.0.0.1", 4321] for a in answers)
            for _ in range(100):
                if first.given_up + other.given_up == sum("hangs" in does for does in (prefill, decode)):
                    break
                await asyncio.sleep(0.02)
            else:
                raise AssertionError("a request was left to hang")

    asyncio.run(asyncio.wait_for(scenario(), 15))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("fails when paused", "hangs"),
        ("hangs", "fails when paused"),
        ("hangs", "aborts when paused"),
        ("answers", "answers when paused"),
    ],
)
def test_what_a_pause_ends_is_nobodys_fault(prefill, decode):
    """What is answered after it, by new weights, may stand on a prompt that the old ones computed."""

    async def scenario():
        servers = Server("prefill", [prefill]), Server("decode", [decode])
        async with split(servers[:1], servers[1]) as (engine, (running,)):
            engine._prefixes, servers[1].version = engine._stamp(3), engine._stamp(4)
            made = asyncio.create_task(engine.generate([5, 6], SamplingParams(max_new_tokens=1)))
            while not all(s.asked for s in servers):
                await asyncio.sleep(0.01)
            await (running.engine if prefill.startswith("fails") else engine).pause("abort")
            made = await asyncio.wait_for(made, 3.0)  # not as long as one of the two takes to give it up
            assert (len(made.tokens), made.versions, made.finish) == (0, (), "abort") and not running.is_lost

    asyncio.run(asyncio.wait_for(scenario(), 15))


def test_prompts_are_scored_by_a_prefill_engine_if_there_is_one():
    async def scenario():
        prefill, decode = Server("prefill"), Server("decode")
        async with split([prefill], decode) as (engine, (running,)):
            assert (await engine.score([5, 6])).tolist() == [0.0, -2.0]
            assert prefill.asked[0]["bootstrap_host"] == "2.2.2.2" and not decode.asked
            prefill.does.append("breaks")
            with pytest.raises(ValueError, match="was lost"):
                await engine.score([5, 6])
            assert running.is_lost
            with pytest.raises(ValueError, match="no prefill engine"):
                await engine.score([5, 6])

    asyncio.run(asyncio.wait_for(scenario(), 15))


@pytest.mark.parametrize(("mode", "flushes"), [("null", True), ("prefill", False), ("decode", False)])
def test_a_push_empties_no_cache_that_an_aborted_request_may_hold(mode, flushes):
    """SGLang would refuse, and not stamp what it samples with the new version."""
    manifest = Manifest(names=("w",), dtypes=("float32",), shapes=((1,),), bucket_bytes=4, via="folder")

    async def scenario():
        server = Server(mode)
        async with split([], server) as (engine, _):
            await engine.pause("abort")
            await engine.receive(manifest, 1, "folder")
        assert server.asked[0]["flush_cache"] == flushes

    asyncio.run(asyncio.wait_for(scenario(), 15))
