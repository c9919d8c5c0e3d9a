"""Both engines with real weights: what they compute is what transformers does, before and after a push."""

import asyncio
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from runtime.types import SamplingParams
from tests.bench.test_decoding import engines, until_first_token
from tests.contract.live import Live, logprobs_of, perturbed

pytestmark = [pytest.mark.smollm, pytest.mark.timeout(1200)]

PUSHES = 3


async def agrees(live: Live, model: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Sampled tokens have the log-probs that the model gives them."""
    params = [SamplingParams(max_new_tokens=32, seed=i, ignore_eos=True) for i in range(len(prompts))]
    asked = zip(prompts, params, strict=True)
    for prompt, made in zip(
        prompts, await asyncio.gather(*(live.engine.generate(p, how) for p, how in asked)), strict=True
    ):
        wanted = logprobs_of(model, [*prompt, *made.tokens])[len(prompt) :]
        np.testing.assert_allclose(made.logprobs, wanted, atol=1e-3)


def test_engines_compute_what_transformers_does(
    smollm: Path, model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    asked, greedy = prompts[0], SamplingParams(max_new_tokens=12, temperature=0.0)
    wanted = model.generate(torch.tensor([asked]), do_sample=False, max_new_tokens=12)[0, len(asked) :].tolist()
    assert "Paris" in tokenizer.decode(wanted)
    other = perturbed(model, 1, 1e-3)
    parts: dict[str, list[dict[str, float]]] = {"embedded": [], "sglang": []}

    async def scenario() -> None:
        async with engines(tmp_path, smollm, model) as lives:
            for name, live in lives.items():
                made = (await live.engine.generate(asked, greedy)).tokens.tolist()
                assert made == wanted[: len(made)] and "Paris" in tokenizer.decode(made), name
                await agrees(live, model, prompts)
                for version in range(2, 2 + PUSHES):
                    parts[name].append(await until_first_token(live, other, version))
                await agrees(live, other, prompts)
                if "digests" in (await live.engine.describe()).can:
                    digests = await live.push(model, 9)
                    assert (await live.engine.checksums()).items() >= digests.items()

    asyncio.run(scenario())
    size = sum(p.nbytes for p in model.parameters()) / 1e6
    for name, every in parts.items():
        part = {key: round(median(p[key] for p in every), 3) for key in every[0]}
        print(
            f"\n{name}: {sum(part.values()):.2f} s from trained to the first new token ({size:.0f} MB): {part}", end=""
        )
    print()
