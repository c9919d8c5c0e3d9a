"""The names of sgl-kernel's CPU build that SGLang imports, and the one operator that seeded sampling calls.

The operator is MurmurHash3 (x86, 32 bit) of 16 bytes: a row's 64-bit seed, its position and the column, as SGLang's
kernels hash them. Only its repeating itself matters here.
"""

import torch
from torch import library

_BITS = 0xFFFFFFFF


def _rotate(x, n):
    return ((x << n) | (x >> (32 - n))) & _BITS


def _take(state, word):
    """One 32-bit word of input. Numbers are int64, so that products keep their low 32 bits after masking."""
    word = _rotate((word * 0xCC9E2D51) & _BITS, 15)
    state = _rotate(state ^ ((word * 0x1B873593) & _BITS), 13)
    return (state * 5 + 0xE6546B64) & _BITS


@library.custom_op("sgl_kernel::murmur_hash32_cpu", mutates_args=())
def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """seed, positions [rows], columns [n] -> [rows, n] uint32"""
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(seed)
    for word in (seed & _BITS, (seed >> 32) & _BITS, positions.to(torch.int64) & _BITS):
        state = _take(state, word)
    state = _take(state[:, None], columns.to(torch.int64)[None, :] & _BITS) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _BITS
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _BITS
    return (state ^ (state >> 16)).to(torch.uint32)


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def absent(*args, **given):
        raise NotImplementedError(f"sgl_kernel.{name} is not there: this is a stand-in")

    return absent
