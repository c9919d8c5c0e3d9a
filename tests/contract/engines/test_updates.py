"""New weights, whole and broken; the last of these tests ends some engines."""

import asyncio
import contextlib
import time

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from runtime.comm.weights.broadcast import BroadcastSender
from runtime.errors import EngineLost, WaitTimeout
from tests.contract.engines.asking import mid_flight, params, post, prompts, reference
from tests.contract.live import SLOTS, off, perturbed


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_update_in_mid_request_is_told_to_the_token(live, runner, model, mode):
    async def scenario():
        versions = iter(range(2, 100))
        pushed = {1: model}
        asked = prompts(5)

        async def update():
            version = next(versions)
            pushed[version] = perturbed(model, version)
            await live.push(pushed[version], version, mode)

        done = await mid_flight(
            lambda: [live.engine.generate(p, params(250, seed=i)) for i, p in enumerate(asked)],
            update,
            lambda c: len(c.versions) == 2 and c.versions[1][0] < 250,
        )
        for prompt, c in zip(asked, done, strict=True):
            (first, old), (start, new) = c.versions
            assert first == 0 and 0 < start < 250 and new == old + 1
            expected = reference(pushed[old], prompt, c.tokens)
            np.testing.assert_allclose(c.logprobs[:start], expected[:start], atol=1e-4)
            if mode == "retract":
                expected = reference(pushed[new], prompt, c.tokens)
            else:
                change = start + live.promises.num_in_flight
                expected[change:] = kept_cache(pushed[old], pushed[new], prompt, c.tokens, change)
            np.testing.assert_allclose(c.logprobs[start:], expected[start:], atol=1e-4)

    runner.run(scenario())


def kept_cache(old, new, prompt, tokens, start):
    """Log-probs of tokens[start:] where keys and values up to the last token before it were made by the old weights."""
    ids = torch.tensor([[*prompt, *tokens]])
    edge = len(prompt) + start - 1
    cache = DynamicCache(config=old.config)
    old(ids[:, :edge], past_key_values=cache, use_cache=True)
    logits = new(ids[:, edge:], past_key_values=cache, use_cache=True).logits[0, :-1].log_softmax(-1)
    return logits.gather(-1, ids[0, edge + 1 :, None])[:, 0].numpy()


def test_nothing_computed_by_old_weights_outlives_an_update(live, runner, model):
    async def scenario():
        shared = [11, 12, 13, 14, 15]
        checks = "digests" in (await live.engine.describe()).can
        for version, mode in ((2, "abort"), (3, "retract"), (4, "in_place")):
            await live.engine.generate(shared, params(4))
            other = perturbed(model, version)
            digests = await live.push(other, version, mode)
            assert not checks or (await live.engine.checksums()).items() >= digests.items()
            assert await off(live, other) == ""
            assert "log-probs of the canary are up to" in await off(live, perturbed(other, 0, 1e-3))
            c = await live.engine.generate(shared, params(8))
            assert c.versions == ((0, version),)
            np.testing.assert_allclose(c.logprobs, reference(other, shared, c.tokens), atol=1e-4)

    runner.run(scenario())


def test_updates_that_are_not_whole_are_refused_or_found_out_until_one_is(live, runner, model):
    new = perturbed(model, 7)
    whole = dict(new.named_parameters())
    name = "model.norm.weight"
    broken = {
        "no weight named": {("nonsense" if n == name else n): t for n, t in whole.items()},
        "were not sent: model.norm": {n: t for n, t in whole.items() if n != name},
        "shape": {n: (t[:-1] if n == name else t) for n, t in whole.items()},
        "bfloat16": {n: (t.bfloat16() if n == name else t) for n, t in whole.items()},
    }

    async def scenario():
        for reason, tensors in broken.items():
            await live.engine.pause("retract")
            if live.promises.is_strict:
                with pytest.raises(EngineLost, match=reason):
                    await live.send(tensors, 7, bucket_bytes=1 << 24)
                await post(live, "/end_weight_update", "{}")
                with pytest.raises(EngineLost, match="not whole"):
                    await live.engine.resume()
                assert (await live.engine.describe()).version == -1
            else:
                with contextlib.suppress(EngineLost):
                    await live.send(tensors, 7, bucket_bytes=1 << 24)
                await live.engine.resume()
                assert await off(live, new), f"weights passed of which a tensor fails by {reason!r}"
            await live.rejoin()
        await live.engine.pause("retract")
        tied = whole | {"lm_head.weight": whole["model.embed_tokens.weight"]}
        await live.send(tied, 8)
        await live.engine.resume()
        assert await off(live, new) == ""
        assert (await live.engine.generate([5], params(3))).versions == ((0, 8),)

    runner.run(scenario())


def test_updates_outside_their_place_are_refused(live, runner):
    body = '{"names": [], "dtypes": [], "shapes": [], "load_format": "flattened_bucket"}'

    async def scenario():
        status, answer = await post(live, "/update_weights_from_distributed", body)
        assert status == 400 and "between begin_weight_update() and end_weight_update()" in answer
        assert (await post(live, "/end_weight_update", "{}"))[0] == 400
        if live.promises.is_strict:
            status, answer = await post(live, "/begin_weight_update", "{}")
            assert status == 400 and "paused" in answer
        with pytest.raises(EngineLost, match=r"nonsense|not exist"):
            await live.engine.disconnect("nonsense")
        assert len((await live.engine.generate([5], params(3))).tokens) == 3

    runner.run(scenario())


def test_a_member_that_never_comes_is_named_and_the_others_go_on(live, runner, model):
    async def scenario():
        sender = BroadcastSender("127.0.0.1", "gloo", device="cpu", timeout_s=2.0)
        address = sender.open(f"{live.name}-three", 3)
        joining = asyncio.create_task(live.engine.connect(address, 1))
        with pytest.raises(WaitTimeout, match=r"for rank 2:"):
            await asyncio.to_thread(sender.join, address.name)
        sender.close(address.name)
        with pytest.raises(EngineLost, match="init_weights_update_group"):
            await asyncio.wait_for(joining, 10)
        await live.rejoin()
        await live.push(model, 2)
        assert (await live.engine.generate([5], params(3))).versions == ((0, 2),)

    runner.run(scenario())


def test_a_flipped_bit_shows_in_the_checksums(live, runner, model):
    async def scenario():
        await live.push(model, 5)
        before = await live.engine.checksums()
        name = "model.layers.1.mlp.up_proj.weight"
        flipped = {n: t.clone() for n, t in model.named_parameters()}
        flipped[name].view(torch.int32)[0, 0] ^= 1
        await live.engine.pause("retract")
        await live.send(flipped, 6)
        held = await live.engine.checksums()
        assert held.keys() == before.keys()
        assert [n for n in held if held[n] != before[n]] == [live.promises.holds_as(name)]
        await live.engine.resume()

    runner.run(scenario())


def test_weights_that_give_nan_are_found_out_or_end_the_engine_and_nothing_hangs(live, runner, model):
    async def scenario():
        start = time.monotonic()
        await live.engine.pause("retract")
        await live.send({n: t * torch.nan for n, t in model.named_parameters()}, 9)
        await live.engine.resume()
        if not live.promises.is_strict:
            assert "up to nan off" in await off(live, model)
            return
        done = await asyncio.gather(
            *(live.engine.generate(p, params()) for p in prompts(SLOTS + 4)), return_exceptions=True
        )
        assert all(isinstance(e, EngineLost) for e in done) and "500" in str(done[0]) and "NaN" in str(done[0])
        while await live.engine.health():
            await asyncio.sleep(0.05)
        ended = await asyncio.wait_for(live._spawner.exits.get(), 10)
        assert ended == (live.name, 1) and time.monotonic() - start < 20

    runner.run(scenario())
