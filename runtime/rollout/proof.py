"""How an engine proves that it computes with the weights that were sent to it, before it is sampled from.

Checksums prove every bit, but only of an engine that keeps tensors as they are sent; others fuse, cut and convert them.
The canary, a prompt whose log-probs come with the push, proves of any engine that it computes what the trainer does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

import numpy as np

from runtime.rollout.base import Engine
from runtime.types import Canary, SamplingParams

logger = logging.getLogger("agent")

CANARY_LIMITS: Final = {"float32": 1e-4, "bfloat16": 0.1}
"""Mean distance of log-probs, by dtype, above which an engine computes with other weights than the trainer. On a CPU
they are 1e-6 apart in float32; in bfloat16 kernels of two makers are 0.01 apart, so only gross mistakes show."""
NUM_DECODED: Final = 16
"""Tokens that a decode engine proves itself by."""
DECODED_S: Final = 30.0
"""For that; if it takes longer, its prefill engine was lost meanwhile, and comes back after this push."""


def other_bytes(wanted: Mapping[str, str], held: Mapping[str, str]) -> str:
    """How the digests of what an engine holds differ from those wanted; "" if they do not."""
    names = [name for name, digest in wanted.items() if held.get(name) != digest]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"holds other bytes than were sent in tensor {shown}" if names else ""


async def off_canary(engine: Engine, canary: Canary, dtype: str) -> str:
    """How an engine's log-probs of the canary differ from the trainer's; "" if they do not.

    The second half is scored first, after a first half that the engine may remember from the push before: that shows a
    memory which outlived an update. Then all of it, which shows other weights.
    """
    half = len(canary.tokens) // 2
    for start, what in ((half, "keeps what old weights computed"), (0, "holds other weights than were sent")):
        try:
            scored = await engine.score(canary.tokens, start)
        except ValueError as e:  # it is too long for it; then so are prompts, and every lease will say so
            logger.warning("the canary proves nothing: %s", e)
            return ""
        gap = np.abs(scored - canary.logprobs[start:])
        if not gap.mean() <= CANARY_LIMITS[dtype]:  # NaN is too far
            return f"{what}: its log-probs of the canary are up to {gap.max():.3g} off the trainer's"
    return ""


async def off_prefill(engine: Engine, canary: Canary, dtype: str) -> str:
    """How what a decode engine samples after the canary differs from what its prefill engine says of it; "" if it
    does not. A decode engine scores nothing itself, and a prefill engine has proved itself by the canary before."""
    params, told = SamplingParams(max_new_tokens=NUM_DECODED, ignore_eos=True), list(canary.tokens)
    try:
        async with asyncio.timeout(DECODED_S):
            await engine.score(told)  # refused where no prefill engine is up; sampling would wait for one
            made = await engine.generate(told, params)
            if not len(made.tokens):
                raise ValueError("its prefill engine was lost")
            scored = await engine.score([*told, *made.tokens.tolist()], len(told))
    except (ValueError, TimeoutError) as e:
        logger.warning("a decode engine proves nothing: %s", str(e) or f"no answer within {DECODED_S:g} s")
        return ""
    gap = np.abs(scored - made.logprobs)
    if not gap.mean() <= CANARY_LIMITS[dtype]:
        return f"decodes with other weights than its prefill engine holds: log-probs are up to {gap.max():.3g} apart"
    return ""
