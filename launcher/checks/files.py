"""Checks of prompts as JSON lines, and of folders that a run writes to."""

from __future__ import annotations

import codecs
import errno
import hashlib
import stat
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from runtime.errors import ConfigError
from runtime.load import near_path

ROW: Final = '{"messages": [{"role": "user", "content": "2+2"}], "answer": "4"} or {"prompt": "2+2", "answer": "4"}'
ROLES: Final = ("system", "user", "assistant", "tool")
MEGABYTE: Final = 2**20
MOST_BYTES: Final = 16 * MEGABYTE
"""Tokenised well before a rank that is silent counts as lost; four million tokens of plain text."""
TOKEN_BYTES: Final = 64
"""Of text; the tokens of none stand for more on average."""


def prompt_bytes(num_tokens: int) -> int:
    """At most, of a prompt's text that may fit into so many tokens. While a text is tokenised, about a second for a
    megabyte, its rank is silent: one that cannot fit is not tried, unless it is small."""
    return min(max(TOKEN_BYTES * num_tokens, MEGABYTE), MOST_BYTES)


def check_data(path: str, where: str, most_bytes: int = MOST_BYTES) -> set[bytes]:
    """Check every line of a data file.

    Args:
        where: the place of the path in the config.
        most_bytes: of a prompt's text.

    Returns:
        Content hashes of its prompts.

    Raises:
        ConfigError: the file or a line cannot be used; it names file:line.
    """
    file = Path(path)
    _check_readable(file, where)
    hashes = set()
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.startswith(codecs.BOM_UTF8):
                raise ConfigError(f"{path}:{number}", "begins with a byte order mark", "save it as UTF-8 without one")
            if line.strip():
                hashes.add(_check_row(line, f"{path}:{number}", most_bytes))
    if not hashes:
        raise ConfigError(where, f"{path} is empty", f"write one prompt a line: {ROW}")
    return hashes


def num_rows(path: str) -> int:
    """Of a data file that was found in order."""
    with Path(path).open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _check_readable(file: Path, where: str) -> None:
    try:
        mode = file.stat().st_mode
        if stat.S_ISREG(mode):
            file.open("rb").close()
    except FileNotFoundError:
        if file.is_symlink():
            problem = f"data file {file} is a link to {file.readlink()}, which does not exist"
            raise ConfigError(where, problem, "copy the file there, or link to where it is") from None
        fix = f"{near_path(file)}check the path; it is relative to the current directory"
        raise ConfigError(where, f"data file {file} does not exist", fix) from None
    except OSError as e:
        problem = f"{file} cannot be read: {e.strerror}"
        raise ConfigError(where, problem, "check the path and its permissions") from None
    if not stat.S_ISREG(mode):  # what a pipe gives is gone when the ranks want it
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise ConfigError(where, f"{file} is {kind}, not a data file", "give a file of JSON lines")
    if mode & stat.S_IWOTH:
        raise ConfigError(where, f"data file {file} can be written by anybody", f"chmod o-w {file}")


def _check_row(line: bytes, where: str, most_bytes: int) -> bytes:
    """Check one line; returns its prompt's content hash."""
    if line.lstrip().startswith(b"["):
        problem = f"is not a JSON object: a list begins here ({_short(line)})"
        raise ConfigError(where, problem, f"write one object a line, not a list: {ROW}")
    if b"\0" in line:
        raise ConfigError(where, "is binary, not JSON lines (NUL byte)", f"write one prompt a line: {ROW}")
    try:
        row = msgspec.json.decode(line)
        msgspec.msgpack.encode(row)  # as it travels
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ConfigError(where, f"is not valid JSON: {e} (line: {_short(line)})", f"write {ROW}") from None
    except OverflowError:
        raise ConfigError(where, "holds an integer of more than 64 bits", "write it in quotes, as text") from None
    except RecursionError:
        raise ConfigError(where, "is nested too deeply", f"write {ROW}") from None
    if not isinstance(row, dict):
        raise ConfigError(where, f"is not a JSON object: {_short(line)}", f"write {ROW}")
    messages = _messages(row, where)
    if "answer" not in row:
        raise ConfigError(where, f"has no `answer` (keys: {', '.join(row)})", f"write {ROW}")
    if not isinstance(row.get("metadata", {}), dict):
        raise ConfigError(where, f"`metadata` is {row['metadata']!r}, not an object", 'write "metadata": {...}')
    if (size := sum(len(message["content"].encode()) for message in messages)) > most_bytes:
        problem = f"has a prompt of {size / 1e6:.1f} MB, more than the engines can take"
        raise ConfigError(where, problem, f"drop it, or cut it to less than {most_bytes / 1e6:.1f} MB")
    return hashlib.blake2b(msgspec.json.encode(messages, order="sorted"), digest_size=16).digest()


def _messages(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    if ("messages" in row) == ("prompt" in row):
        both = "both `messages` and `prompt`" if "prompt" in row else "neither `messages` nor `prompt`"
        raise ConfigError(where, f"has {both} (keys: {', '.join(row) or 'none'})", f"write {ROW}")
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ConfigError(where, f"`prompt` is {row['prompt']!r}, not text", f"write {ROW}")
        return [{"role": "user", "content": row["prompt"]}]
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(where, f"`messages` is {messages!r}, not a list of messages", f"write {ROW}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(v, str) for v in message.values()):
            raise ConfigError(where, f"messages[{i}] is {message!r}, not an object of texts", f"write {ROW}")
        if "content" not in message or message.get("role") not in ROLES:
            problem = f"messages[{i}] is {message!r}"
            raise ConfigError(where, problem, f"give it `content`, and a `role` out of {', '.join(ROLES)}")
    return messages


def _short(line: bytes) -> str:
    text = line.strip().decode(errors="replace")
    return text if len(text) <= 60 else text[:57] + "..."


def check_folder(path: str, where: str) -> None:
    """Folders can be made in it: for a moment one is, since root, /proc and network disks have rules of their own.

    Raises:
        ConfigError: its nearest parent that exists is no folder, or not ours to write to.
    """
    folder = Path(path).absolute()
    nearest = folder
    try:
        nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
        Path(tempfile.mkdtemp(prefix=".sluice-", dir=nearest)).rmdir()
    except OSError as e:
        problem = "is not a folder" if e.errno == errno.ENOTDIR else f"cannot be written to ({e.strerror})"
        raise ConfigError(where, f"{path}: {nearest} {problem}", "choose a folder you can write to") from None
