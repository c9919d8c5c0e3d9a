"""Real SGLangs of which one computes prompts and one decodes: pushed to, sampled from and lost like any other engine.

A decode engine computes no prompt, so an answer with the right log-probs proves that the prompt's keys and values came.
"""

import asyncio
import os
import signal
import time

import msgspec
import numpy as np
import pytest
import torch

from runtime.rollout.pool import Pool, Running
from runtime.rollout.proof import off_canary, off_prefill
from runtime.topology import Kind
from runtime.trainer.base import Scores
from runtime.types import Canary, Lease, Prompt, SamplingParams
from tests.contract.live import logprobs_of, make_model, perturbed, session_of, sglang_kind
from tests.contract.rig import START_S, Rig
from tests.contract.test_agent_live import samples_of, wait

PREFILL, DECODE = 0, 1
KINDS: dict[int, Kind] = {PREFILL: "prefill", DECODE: "decode"}
CHANNELS = ("broadcast", "delta", "disk", "ipc")

pytestmark = pytest.mark.long


class SplitRig(Rig):
    def settings(self, datasets):
        settings = super().settings(datasets)
        engines = tuple(msgspec.structs.replace(start, kind=KINDS[start.id]) for start in settings.engines)
        engine = msgspec.structs.replace(settings.engine, pause="abort", deterministic=True)
        return msgspec.structs.replace(settings, engines=engines, engine=engine, max_concurrent=32)

    def proving(self, channel):
        """A publisher whose pushes are proved by the canary, as the trainer's model computes it."""
        publisher = self.publisher(channel)
        publisher._proof = tuple(range(20, 50))
        self.trainer.score = lambda batches, *_, **__: [
            Scores(logprobs=torch.from_numpy(logprobs_of(self.policy(), b.tokens.tolist()))) for b in batches
        ]
        return publisher

    def policy(self):
        """The trainer's weights as a model."""
        policy = perturbed(self.model, 0, 0.0)
        for name, p in policy.named_parameters():
            p.copy_(self.trainer.tensors[name])
        return policy

    def begin(self, num_leases=4, num_samples=4, num_tokens=24):
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        made = [
            Lease(
                number=n,
                prompt=Prompt(id=f"math:{n}", tokens=tuple(range(7, 12 + 9 * n)), dataset="math", answer="1"),
                version=self.version,
                num_samples=num_samples,
                params=params,
            )
            for n in range(num_leases)
        ]
        self.fleet.lease(made)
        return len(made)

    def finish(self, num_leases, limit_s=START_S):
        end, done = time.monotonic() + limit_s, []
        while len(done) < num_leases:
            assert time.monotonic() < end, "groups were not finished"
            done += self.fleet.poll(0.5)
        return samples_of(done)

    def kill(self, engine):
        """Its server, and wait for word of it."""
        seen = self.fleet.starts(engine)
        killed = self.spawner.pids[engine]
        os.kill(killed, signal.SIGKILL)
        assert wait(lambda: self.fleet.pump(0.1) or engine not in self.fleet.alive(), 20)
        assert wait(lambda: not session_of(killed), 10)
        return seen


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    rig = SplitRig(folder, make_model(folder), sglang_kind(), engines={PREFILL, DECODE})
    yield rig
    rig.close()


def check(samples, models):
    """Whether their log-probs are those of the version that each token is stamped with."""
    for s in samples:
        assert s.status != "failed", s.reason
        starts = [at for at, _ in s.versions] + [len(s.tokens)]
        for (start, version), end in zip(s.versions, starts[1:], strict=True):
            at = slice(max(start, int(np.argmax(s.loss_mask))), end)
            wanted = logprobs_of(models[version], s.tokens.tolist())
            np.testing.assert_allclose(s.logprobs[at], wanted[at], atol=1e-4)


@pytest.mark.parametrize("channel", CHANNELS)
def test_both_take_weights_over_every_channel_and_answer_together(rig, channel):
    publisher = rig.proving(channel)
    for _ in range(2):
        rig.trainer.step()
        assert rig.publish(publisher) == {PREFILL, DECODE}
        samples = rig.finish(rig.begin())
        assert len(samples) == 16 and all(s.loss_mask.sum() == 24 for s in samples)
        assert {version for s in samples for _, version in s.versions} == {rig.version}
        check(samples, {rig.version: rig.policy()})
    publisher.close()


def test_answers_that_a_push_meets_go_on_with_the_new_weights(rig):
    publisher = rig.proving("broadcast")
    assert rig.publish(publisher) == {PREFILL, DECODE}
    models = {rig.version: rig.policy()}
    for attempt in range(6):
        number = rig.begin(8, 4, num_tokens=160)
        time.sleep(0.2 + 0.3 * attempt)
        rig.trainer.step()
        assert rig.publish(publisher) == {PREFILL, DECODE}
        models[rig.version] = rig.policy()
        samples = rig.finish(number)
        assert all(s.loss_mask.sum() == 160 for s in samples)
        check(samples, models)
        if any(len(s.versions) > 1 for s in samples):
            break
    else:
        raise AssertionError("no answer was met between its first and last token")
    publisher.close()


@pytest.mark.parametrize("lost", [PREFILL, DECODE])
def test_the_loss_of_either_changes_no_answer_and_is_that_of_no_other(rig, lost):
    publisher, other = rig.proving("broadcast"), DECODE - lost
    assert rig.publish(publisher) == {PREFILL, DECODE}
    undisturbed = rig.finish(rig.begin(8, 4, num_tokens=64))
    stays = rig.fleet.starts(other)
    number = rig.begin(8, 4, num_tokens=64)
    time.sleep(0.3)
    rig.kill(lost)
    rig.fleet.wait_engines(START_S)
    assert publisher.publish(rig.version, {lost}) == {lost}
    disturbed = rig.finish(number)
    assert rig.fleet.starts(other) == stays, "the other one went on"
    for one, another in zip(disturbed, undisturbed, strict=True):
        assert one.tokens.tolist() == another.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, another.logprobs, atol=1e-4)
    publisher.close()


def test_a_decode_engine_with_other_weights_is_found_out_by_its_prefill_engine(rig):
    """The last of this module: it leaves the engine with them."""
    publisher = rig.proving("broadcast")
    assert rig.publish(publisher) == {PREFILL, DECODE}
    other = rig.folder / "other"
    perturbed(rig.policy(), 3).save_pretrained(other)
    tokens = tuple(range(20, 50))
    canary = Canary(tokens=tokens, logprobs=logprobs_of(rig.policy(), tokens))

    async def proofs():
        token, kind, pool = "secret", sglang_kind(), Pool(5.0)
        urls = [f"http://127.0.0.1:{rig.spawner.ports[e]}" for e in (PREFILL, DECODE)]
        first = kind.client(url=urls[0], token=token, timeout_s=30)
        second = kind.fed_by(pool).client(url=urls[1], token=token, timeout_s=30)
        for engine in (first, second):
            await engine.describe()
        pool.admit(Running(0, first, asyncio.get_running_loop().create_future()))
        found = await off_canary(first, canary, "float32"), await off_prefill(second, canary, "float32")
        for engine in (first, second):
            await engine.close()
        return found

    assert asyncio.run(proofs()) == ("", "")
    rig.ask(DECODE, "/update_weights_from_disk", {"model_path": str(other), "load_format": "safetensors"})
    held, decodes = asyncio.run(proofs())
    assert held == "" and "decodes with other weights than its prefill engine holds" in decodes
    publisher.close()
