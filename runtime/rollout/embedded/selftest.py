"""Deterministic mode rests on one property of this machine's kernels: with one constant shape, a row's bits depend
neither on its place in the batch nor on the other rows. It is checked at start, before anything relies on it."""

from __future__ import annotations

import torch

from runtime.errors import ConfigError
from runtime.rollout.embedded.model import SlotModel

_STEPS = 4


@torch.inference_mode()
def check_rows(model: SlotModel) -> None:
    """Decode a few tokens in two orders and with other neighbours, and compare bits.

    Raises:
        ConfigError: they differ.
    """
    slots = model.slots
    tokens = [(7 * i + 3) % model.vocab_size for i in range(slots)]
    plain = _decode(model, tokens)
    swapped = _decode(model, tokens[::-1]).flip(1)
    alone = _decode(model, [tokens[0], *[0] * (slots - 1)])
    model.cache.clear()
    if not (torch.equal(plain, swapped) and torch.equal(plain[:, 0], alone[:, 0])):
        raise ConfigError(
            "deterministic",
            f"rows of a batch of {slots} influence each other's bits on this machine",
            "use another number of slots (a multiple of 16), or deterministic: false",
        )


def _decode(model: SlotModel, tokens: list[int]) -> torch.Tensor:
    """[steps, slots, vocabulary]"""
    steps = range(_STEPS)
    return torch.stack([model.decode(tokens, [step] * model.slots, full_width=True) for step in steps])
