"""Requests to engines, and the log-probs that their answers must have."""

import asyncio

import aiohttp
import numpy as np
import torch

from runtime.types import SamplingParams


def params(n=40, *, seed=0, **more):
    return SamplingParams(max_new_tokens=n, seed=seed, ignore_eos=more.pop("ignore_eos", True), **more)


def prompts(n):
    """Of many lengths, all different."""
    return [[(7 * i + 11 * j) % 150 + 3 for j in range(1 + (5 * i) % 40)] for i in range(n)]


def reference(model, prompt, tokens, p=None):
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
