"""Both engines over HTTP against transformers' padded `generate`, and how long a push keeps them from sampling."""

import asyncio
import contextlib
import random
import shutil
import statistics
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime.rollout.engines import embedded
from runtime.rollout.spawning import Spawner
from runtime.types import SamplingParams
from tests.contract.live import Kind, Live, off, sglang_kind

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

NUM_REQUESTS = (1, 8, 32)
NEW_TOKENS = (128, 64, 32, 16)
MAX_PROMPT = 64
ROUNDS = 7
AT_LEAST = {"embedded": (1.2, 1.8, 2.0), "sglang": (0.35, 0.45, 0.6)}
"""Times as fast as `generate`, by number of requests. On a model this small most of SGLang's time goes between its
processes."""
NOISE = 0.1


def requests(num_requests: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """(prompt tokens, new tokens wanted)"""
    rng = random.Random(0)
    sizes = [(rng.randint(8, MAX_PROMPT), NEW_TOKENS[i % len(NEW_TOKENS)]) for i in range(num_requests)]
    return [([rng.randrange(vocab_size) for _ in range(prompt)], new) for prompt, new in sizes]


def padded(model: torch.nn.Module, wanted: list[tuple[list[int], int]]) -> float:
    """Seconds that one padded batch takes: everyone waits for the longest."""
    width, longest = max(len(p) for p, _ in wanted), max(n for _, n in wanted)
    tokens = torch.tensor([[0] * (width - len(p)) + p for p, _ in wanted])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in wanted])
    started = time.perf_counter()
    out = model.generate(
        tokens, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=longest, eos_token_id=10**6, pad_token_id=0
    )
    assert out.shape == (len(wanted), width + longest)
    return time.perf_counter() - started


async def over_http(live: Live, wanted: list[tuple[list[int], int]]) -> float:
    """Seconds until all requests, sent at once, are answered."""
    started = time.perf_counter()
    completions = await asyncio.gather(
        *(
            live.engine.generate(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True, seed=i))
            for i, (prompt, new) in enumerate(wanted)
        )
    )
    assert [len(c.tokens) for c in completions] == [new for _, new in wanted]
    return time.perf_counter() - started


async def until_first_token(live: Live, model: PreTrainedModel, version: int) -> dict[str, float]:
    """Seconds from a trained model to a token that it sampled, with requests of the old version under way, by part."""
    running = [asyncio.create_task(live.engine.generate([5], SamplingParams(max_new_tokens=200))) for _ in range(4)]
    await asyncio.sleep(0.05)
    at = [time.perf_counter()]
    await live.engine.pause("retract")
    at.append(time.perf_counter())
    await live.send(dict(model.named_parameters()), version, bucket_bytes=1 << 26)
    at.append(time.perf_counter())
    await live.engine.resume()
    wrong = await off(live, model)
    at.append(time.perf_counter())
    first = await live.engine.generate([5], SamplingParams(max_new_tokens=1))
    at.append(time.perf_counter())
    assert not wrong and first.versions == ((0, version),)
    await asyncio.gather(*running)
    return {part: b - a for part, (a, b) in zip(("pause", "push", "proof", "token"), pairwise(at), strict=True)}


@contextlib.asynccontextmanager
async def engines(folder: Path, source: Path, model: PreTrainedModel) -> AsyncIterator[dict[str, Live]]:
    """Both, up and pushed to, on one thread each; they make their tokens in turn."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)
    slots = embedded.Config(slots=max(NUM_REQUESTS), max_length=MAX_PROMPT + max(NEW_TOKENS) + 16, threads=1)
    kinds = {"embedded": embedded.build(slots), "sglang": sglang_kind()}
    spawner = Spawner()
    try:
        lives = {name: Live(name, Kind(kind=k, deterministic=False), spawner, folder) for name, k in kinds.items()}
        for live in lives.values():
            await live.start()
            await live.join()
            await live.push(model, 1)
        yield lives
        for live in lives.values():
            await live.close()
    finally:
        spawner.close()


def test_engines_decode_faster_than_padded_generate_and_sample_soon_after_a_push(
    quickstart: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(quickstart, dtype=torch.float32).eval().requires_grad_(False)
    seconds: dict[tuple[str, int], list[float]] = {}
    parts: dict[str, list[dict[str, float]]] = {"embedded": [], "sglang": []}

    async def compare() -> None:
        async with engines(tmp_path, quickstart, model) as lives:
            for _ in range(ROUNDS + 1):
                for number in NUM_REQUESTS:
                    wanted = requests(number, model.config.vocab_size)
                    seconds.setdefault(("generate", number), []).append(padded(model, wanted))
                    for name, live in lives.items():
                        seconds.setdefault((name, number), []).append(await over_http(live, wanted))
            for version in range(2, ROUNDS + 3):
                for name, live in lives.items():
                    parts[name].append(await until_first_token(live, model, version))

    asyncio.run(compare())
    ratios = {}
    for number in NUM_REQUESTS:
        useful = sum(new for _, new in requests(number, 2))
        told = [f"generate {useful / statistics.median(seconds['generate', number]):.0f}"]
        for name in AT_LEAST:
            pairs = zip(seconds["generate", number], seconds[name, number], strict=True)
            ratios[name, number] = statistics.median([a / b for a, b in pairs][1:])
            told.append(f"{name} {useful / statistics.median(seconds[name, number]):.0f} ({ratios[name, number]:.2f})")
        print(f"\n{number} requests, useful tokens/s (times generate's), 1 thread: {', '.join(told)}", end="")
    for name, every in parts.items():
        part = {key: 1000 * statistics.median(p[key] for p in every[1:]) for key in every[0]}
        print(f"\n{name}: {sum(part.values()):.1f} ms from trained to the first new token: {part}", end="")
    print()
    for name, limits in AT_LEAST.items():
        for number, limit in zip(NUM_REQUESTS, limits, strict=True):
            assert ratios[name, number] > limit * (1 - NOISE), (name, number)
