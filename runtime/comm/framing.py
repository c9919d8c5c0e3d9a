"""How one message lies in a byte stream: sizes first, then the frames, each at a multiple of 64 bytes.

MPI counts are 32-bit in most libraries in use and a message of thousands of small arrays is slow to send one by one, so
`comm.world` sends a stream in pieces: small frames are joined, a large one is cut without being copied. The receiver
needs to know the stream's length only; where a piece ends means nothing.

    | sizes: uint64 [n] | pad | frame 0 | pad | frame 1 | pad | ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from runtime.comm.codec import Frame

ALIGNMENT: Final = 64
"""Arrays are read in place, by code that likes them aligned."""
JOIN_BYTES: Final = 1 << 20
"""Frames below this are copied together into one piece."""


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def stream_bytes(frames: Sequence[Frame]) -> int:
    """Length of the stream that holds these frames."""
    sizes = [8 * len(frames), *map(len, frames)]
    return sum(size + _padding(size) for size in sizes)


def pieces(frames: Sequence[Frame], piece_bytes: int) -> Iterator[memoryview]:
    """The stream, in order, cut into pieces of at most `piece_bytes`; none is empty."""
    table = np.array([len(f) for f in frames], np.uint64).tobytes()
    joined = bytearray()
    for frame in (table, *frames):
        if len(joined) + len(frame) > JOIN_BYTES:
            yield from _cut(memoryview(joined), piece_bytes)
            joined = bytearray()
        if len(frame) > JOIN_BYTES:
            yield from _cut(memoryview(frame), piece_bytes)
        else:
            joined += frame
        joined += bytes(_padding(len(frame)))
    yield from _cut(memoryview(joined), piece_bytes)


def _cut(view: memoryview, piece_bytes: int) -> Iterator[memoryview]:
    for start in range(0, len(view), piece_bytes):
        yield view[start : start + piece_bytes]


def split(stream: memoryview, num_frames: int) -> list[memoryview]:
    """The frames of a received stream, as views of it.

    Raises:
        ValueError: the sizes in its table do not add up to its length.
    """
    table = 8 * num_frames
    if num_frames < 1 or table > len(stream):
        raise ValueError(f"a stream of {len(stream)} bytes cannot hold {num_frames} frames")
    sizes = np.frombuffer(stream[:table], np.uint64).tolist()
    if table + _padding(table) + sum(size + _padding(size) for size in sizes) != len(stream):
        raise ValueError(f"sizes of {num_frames} frames do not add up to {len(stream)} bytes")
    frames: list[memoryview] = []
    start = table + _padding(table)
    for size in sizes:
        frames.append(stream[start : start + size])
        start += size + _padding(size)
    return frames
