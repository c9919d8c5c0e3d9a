"""What sequences have in common is computed once.

What a causal model computes at a token depends on the tokens up to there alone, and the samples of a group share their
prompt. So the model runs on the distinct prefixes of a micro-batch, and only attention sees whole sequences. The last
token of a sequence predicts nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Prefixes:
    """N distinct prefixes of S sequences of T tokens in all; the sequences go through L of them.

    >>> p = distinct(np.array([7, 8, 1, 2, 7, 8, 3, 4]), [0, 4, 8])  # 7 8 1 and 7 8 3
    >>> p.ends.tolist(), p.path.tolist(), p.starts
    ([0, 1, 2, 6], [0, 1, 2, 0, 1, 3], (0, 3, 6))
    """

    ends: np.ndarray
    """[N] index of a token that ends each, ascending"""
    of: np.ndarray
    """[T] the prefix that a token ends; -1 at the last token of a sequence"""
    path: np.ndarray
    """[L] `of` without last tokens"""
    starts: tuple[int, ...]
    """[S+1]; sequence s goes through path[starts[s]:starts[s+1]]"""

    @property
    def are_shared(self) -> bool:
        return len(self.ends) < len(self.path)


def distinct(tokens: np.ndarray, starts: Sequence[int]) -> Prefixes:
    """The prefixes of sequences tokens[starts[s]:starts[s+1]], none of them empty. Of a single token it is kept."""
    sizes = [max(1, b - a - 1) for a, b in pairwise(starts)]
    rows = [tokens[a : a + size] for a, size in zip(starts, sizes, strict=False)]
    home = np.arange(len(tokens))
    # In lexicographic order the longest prefix shared with any earlier sequence is shared with the one just before.
    for before, s in pairwise(sorted(range(len(rows)), key=lambda s: rows[s].tobytes())):
        common = _common(rows[before], rows[s])
        home[starts[s] :][:common] = home[starts[before] :][:common]
    kept = np.concatenate([np.arange(a, a + size) for a, size in zip(starts, sizes, strict=False)])
    ends, path = np.unique(home[kept], return_inverse=True)
    of = np.full(len(tokens), -1)
    of[kept] = path
    return Prefixes(ends=ends, of=of, path=path, starts=(0, *accumulate(sizes)))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size
