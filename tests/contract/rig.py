"""What pushes are tested on: a real agent with real engines, the real publisher and learner, and a trainer rank in a
thread, whose model is not trained but changed by hand."""

import asyncio
import json
import os
import queue
import resource
import threading
import urllib.error
import urllib.request
from pathlib import Path

import torch

from runtime.comm import commands as c
from runtime.comm.weights.channels import make_sender
from runtime.comm.weights.tensors import digest
from runtime.config import DataSet, Sync
from runtime.fleet import Fleet
from runtime.learner import Learner
from runtime.publish import Publisher
from runtime.rollout.agent import Settings, serve
from runtime.rollout.scoring import RewardPool
from runtime.rollout.spawning import Spawner
from runtime.rollout.start import EngineSettings, EngineStart
from runtime.topology import EngineSlot, RankSlot, Topology
from runtime.trainer import worker
from runtime.turns import Turns
from tests.contract.live import manifest_of

HOST = "127.0.0.1"
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

    def stop(self):
        self._commands.put(c.StopTrainer())


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
        self.mailbox, self.spawner, self.worlds = Mailbox(), Engines(), []
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
        self.worlds.append(world)
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
        for world in self.worlds:
            world.stop()
        self.fleet.stop()
        self.thread.join(30)
        self.rewards.close()
        self.spawner.close()
