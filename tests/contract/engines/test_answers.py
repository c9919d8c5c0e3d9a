"""What engines answer, and how they pause."""

import asyncio

import numpy as np
import pytest
import torch

from runtime.errors import EngineLost
from runtime.rollout.embedded.decoder import Decoder
from runtime.rollout.engines import _dialect
from runtime.types import SamplingParams
from tests.contract.engines.asking import mid_flight, params, post, prompts, reference
from tests.contract.live import EOS, MAX_LENGTH, SLOTS, VOCABULARY


def test_nothing_is_generated_before_weights_came(fresh, runner, monkeypatch):
    monkeypatch.setattr(_dialect, "_BUSY", ())  # else it is asked again and again

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


def test_what_nobody_waits_for_any_more_is_left_undone():
    decoder = Decoder(None, deterministic=False)
    done = []
    given_up, wanted = (decoder.call(lambda i=i: done.append(i)) for i in (1, 2))
    given_up.cancel()
    decoder.close()
    decoder.run()
    assert done == [2] and wanted.done()
