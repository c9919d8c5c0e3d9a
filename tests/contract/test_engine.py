"""What every engine must do, asked over HTTP of real processes; each kind starts once for all cases."""

import asyncio
import contextlib
import json
import time

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from transformers import DynamicCache

from runtime.comm.weights.broadcast import BroadcastSender
from runtime.comm.weights.delta import Kept
from runtime.comm.weights.folder import FolderSender
from runtime.comm.weights.handles import Lender
from runtime.errors import EngineLost, WaitTimeout
from runtime.rollout.embedded.decoder import Decoder
from runtime.rollout.process import Spawner
from runtime.types import SamplingParams
from tests.contract.live import (
    EOS,
    MAX_LENGTH,
    SLOTS,
    VOCABULARY,
    Kind,
    Live,
    kinds_of_engine,
    make_model,
    off,
    perturbed,
    sglang_kind,
)
from tests.unit.fakes import save_tokenizer

KINDS = kinds_of_engine()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """Other weights, and the folder a run would end with."""
    folder = tmp_path_factory.mktemp("export")
    other = perturbed(model, 11)
    other.save_pretrained(folder)
    save_tokenizer(folder)
    return other, folder


@pytest.fixture(scope="module")
def lives(runner, model, exported, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    model.config.save_pretrained(folder)
    save_tokenizer(folder)
    spawner = Spawner()
    lives = {name: Live(name, kind, spawner, folder) for name, kind in KINDS.items()}
    from_disk = Kind(kind=sglang_kind(**{"load-format": "auto"}), deterministic=False, num_ranks=2)
    lives["from disk"] = Live("from disk", from_disk, spawner, exported[1], kept=Kept())

    async def start():
        await asyncio.gather(*(live.start() for live in lives.values()))

    async def close():
        for live in lives.values():
            await live.close()

    try:
        runner.run(start())
        yield lives
        runner.run(close())
    finally:
        spawner.close()


@pytest.fixture(params=KINDS, scope="module")
def fresh(request, lives):
    """Before its first weights."""
    return lives[request.param]


async def hand_version_1(live, model):
    if (await live.engine.describe()).version == -1:
        await live.join()
    await live.push(model, 1)


@pytest.fixture
def live(fresh, runner, model):
    """With version 1 of the weights, which are `model`'s."""
    runner.run(hand_version_1(fresh, model))
    return fresh


@pytest.fixture
def from_disk(lives, runner, model):
    """An SGLang of two ranks that read `exported` and was then pushed version 1. It keeps prefixes, knows no seeds."""
    live = lives["from disk"]
    if not hasattr(live, "checksums_from_disk"):
        live.checksums_from_disk = runner.run(live.engine.checksums())
    runner.run(hand_version_1(live, model))
    return live


def params(n=40, *, seed=0, **more):
    return SamplingParams(max_new_tokens=n, seed=seed, ignore_eos=more.pop("ignore_eos", True), **more)


def prompts(n, first=0):
    """Of many lengths, all different."""
    return [[(7 * i + 11 * j) % 150 + 3 for j in range(1 + (5 * i) % 40)] for i in range(first, first + n)]


def reference(model, prompt, tokens, p=None, past=0):
    """[n] log-probs of tokens after prompt, of the distribution that p samples from, by a plain forward."""
    p = p or SamplingParams()
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    logits = logits / (p.temperature or 1.0)
    if p.top_k > 0:
        logits[logits < logits.topk(p.top_k).values[:, -1:]] = -torch.inf
    if p.top_p < 1:
        chances, order = logits.softmax(-1).sort(descending=True)
        outside = chances.cumsum(-1) - chances >= p.top_p
        logits[torch.zeros_like(outside).scatter(-1, order, outside)] = -torch.inf
    picked = torch.tensor(np.asarray(tokens), dtype=torch.long)[:, None]
    return logits.log_softmax(-1).gather(-1, picked)[:, 0].numpy()


async def post(live, path, body, token=None):
    headers = {"Authorization": f"Bearer {token or live.token}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(live.url + path, data=body) as answer:
        return answer.status, await answer.text()


async def mid_flight(start, disturb, is_mid):
    """Disturb running requests until it met them between their first and last token."""
    for attempt in range(12):
        running = asyncio.gather(*start())
        await asyncio.sleep(0.02 * 1.6**attempt)
        await disturb()
        done = await running
        if all(is_mid(c) for c in done):
            return done
    raise AssertionError("the requests were never met in mid-flight")


def test_nothing_is_generated_before_weights_came(fresh, runner):
    async def scenario():
        assert (await fresh.engine.describe()).version == -1
        if fresh.promises.is_strict:
            with pytest.raises(EngineLost, match=r"503.*no weights"):
                await fresh.engine.generate([5, 6], params())
        else:
            assert (await fresh.engine.generate([5, 6], params())).versions == ((0, -1),)

    runner.run(scenario())


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 1.3, "top_k": 20, "top_p": 0.9}]
)
def test_logprobs_are_of_the_distribution_sampled_from(live, runner, model, how):
    async def scenario():
        asked = [(prompt, params(30, seed=i, **how)) for i, prompt in enumerate(prompts(12))]
        for (prompt, p), c in zip(asked, await asyncio.gather(*(live.engine.generate(*a) for a in asked)), strict=True):
            assert len(c.tokens) == len(c.logprobs) == 30 and c.finish == "length" and c.versions == ((0, 1),)
            cut = reference(model, prompt, c.tokens, p)
            for alone in (SamplingParams(top_k=p.top_k), SamplingParams(temperature=p.temperature, top_p=p.top_p)):
                given = reference(model, prompt, c.tokens, alone)
                assert np.isfinite(given).all(), "a token was sampled that top-k or top-p exclude"
            whole = reference(model, prompt, c.tokens, SamplingParams(temperature=p.temperature))
            np.testing.assert_allclose(c.logprobs, cut if live.promises.cuts_logprobs else whole, atol=1e-4)

    runner.run(scenario())


def test_samples_follow_the_probabilities(live, runner, model):
    async def scenario():
        drawn = await asyncio.gather(*(live.engine.generate([9, 8, 7], params(1, seed=i)) for i in range(800)))
        counts = np.bincount([c.tokens[0] for c in drawn], minlength=VOCABULARY)
        chances = model(torch.tensor([[9, 8, 7]])).logits[0, -1].softmax(-1).numpy()
        expected = 800 * chances
        big = expected >= 8
        distance = ((counts - expected)[big] ** 2 / expected[big]).sum()
        assert big.sum() > 5 and distance < big.sum() + 5 * np.sqrt(2 * big.sum()), (distance, big.sum())

    runner.run(scenario())


def test_greedy_is_what_transformers_generates(live, runner, model):
    async def scenario():
        asked = prompts(6)
        done = await asyncio.gather(*(live.engine.generate(p, params(50, temperature=0.0)) for p in asked))
        for prompt, c in zip(asked, done, strict=True):
            out = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=50, eos_token_id=None, pad_token_id=0
            )
            assert c.tokens.tolist() == out[0, len(prompt) :].tolist()
            np.testing.assert_allclose(c.logprobs, reference(model, prompt, c.tokens), atol=1e-4)

    runner.run(scenario())


def test_answers_depend_on_the_seed_alone_not_on_neighbours(live, runner):
    async def scenario():
        crowd = [(prompt, params(20 + 3 * i, seed=i)) for i, prompt in enumerate(prompts(3 * SLOTS))]
        together = await asyncio.gather(*(live.engine.generate(*a) for a in crowd))
        backwards = await asyncio.gather(*(live.engine.generate(*a) for a in crowd[::-1]))
        for i in (0, 7, SLOTS - 1, 2 * SLOTS + 1):
            alone = await live.engine.generate(*crowd[i])
            for other in (together[i], backwards[-1 - i]):
                assert alone.tokens.tolist() == other.tokens.tolist()
                if live.promises.repeats_bits:
                    assert alone.logprobs.tobytes() == other.logprobs.tobytes()
        other_seed = await live.engine.generate(crowd[7][0], params(41, seed=1000))
        assert other_seed.tokens.tolist() != together[7].tokens.tolist()

    runner.run(scenario())


def test_end_of_sequence_ends_an_answer_unless_ignored(live, runner):
    async def scenario():
        asked = [(prompt, i) for i, prompt in enumerate(prompts(12))]
        stops = await asyncio.gather(
            *(live.engine.generate(p, params(200, seed=i, ignore_eos=False)) for p, i in asked)
        )
        goes_on = await asyncio.gather(*(live.engine.generate(p, params(200, seed=i)) for p, i in asked))
        assert {"stop", "length"} >= {c.finish for c in stops} and "stop" in {c.finish for c in stops}
        for short, long in zip(stops, goes_on, strict=True):
            assert len(long.tokens) == 200 and long.finish == "length"
            end = long.tokens.tolist().index(EOS) + 1 if EOS in long.tokens else 200
            assert short.tokens.tolist() == long.tokens[:end].tolist()
            assert short.finish == ("stop" if short.tokens[-1] == EOS else "length")

    runner.run(scenario())


def test_length_is_bounded_and_bad_requests_are_refused(live, runner):
    async def scenario():
        full = await live.engine.generate([5] * (MAX_LENGTH - 8), params(100))
        assert 6 <= len(full.tokens) <= 8 and full.finish == "length"  # SGLang leaves two places empty
        for tokens in ([5] * (MAX_LENGTH + 1), *([[], [VOCABULARY]] if live.promises.is_strict else [])):
            with pytest.raises(ValueError, match=rf"the engine refused {len(tokens)} tokens: .*(tokens|input|vocab)"):
                await live.engine.generate(tokens, params())
        for field in ('"nonsense": 1', '"top_p": 0', '"temperature": -1', '"max_new_tokens": -1'):
            body = f'{{"input_ids": [5], "sampling_params": {{{field}}}}}'
            status, answer = await post(live, "/generate", body)
            assert status == 400 and field.split('"')[1] in answer

    runner.run(scenario())


def test_token_is_checked_before_the_body_is_parsed(live, runner):
    async def scenario():
        for path in ("/generate", "/pause_generation", "/weights_checker"):
            assert (await post(live, path, "{not json", token="wrong"))[0] == 401
            assert (await post(live, path, "{not json"))[0] == 400

    runner.run(scenario())


def test_pause_abort_keeps_partial_answers(live, runner):
    async def scenario():
        asked = [(prompt, params(250, seed=i)) for i, prompt in enumerate(prompts(6))]
        full = await asyncio.gather(*(live.engine.generate(*a) for a in asked))

        async def disturb():
            await live.engine.pause("abort")
            await live.engine.resume()

        partial = await mid_flight(
            lambda: [live.engine.generate(*a) for a in asked], disturb, lambda c: 0 < len(c.tokens) < 250
        )
        for part, whole in zip(partial, full, strict=True):
            assert part.finish == "abort"
            assert part.tokens.tolist() == whole.tokens[: len(part.tokens)].tolist()

    runner.run(scenario())


def test_abort_request_ends_one_and_leaves_the_others(live, runner):
    async def scenario():
        one = '{"input_ids": [5, 6], "rid": "one", "sampling_params": {"max_new_tokens": 300, "ignore_eos": true}}'
        for attempt in range(12):
            other = asyncio.create_task(live.engine.generate([5, 6, 7], params(250)))
            aborted = asyncio.create_task(post(live, "/generate", one))
            await asyncio.sleep(0.02 * 1.6**attempt)
            assert (await post(live, "/abort_request", '{"rid": "one"}'))[0] == 200
            assert (await other).finish == "length"
            status, answer = await aborted
            if status == 200 and '"abort"' in answer and '"output_ids":[]' not in answer:
                return
        raise AssertionError("no partial answer came back")

    runner.run(scenario())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_and_resume_change_no_answer(live, runner, mode):
    async def scenario():
        asked = [(prompt, params(250, seed=i)) for i, prompt in enumerate(prompts(SLOTS + 4))]
        undisturbed = await asyncio.gather(*(live.engine.generate(*a) for a in asked))
        running = asyncio.gather(*(live.engine.generate(*a) for a in asked))
        await asyncio.sleep(0.1)
        await live.engine.pause(mode)
        late = asyncio.create_task(live.engine.generate([5], params(2)))
        flushed = (await post(live, "/flush_cache", ""))[0]
        await asyncio.sleep(0.3)
        assert not late.done() and not running.done(), "generation went on during a pause"
        assert mode == "retract" or flushed == 400, "a cache that is in use was flushed"
        await live.engine.resume()
        for before, after in zip(undisturbed, await running, strict=True):
            assert before.tokens.tolist() == after.tokens.tolist()
            np.testing.assert_allclose(before.logprobs, after.logprobs, atol=1e-4)
        assert len((await late).tokens) == 2

    runner.run(scenario())


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


def test_pushed_weights_are_those_that_a_fresh_sglang_reads_from_the_export(from_disk, runner, exported):
    """To the bit, in each of its ranks, whichever way they came."""
    live, wanted = from_disk, exported[0]
    other = perturbed(wanted, 0, 0.0)
    for tensor in other.parameters():
        tensor.view(-1)[::7] += 0.01

    async def scenario():
        assert (await live.engine.describe()).num_ranks == 2
        folder = FolderSender(kept=Kept())
        ways = {
            "broadcast": lambda version: live.push(wanted, version),
            "delta": lambda version: live.push(wanted, version, base=version - 1),
            "disk": lambda version: live.push_through_folder(folder, wanted, version),
            "ipc": lambda version: live.push_by_handles([Lender(CPU), Lender(CPU)], wanted, version),
            "delta through a folder": lambda version: live.push_through_folder(folder, wanted, version, version - 1),
        }
        for i, (way, push) in enumerate(ways.items(), 1):
            if way == "delta through a folder":
                await live.push_through_folder(folder, other, 2 * i)
            else:
                await live.push(other, 2 * i)
            assert await live.engine.checksums() != live.checksums_from_disk
            await push(2 * i + 1)
            assert await live.engine.checksums() == live.checksums_from_disk, way
            assert await off(live, wanted) == "", way
        await live.engine.pause("retract")
        with pytest.raises(EngineLost, match="the delta is of version 1, this engine holds"):
            await live.send(dict(other.named_parameters()), 99, base=1)
        await live.engine.resume()
        await live.rejoin()
        assert await live.engine.checksums() == live.checksums_from_disk, "nothing of it was taken"
        tokens = (await live.engine.generate([5, 6, 7], params(8))).tokens
        scored = await live.engine.score([5, 6, 7, *tokens], 3)
        np.testing.assert_allclose(scored, reference(wanted, [5, 6, 7], tokens), atol=1e-4)

    runner.run(scenario())


def test_prefixes_that_old_weights_computed_are_not_reused(from_disk, runner, model):
    """Also while a request keeps its cache, so that nothing can be flushed."""
    prompt = list(range(60, 100))

    async def scenario():
        engine, other = from_disk.engine, perturbed(model, 2)
        await engine.generate(prompt, params(1))
        body = msgspec.json.encode({"input_ids": prompt, "extra_key": "1", "sampling_params": {"max_new_tokens": 1}})
        assert json.loads((await post(from_disk, "/generate", body))[1])["meta_info"]["cached_tokens"] >= 30
        running = asyncio.create_task(engine.generate([5, 6], params(60)))
        await asyncio.sleep(0.2)
        await from_disk.push(other, 2, "in_place")
        c = await engine.generate(prompt, params(8))
        np.testing.assert_allclose(c.logprobs, reference(other, prompt, c.tokens), atol=1e-4)
        assert [version for _, version in (await running).versions] == [1, 2], "it was no longer running"

    runner.run(scenario())


def test_a_cache_of_old_weights_is_found_out(from_disk, runner, model):
    async def scenario():
        other = perturbed(model, 2)
        assert await off(from_disk, model) == ""
        await from_disk.push(other, 2, "in_place")
        from_disk.engine._prefixes = "1"  # as if the server did not know what an extra_key is
        assert "keeps what old weights computed" in await off(from_disk, other)
        await from_disk.push(other, 3)
        assert await off(from_disk, other) == ""

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


def test_what_nobody_waits_for_any_more_is_left_undone():
    decoder = Decoder(None, deterministic=False)
    done = []
    given_up, wanted = (decoder.call(lambda i=i: done.append(i)) for i in (1, 2))
    given_up.cancel()
    decoder.close()
    decoder.run()
    assert done == [2] and wanted.done()
