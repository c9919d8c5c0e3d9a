"""Servers that somebody else runs: what they may answer, who else may push to them, and when they are given up."""

import asyncio
import contextlib
import json

import pytest
from aiohttp import web

from runtime.comm.messages import Commit, Connect, EngineDown, EngineReady, Receive, Restart, Work
from runtime.errors import EngineLost, Unauthorized
from runtime.rollout import external
from runtime.rollout.engines import _dialect, _wire
from runtime.rollout.engines._dialect import DialectClient
from runtime.types import Manifest, SamplingParams
from tests.unit.agents import GROUP, MANIFEST, drive, finished, lease
from tests.unit.fakes import CANARY, WEIGHTS

__all__ = ["drive"]

ADDRESS = "http://elsewhere:7"
FOLDER = Manifest(names=(), dtypes=(), shapes=(), bucket_bytes=1, via="folder")
HTML = "<html>It works!</html>"
DEEP = '{"too_deep": ' + "[" * 90_000


class Server:
    """Speaks as much of the dialect as a push and a completion need."""

    def __init__(self):
        self.answers, self.asked, self.version, self.status = {}, [], "default", 200
        """By path, instead of its own; a text of None never ends."""

    async def start(self):
        app = web.Application()
        app.router.add_route("*", "/{path}", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def answer(self, request):
        path, body = request.path, await request.read()
        self.asked.append(path)
        if self.answers.get(path):
            status, text = self.answers[path]
            if text is not None:
                return web.Response(text=text, status=status)
            endless = web.StreamResponse(status=status)
            await endless.prepare(request)
            while True:
                await endless.write(b" " * 10000)
        made = {"model_path": "m", "weight_version": self.version}
        if path == "/update_weights_from_disk":
            self.version = json.loads(body)["weight_version"]
        if path == "/generate":
            made = {"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 7, None]]}}
            made["meta_info"]["weight_version"] = self.version
        return web.json_response(made, status=self.status)


@contextlib.asynccontextmanager
async def served(num_clients=1):
    server = Server()
    await server.start()
    clients = [DialectClient(url=server.url, token="t", timeout_s=5) for _ in range(num_clients)]
    try:
        yield server, *clients
    finally:
        for client in clients:
            await client.close()
        await server.runner.cleanup()


def test_what_another_run_pushed_is_not_taken_for_this_runs():
    async def scenario():
        async with served(2) as (server, one, other):
            await one.receive(FOLDER, 3, "folder")
            assert (await one.describe()).version == 3
            assert (await one.generate([1], SamplingParams())).versions == ((0, 3),)
            await other.receive(FOLDER, 3, "folder")
            assert (await one.describe()).version == -1 and (await other.describe()).version == 3
            with pytest.raises(EngineLost, match=rf"{server.url}/generate: .* another run pushed .* of its own"):
                await one.generate([1], SamplingParams())
            assert one._prefixes != other._prefixes, "one would find what the other's weights computed"
            server.version = "default"  # it was started anew
            assert (await one.generate([1], SamplingParams())).versions == ((0, -1),)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/model_info", lambda engine: engine.describe()),
        ("/server_info", lambda engine: engine.describe()),
        ("/weights_checker", lambda engine: engine.checksums()),
        ("/generate", lambda engine: engine.generate([1], SamplingParams())),
    ],
)
def test_answers_of_something_else_name_the_address(path, call, monkeypatch):
    strange = {"meta_info": {"finish_reason": {"type": "content_filter"}}, "model_path": 3, "ranks": 1, "tp_size": ""}

    async def scenario():
        async with served() as (server, engine):
            for text in (HTML, json.dumps(strange), DEEP):
                server.answers[path] = 200, text
                with pytest.raises(EngineLost, match=rf"{server.url}{path}: answered what no engine"):
                    await call(engine)
            server.answers[path] = 200, None
            with pytest.raises(EngineLost, match=rf"{server.url}{path}: .* more than 100,000 bytes"):
                await call(engine)
            server.answers[path] = 403, "no"
            with pytest.raises(Unauthorized, match=rf"{server.url}{path}: status 403: .* see token_file"):
                await call(engine)

    monkeypatch.setattr(_wire, "_ANSWER_BYTES", 100_000)

    asyncio.run(scenario())


@pytest.mark.parametrize("size", ["dp_size", "pp_size"])
def test_a_server_with_ranks_that_no_group_reaches_says_so(size):
    async def scenario():
        async with served() as (server, engine):
            await engine.describe()
            await engine.connect(GROUP, 1)
            server.answers["/server_info"] = 200, json.dumps({size: 2})
            await engine.describe()
            with pytest.raises(EngineLost, match=r"pipeline-parallel ranks, which .* sync.channel: disk"):
                await engine.connect(GROUP, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_has_too_much_to_do_is_asked_again_as_long_as_a_call_may_take(status, monkeypatch):
    async def scenario():
        async with served() as (server, engine):
            server.answers["/generate"] = status, "the queue is full"
            asked = asyncio.create_task(engine.generate([1], SamplingParams()))
            while server.asked.count("/generate") < 3:
                await asyncio.sleep(0.01)
            del server.answers["/generate"]
            assert (await asked).tokens.tolist() == [7]
            server.answers["/generate"], engine._timeout_s = (status, "the queue is full"), 0.1
            with pytest.raises(EngineLost, match=f"status {status}: the queue is full"):
                await engine.generate([1], SamplingParams())

    monkeypatch.setattr(_dialect, "_BUSY_S", 0.01)
    asyncio.run(asyncio.wait_for(scenario(), 5))


# ---- an agent with one of its own, and one that somebody else runs


def test_why_one_does_not_answer_is_told(drive, caplog):
    async def no():
        return False

    async def scenario(bench):
        bench.kind.prepare = lambda engine: (setattr(engine, "health", no), setattr(engine, "describe", fails))
        while not caplog.messages:
            await asyncio.sleep(0.01)
        assert caplog.messages[0].startswith(f"engine 0 at {ADDRESS} does not answer well (refused): the run goes on")

    drive(scenario, stops=False, num_engines=0, others=[("policy", ADDRESS)])


async def fails(*_, **__):
    raise EngineLost("refused")


async def receive(bench, engine):
    """A push to one engine up to its commit; why it failed."""
    assert (await bench.ask(Connect, address=GROUP, ranks={engine: engine + 1})).failures == {}
    order = {"source": GROUP.name, "manifest": MANIFEST, "version": 1, "engines": (engine,)}
    return (await bench.ask(Receive, **order)).failures


async def ready(bench, engine):
    while (await bench.until(EngineReady)).engine != engine:
        pass


@pytest.mark.parametrize("what", ["pause", "receive"])
def test_one_that_refuses_pushes_leaves_their_group_and_is_given_up_until_it_is_restarted(drive, monkeypatch, what):
    async def scenario(bench):
        await ready(bench, 1)
        await bench.publish(0, (0,))
        bench.kind.prepare = lambda engine: setattr(engine, what, fails)
        setattr(bench.engine(7), what, fails)
        for i in (1, 2, 3):
            assert await receive(bench, 1) == {1: "refused"}
            assert bench.engine(7).groups == [], "the others of the group would wait for it"
            bench.mailbox.tell(Work(leases=(lease(i),)))
            await finished(bench, 1)  # says nothing of this one
            bench.mailbox.tell(Restart(engines=(1,), reason="refused"))
            down = await bench.until(EngineDown)
            assert (down.engine, down.restarts, down.is_given_up) == (1, i, i == 3)
            if i < 3:
                await ready(bench, 1)
        assert (
            bench.mailbox.seen[EngineDown][-1].reason
            == f"refused; engine 1 at {ADDRESS} is left out until its server is restarted"
        )
        await asyncio.sleep(0.2)
        assert not bench.agent.done() and bench.mailbox._out.empty(), "it is not tried again as it is"
        bench.kind.prepare = lambda engine: None
        bench.engine(7).answers = False
        await ready(bench, 1)
        await bench.publish(1, (0, 1))

    monkeypatch.setattr(external, "POLL_S", 0.01)
    drive(scenario, num_engines=1, others=[("policy", ADDRESS)])


def test_one_that_takes_every_other_push_is_of_no_use(drive, monkeypatch):
    """As where another run pushes to it too."""

    async def scenario(bench):
        for num_pushes, is_given_up in ((1, False), (1, False), (2, False), (1, False), (1, True)):
            await ready(bench, 0)
            for _ in range(num_pushes):
                await bench.publish(1, (0,))
            bench.mailbox.tell(Restart(engines=(0,), reason="another run"))
            assert (await bench.until(EngineDown)).is_given_up == is_given_up

    monkeypatch.setattr(external, "POLL_S", 0.01)
    drive(scenario, num_engines=0, others=[("policy", ADDRESS)])


def test_one_that_wants_another_token_is_given_up_when_it_says_so_again_and_again(drive, monkeypatch):
    """A single refusal may be a slip."""
    refuses = iter([True, True, False, True, True, True])

    async def describe():
        raise Unauthorized("see token_file")

    async def scenario(bench):
        bench.kind.prepare = lambda engine: setattr(engine, "describe", describe) if next(refuses) else None
        for _ in range(2):
            assert not (await bench.until(EngineDown)).is_given_up
        await ready(bench, 0)
        bench.mailbox.tell(Restart(engines=(0,), reason="a test"))
        downs = [await bench.until(EngineDown) for _ in range(4)]
        assert [down.is_given_up for down in downs] == [False, False, False, True]
        assert downs[-1].reason.startswith("see token_file; engine 0 at http://elsewhere:7 is left out")

    monkeypatch.setattr(external, "POLL_S", 0.01)
    drive(scenario, num_engines=0, others=[("policy", ADDRESS)], restarts=9)


def test_weights_of_another_run_are_no_mismatch(drive, monkeypatch):
    """The trainer and this engine are well."""

    async def scenario(bench):
        await ready(bench, 0)
        assert await receive(bench, 0) == {}
        engine = bench.engine(7)
        engine.held, engine.version = {}, -1
        reply = await bench.ask(Commit, version=1, digests=WEIGHTS, canary=CANARY, engines=(0,))
        assert reply.mismatched == {} and "another run pushes to it" in reply.failures[0]

    drive(scenario, stops=False, num_engines=0, others=[("policy", ADDRESS)])


@pytest.mark.parametrize(("text", "problem"), [("two\nlines", "holds 2 words"), (None, "cannot be read")])
def test_a_token_that_is_none(tmp_path, text, problem):
    file = tmp_path / "token"
    if text:
        file.write_text(text)
    with pytest.raises(EngineLost, match=f"token file {file} {problem}"):
        external._token(str(file))
    file.write_text(" one \n")
    assert external._token(str(file)) == "one" and external._token("") == ""
