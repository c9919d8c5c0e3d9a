"""The weight channels with the real SGLang at their end, held to the very bytes, though it fuses tensors: as
test_channels, without what is the same for every engine."""

import hashlib
import os
import re
import signal
import tempfile
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig

from runtime import publish
from runtime.comm import messages as m
from runtime.comm.weights.handles import SHARED
from runtime.rollout.spawner import FOLDERS, LOOK_MOST_S, NAMES, left_by
from runtime.trainer.base import Scores
from tests.contract.live import EOS, VOCABULARY, fused, logprobs_of, made, perturbed, session_of, sglang_kind
from tests.contract.rig import START_S, Rig
from tests.contract.test_agent_live import wait
from tests.contract.test_channels import last_byte_flipped

CHANNELS = ("broadcast", "delta", "delta through a folder", "disk", "ipc")
PADDED = 64
"""SGLang's vocabulary is a multiple of it."""
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}


def make_mixture(folder):
    """As live.make_model, with experts, and with the output layer's own weights, which SGLang asks of such a model."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=0,
        architectures=["Qwen3MoeForCausalLM"],
    )
    return made(folder, config)


def make_latent(folder):
    """As DeepSeek-V3, of whose attention SGLang fuses two tensors; it asks for fields that transformers leaves out."""
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        rope_parameters=YARN,
        max_position_embeddings=512,
        eos_token_id=EOS,
        pad_token_id=0,
        architectures=["DeepseekV3ForCausalLM"],
        moe_layer_freq=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    )
    return made(folder, config)


def as_in_files(model):
    """(name, tensor): each expert by itself, as views of what transformers holds together."""
    biases = ((name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    for name, p in chain(model.named_parameters(), biases):
        layer, experts, of = name.partition(".experts.")
        if not experts:
            yield name, p
            continue
        pieces = ("gate_proj", "up_proj") if of == "gate_up_proj" else (of,)
        for i, expert in enumerate(p):
            for piece, tensor in zip(pieces, expert.chunk(len(pieces)), strict=True):
                yield f"{layer}.experts.{i}.{piece}.weight", tensor


def held_as(name):
    name = re.sub(r"experts\.\d+\.down_proj\.", "experts.w2_", name)
    return fused(re.sub(r"experts\.\d+\.(gate|up)_proj\.", "experts.w13_", name))


class SGLangRig(Rig):
    def __init__(self, folder, engines):
        model = make_mixture(folder)
        super().__init__(folder, model, sglang_kind(**{"moe-runner-backend": "triton"}), engines)
        self.trainer.tensors = {name: tensor.clone() for name, tensor in as_in_files(model)}

    def wanted(self):
        """What the trainer's tensors are in SGLang, by its checksums."""
        parts = {}
        for name, tensor in self.trainer.tensors.items():
            parts.setdefault(held_as(name), []).append(tensor)
        held = {name: torch.cat(tensors) for name, tensors in parts.items()}
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            held[name] = torch.nn.functional.pad(held[name], (0, 0, 0, -len(held[name]) % PADDED))
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


class LatentRig(Rig):
    """Of two ranks."""

    def __init__(self, folder):
        server = {"moe-runner-backend": "triton", "disable-shared-experts-fusion": True}
        model = make_latent(folder)
        super().__init__(folder, model, sglang_kind(**server), {0})
        self.trainer.tensors = {name: tensor.clone() for name, tensor in as_in_files(model)}

    def settings(self, datasets):
        settings = super().settings(datasets)
        engines = tuple(msgspec.structs.replace(start, num_ranks=2) for start in settings.engines)
        return msgspec.structs.replace(
            settings, engines=engines, engine=msgspec.structs.replace(settings.engine, threads=2)
        )


def shared():
    """Of the trainer rank, which is this process."""
    return set(SHARED.glob(f"torch_{os.getpid()}_*"))


def noted():
    """What spawners here have seen that will be left."""
    lines = (file.read_text().splitlines() for file in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*/{NAMES}"))
    return {Path(line) for line in chain.from_iterable(lines)}


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    folder = tmp_path_factory.mktemp("channels")
    rig = SGLangRig(folder, engines={0})
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
    publisher._proof = tuple(range(20, 50))

    def logprobs(tokens):
        for name, tensor in as_in_files(policy):
            tensor.copy_(rig.trainer.tensors[name])
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
    left = left_by(session_of(rig.spawner.pids[0]))
    assert left and wait(lambda: left <= noted(), LOOK_MOST_S + 10.0), "the spawner has not seen it"

    def kill():
        rig.trainer.between = lambda: None
        for pid in session_of(rig.spawner.pids[0]):
            os.kill(pid, signal.SIGKILL)
        assert shared()

    rig.trainer.between = kill
    assert rig.publish(publisher) == frozenset()
    assert "engine 0 left out of the push" in caplog.text and not shared()
    assert wait(lambda: not any(path.exists() for path in left), 10.0), "it left them in shared memory"


@pytest.mark.long
def test_a_member_that_dies_in_a_push_is_named_and_the_other_gets_the_version(tmp_path, caplog):
    rig = SGLangRig(tmp_path, engines={0, 1})

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


@pytest.mark.long
def test_what_sglang_fuses_of_latent_attention_comes_whole_to_both_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_LATENT_ATTENTION", "1")
    rig = LatentRig(tmp_path)
    policy, params = perturbed(rig.model, 0, 0.0), {"max_new_tokens": 16, "ignore_eos": True}
    asked = {"input_ids": list(range(20, 50)), "sampling_params": params, "return_logprob": True}
    try:
        for channel in CHANNELS:
            publisher = rig.publisher(channel)
            for seed in range(2):
                for tensor in rig.trainer.tensors.values():
                    changes = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
                    tensor += 0.02 * changes.where(changes > 1, 0)
                assert rig.publish(publisher) == {0}
                for name, tensor in as_in_files(policy):
                    tensor.copy_(rig.trainer.tensors[name])
                made = rig.ask(0, "/generate", asked)["meta_info"]["output_token_logprobs"]
                wanted = logprobs_of(policy, [*asked["input_ids"], *(token for _, token, _ in made)])[30:]
                np.testing.assert_allclose([logprob for logprob, _, _ in made], wanted, atol=1e-4, err_msg=channel)
            publisher.close()
    finally:
        rig.close()
