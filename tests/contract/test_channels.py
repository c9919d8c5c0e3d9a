"""What every weight channel must do: a real agent with two real engines, pushed to by the real publisher, learner and
trainer rank. Only the model that is trained is none."""

import asyncio
import json
import os
import queue
import resource
import signal
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from runtime import publish
from runtime.comm import messages as m
from runtime.comm.rendezvous import Group
from runtime.comm.weights.channels import make_sender
from runtime.comm.weights.folder import FolderSender
from runtime.comm.weights.tensors import digest
from runtime.config import DataSet, Sync
from runtime.errors import WeightMismatch
from runtime.fleet import Fleet
from runtime.learner import Learner
from runtime.publish import Publisher
from runtime.rollout.agent import Settings, serve
from runtime.rollout.engines import embedded
from runtime.rollout.keeper import EngineSettings, EngineStart
from runtime.rollout.process import Spawner
from runtime.rollout.scoring import RewardPool
from runtime.topology import EngineSlot, RankSlot, Topology
from runtime.trainer import worker
from runtime.turns import Turns
from tests.contract.live import make_model, manifest_of

HOST = "127.0.0.1"
CHANNELS = ("broadcast", "delta", "delta through a folder", "disk", "ipc")
WITH_A_DEATH = ("delta", "disk")
"""One over a group and one through a folder: an engine's start takes longer than all the rest."""
START_S = 200.0
"""For engines to start, on a machine that is busy with more than these tests."""
ENGINES = {0, 1}


def topology_of(engines):
    return Topology(
        nodes=("here",),
        ranks=(
            RankSlot(rank=0, node=0, local_rank=0, role="agent", device=None),
            RankSlot(rank=1, node=0, local_rank=1, role="trainer", device=None),
        ),
        engines=tuple(EngineSlot(id=i, model="policy", nodes=(0,), gpus=()) for i in sorted(engines)),
    )


class Mailbox:
    """Both ends in one process, each in a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.sent = []
        """What the controller said."""
        self._to_agent = asyncio.Queue()
        self._to_controller = queue.SimpleQueue()

    def send(self, *words):
        if len(words) == 1:
            self._to_controller.put(words[0])
        else:
            self.sent.append(words[1])
            self.loop.call_soon_threadsafe(self._to_agent.put_nowait, words[1])

    async def next(self):
        return await self._to_agent.get()

    def receive(self, timeout_s):
        try:
            return 0, self._to_controller.get(timeout=timeout_s) if timeout_s else self._to_controller.get_nowait()
        except queue.Empty:
            return None


class Trainer:
    """Holds weights that change a little with each step."""

    def __init__(self, model):
        self.tensors = {name: p.clone() for name, p in model.named_parameters()}
        self.bucket_bytes = 1 << 16
        self.between = lambda: None
        """Called before the last weight is given."""

    def step(self):
        for tensor in self.tensors.values():
            tensor.view(-1)[:: 7 if tensor.dim() > 1 else 1] += 0.01

    def manifest(self):
        return manifest_of(self.tensors, self.bucket_bytes)

    def weights(self):
        for i, item in enumerate(self.tensors.items(), 1):
            if i == len(self.tensors):
                self.between()
            yield item

    def sleep(self):
        pass

    wake = sleep


class World:
    """One trainer rank, in a thread; the controller's end of its stream of commands."""

    def __init__(self, trainer, sender):
        self._commands, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
        settings = worker.Settings(device="cpu", timeout_s=600.0)
        threading.Thread(target=worker.serve, args=(self, trainer, None, sender, settings), daemon=True).start()

    def deal(self, messages, timeout_s):
        self._commands.put(messages[1])

    def poll(self, source, kind, timeout_s):
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def receive(self, timeout_s):
        return self._commands.get(timeout=timeout_s)

    def answer(self, answer):
        self._answers.put(answer)


class Engines(Spawner):
    """Knows where its engines are."""

    pids: dict
    ports: dict

    async def start(self, name, argv, env, log, host):
        started = await super().start(name, argv, env, log, host)
        id = int(name.removeprefix("engine-").partition(".")[0])
        self.pids[id], self.ports[id] = started.pid, started.port
        return started


class Rig:
    """The agent, its engines, and the controller's view of them."""

    def __init__(self, folder, model, kind, engines=ENGINES):
        self.folder, self.model, self.trainer, self.version = folder, model, Trainer(model), 0
        self.engines = engines
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text("secret")
        self.mailbox, self.spawner = Mailbox(), Engines()
        self.spawner.pids, self.spawner.ports = {}, {}
        datasets = {"math": DataSet(path="none")}
        self.rewards = RewardPool.start(datasets, 1, 5.0)
        self.fleet = Fleet(topology_of(engines), self.mailbox)
        serving = serve(self.settings(datasets), self.mailbox, self.spawner, {"policy": kind}, self.rewards)
        self.thread = threading.Thread(target=self.mailbox.loop.run_until_complete, args=(serving,), daemon=True)
        self.thread.start()
        self.fleet.wait_engines(START_S)

    def settings(self, datasets):
        path = str(self.folder)
        return Settings(
            node=0,
            rank=0,
            seed=0,
            datasets=datasets,
            tokenizer=path,
            max_concurrent=4,
            wait_s=START_S,
            engines=tuple(EngineStart(id=i, model="policy", path=path, env=dict(os.environ)) for i in self.engines),
            engine=EngineSettings(
                host=HOST,
                log_dir=path,
                token_file=str(self.folder / "token"),
                dtype="float32",
                threads=1,
                deterministic=False,
                pause="retract",
                call_s=60.0,
                order_s=30.0,
                start_s=START_S,
                silence_s=30.0,
                restarts=100,
            ),
        )

    def publisher(self, channel, *, takes_turns=False):
        name = channel.partition(" ")[0]
        folder = str(self.folder / "versions") if channel not in ("broadcast", "delta") else ""
        sync = Sync(channel=name, folder=folder, timeout_s=30.0)
        world = World(self.trainer, make_sender(sync, HOST, torch.device("cpu")))
        learner = Learner(world, [1], [1], idle=lambda: self.fleet.pump(0.005))
        turns = Turns(self.fleet, learner, start_s=START_S, order_s=30.0) if takes_turns else None
        if turns:
            turns.is_trainers = False
        return Publisher(self.fleet, learner, sync, self.folder / "versions", turns=turns)

    def ask(self, engine, path, body):
        url = f"http://{HOST}:{self.spawner.ports[engine]}{path}"
        data = json.dumps(body).encode()
        headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10) as answer:
            return json.load(answer)

    def checksums(self, engine):
        return self.ask(engine, "/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]

    def memory(self, engine):
        """Bytes that its process has."""
        return int(Path(f"/proc/{self.spawner.pids[engine]}/statm").read_text().split()[1]) * resource.getpagesize()

    def publish(self, publisher):
        self.version += 1
        return publisher.publish(self.version, self.engines)

    def hold(self, engines=ENGINES):
        """Whether these engines hold the trainer's bytes."""
        wanted = {name: digest(tensor) for name, tensor in self.trainer.tensors.items()}
        return all(self.checksums(engine).items() >= wanted.items() for engine in engines)

    def told(self, kind):
        return [message for message in self.mailbox.sent if isinstance(message, kind)]

    def close(self):
        self.fleet.stop()
        self.thread.join(30)
        self.rewards.close()
        self.spawner.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    folder = tmp_path_factory.mktemp("channels")
    rig = Rig(folder, make_model(folder), embedded.build(embedded.Config(slots=256, max_length=512)))
    yield rig
    rig.close()


@pytest.fixture(scope="module", params=CHANNELS)
def channel(request):
    return request.param


@pytest.fixture(scope="module")
def publisher(rig, channel):
    """With one version pushed."""
    publisher = rig.publisher(channel)
    assert rig.publish(publisher) == ENGINES
    yield publisher
    publisher.close()
    assert not list((rig.folder / "versions").glob("*"))


def test_engines_hold_the_bytes_that_were_pushed(rig, channel, publisher):
    assert rig.hold()
    for _ in range(2):
        rig.trainer.step()
        assert not rig.hold()
        assert rig.publish(publisher) == ENGINES
        assert rig.hold()
    assert rig.told(m.Receive)[-1].manifest.kind == ("delta" if "delta" in channel else "full")


@pytest.mark.parametrize("channel", WITH_A_DEATH, indirect=True, scope="module")
def test_a_member_that_dies_in_a_push_is_named_and_the_other_gets_the_version(rig, channel, publisher, caplog):
    def kill():
        rig.trainer.between = lambda: None
        os.kill(rig.spawner.pids[1], signal.SIGKILL)

    rig.trainer.step()
    rig.trainer.between = kill
    assert rig.publish(publisher) == {0}
    assert rig.hold({0}) and "engine 1 left out of the push" in caplog.text
    rig.fleet.wait_engines(START_S)
    assert rig.fleet.fresh() == {1}
    assert publisher.publish(rig.version, {1}) == {1}
    assert rig.hold()
    rig.trainer.step()
    assert rig.publish(publisher) == ENGINES
    assert rig.hold()
    assert [r.manifest.kind for r in rig.told(m.Receive)[-2:]] == ["full", "delta" if "delta" in channel else "full"]


@contextmanager
def last_byte_flipped(trainer):
    """Of the first push meanwhile."""
    broadcast, write, ends = Group.broadcast, FolderSender._write, threading.Event()

    def flipped(self, tensor):
        if tensor.dtype == torch.uint8 and ends.is_set():
            tensor[-1] ^= 1
            trainer.between = lambda: None
            ends.clear()
        return broadcast(self, tensor)

    def spoiled(self, version, path, pieces):
        write(self, version, path, pieces)
        if not ends.is_set():
            return
        trainer.between = lambda: None
        ends.clear()
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))

    trainer.between = ends.set
    with mock.patch.object(Group, "broadcast", flipped), mock.patch.object(FolderSender, "_write", spoiled):
        yield


def test_a_byte_that_changes_on_its_way_is_found_and_its_tensor_named(rig, channel, publisher, caplog, monkeypatch):
    monkeypatch.setattr(publish, "WORD_S", 0.5)
    rig.trainer.step()
    last = list(rig.trainer.tensors)[-1]
    with last_byte_flipped(rig.trainer):
        if "delta" in channel:  # known before it is taken, so that everything can be pushed instead
            assert rig.publish(publisher) == ENGINES
            assert f"the delta of tensor '{last}' was damaged" in caplog.text
        else:
            with pytest.raises(WeightMismatch, match=f"other bytes than were sent in tensor {last}"):
                rig.publish(publisher)
            assert rig.publish(publisher) == ENGINES
    assert rig.hold()


def test_channels_are_rebuilt_without_end(rig, publisher):
    def resources():
        """Open files and sockets, shared memory, threads."""
        processes = [Path("/proc/self"), *(Path(f"/proc/{pid}") for pid in rig.spawner.pids.values())]
        open_files = [len(list((p / "fd").iterdir())) for p in processes]
        shared = [
            (p / "maps").read_text().count("memfd:") + (p / "maps").read_text().count("/dev/shm") for p in processes
        ]
        return open_files, shared, threading.active_count()

    counts = []
    for i in range(20):
        assert rig.publish(publisher) == ENGINES
        publisher.close()
        if i in (4, 19):
            counts.append(resources())
    assert counts[0] == counts[1]
    assert rig.hold()


def test_engines_sleep_and_generate_again_with_the_weights_that_come(rig):
    """Twice: bytes that were compared are as easily given back as others."""
    publisher = rig.publisher("ipc", takes_turns=True)
    asked = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
    for _ in range(2):
        rig.trainer.step()
        awake = rig.memory(0)
        publisher.make_room()
        assert awake - rig.memory(0) > 0.9 * 2 * 2 * 256 * 2 * 512 * 16 * 4, "keys and values of 2 layers, in float32"
        with pytest.raises(urllib.error.HTTPError, match="503"):
            rig.ask(0, "/generate", asked)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            rig.ask(0, "/continue_generation", {})
        assert rig.publish(publisher) == ENGINES
        assert rig.hold()
        made = rig.ask(0, "/generate", asked)["meta_info"]["output_token_logprobs"]
        tokens = torch.tensor([[5, 6, 7, *(token for _, token, _ in made)]])
        logits = torch.func.functional_call(rig.model, rig.trainer.tensors, (tokens,)).logits[0, 2:-1]
        wanted = logits.log_softmax(-1).gather(-1, tokens[0, 3:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([logprob for logprob, _, _ in made]), wanted, atol=1e-4, rtol=0)
    publisher.close()
