"""Proof that a checkpoint's files are those that were written.

seal-<rank>.json    {"num_ranks": 4, "files": {"__0_0.distcp": checksum, ...}}

Each rank seals what it wrote, rank 0 also what belongs to all; ranks that read share the files out, whoever wrote them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import xxhash

from runtime.durable import write_durably
from runtime.errors import ConfigError

PORTION_BYTES: Final = 1 << 24


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    num_ranks: int
    files: dict[str, str]
    """Name -> xxh3_128 of its bytes, as hex."""


def write(folder: Path, rank: int, num_ranks: int) -> None:
    """Seal this rank's files, which torch calls __<rank>_<number>.distcp; called when they are written."""
    own = [path for path in folder.iterdir() if path.is_file() and _writer(path.name) == rank]
    seal = Seal(num_ranks=num_ranks, files={path.name: _checksum(path) for path in sorted(own)})
    write_durably(folder / _name(rank), msgspec.json.encode(seal))


def check(folder: Path, rank: int, num_ranks: int) -> None:
    """Read every num_ranks-th file again, beginning with that of this rank.

    Raises:
        ConfigError: a file is not there, or not as it was written.
    """
    number, files, at = 1, dict[str, str](), 0
    while at < number:
        name = _name(at)
        try:
            seal = msgspec.json.decode((folder / name).read_bytes(), type=Seal)
        except (OSError, msgspec.DecodeError) as e:
            raise _damaged(folder, name, str(e)) from e
        number, files, at = seal.num_ranks, files | seal.files, at + 1
    for name in sorted(files)[rank::num_ranks]:
        try:
            found = _checksum(folder / name)
        except OSError as e:
            raise _damaged(folder, name, e.strerror or str(e)) from e
        if found != files[name]:
            raise _damaged(folder, name, "it is not as it was written")


def _name(rank: int) -> str:
    return f"seal-{rank}.json"


def _writer(name: str) -> int | None:
    """Rank that seals a file; None: none does."""
    if name.startswith("seal-"):
        return None
    return int(name.split("_")[2]) if name.startswith("__") else 0


def _checksum(path: Path) -> str:
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while portion := file.read(PORTION_BYTES):
            found.update(portion)
    return found.hexdigest()


def _damaged(folder: Path, name: str, problem: str) -> ConfigError:
    checkpoint = next((p for p in folder.parents if p.name.startswith("step-")), folder)
    return ConfigError(str(folder / name), problem, f"remove {checkpoint} to go back one checkpoint")
