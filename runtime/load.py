"""From a YAML file and `--set` overrides to a RunConfig or SiteConfig, or to one error that says what to change.

Paths of models, data and tokens are looked up from the current directory, then from the folder of the file that names
them, and are absolute in the resolved config; `runs_dir` is relative to the current directory. Errors, here and in the
launcher's checks, name the file of the `extends` chain in which the key stands, and its line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import inspect

from runtime import source
from runtime.config import RunConfig, Section, SiteConfig, Slurm
from runtime.errors import ConfigError
from runtime.source import Entry, Key, KeyPath, near_match

T = TypeVar("T", bound=Section)

SITE_DIR: Final = Path("configs/site")

_WALLTIME: Final = "a time as [days-]hours:minutes:seconds, such as 04:00:00"
_ADDRESS: Final = "an address with its port, such as http://10.0.0.7:30000"


class Loaded(msgspec.Struct, frozen=True):
    """A resolved config, and where its values came from."""

    config: RunConfig
    tree: Entry

    def where(self, *path: Key) -> str:
        """How an error names the place of a key, such as "run.yaml:12: rollout.num_prompts"."""
        return _where(self.tree.at(path), path)


class LoadedSite(msgspec.Struct, frozen=True):
    """The same of a site."""

    config: SiteConfig
    tree: Entry

    def where(self, *path: Key) -> str:
        return _where(self.tree.at(path), path)


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The resolved config of a run.

    Args:
        overrides: "dotted.key=value", the value written as in YAML; list entries by index (data.0.path=x).

    Raises:
        ConfigError: anything the user can fix.
    """
    return read_run(path, overrides).config


def read_run(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """As `load_run`, with the places of the values for later checks."""
    tree = source.read(Path(path))
    for override in overrides:
        tree = source.override(tree, override)
    tree = _resolve_paths(tree)
    return Loaded(_convert(tree, RunConfig), tree)


def load_site(name_or_path: str, overrides: Sequence[str] = ()) -> SiteConfig:
    """The site called so (configs/site/<name>.yaml, here or beside the source), or the one in a file.

    Args:
        overrides: as for a run. A key of the section `slurm` may be written without it: partition=debug.
    """
    return read_site(name_or_path, overrides).config


def read_site(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedSite:
    """As `load_site`, with the places of the values for later checks."""
    tree = source.read(_site_file(name_or_path))
    outer, inner = SiteConfig.__struct_fields__, Slurm.__struct_fields__
    for override in overrides:
        first = re.split(r"[.=]", override, maxsplit=1)[0]
        if "=" in override and first not in (*outer, *inner):
            fix = near_match(first, [*outer, *inner]) or f"known keys: {', '.join((*outer, *inner))}"
            raise ConfigError(f"--set-site {override}", f"a site has no key {first!r}", fix.strip())
        short = "slurm." if first in inner else ""
        tree = source.override(tree, short + override, "--set-site", "partition=debug")
    return LoadedSite(_convert(tree, SiteConfig), tree)


def _site_file(name_or_path: str) -> Path:
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    folders = [SITE_DIR, Path(__file__).parents[1] / SITE_DIR]
    for folder in folders:
        if (folder / f"{name_or_path}.yaml").is_file():
            return folder / f"{name_or_path}.yaml"
    known = sorted({p.stem for folder in folders for p in folder.glob("*.yaml")})
    fix = f"{near_match(name_or_path, known)}known sites: {', '.join(known) or 'none'}; or give the path of a site file"
    raise ConfigError("site", f"no site named {name_or_path!r}", fix)


def dump(config: Section) -> str:
    """YAML of a config with every default written out; loading it gives the same config."""
    return source.dump(msgspec.to_builtins(config))


def _where(entry: Entry, path: KeyPath) -> str:
    """`extends` leaves files such as a/../b."""
    file = f"{os.path.normpath(entry.file)}:{entry.line}" if entry.line else entry.file
    return f"{file}: {dotted(path)}"


def dotted(path: KeyPath) -> str:
    return ".".join(map(str, path)) or "(top level)"


# ---- paths -------------------------------------------------------------------------------------------------------


def _resolve_paths(tree: Entry) -> Entry:
    """Paths made absolute; entries of the wrong type are left to `_convert`."""
    if not isinstance(tree.value, dict):
        return tree
    values = dict(tree.value)
    if "models" in values:
        values["models"] = _each(values["models"], _absolute)
    if "data" in values:
        values["data"] = _each(values["data"], _absolute)
    if "evaluation" in values and isinstance(values["evaluation"].value, dict):
        evaluation = values["evaluation"]
        sets = {k: _each(e, _absolute) if k == "sets" else e for k, e in evaluation.value.items()}
        values["evaluation"] = Entry(sets, evaluation.file, evaluation.line)
    if "rollout" in values and isinstance(values["rollout"].value, dict):
        token = partial(_absolute, key="token_file")
        rollout = token(values["rollout"])
        sets = {k: _each(e, token) if k == "sets" else e for k, e in rollout.value.items()}
        values["rollout"] = Entry(sets, rollout.file, rollout.line)
    runs = values.get("runs_dir", Entry("runs", tree.file))
    if isinstance(runs.value, str):
        values["runs_dir"] = Entry(str(Path(runs.value).absolute()), runs.file, runs.line)
    return Entry(values, tree.file, tree.line)


def _each(entry: Entry, change: Callable[[Entry], Entry]) -> Entry:
    """`change` applied to the members of a mapping or list."""
    if isinstance(entry.value, dict):
        return Entry({k: change(e) for k, e in entry.value.items()}, entry.file, entry.line)
    return Entry([change(e) for e in entry.value], entry.file, entry.line) if isinstance(entry.value, list) else entry


def _absolute(entry: Entry, key: str = "path") -> Entry:
    path = entry.value.get(key) if isinstance(entry.value, dict) else None
    if path is None or not isinstance(path.value, str) or not path.value:
        return entry
    beside = Path(path.file).parent / path.value
    chosen = Path(path.value)
    if path.line and not source.exists(chosen) and source.exists(beside):
        chosen = beside
    return Entry({**entry.value, key: Entry(str(chosen.absolute()), path.file, path.line)}, entry.file, entry.line)


# ---- types -------------------------------------------------------------------------------------------------------


def _convert(tree: Entry, kind: type[T]) -> T:
    _check_keys(tree, inspect.type_info(kind), ())
    try:
        return msgspec.convert(tree.plain(), kind)
    except msgspec.ValidationError as e:
        problem, _, at = str(e).partition(" - at `$")
        path: KeyPath = tuple(name or int(index) for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", at))
        entry = tree.at(path)
        wanted = _describe(_type_at(inspect.type_info(kind), path)) or problem
        raise ConfigError(_where(entry, path), _found(entry), f"give {wanted}") from None


def _found(entry: Entry) -> str:
    if entry.value is None:
        return "has no value"
    if isinstance(entry.value, dict):
        return f"is a section (keys {', '.join(entry.value) or 'none'})"
    return "is a list" if isinstance(entry.value, list) else f"cannot be {entry.value!r}"


def _check_keys(entry: Entry, kind: inspect.Type, path: KeyPath) -> None:
    """Refuse unknown and missing keys; values of the wrong type are left to msgspec."""
    if isinstance(kind, inspect.VarTupleType) and isinstance(entry.value, list):
        for i, item in enumerate(entry.value):
            _check_keys(item, kind.item_type, (*path, i))
    if not (isinstance(kind, inspect.StructType) and isinstance(entry.value, dict)):
        return
    fields = {f.encode_name: f for f in kind.fields}
    for key, value in entry.value.items():
        if key not in fields:
            fix = near_match(key, list(fields)) or f"known keys here: {', '.join(fields)}"
            raise ConfigError(_where(value, (*path, key)), f"unknown key (value {_short(value)})", fix.strip())
        _check_keys(value, fields[key].type, (*path, key))
    for name, field in fields.items():
        if field.required and name not in entry.value:
            raise ConfigError(_where(entry, (*path, name)), "is missing", f"give {_describe(field.type)}")


def _short(entry: Entry) -> str:
    text = repr(entry.plain())
    return text if len(text) <= 60 else text[:57] + "..."


def _type_at(kind: inspect.Type, path: KeyPath) -> inspect.Type:
    for key in path:
        if isinstance(kind, inspect.StructType):
            kind = next(f.type for f in kind.fields if f.encode_name == key)
        elif isinstance(kind, inspect.VarTupleType):
            kind = kind.item_type
        elif isinstance(kind, inspect.DictType):
            kind = kind.value_type
    return kind


def _describe(kind: inspect.Type) -> str:
    """A type in words, to follow "give"."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            word = "an integer" if isinstance(kind, inspect.IntType) else "a number"
            limits = {"of at least": kind.ge, "above": kind.gt, "of at most": kind.le, "below": kind.lt}
            return " and ".join([word, *(f"{k} {v:g}" for k, v in limits.items() if v is not None)]).replace(
                " and ", " ", 1
            )
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return f"one of: {', '.join(map(str, values))}"
        case inspect.StrType(pattern=pattern):
            if pattern and ":" in pattern:
                return _ADDRESS if pattern.startswith("^http") else _WALLTIME
            return f"text that matches {pattern}" if pattern else "text (in quotes if it looks like a number)"
        case inspect.VarTupleType():
            return "a list (lines that start with `- `)"
        case inspect.StructType() | inspect.DictType():
            return "a section (`key: value` lines)"
        case _:
            return ""
