"""YAML files and `--set` overrides as one tree of values that know the file and line they stand in.

A file may name another with `extends: base.yaml`, relative to itself: mappings are merged key by key, anything else is
replaced. What the values mean is the business of `runtime.load`.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from runtime.errors import ConfigError

Key = str | int
KeyPath = tuple[Key, ...]

_FLOAT: Final = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as text and 12:30:00 as a number; like YAML 1.2 and Python, this does the other thing."""


class _Dumper(yaml.SafeDumper):
    """Writes what _Loader reads back."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    if ":" in node.value:
        return node.value
    make = loader.construct_yaml_float if node.tag.endswith("float") else loader.construct_yaml_int
    return make(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


class Entry(msgspec.Struct, frozen=True):
    """A value and where it stands."""

    value: Any
    """dict[str, Entry], list[Entry] or a plain value."""
    file: str
    """Path as the user would write it, or "--set"."""
    line: int = 0

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {k: e.plain() for k, e in self.value.items()}
        return [e.plain() for e in self.value] if isinstance(self.value, list) else self.value

    def at(self, path: KeyPath) -> Entry:
        """The entry at a path, or the nearest one above it."""
        here = self
        for key in path:
            if isinstance(here.value, dict):
                below = here.value.get(str(key))
            else:
                items = here.value if isinstance(here.value, list) else []
                below = items[key] if isinstance(key, int) and key < len(items) else None
            if below is None:
                break
            here = below
        return here


def dump(value: Any) -> str:
    """A plain value as YAML that reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120)


def near_match(word: str, known: Sequence[str]) -> str:
    """ "did you mean 'x'? " or nothing."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def near_path(path: Path, start: Path | None = None) -> str:
    """As `near_match`, for a path of which a part does not exist: one that does, if it differs in that part only.

    Args:
        start: what it is relative to; None: the current directory.
    """
    missing = path
    while missing.parent != missing and not exists(missing.parent):
        missing = missing.parent
    try:
        beside = {p.name: p.name.removesuffix(p.suffix) for p in sorted(missing.parent.iterdir())}
    except (OSError, ValueError):
        return ""
    stem = missing.name.removesuffix(missing.suffix)  # else all that end in .yaml are alike
    stems = difflib.get_close_matches(stem, set(beside.values()), n=1, cutoff=0.75)
    names = difflib.get_close_matches(missing.name, [name for name in beside if beside[name] in stems], n=1, cutoff=0)
    guess = missing.with_name(names[0]) / path.relative_to(missing) if names else path
    if not names or not exists(guess):
        return ""
    start = start or Path.cwd()
    return f"did you mean {str(guess.relative_to(start) if guess.is_relative_to(start) else guess)!r}? "


def exists(path: Path) -> bool:
    """As Path.exists, and False for what can be no path: too long, or with a NUL."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_text(path: Path) -> str:
    """A user's text file.

    Raises:
        ConfigError: missing, a folder, unreadable, open to others' writing, binary, or empty.
    """
    name = str(path)
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISFIFO(mode)):  # <(...) of a shell is a pipe
            raise ConfigError(name, "is a device or a socket", "give the path of a YAML file")
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(name, "no such file", f"{near_path(path)}check the path") from None
    except IsADirectoryError:
        raise ConfigError(name, "is a folder", "give the path of a YAML file") from None
    except OSError as e:
        raise ConfigError(name, f"cannot be read: {e.strerror}", "check the path and its permissions") from None
    if mode & stat.S_IWOTH:
        raise ConfigError(name, "every user of this machine can change it", f"run: chmod o-w {name}")
    if b"\0" in data:
        raise ConfigError(name, f"is a binary file (NUL at byte {data.index(0)})", "give the path of a YAML file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(name, f"is not UTF-8 text (byte {e.start})", "save it as UTF-8") from None
    if not text.strip():
        raise ConfigError(name, "is empty", "start from configs/quickstart.yaml")
    return text


def read(path: Path, chain: tuple[Path, ...] = ()) -> Entry:
    """The tree of a file, merged over what it extends. `chain` holds the files that led here."""
    real = os.path.realpath(path)  # unlike Path.resolve it takes a circle of links as it is
    if real in map(os.path.realpath, chain):
        circle = " -> ".join(str(p) for p in (*chain, path))
        raise ConfigError(str(path), f"`extends` goes in a circle: {circle}", "remove one of these `extends`")
    tree = _parse(read_text(path), str(path))
    if tree.value is None:
        raise ConfigError(str(path), "is empty (only comments)", "start from configs/quickstart.yaml")
    if not isinstance(tree.value, dict):
        kind = "a list" if isinstance(tree.value, list) else f"only {tree.value!r}"
        raise ConfigError(tree.place, f"holds {kind}, not a mapping", "write it as `key: value` lines")
    base = tree.value.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base.value, str) or not base.value:
        raise ConfigError(f"{base.place}: extends", f"is {base.plain()!r}, not a file name", "give one file")
    target = path.parent / base.value
    if not exists(target):
        name = Path(base.value).name
        beside = f"did you mean {name!r}? " if exists(path.parent / name) else ""
        fix = f"{near_path(target, path.parent) or beside}it is relative to the file it stands in"
        raise ConfigError(f"{base.place}: extends", f"no such file: {target}", fix)
    return _merge(read(target, (*chain, path)), tree)


def _parse(text: str, file: str) -> Entry:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return _entry(loader, node, file, ()) if node else Entry(None, file)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        problem = " ".join(filter(None, [e.context, e.problem]))
        fix = "check quotes, brackets, colons and the indentation (spaces, no tabs) there and in the line above"
        raise ConfigError(where, f"not valid YAML: {problem}", fix) from None
    except yaml.YAMLError as e:
        raise ConfigError(file, f"not valid YAML: {str(e).splitlines()[0]}", "remove that character") from None
    except RecursionError:
        raise ConfigError(file, "is nested too deeply", "a config has at most a few levels") from None


def _entry(loader: _Loader, node: yaml.Node, file: str, above: tuple[yaml.Node, ...]) -> Entry:
    line = node.start_mark.line + 1
    if any(node is a for a in above):
        raise ConfigError(f"{file}:{line}", "an anchor refers to itself", "write the value out")
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, file)
        loader.flatten_mapping(node)
        entries: dict[str, Entry] = {}
        for key, value in node.value:
            entry = _entry(loader, value, file, above)
            entries[key.value] = Entry(entry.value, file, key.start_mark.line + 1)
        return Entry(entries, file, line)
    if isinstance(node, yaml.SequenceNode):
        return Entry([_entry(loader, item, file, above) for item in node.value], file, line)
    try:
        return Entry(loader.construct_object(node, deep=True), file, line)
    except (ValueError, LookupError, AttributeError):  # what PyYAML lets through: the 40th of May, !!bool x
        raise ConfigError(
            f"{file}:{line}", f"is no {node.tag.rpartition(':')[2]}: {node.value!r}", "quote it"
        ) from None


def _check_keys(node: yaml.MappingNode, file: str) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{file}:{line}", "a key is not text", "write `key: value`")
        if key.value in lines and key.tag != "tag:yaml.org,2002:merge":
            first = lines[key.value]
            raise ConfigError(f"{file}:{line}", f"key {key.value!r} stands in line {first} too", "remove one of them")
        lines[key.value] = line


def _merge(base: Entry, over: Entry) -> Entry:
    """Mappings key by key; anything else is replaced."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, entry in over.value.items():
        merged[key] = _merge(merged[key], entry) if key in merged else entry
    return Entry(merged, over.file, over.line)


def override(tree: Entry, text: str, option: str = "--set", example: str = "rollout.num_prompts=16") -> Entry:
    """The tree with one value changed, as `option` was given it."""
    key, equals, value = text.partition("=")
    where = f"{option} {text}"
    if not equals or not all(key.split(".")):
        raise ConfigError(where, "is not of the form dotted.key=value", f"for example: {option} {example}")
    new = _parse(value, where)
    path = tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))
    return _put(tree, path, _stamp(new, option), where)


def _stamp(entry: Entry, file: str) -> Entry:
    """The same values, said to stand in `file`."""
    if isinstance(entry.value, dict):
        return Entry({k: _stamp(e, file) for k, e in entry.value.items()}, file)
    return (
        Entry([_stamp(e, file) for e in entry.value], file)
        if isinstance(entry.value, list)
        else Entry(entry.value, file)
    )


def _put(tree: Entry, path: KeyPath, new: Entry, where: str) -> Entry:
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(tree.value, list):
        if not isinstance(key, int) or key >= len(tree.value):
            problem = f"the list in {tree.place} has {len(tree.value)} entries, {key!r} is none of them"
            fix = f"use an index from 0 to {len(tree.value) - 1}" if tree.value else "give the whole list"
            raise ConfigError(where, problem, fix)
        items = [_put(e, rest, new, where) if i == key else e for i, e in enumerate(tree.value)]
        return Entry(items, tree.file, tree.line)
    if tree.value is not None and not isinstance(tree.value, dict):
        raise ConfigError(where, f"{key!r} is looked for in {tree.value!r}, which has no keys", "check the dotted key")
    section = tree.value or {}
    below = section.get(str(key), Entry(None, new.file))
    return Entry({**section, str(key): _put(below, rest, new, where)}, tree.file, tree.line)
