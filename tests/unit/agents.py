"""An agent under test, with engines that fail as they are told to."""

import asyncio
import itertools

import pytest

from runtime.comm.messages import Commit, Connect, EngineReady, Finished, Receive, Reply, StopAgent
from runtime.config import DataSet
from runtime.rollout import keeper
from runtime.rollout.agent import Settings, serve
from runtime.rollout.scoring import RewardPool
from runtime.rollout.start import EngineStart
from runtime.types import GroupAddress, Lease, Manifest, Prompt, SamplingParams
from tests.unit.fakes import CANARY, WEIGHTS, FakeKind, FakeMailbox, FakeSpawner, engine_settings, save_tokenizer

ASKS = DataSet(path="none", reward="tests.unit.plays", reward_options={"play": "asks"})
DATASETS = {"math": DataSet(path="none"), "judged": ASKS}
GROUP = GroupAddress(name="weights-1", host="127.0.0.1", port=1, world_size=3, backend="gloo")
MANIFEST = Manifest(names=tuple(WEIGHTS), dtypes=("float32",) * 3, shapes=((1,),) * 3, bucket_bytes=64)


class Bench:
    """An agent under test and the controller's side of it."""

    def __init__(self, folder, num_engines=2, others=(), **changes):
        """
        Args:
            others: (model, address) of further engines; the address is empty where they are started.
        """
        self.mailbox, self.spawner, self.kind = FakeMailbox(), FakeSpawner(), FakeKind()
        self.kinds = dict.fromkeys(("policy", "judge"), self.kind)
        (folder / "model").mkdir(exist_ok=True)
        save_tokenizer(folder / "model")
        self.settings = Settings(
            node=1,
            rank=3,
            seed=0,
            datasets=DATASETS,
            tokenizer=str(folder / "model"),
            max_concurrent=8,
            wait_s=5.0,
            engines=tuple(
                EngineStart(id=i, model=model, path=str(folder / "model"), env={}, url=url)
                for i, (model, url) in enumerate([*[("policy", "")] * num_engines, *others])
            ),
            asked={"judge": str(folder / "model")},
            engine=engine_settings(folder, **changes),
        )
        self.requests = itertools.count(1)

    def engine(self, start):
        """The engine of the `start`-th process, from 1."""
        return self.kind.engines[start]

    async def until(self, kind):
        """The next message of a kind; an agent that ends instead ends the test."""
        waiting = asyncio.create_task(self.mailbox.until(kind))
        await asyncio.wait([waiting, self.agent], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            self.agent.result()
        return await waiting

    async def ask(self, make, **fields):
        request = next(self.requests)
        self.mailbox.tell(make(request=request, **fields))
        reply = await self.until(Reply)
        assert reply.request == request
        return reply

    async def publish(self, version, engines=(0, 1), digests=WEIGHTS):
        made = [await self.ask(Connect, address=GROUP, ranks={e: e + 1 for e in engines})]
        made.append(await self.ask(Receive, source=GROUP.name, manifest=MANIFEST, version=version, engines=engines))
        made.append(await self.ask(Commit, version=version, digests=digests, canary=CANARY, engines=engines))
        assert [r.failures for r in made] == [{}, {}, {}]
        return made[-1].mismatched

    async def started(self, engines=(0, 1), version=0):
        for _ in engines:
            await self.until(EngineReady)
        assert await self.publish(version, engines) == {}


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Run a scenario against an agent; afterwards the agent stops when told to, and ends its engines."""
    monkeypatch.setattr(keeper, "PROBE_S", 0.05)
    monkeypatch.setattr(keeper, "EXIT_S", 0.02)

    def run(scenario, stops=True, **options):
        async def main():
            bench = Bench(tmp_path, **options)
            bench.agent = asyncio.create_task(serve(bench.settings, bench.mailbox, bench.spawner, bench.kinds, rewards))
            try:
                await scenario(bench)
                if stops:
                    bench.mailbox.tell(StopAgent())
                    await asyncio.wait_for(bench.agent, 5)
                    assert set(bench.spawner.stopped) >= {f"engine-{e.id}.1" for e in bench.settings.engines}
            finally:
                bench.agent.cancel()

        rewards = RewardPool.start(DATASETS, 1, 5.0)
        try:
            asyncio.run(asyncio.wait_for(main(), 20))
        finally:
            rewards.close()

    return run


def lease(number, num_samples=4, dataset="math", **fields):
    prompt = Prompt(id=f"{dataset}:{number}", tokens=(1, 2, 3), dataset=dataset, answer="x")
    made = {"version": 0, "params": SamplingParams(max_new_tokens=6), "num_samples": num_samples} | fields
    return Lease(number=number, prompt=prompt, **made)


def streams(finished):
    return {f.group.lease: [s.tokens.tolist() for s in f.group.samples] for f in finished}


async def finished(bench, n):
    return [await bench.until(Finished) for _ in range(n)]
