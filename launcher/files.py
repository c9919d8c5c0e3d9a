"""Checks of the files a run reads, without torch or transformers: prompts as JSON lines, and the model folder."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

import msgspec

from runtime.config import DataSet
from runtime.errors import ConfigError
from runtime.load import near_match

ROW: Final = '{"messages": [{"role": "user", "content": "2+2"}], "answer": "4"} or {"prompt": "2+2", "answer": "4"}'
ROLES: Final = ("system", "user", "assistant", "tool")
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


def dataset_name(data: DataSet) -> str:
    return data.name or Path(data.path).stem


def check_data(path: str, where: str) -> set[bytes]:
    """Check every line of a data file.

    Args:
        where: the place of the path in the config.

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
            if line.strip():
                hashes.add(_check_row(line, f"{path}:{number}"))
    if not hashes:
        raise ConfigError(where, f"{path} is empty", f"write one prompt a line: {ROW}")
    return hashes


def _check_readable(file: Path, where: str) -> None:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
        if mode & stat.S_IWOTH:
            raise ConfigError(where, f"data file {file} can be written by anybody", f"chmod o-w {file}")
    except FileNotFoundError:
        beside = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        fix = f"{near_match(file.name, beside)}check the path; it is relative to the current directory"
        raise ConfigError(where, f"data file {file} does not exist", fix) from None
    except IsADirectoryError:
        raise ConfigError(where, f"{file} is a folder, not a data file", "give a file of JSON lines") from None
    except (OSError, ValueError) as e:
        raise ConfigError(where, f"{file} cannot be read: {e}", "check the path and its permissions") from None


def _check_row(line: bytes, where: str) -> bytes:
    """Check one line; returns its prompt's content hash."""
    if b"\0" in line:
        raise ConfigError(where, "is binary, not JSON lines (NUL byte)", f"write one prompt a line: {ROW}")
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ConfigError(where, f"is not valid JSON: {e} (line: {_short(line)})", f"write {ROW}") from None
    if not isinstance(row, dict):
        raise ConfigError(where, f"is not a JSON object: {_short(line)}", f"write {ROW}")
    messages = _messages(row, where)
    if "answer" not in row:
        raise ConfigError(where, f"has no `answer` (keys: {', '.join(row)})", f"write {ROW}")
    if not isinstance(row.get("metadata", {}), dict):
        raise ConfigError(where, f"`metadata` is {row['metadata']!r}, not an object", 'write "metadata": {...}')
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


def check_runs_dir(path: str, where: str) -> None:
    """Run folders can be made in it.

    Raises:
        ConfigError: its nearest parent that exists is no folder, or not ours to write to.
    """
    folder = Path(path).absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        problem = "cannot be written to" if nearest.is_dir() else "is not a folder"
        raise ConfigError(where, f"{path}: {nearest} {problem}", "choose a folder you can write to")


# ---- model folder ------------------------------------------------------------------------------------------------


def check_model(path: str, where: str) -> None:
    """A Hugging Face folder with a config, weights, a tokenizer and a chat template.

    Raises:
        ConfigError: something of it is missing or broken.
    """
    check_weights(path, where)
    check_tokenizer(path, where)


def check_tokenizer(path: str, where: str) -> None:
    """The tokenizer's part of such a folder."""
    folder = Path(path)
    tokenizer = {name: _read_json(folder / name, where) for name in TOKENIZER_FILES}
    template = tokenizer["tokenizer_config.json"].get("chat_template") or (folder / "chat_template.jinja").exists()
    if not template:
        fix = "save the tokenizer with one; prompts are chat messages"
        raise ConfigError(where, f"the tokenizer in {path} has no chat template", fix)


def check_weights(path: str, where: str) -> dict[str, Any]:
    """A Hugging Face folder with a config, which is returned, and weights.

    Raises:
        ConfigError: something of it is missing or broken.
    """
    folder = Path(path)
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "does not exist"
        fix = "give a Hugging Face model folder; the quickstart's is made by `python -m runtime.quickstart`"
        if not folder.parent.exists() and folder.parent.parent == Path.cwd():
            name = f"{folder.parent.name}/{folder.name}"
            fix += (
                f"; runs download nothing, so for a name on the Hub run `hf download {name} --local-dir {name}` first"
            )
        raise ConfigError(where, f"model folder {path} {kind}", fix)
    config = _read_json(folder / "config.json", where)
    if "model_type" not in config:
        raise ConfigError(where, f"{folder / 'config.json'} has no `model_type`", "use the model's own config.json")
    weights = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = set(_read_json(index, where).get("weight_map", {}).values())
        missing = sorted(named - {file.name for file in weights})
        if missing:
            raise ConfigError(where, f"{path} lacks {missing[0]}, which {index.name} names", "copy the whole model")
    if not weights:
        raise ConfigError(where, f"{path} holds no weights (*.safetensors)", "copy or convert the model's weights")
    for file in weights:
        _check_safetensors(file, where)
    return config


def _read_json(file: Path, where: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(where, f"{file} does not exist", "copy the whole model folder") from None
    except (OSError, ValueError) as e:
        raise ConfigError(where, f"{file} cannot be read as JSON: {e}", "copy that file again") from None
    if not isinstance(value, dict):
        raise ConfigError(where, f"{file} is not a JSON object", "copy that file again")
    return value


def _check_safetensors(file: Path, where: str) -> None:
    """Its header, and that the file is as long as the header says (copies get cut, Git LFS leaves pointers)."""
    size = file.stat().st_size
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        head = data.read(length) if 0 < length <= size - 8 else b""
    try:
        tensors = {name: t for name, t in json.loads(head).items() if name != "__metadata__"}
        end = 8 + length + max((t["data_offsets"][1] for t in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(where, f"{file} ({size} bytes) is no safetensors file", "copy or download it again") from None
    if not tensors:
        raise ConfigError(where, f"{file} holds no tensors", "copy or download it again")
    if end != size:
        raise ConfigError(where, f"{file} has {size} bytes, its header says {end}", "copy or download it again")
