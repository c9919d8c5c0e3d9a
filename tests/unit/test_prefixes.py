"""Prefixes that sequences share are found, all of them, and every sequence goes through its own."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runtime.trainer.prefixes import distinct

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)
"""Of three tokens, so that many prefixes are equal."""


@given(SEQUENCES)
def test_every_prefix_is_there_once_and_on_the_path_of_its_sequences(sequences: list[list[int]]) -> None:
    tokens = np.array([token for s in sequences for token in s], np.int32)
    starts = [0, *np.cumsum([len(s) for s in sequences]).tolist()]
    prefixes = distinct(tokens, starts)

    wanted = {tuple(s[:n]) for s in sequences for n in range(1, max(2, len(s)))}
    assert len(prefixes.ends) == len(wanted)
    assert (np.diff(prefixes.ends) > 0).all()
    assert prefixes.are_shared == (len(wanted) < len(prefixes.path))

    def prefix_at(token: int) -> tuple[int, ...]:
        """The prefix that ends at a token of the flat array."""
        start = max(s for s in starts if s <= token)
        return tuple(tokens[start : token + 1].tolist())

    meant = [prefix_at(end) for end in prefixes.ends.tolist()]
    for sequence, start, (a, b) in zip(sequences, starts, pairwise(prefixes.starts), strict=False):
        path = prefixes.path[a:b]
        assert [meant[p] for p in path] == [tuple(sequence[: n + 1]) for n in range(max(1, len(sequence) - 1))]
        assert prefixes.of[start : start + len(path)].tolist() == path.tolist()
        assert (prefixes.of[start + len(path) : start + len(sequence)] == -1).all()
