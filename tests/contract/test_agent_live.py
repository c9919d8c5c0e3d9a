"""An agent with the real spawner, a real engine and real weight groups: the engine is killed in mid-generation."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from runtime.comm.messages import Commit, Connect, EngineDown, EngineReady, Finished, Receive, Reply, StopAgent, Work
from runtime.comm.weights import BroadcastSender
from runtime.config import DataSet
from runtime.rollout.agent import Settings, serve
from runtime.rollout.engines import embedded
from runtime.rollout.keeper import EngineSettings, EngineStart
from runtime.rollout.process import Spawner
from runtime.rollout.scoring import RewardPool
from runtime.types import Lease, Prompt, SamplingParams
from tests.contract.live import MAX_LENGTH, SLOTS, make_model, manifest_of
from tests.unit.fakes import FakeMailbox, save_tokenizer

NUM_LEASES, NUM_SAMPLES = 8, 8
DATASETS = {"math": DataSet(path="none")}


class Controller:
    """The controller's and the trainer's side of one agent with one engine."""

    def __init__(self, model, mailbox):
        self._tensors, self._mailbox = dict(model.named_parameters()), mailbox
        self._sender = BroadcastSender("127.0.0.1", "gloo", device="cpu", timeout_s=30)
        self._groups = 0

    async def until(self, kind):
        return await self._mailbox.until(kind, 60)

    async def publish(self, version):
        self._groups += 1
        name, manifest = f"weights-{self._groups}", manifest_of(self._tensors)
        address = self._sender.open(name, 2)
        self._mailbox.tell(Connect(request=1, address=address, ranks={0: 1}))
        await asyncio.to_thread(self._sender.join, name)
        assert (await self.until(Reply)).failures == {}
        self._mailbox.tell(Receive(request=2, group=name, manifest=manifest, version=version, engines=(0,)))
        digests = await asyncio.to_thread(self._sender.push, name, manifest, iter(self._tensors.items()))
        assert (await self.until(Reply)).failures == {}
        self._mailbox.tell(Commit(request=3, version=version, digests=digests, engines=(0,)))
        reply = await self.until(Reply)
        assert (reply.failures, reply.mismatched) == ({}, {})

    def close(self):
        self._sender.close(f"weights-{self._groups}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("agent")


@pytest.fixture(scope="module")
def model(folder):
    save_tokenizer(folder)
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text("a" * 32)
    return make_model(folder)


def settings(folder):
    path = str(folder)
    return Settings(
        node=0,
        rank=0,
        seed=0,
        datasets=DATASETS,
        tokenizer=path,
        max_concurrent=32,
        wait_s=60.0,
        engines=(EngineStart(id=0, model="policy", path=path, env=dict(os.environ)),),
        engine=EngineSettings(
            host="127.0.0.1",
            log_dir=path,
            token_file=str(folder / "token"),
            dtype="float32",
            threads=1,
            deterministic=True,
            pause="retract",
            call_s=60.0,
            order_s=60.0,
            start_s=60.0,
            silence_s=30.0,
            restarts=1,
        ),
    )


def engine_pid(folder):
    """The process whose command line names our token file."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and str(folder / "token").encode() in (entry / "cmdline").read_bytes():
            return int(entry.name)
    raise AssertionError("no engine runs")


def begin_leases(mailbox):
    prompts = [Prompt(id=f"math:{n}", tokens=(7, 8, 9 + n), dataset="math", answer="1") for n in range(NUM_LEASES)]
    params = SamplingParams(max_new_tokens=128, ignore_eos=True)
    leases = [
        Lease(number=n, prompt=prompt, version=0, num_samples=NUM_SAMPLES, params=params)
        for n, prompt in enumerate(prompts)
    ]
    mailbox.tell(Work(leases=tuple(leases)))


def exact(groups):
    return {
        f.group.lease: [(s.tokens.tobytes(), s.logprobs.tobytes(), s.versions, s.reward) for s in f.group.samples]
        for f in groups
    }


def test_a_killed_engine_changes_no_bit(folder, model):
    """The groups of an engine that is killed and replaced are those that its successor makes undisturbed."""
    kind = embedded.build(embedded.Config(slots=SLOTS, max_length=MAX_LENGTH))
    spawner, rewards = Spawner(), RewardPool.start(DATASETS, 1, 5.0)

    async def scenario():
        mailbox = FakeMailbox()
        controller = Controller(model, mailbox)
        agent = asyncio.create_task(serve(settings(folder), mailbox, spawner, kind, rewards))
        await controller.until(EngineReady)
        await controller.publish(0)
        begin_leases(mailbox)
        disturbed = [await controller.until(Finished)]
        os.kill(engine_pid(folder), signal.SIGKILL)
        down = await controller.until(EngineDown)
        assert "was killed by signal 9" in down.reason
        controller.close()
        await controller.until(EngineReady)
        await controller.publish(0)
        disturbed += [await controller.until(Finished) for _ in range(NUM_LEASES - 1)]
        begin_leases(mailbox)
        undisturbed = [await controller.until(Finished) for _ in range(NUM_LEASES)]
        assert exact(disturbed) == exact(undisturbed)
        mailbox.tell(StopAgent())
        await asyncio.wait_for(agent, 30)
        controller.close()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 120))
    finally:
        rewards.close()
        spawner.close()
    with pytest.raises(AssertionError, match="no engine runs"):
        engine_pid(folder)
