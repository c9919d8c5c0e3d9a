"""Deterministic mode rests on properties of this machine's kernels, which are checked at start.

With a constant number of rows, a row's bits must depend neither on its place nor on the other rows. Where they do not
depend on how many masked columns of the cache are read either, only as many as needed are read; else always all.
"""

from __future__ import annotations

import torch

from runtime.errors import ConfigError
from runtime.rollout.embedded.model import SlotModel


@torch.inference_mode()
def check_rows(model: SlotModel) -> None:
    """Decode the same rows in two orders and among other neighbours, and compare bits.

    Raises:
        ConfigError: they differ.
    """
    slots = model.slots
    tokens = [(7 * i + 3) % model.vocab_size for i in range(slots)]
    places = [(5 * i) % model.max_length for i in range(slots)]
    _fill(model)
    plain = model.decode(tokens, places, full_width=True)
    alone = model.decode([tokens[0], *[0] * (slots - 1)], [places[0], *[0] * (slots - 1)], full_width=True)
    _fill(model, flip=True)
    swapped = model.decode(tokens[::-1], places[::-1], full_width=True).flip(0)
    model.cache.clear()
    if not (torch.equal(plain, swapped) and torch.equal(plain[0], alone[0])):
        raise ConfigError(
            "deterministic",
            f"rows of a batch of {slots} influence each other's bits on this machine",
            "use another number of slots (a multiple of 16), or deterministic: false",
        )


@torch.inference_mode()
def widths_agree(model: SlotModel) -> bool:
    """Whether every width of the cache that holds all rows gives the same bits."""
    tokens = [(7 * i + 3) % model.vocab_size for i in range(model.slots)]
    agree = True
    for longest in range(model.chunk, model.max_length, model.chunk):
        places = [(11 * i) % longest for i in range(model.slots - 1)] + [longest - 1]
        _fill(model)
        narrow = model.decode(tokens, places, full_width=False)
        agree = agree and torch.equal(narrow, model.decode(tokens, places, full_width=True))
    model.cache.clear()
    return agree


def _fill(model: SlotModel, *, flip: bool = False) -> None:
    """The same random sequence in each slot every time, in reverse order of slots if `flip`."""
    generator = torch.Generator().manual_seed(0)
    for stored in (*model.cache.keys, *model.cache.values):
        stored.normal_(generator=generator)
        if flip:
            stored.copy_(stored.flip(0))
