"""Which channel a run has: the one place that looks at `sync.channel` on the trainer's side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime import device
from runtime.comm.weights.broadcast import BroadcastSender
from runtime.comm.weights.delta import Kept
from runtime.comm.weights.folder import FolderSender
from runtime.config import Sync

if TYPE_CHECKING:
    import torch


def make_sender(sync: Sync, host: str, where: torch.device) -> BroadcastSender | FolderSender:
    """Trainer rank 0's side.

    Args:
        host: numeric address that engines reach this rank at.
        where: what the trainer computes on.
    """
    kept = Kept() if sync.channel == "delta" else None
    if sync.via == "folder":
        return FolderSender(in_memory=sync.channel == "ipc", kept=kept)
    return BroadcastSender(host, device.backend(where), device=str(where), timeout_s=sync.timeout_s, kept=kept)
