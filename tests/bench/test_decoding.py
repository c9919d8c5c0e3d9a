"""The embedded engine over HTTP against transformers' padded `generate`: 32 requests of mixed lengths."""

import asyncio
import random
import statistics
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.rollout.engines import embedded
from runtime.rollout.process import Spawner
from runtime.types import SamplingParams
from tests.contract.live import Kind, Live

NUM_REQUESTS = 32
NEW_TOKENS = (16, 32, 64, 128)
MAX_PROMPT = 64
ROUNDS = 7
AT_LEAST, NOISE = 2.0, 0.1


def requests(vocab_size: int) -> list[tuple[list[int], int]]:
    """(prompt tokens, new tokens wanted)"""
    rng = random.Random(0)
    sizes = [(rng.randint(8, MAX_PROMPT), NEW_TOKENS[i % len(NEW_TOKENS)]) for i in range(NUM_REQUESTS)]
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
    assert out.shape == (NUM_REQUESTS, width + longest)
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


@pytest.mark.bench
@pytest.mark.timeout(900)
def test_the_engine_decodes_twice_as_fast_as_padded_generate(quickstart: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(quickstart, dtype=torch.float32).eval().requires_grad_(False)
    model.config.save_pretrained(tmp_path)
    wanted = requests(model.config.vocab_size)
    spawner = Spawner()
    kind = embedded.build(embedded.Config(slots=NUM_REQUESTS, max_length=MAX_PROMPT + max(NEW_TOKENS), threads=1))
    live = Live("bench", Kind(kind=kind, deterministic=False), spawner, tmp_path)
    theirs, ours = [], []

    async def compare() -> None:
        await live.start()
        await live.join()
        await live.push(model, 1)
        for _ in range(ROUNDS + 1):
            theirs.append(padded(model, wanted))
            ours.append(await over_http(live, wanted))
        await live.close()

    try:
        asyncio.run(compare())
    finally:
        spawner.close()
    useful = sum(new for _, new in wanted)
    ratio = statistics.median(a / b for a, b in list(zip(theirs, ours, strict=True))[1:])
    print(
        f"\ndecoding {NUM_REQUESTS} requests: padded generate {useful / statistics.median(theirs):.0f} useful tokens/s,"
        f" engine over HTTP {useful / statistics.median(ours):.0f}, {ratio:.2f} times as fast (1 thread)"
    )
    assert ratio > AT_LEAST * (1 - NOISE)
