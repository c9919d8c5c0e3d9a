"""Sends a message from one rank of a model to the others, with the codec that all messages have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from runtime.comm.codec import decode, encode
from runtime.comm.framing import pieces, split, stream_bytes
from runtime.trainer.megatron import groups

PIECE_BYTES: Final = 1 << 30


def from_leader(message: msgspec.Struct | None, kind: Any, device: torch.device) -> Any:
    """The message of the rank that leads this one's data-parallel group, on every rank of it: first to those of the
    leader's pipeline stage, then from each of them along the stages."""
    found = message
    if groups.pipeline().rank() == 0:
        found = _broadcast(found, kind, groups.tensor_and_context(), 0, device)
    return _broadcast(found, kind, groups.pipeline(), 0, device)


def from_last_stage(message: Any, kind: Any, device: torch.device) -> Any:
    """What the last pipeline stage gives, on all stages."""
    group = groups.pipeline()
    return _broadcast(message, kind, group, group.size() - 1, device)


def _broadcast(message: Any, kind: Any, group: dist.ProcessGroup, source: int, device: torch.device) -> Any:
    if group.size() == 1:
        return message
    is_source = group.rank() == source
    frames: Sequence[Any] = encode(message) if is_source else ()
    size = torch.tensor([len(frames), stream_bytes(frames) if is_source else 0], device=device)
    dist.broadcast(size, group=group, group_src=source)
    num_frames, total = size.tolist()
    stream = np.empty(total, np.uint8)
    if is_source:
        at = 0
        for piece in pieces(frames, PIECE_BYTES):
            stream[at : at + len(piece)] = piece
            at += len(piece)
    moved = torch.from_numpy(stream).to(device)
    dist.broadcast(moved, group=group, group_src=source)
    if is_source:
        return message
    return decode(split(moved.cpu().numpy().data, num_frames), kind)
