"""What the variable-length kernel of a GPU is given: a plain function stands for it, on the CPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from runtime.trainer import attention
from runtime.trainer.prefixes import distinct


def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """As torch documents varlen_attn; heads of queries, keys and values are of one size."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
    assert cu_q.dtype == cu_k.dtype == torch.int32 and window_size == (-1, 0)
    parts = []
    for a, b in pairwise(cu_q.tolist()):
        assert b - a <= max_q == max_k
        one = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(*one, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("tokens", [[1, 2, 3, 1, 2, 4, 5], [1, 2, 3, 6, 2, 4, 5]], ids=["shared", "apart"])
@pytest.mark.parametrize(("num_heads", "size", "value_size"), [((4, 2), 16, 16), ((4, 4), 24, 16)], ids=["gqa", "mla"])
def test_the_kernel_of_a_gpu_gives_what_rectangles_give(monkeypatch, tokens, num_heads, size, value_size) -> None:
    prefixes = distinct(np.array(tokens), (0, 3, 7))
    (of_queries, of_keys), num = num_heads, len(prefixes.ends)
    shapes = (of_queries, size), (of_keys, size), (of_keys, value_size)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, num, width, generator=random) for heads, width in shapes)
    found = []
    for on_gpu in (False, True):
        monkeypatch.setattr(attention, "is_gpu", lambda device, on_gpu=on_gpu: on_gpu)
        monkeypatch.setattr(attention, "varlen_attn", kernel)
        packing = attention.pack(prefixes, torch.device("cpu"), torch.bfloat16)
        assert bool(packing.buckets) != on_gpu
        out, _ = attention.packed_attention(torch.nn.Identity(), q, k, v, None, packing=packing, scaling=0.3)
        found.append(out)
    assert found[0].shape == (1, num, of_queries, value_size)
    torch.testing.assert_close(found[1], found[0])
