"""Trained samples as text, for people to read: the rows of samples/step-<n>.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from runtime.types import Group, Sample

Decode = Callable[[Sequence[int]], str]


def rows(groups: Sequence[Group], num_rows: int, decode: Decode) -> list[dict[str, Any]]:
    """Samples of as many groups as there are: first one of each group, then the next of each."""
    longest = max(len(g.samples) for g in groups)
    every = [(g, i) for i in range(longest) for g in groups if i < len(g.samples)]
    return [_row(g, i, decode) for g, i in every[:num_rows]]


def _row(group: Group, index: int, decode: Decode) -> dict[str, Any]:
    sample, messages = group.samples[index], group.prompt.messages
    return {
        "prompt_id": sample.prompt_id,
        "index": sample.index,
        "prompt": messages[-1]["content"] if messages else "",
        "messages": messages if len(messages) > 1 else [],
        "text": decode(sample.tokens[sample.loss_mask].tolist()),
        "turns": turns(sample, decode),
        "answer": group.prompt.answer,
        "reward": sample.reward,
        "status": sample.status,
        "reason": sample.reason,
        "versions": sample.versions,
    }


def turns(sample: Sample, decode: Decode) -> list[dict[str, str]]:
    """What the policy and its environment wrote in turn, after the prompt; empty where the policy alone did."""
    pairs = zip(sample.tokens.tolist(), sample.loss_mask.tolist(), strict=True)
    parts = [(own, [token for token, _ in part]) for own, part in groupby(pairs, key=itemgetter(1))]
    parts = parts[1:] if parts and not parts[0][0] else parts
    if len(parts) < 2:
        return []
    return [{"by": "policy" if own else "environment", "text": decode(tokens)} for own, tokens in parts]
