"""Checkpoints: shards, then the controller's state, then one marker. What has no marker does not exist.

checkpoints/step-000020/trainer/...     written by the trainer ranks
checkpoints/step-000020/state.bin       RunState: checksum of the rest, a count, frame sizes, frames (comm.codec)
checkpoints/step-000020/COMPLETE        the marker
"""

from __future__ import annotations

import logging
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import xxhash

from runtime.comm.codec import decode, encode
from runtime.durable import write_durably
from runtime.errors import ConfigError
from runtime.types import RunState

logger = logging.getLogger("checkpoints")

MARKER: Final = "COMPLETE"
CHECKSUM_BYTES: Final = 16


def write_state(path: Path, state: RunState) -> None:
    frames = [bytes(f) for f in encode(state)]
    sizes = struct.pack(f"<{len(frames) + 1}Q", len(frames), *(len(f) for f in frames))
    blob = b"".join([sizes, *frames])
    write_durably(path, xxhash.xxh3_128_digest(blob) + blob)


def read_state(path: Path) -> RunState:
    """
    Raises:
        ValueError: it is not as it was written.
    """
    given = path.read_bytes()
    checksum, blob = given[:CHECKSUM_BYTES], given[CHECKSUM_BYTES:]
    if xxhash.xxh3_128_digest(blob) != checksum:
        raise ValueError("it is not as it was written")
    (count,) = struct.unpack_from("<Q", blob)
    sizes = struct.unpack_from(f"<{count}Q", blob, 8)
    at, frames = 8 * (count + 1), []
    for size in sizes:
        frames.append(blob[at : at + size])
        at += size
    return decode(frames, RunState)


def _remove(folder: Path) -> None:
    """The marker first. What cannot be removed, as somebody keeps it so or reads it over NFS, harms no run; of a folder
    that was moved elsewhere the link goes."""
    try:
        (folder / MARKER).unlink(missing_ok=True)
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)
    except OSError as e:
        logger.warning("%s is left as it is: %s", folder, e)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._begun: Path | None = None
        """Has no marker yet."""

    def latest(self) -> Path | None:
        """Newest complete checkpoint."""
        return next(reversed(self._complete()), None)

    def _complete(self) -> list[Path]:
        return [folder for folder in self._all() if (folder / MARKER).exists()]

    def _all(self) -> list[Path]:
        """Oldest first. What else stands there, such as step-000020.bak or an archive, is not ours."""
        found = (p for p in self._folder.glob("step-*") if p.name.removeprefix("step-").isdecimal() and p.is_dir())
        return sorted(found, key=lambda folder: int(folder.name.removeprefix("step-")))

    def begin(self, step: int, save_shards: Callable[[Path], None], state: Callable[[], RunState]) -> None:
        """Write one, but for the marker: `save_shards` gets the folder for the trainer ranks, `state` is taken after
        it. `commit` follows when the shards are written.

        Where there is one of this step, its shards are these shards; the state may have got on since.
        """
        assert self._begun is None, f"{self._begun} waits for its marker"
        folder = self._folder / f"step-{step:06d}"
        if (folder / MARKER).exists():
            write_state(folder / "state.bin", state())
            return
        _remove(folder)
        (folder / "trainer").mkdir(parents=True)
        save_shards(folder / "trainer")
        write_state(folder / "state.bin", state())
        self._begun = folder

    def commit(self) -> None:
        """Mark what was begun last, and remove what is too old."""
        assert self._begun is not None
        write_durably(self._begun / MARKER, b"")
        self._begun = None
        for old in self._complete()[: -self._keep]:
            _remove(old)

    def load(self) -> tuple[Path, RunState] | None:
        """Trainer folder and state of the newest complete checkpoint; incomplete ones are removed.

        Raises:
            ConfigError: it is damaged.
        """
        for folder in self._all():
            if not (folder / MARKER).exists():
                _remove(folder)
        latest = self.latest()
        if latest is None:
            return None
        try:
            return latest / "trainer", read_state(latest / "state.bin")
        except (OSError, ValueError) as e:
            raise ConfigError(f"{latest}/state.bin", str(e), f"remove {latest} to go back one checkpoint") from e
