"""What a run leaves to read: metrics.jsonl, events.jsonl, samples/, and TensorBoard beside them.

The JSON lines are the truth: an attempt that resumes cuts them back to the offsets of its checkpoint, and TensorBoard's
files are written anew from them, so neither ever shows a step twice. What else shows steps beyond the checkpoint goes
too, but for a trained model, which gets another name. events.jsonl names every lease, every group and
every trained sample once, so that an outsider can prove that nothing was lost or doubled.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tensorboard.summary import Writer

from runtime.batching import trained_samples
from runtime.errors import ConfigError
from runtime.types import Group, Lease, Sample

logger = logging.getLogger("metrics")


class JsonLog:
    """Appends JSON objects, one a line, each written whole."""

    def __init__(self, path: Path, keep_bytes: int) -> None:
        """
        Args:
            keep_bytes: length to cut the file back to: what was written after the checkpoint is done again.
        """
        self.path = path
        self._file = path.open("ab", buffering=0)
        if keep_bytes and _byte(path, keep_bytes - 1) != b"\n":
            problem = f"is not as it was when the checkpoint was written, with {keep_bytes} bytes"
            raise ConfigError(str(path), problem, "resume with the whole run folder as it was, or start a new run")
        self._file.truncate(keep_bytes)

    def write(self, line: dict[str, Any]) -> None:
        self.write_all([line])

    def write_all(self, lines: Iterable[dict[str, Any]]) -> None:
        blob = memoryview(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        while blob:  # a write may be short where the disk fills up; the next one then says so
            blob = blob[self._file.write(blob) :]

    @property
    def offset(self) -> int:
        """Length of what is safe on disk."""
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def lines(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.path.read_bytes().splitlines()]

    def close(self) -> None:
        self._file.close()


def _byte(path: Path, at: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(1)


def sample_digest(sample: Sample) -> str:
    """Names a sample by its tokens and log-probs."""
    h = hashlib.blake2b(sample.tokens.tobytes(), digest_size=12)
    h.update(sample.logprobs.tobytes())
    return h.hexdigest()


class Recorder:
    """The controller's one way to write about the run."""

    def __init__(self, run_dir: Path, offsets: dict[str, int], *, step: int, tensorboard: bool) -> None:
        """
        Args:
            step: that the attempt goes on after, as `offsets` of the logs do.
        """
        self._samples_dir = run_dir / "samples"
        self._samples_dir.mkdir(exist_ok=True)
        self._metrics = JsonLog(run_dir / "metrics.jsonl", offsets.get("metrics.jsonl", 0))
        self._events = JsonLog(run_dir / "events.jsonl", offsets.get("events.jsonl", 0))
        _forget(run_dir, step)
        self._board = self._replay(run_dir / "tensorboard") if tensorboard else None

    def _replay(self, folder: Path) -> Writer:
        shutil.rmtree(folder, ignore_errors=True)
        board = Writer(str(folder))
        for line in self._metrics.lines():
            _show(board, line)
        return board

    @property
    def offsets(self) -> dict[str, int]:
        return {log.path.name: log.offset for log in (self._metrics, self._events)}

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        line = {"step": step, **values, "time": round(time.time(), 3)}
        self._metrics.write(line)
        if self._board is not None:
            _show(self._board, line)
            self._board.flush()

    def event(self, kind: str, **fields: Any) -> None:
        self._events.write({"kind": kind, **fields, "time": round(time.time(), 3)})

    def leased(self, leases: Sequence[Lease], step: int, first_new: int) -> None:
        """Leases handed out; those under `first_new` were in an earlier attempt too, and go on."""
        now = round(time.time(), 3)
        self._events.write_all(
            {
                "kind": "leased" if lease.number >= first_new else "resumed",
                "lease": lease.number,
                "prompt_id": lease.prompt.id,
                "version": lease.version,
                "step": step,
                "time": now,
            }
            for lease in leases
        )

    def group(self, group: Group, reason: str) -> None:
        """A finished group; `reason` says why it was dropped, "" that it was kept."""
        self.event(
            "group",
            lease=group.lease,
            prompt_id=group.prompt.id,
            samples=len(group.samples),
            kept=not reason,
            reason=reason,
        )

    def trained(self, groups: Sequence[Group], step: int, version: int) -> None:
        """One line a sample: trained, or excluded with the reason."""
        now = round(time.time(), 3)
        trained = {id(s) for group in groups for s in trained_samples(group)}
        self._events.write_all(
            {
                "kind": "trained" if id(s) in trained else "excluded",
                "step": step,
                "version": version,
                "lease": group.lease,
                "prompt_id": s.prompt_id,
                "index": s.index,
                "segment": s.segment,
                "digest": sample_digest(s),
                "oldest": min((v for _, v in s.versions), default=group.version),
                "reason": s.reason,
                "time": now,
            }
            for group in groups
            for s in group.samples
        )

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Text of trained samples; the file of a step that is done again is replaced."""
        blob = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        (self._samples_dir / f"step-{step:06d}.jsonl").write_bytes(blob)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()
        if self._board is not None:
            self._board.close()


def _forget(run_dir: Path, step: int) -> None:
    """Take away what shows later steps, which are done again."""
    stale = _after(step, run_dir / "samples", ".jsonl")
    for path in stale:
        path.unlink()
    if stale:
        (run_dir / "reward.png").unlink(missing_ok=True)
    for model in _after(step, run_dir / "hf"):
        kept = model.with_name(f"{model.name}.until-{time.strftime('%y%m%d-%H%M%S')}")
        logger.warning("%s is of steps that are done again, so it is now %s", model, kept)
        model.rename(kept)


def _after(step: int, folder: Path, suffix: str = "") -> list[Path]:
    """step-000020 and their like of later steps; what users put beside them is not ours."""
    numbers = {path: path.name.removeprefix("step-").removesuffix(suffix) for path in folder.glob(f"step-*{suffix}")}
    return [path for path, number in numbers.items() if number.isdecimal() and int(number) > step]


def _show(board: Writer, line: dict[str, Any]) -> None:
    for tag, value in line.items():
        if tag not in ("step", "time") and isinstance(value, (int, float)):
            board.add_scalar(tag, float(value), int(line["step"]), wall_time=line["time"])
