"""Files that are there after a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, blob: bytes) -> None:
    """Whole or not at all, also over a power cut: write beside, fsync, rename, fsync the folder."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as f:
        f.write(blob)
        f.flush()
        os.fsync(f.fileno())
    beside.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Let what was made or renamed in it be there after a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
