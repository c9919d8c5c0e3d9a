"""A real SGLang that stands on two nodes: two agents on this machine, each with a process tree of it."""

import asyncio
import os
import queue
import signal
import threading
from types import SimpleNamespace

import msgspec
import pytest
import torch

from runtime.comm import messages as m
from runtime.config import DataSet
from runtime.fleet import Fleet
from runtime.rollout.agent import serve
from runtime.rollout.scoring import RewardPool
from runtime.topology import EngineSlot, RankSlot, Topology
from tests.contract.live import make_model, session_of, sglang_kind
from tests.contract.rig import START_S, Engines, Mailbox, Rig, Trainer
from tests.contract.test_agent_live import wait

RANKS = (0, 2)
"""Of the agents."""
TOPOLOGY = Topology(
    nodes=("a", "b"),
    ranks=(
        RankSlot(rank=0, node=0, local_rank=0, role="agent", device=None),
        RankSlot(rank=1, node=0, local_rank=1, role="trainer", device=None),
        RankSlot(rank=2, node=1, local_rank=0, role="agent", device=None),
    ),
    engines=(EngineSlot(id=0, model="policy", nodes=(0, 1), gpus=()),),
)


class Mailboxes(Mailbox):
    """The controller's end of several, whose agents' ends are `ends`."""

    def __init__(self):
        super().__init__()
        self._queues = {rank: asyncio.Queue() for rank in RANKS}
        self._heard = queue.SimpleQueue()
        self.ends = [
            SimpleNamespace(send=lambda message, r=rank: self._heard.put((r, message)), next=self._queues[rank].get)
            for rank in RANKS
        ]

    def send(self, rank, message):
        self.sent.append((rank, message))
        self.loop.call_soon_threadsafe(self._queues[rank].put_nowait, message)

    def receive(self, timeout_s):
        try:
            return self._heard.get(timeout=timeout_s) if timeout_s else self._heard.get_nowait()
        except queue.Empty:
            return None


class WideRig(Rig):
    def __init__(self, folder, model):
        self.folder, self.model, self.trainer, self.version, self.engines = folder, model, Trainer(model), 0, {0}
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text("secret")
        self.mailbox, self.spawners, self.events = Mailboxes(), [Engines() for _ in RANKS], []
        self.spawner, self.worlds = self.spawners[0], []
        datasets = {"math": DataSet(path="none")}
        self.pools = [RewardPool.start(datasets, 1, 5.0) for _ in RANKS]
        self.fleet = Fleet(TOPOLOGY, self.mailbox, lambda kind, _, why: self.events.append((kind, why)))
        parts = []
        for node, (end, spawner, rewards) in enumerate(zip(self.mailbox.ends, self.spawners, self.pools, strict=True)):
            spawner.pids, spawner.ports = {}, {}
            settings = msgspec.structs.replace(self.settings(datasets), node=node, rank=RANKS[node])
            start = msgspec.structs.replace(settings.engines[0], num_ranks=2, num_nodes=2, node_rank=node)
            settings = msgspec.structs.replace(settings, engines=(start,))
            parts.append(serve(settings, end, spawner, {"policy": sglang_kind()}, rewards))
        together = asyncio.wait([self.mailbox.loop.create_task(part) for part in parts])
        self.thread = threading.Thread(target=self.mailbox.loop.run_until_complete, args=(together,), daemon=True)
        self.thread.start()
        self.fleet.wait_engines(START_S)

    def processes(self):
        """Of each node."""
        return [session_of(spawner.pids[0]) for spawner in self.spawners]

    def agrees(self):
        """Whether what it generates has the log-probs of the trainer's weights."""
        params = {"max_new_tokens": 8, "ignore_eos": True}
        asked = {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True}
        made = self.ask(0, "/generate", asked)["meta_info"]["output_token_logprobs"]
        tokens = torch.tensor([[5, 6, 7, *(token for _, token, _ in made)]])
        logits = torch.func.functional_call(self.model, self.trainer.tensors, (tokens,)).logits[0, 2:-1]
        wanted = logits.log_softmax(-1).gather(-1, tokens[0, 3:, None])[:, 0]
        return len(made) == 8 and torch.allclose(torch.tensor([p for p, _, _ in made]), wanted, atol=1e-4)

    def close(self):
        for world in self.worlds:
            world.stop()
        self.fleet.stop()
        self.thread.join(30)
        for closed in (*self.pools, *self.spawners):
            closed.close()


@pytest.mark.long
def test_an_engine_on_two_nodes_takes_weights_and_is_lost_and_back_as_a_whole(tmp_path):
    rig = WideRig(tmp_path, make_model(tmp_path))
    try:
        for channel in ("broadcast", "delta", "disk", "ipc", "ipc in turns"):
            publisher = rig.publisher(channel, takes_turns="turns" in channel)
            for _ in range(2):
                rig.trainer.step()
                publisher.make_room()
                assert rig.publish(publisher) == {0}
                assert rig.agrees(), channel
            publisher.close()
        assert rig.fleet.num_ranks(0) == 2
        for lost in (1, 0):
            before = rig.processes()
            assert all(len(processes) >= 2 for processes in before)
            os.kill(rig.spawners[lost].pids[0], signal.SIGKILL)
            assert wait(lambda: rig.fleet.pump(0.1) or rig.events[-1][0] == "engine_down", 20)
            rig.fleet.wait_engines(START_S)
            left = [pid for node in rig.processes() for pid in node if pid in {p for b in before for p in b}]
            assert not left, "of the parts that were lost"
            publisher = rig.publisher("broadcast")
            assert rig.publish(publisher) == {0} and rig.agrees()
            publisher.close()
        assert "its part on node 1 of its own was killed by signal 9" in rig.events[1][1]
        assert [kind for kind, _ in rig.events] == ["engine_ready", *["engine_down", "engine_ready"] * 2]
        assert len({message.start for _, message in rig.mailbox.sent if isinstance(message, m.EngineBegun)}) == 3
        last = [pid for node in rig.processes() for pid in node]
    finally:
        rig.close()
    assert not [pid for spawner in rig.spawners for pid in session_of(spawner.pids[0])], last
