"""From a YAML file and `--set` overrides to a RunConfig or SiteConfig, or to one error that says what to change.

Paths of models, data and tokens are looked up from the current directory, then from the folder of the file that names
them, and are absolute in the resolved config; `runs_dir` is relative to the current directory, `code_dir` to the file.
A path may begin with ~ and hold $NAMES of the environment.
Errors, here and in the launcher's checks, name the file of the `extends` chain in which the key stands, and its line.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from runtime import plugins, source, wording
from runtime.config import AlgorithmChoice, DataSet, Engines, RunConfig, Section
from runtime.errors import Collector, ConfigError
from runtime.site import SiteConfig, Slurm
from runtime.source import Entry, Key, KeyPath, near_match
from runtime.source import near_path as near_path

T = TypeVar("T", bound=Section)

SITE_DIR: Final = Path("configs/site")


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
    tree, told = source.read(Path(path)), Collector()
    for override in overrides:
        with told.going_on():
            tree = source.override(tree, _spelt(override, RunConfig))
    with told.going_on():
        tree = _resolve_paths(tree)
    return Loaded(_convert(tree, RunConfig, told), tree)


def load_site(name_or_path: str, overrides: Sequence[str] = ()) -> SiteConfig:
    """The site called so (configs/site/<name>.yaml, here or beside the source), or the one in a file.

    Args:
        overrides: as for a run. A key of the section `slurm` may be written without it: partition=debug.
    """
    return read_site(name_or_path, overrides).config


def read_site(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedSite:
    """As `load_site`, with the places of the values for later checks."""
    tree, told = source.read(_site_file(name_or_path)), Collector()
    outer, inner = SiteConfig.__struct_fields__, Slurm.__struct_fields__
    for override in overrides:
        first = re.split(r"[.=]", override, maxsplit=1)[0]
        short = "slurm." if first in inner else ""
        with told.going_on():
            if "=" in override and first not in (*outer, *inner):
                fix = near_match(first, [*outer, *inner]) or f"known keys: {', '.join((*outer, *inner))}"
                raise ConfigError(f"--set-site {override}", f"a site has no key {first!r}", fix.strip())
            tree = source.override(tree, _spelt(short + override, SiteConfig), "--set-site", "partition=debug")
    tree = _with_texts(tree, told)
    return LoadedSite(_convert(tree, SiteConfig, told), tree)


def _spelt(override: str, kind: type[Section]) -> str:
    """`key=` of a text is the empty text; YAML would say that there is no value."""
    key, equals, value = override.partition("=")
    path = tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))
    is_text = isinstance(wording.type_at(inspect.type_info(kind), path), inspect.StrType)
    return f"{override}''" if equals and not value.strip() and is_text else override


def _with_texts(tree: Entry, told: Collector) -> Entry:
    """Numbers in `env` as the text they are; what YAML reads as true or false is refused, for who knows how it was
    written."""
    env = tree.at(("env",))
    if not (isinstance(tree.value, dict) and "env" in tree.value and isinstance(env.value, dict)):
        return tree
    values = {}
    for name, entry in env.value.items():
        place, value = _where(entry, ("env", name)), entry.value
        with told.going_on():
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ConfigError(place, "is no name of a variable", "write one, as NCCL_DEBUG")
            if isinstance(value, bool):
                raise ConfigError(place, wording.found(value), 'write "1" or "true" in quotes')
            if not isinstance(value, str | int | float):
                raise ConfigError(place, wording.found(value), f"give {wording.described(inspect.StrType())}")
            values[name] = Entry(str(value), entry.file, entry.line)
    return Entry({**tree.value, "env": Entry(values, env.file, env.line)}, tree.file, tree.line)


def _site_file(name_or_path: str) -> Path:
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    folders = [SITE_DIR, Path(__file__).parents[1] / SITE_DIR]
    for folder in folders:
        if (folder / f"{name_or_path}.yaml").is_file():
            return folder / f"{name_or_path}.yaml"
    known = sorted({p.stem for folder in folders for p in folder.glob("*.yaml")})
    own = Path(f"{name_or_path}.yaml")
    near = f"did you mean ./{own}? " if source.exists(own) else near_match(name_or_path, known)
    fix = f"{near}known sites: {', '.join(known) or 'none'}; or give the path of a site file"
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


def check_json(value: Any, kind: type[msgspec.Struct], where: str, file: Path) -> None:
    """What a JSON file holds, though more may stand in it.

    Args:
        where: the place of its path in the config.

    Raises:
        ConfigError: keys of it are missing or of another type.
    """
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.convert(value, kind)
        return
    told = Collector()
    for path, problem, fix in wording.mistakes(value, kind):
        fix = f"{fix}, as in the original file" if fix else "copy that file again"
        told.found.append(ConfigError(where, f"{file}: {dotted(path)} {problem}", fix))
    told.tell()


# ---- paths -------------------------------------------------------------------------------------------------------


def _resolve_paths(tree: Entry) -> Entry:
    """Paths made absolute; entries of the wrong type are left to `_convert`."""
    if not isinstance(tree.value, dict):
        return tree
    values = dict(tree.value)
    if "models" in values:
        models = _each(values["models"], _absolute)
        if isinstance(models.value, dict) and "teachers" in models.value:
            several = {**models.value, "teachers": _each(models.value["teachers"], _absolute)}
            models = Entry(several, models.file, models.line)
        values["models"] = models
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
    if "sync" in values:
        values["sync"] = _absolute(values["sync"], key="folder")
    runs = values.get("runs_dir", Entry("runs", tree.file))
    if isinstance(runs.value, str):
        values["runs_dir"] = Entry(str(_spelt_out(runs, "runs_dir").absolute()), runs.file, runs.line)
    code = values.get("code_dir", Entry("", tree.file))
    if isinstance(code.value, str):
        folder = Path(code.file if code.value else tree.file).parent / _spelt_out(code, "code_dir")
        values["code_dir"] = Entry(os.path.normpath(folder.absolute()), code.file, code.line)
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
    chosen = _spelt_out(path, key)
    beside = Path(path.file).parent / chosen
    if path.line and not source.exists(chosen) and source.exists(beside):
        chosen = beside
    return Entry({**entry.value, key: Entry(str(chosen.absolute()), path.file, path.line)}, entry.file, entry.line)


def _spelt_out(path: Entry, key: str) -> Path:
    """With the home folder and variables in the place of their names.

    Raises:
        ConfigError: one is not known, and a folder of that name shall not be made.
    """
    place, shown = f"{path.place}: {key}", wording.short(path.value)
    if "\0" in path.value:
        raise ConfigError(place, f"{shown} is no path", "leave the NUL out")
    text, fix = os.path.expandvars(path.value), "export it, or write the path out"
    if unset := re.search(r"\$(\w+|\{\w+\})", text):
        raise ConfigError(place, f"{shown}: {unset.group(0)} is not set", fix)
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise ConfigError(place, f"{shown}: {e}", "write the path out") from None


# ---- types -------------------------------------------------------------------------------------------------------


CHOSEN: Final = (
    (AlgorithmChoice, "algorithm", "name", "options"),
    (Engines, "engine", "engine", "engine_options"),
    (DataSet, "reward", "reward", "reward_options"),
    (DataSet, "environment", "environment", "environment_options"),
)
"""Section in which a plugin is chosen, its kind, the key of its name, and that of its options."""


def _option_meant(value: Any, path: KeyPath, kind: type[Section]) -> str:
    """Of a key that a section does not have: that it is an option of a plugin of the project that is chosen there."""
    section = wording.type_at(inspect.type_info(kind), path[:-1])
    if not path or not isinstance(section, inspect.StructType) or path[-1] in section.cls.__struct_fields__:
        return ""
    for key in path[:-1]:
        value = value[key]
    defaults = {f.name: f.default for f in msgspec.structs.fields(section.cls)}
    for of, what, choice, options in CHOSEN:
        name = value.get(choice, defaults.get(choice)) if issubclass(section.cls, of) else ""
        if name not in plugins.names(what):
            continue
        module = plugins.find(what, name, "")
        if path[-1] in module.Config.__struct_fields__:
            return f"did you mean {dotted((*path[:-1], options, path[-1]))}?"
    return ""


def _convert(tree: Entry, kind: type[T], told: Collector) -> T:
    """
    Args:
        told: what is wrong already.
    """
    value = tree.plain()
    for path, problem, fix in wording.mistakes(value, kind):
        fix = _option_meant(value, path, kind) or fix or f"see {kind.__module__.replace('.', '/')}.py"
        told.found.append(ConfigError(_where(tree.at(path), path), problem, fix))
    told.tell()
    return msgspec.convert(value, kind)
