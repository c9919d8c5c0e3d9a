"""Checkpoints: shards, then the controller's state, then one marker. What has no marker does not exist.

checkpoints/step-000020/trainer/...     written by the trainer ranks
checkpoints/step-000020/state.bin       RunState: a count, frame sizes, frames (see comm.messages)
checkpoints/step-000020/COMPLETE        the marker
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from runtime.comm.messages import decode, encode
from runtime.durable import write_durably
from runtime.errors import SluiceError
from runtime.types import RunState

MARKER = "COMPLETE"


def write_state(path: Path, state: RunState) -> None:
    frames = [bytes(f) for f in encode(state)]
    sizes = struct.pack(f"<{len(frames) + 1}Q", len(frames), *(len(f) for f in frames))
    write_durably(path, b"".join([sizes, *frames]))


def read_state(path: Path) -> RunState:
    blob = path.read_bytes()
    (count,) = struct.unpack_from("<Q", blob)
    sizes = struct.unpack_from(f"<{count}Q", blob, 8)
    at, frames = 8 * (count + 1), []
    for size in sizes:
        frames.append(blob[at : at + size])
        at += size
    return decode(frames, RunState)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._begun: Path | None = None
        """Has no marker yet."""

    def latest(self) -> Path | None:
        """Newest complete checkpoint."""
        return max(self._complete(), default=None)

    def _complete(self) -> list[Path]:
        return sorted(m.parent for m in self._folder.glob(f"step-*/{MARKER}"))

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
        shutil.rmtree(folder, ignore_errors=True)
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
            (old / MARKER).unlink()
            shutil.rmtree(old)

    def load(self) -> tuple[Path, RunState] | None:
        """Trainer folder and state of the newest complete checkpoint; incomplete ones are removed."""
        for folder in self._folder.glob("step-*"):
            if not (folder / MARKER).exists():
                shutil.rmtree(folder)
        latest = self.latest()
        if latest is None:
            return None
        try:
            return latest / "trainer", read_state(latest / "state.bin")
        except (OSError, ValueError, struct.error) as e:
            raise SluiceError(
                f"{latest}/state.bin cannot be read: {e}; remove {latest} to go back one checkpoint"
            ) from e
