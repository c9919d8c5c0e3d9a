"""The one codec of all that travels or is kept: a header and flat arrays beside it.

The header is MessagePack, typed, and unknown kinds are refused: frames[0]; frames[1:] are the arrays in the order the
header names them. The mailbox sends the frames as one zmq multipart message, `comm.world` as MPI messages, `state` as
one file. Nothing is unpickled anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

Frame = bytes | memoryview | bytearray


def encode(message: msgspec.Struct) -> list[Frame]:
    """A message as frames: the header, then each array's bytes (no copy where the array is contiguous)."""
    arrays: list[Frame] = []

    def hook(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            flat = np.ascontiguousarray(value)
            arrays.append(flat.reshape(-1).view(np.uint8).data)
            return (len(arrays), flat.dtype.str, value.shape)
        if isinstance(value, np.generic):
            return value.item()
        raise NotImplementedError(f"no wire form for {type(value).__name__}")

    header = msgspec.msgpack.encode(message, enc_hook=hook)
    return [header, *arrays]


def decode(frames: Sequence[Frame], kind: Any) -> Any:
    """The message in these frames.

    Args:
        frames: what `encode` gave, after transport.
        kind: the type, or union of types, that may be in there.

    Raises:
        msgspec.ValidationError: not of that type, or array sizes that do not match the frames.
    """

    def hook(wanted: type, value: Any) -> Any:
        if wanted is not np.ndarray:
            raise NotImplementedError(f"no wire form for {wanted}")
        number, dtype, shape = value
        if not 0 < number < len(frames):
            raise ValueError(f"array {number} of {len(frames) - 1}")
        flat = np.frombuffer(frames[number], dtype=np.dtype(dtype))
        return flat.reshape(shape)

    return msgspec.msgpack.decode(frames[0], type=kind, dec_hook=hook)
