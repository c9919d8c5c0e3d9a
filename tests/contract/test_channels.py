"""What every weight channel must do: a real agent with two real engines, pushed to by the real publisher, learner and
trainer rank. Only the model that is trained is none."""

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch

from runtime import publish
from runtime.comm import messages as m
from runtime.comm.rendezvous import Group
from runtime.comm.weights import tensors
from runtime.comm.weights.folder import FolderSender
from runtime.errors import WeightMismatch
from runtime.rollout.engines import embedded
from tests.contract.live import make_model, refusing
from tests.contract.rig import ENGINES, START_S, Rig

CHANNELS = ("broadcast", "delta", "delta through a folder", "disk", "ipc")
WITH_A_DEATH = ("delta", "disk")
"""One over a group and one through a folder: an engine's start takes longer than all the rest."""


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


def test_no_digest_is_computed_that_nobody_compares(rig, channel, publisher, monkeypatch):
    monkeypatch.setattr(publisher, "_sync", msgspec.structs.replace(publisher._sync, verify=False))
    monkeypatch.setattr(tensors, "digest", None)
    rig.trainer.step()
    assert rig.publish(publisher) == ENGINES
    assert not rig.told(m.Commit)[-1].digests and rig.hold()


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


def test_one_that_refuses_to_join_costs_the_others_no_time(rig, caplog):
    """The last of this module: nobody waits until it is up again."""
    publisher, pid, start = rig.publisher("broadcast"), rig.spawner.pids[0], time.monotonic()
    rig.trainer.step()
    with refusing(rig.spawner.ports[1]):
        assert rig.publish(publisher) == {0}
    assert time.monotonic() - start < 10.0 and rig.spawner.pids[0] == pid and rig.hold({0})
    assert "engine 1 left out of the push: it refuses" in caplog.text
