"""The weight channels with the real SGLang at their end, held to the very bytes, though it fuses tensors: as
test_channels, without what is the same for every engine."""

import hashlib
import os
import signal
from pathlib import Path

import pytest
import torch

from runtime import publish
from runtime.comm import messages as m
from runtime.comm.weights.handles import SHARED
from runtime.trainer.base import Scores
from tests.contract.live import logprobs_of, make_model, perturbed, sglang_kind
from tests.contract.test_agent_live import session_of
from tests.contract.test_channels import START_S, Rig, last_byte_flipped

CHANNELS = ("broadcast", "delta", "delta through a folder", "disk", "ipc")
PADDED = 64
"""SGLang's vocabulary is a multiple of it."""

pytestmark = pytest.mark.timeout(500)


class SGLangRig(Rig):
    def wanted(self):
        """What the trainer's tensors are in SGLang, by its checksums."""
        parts = {}
        for name, tensor in self.trainer.tensors.items():
            for fused, pieces in {
                "qkv_proj": ("q_proj", "k_proj", "v_proj"),
                "gate_up_proj": ("gate_proj", "up_proj"),
            }.items():
                for piece in pieces:
                    name = name.replace(f".{piece}.", f".{fused}.")
            parts.setdefault(name, []).append(tensor)
        held = {name: torch.cat(tensors) for name, tensors in parts.items()}
        words = held["model.embed_tokens.weight"]
        held["model.embed_tokens.weight"] = torch.nn.functional.pad(words, (0, 0, 0, -len(words) % PADDED))
        return {name: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for name, t in held.items()}

    def hold(self, engines=None):
        wanted = self.wanted()
        return all(self.checksums(engine) == wanted for engine in engines or self.engines)

    def resources(self):
        """Open files, threads and mapped memory of this process and all of an engine's; what is in shared memory."""
        places = [Path(f"/proc/{pid}") for first in self.spawner.pids.values() for pid in session_of(first)]
        places = [Path("/proc/self"), *places]
        opened = sum(len([*p.joinpath("fd").iterdir(), *p.joinpath("task").iterdir()]) for p in places)
        return opened, sum((p / "maps").read_text().count("/torch_") for p in places), shared()


def shared():
    """Of the trainer rank, which is this process."""
    return set(SHARED.glob(f"torch_{os.getpid()}_*"))


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    folder = tmp_path_factory.mktemp("channels")
    rig = SGLangRig(folder, make_model(folder), sglang_kind(), engines={0})
    yield rig
    rig.close()


@pytest.fixture(scope="module", params=CHANNELS)
def channel(request):
    return request.param


@pytest.fixture(scope="module")
def publisher(rig, channel):
    """With one version pushed."""
    publisher = rig.publisher(channel)
    assert rig.publish(publisher) == {0}
    yield publisher
    publisher.close()


def test_engines_hold_the_bytes_that_were_pushed(rig, channel, publisher):
    assert rig.hold()
    for _ in range(2):
        rig.trainer.step()
        assert not rig.hold()
        assert rig.publish(publisher) == {0}
        assert rig.hold()
    if channel == "ipc":
        assert len({take.version for take in rig.told(m.Take)}) == 3 < len(rig.told(m.Take)), "bucket by bucket"
    else:
        assert rig.told(m.Receive)[-1].manifest.kind == ("delta" if "delta" in channel else "full")


@pytest.mark.parametrize("channel", ["delta", "delta through a folder"], indirect=True, scope="module")
def test_a_damaged_delta_is_refused_and_everything_pushed_to_the_same_process(
    rig, channel, publisher, caplog, monkeypatch
):
    monkeypatch.setattr(publish, "WORD_S", 0.5)
    rig.trainer.step()
    last, first = list(rig.trainer.tensors)[-1], dict(rig.spawner.pids)
    with last_byte_flipped(rig.trainer):
        assert rig.publish(publisher) == {0}
    assert f"the delta of tensor '{last}' was damaged" in caplog.text
    assert rig.hold() and rig.spawner.pids == first


def test_channels_are_rebuilt_without_end(rig, publisher):
    counts = []
    for i in range(10):
        assert rig.publish(publisher) == {0}
        publisher.close()
        if i in (4, 9):
            counts.append(rig.resources())
    assert counts[0] == counts[1]
    assert rig.hold()


def test_engines_sleep_and_generate_again_with_the_weights_that_come_by_handles(rig):
    """Twice. On a CPU SGLang says that it sleeps, and keeps its memory. The canary is the trainer's word."""
    publisher, policy = rig.publisher("ipc", takes_turns=True), perturbed(rig.model, 0, 0.0)
    publisher._canary = tuple(range(20, 50))

    def logprobs(tokens):
        for name, p in policy.named_parameters():
            p.copy_(rig.trainer.tensors[name])
        return torch.from_numpy(logprobs_of(policy, tokens))

    rig.trainer.score = lambda batches, *_, **__: [Scores(logprobs=logprobs(b.tokens.tolist())) for b in batches]
    asked = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
    for _ in range(2):
        rig.trainer.step()
        publisher.make_room()
        assert rig.publish(publisher) == {0}
        assert rig.hold()
        made = rig.ask(0, "/generate", asked)["meta_info"]["output_token_logprobs"]
        wanted = logprobs([5, 6, 7, *(token for _, token, _ in made)])[3:]
        torch.testing.assert_close(torch.tensor([logprob for logprob, _, _ in made]), wanted, atol=1e-4, rtol=0)
    publisher.close()


def test_a_member_that_dies_while_it_takes_a_bucket_leaves_nothing(rig, caplog):
    """The last of this module: nobody waits until it is up again."""
    publisher = rig.publisher("ipc")
    assert rig.publish(publisher) == {0}

    def kill():
        rig.trainer.between = lambda: None
        for pid in session_of(rig.spawner.pids[0]):
            os.kill(pid, signal.SIGKILL)
        assert shared()

    rig.trainer.between = kill
    assert rig.publish(publisher) == frozenset()
    assert "engine 0 left out of the push" in caplog.text and not shared()


@pytest.mark.long
def test_a_member_that_dies_in_a_push_is_named_and_the_other_gets_the_version(tmp_path, caplog):
    rig = SGLangRig(tmp_path, make_model(tmp_path), sglang_kind(), engines={0, 1})

    def kill():
        rig.trainer.between = lambda: None
        os.kill(rig.spawner.pids[1], signal.SIGKILL)

    try:
        for channel in ("broadcast", "delta", "disk", "ipc"):
            publisher = rig.publisher(channel)
            assert rig.publish(publisher) == {0, 1}
            rig.trainer.step()
            rig.trainer.between = kill
            assert rig.publish(publisher) == {0}
            assert rig.hold({0}) and "engine 1 left out of the push" in caplog.text
            rig.fleet.wait_engines(START_S)
            assert publisher.publish(rig.version, {1}) == {1}
            assert rig.hold()
            publisher.close()
    finally:
        rig.close()
