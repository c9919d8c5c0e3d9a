"""Finds algorithms, rewards, environments, engines and trainers by file name, or by a dotted path outside the tree.

A plugin is one module. It defines `Config`, a frozen msgspec Struct of its options, and `build(...)`, whose arguments
its Protocol documents. Importing one must not load torch, so that the launcher can check its options before a job is
queued (a test imports each in a fresh process).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from types import ModuleType
from typing import Any, Final

import msgspec

from runtime.errors import ConfigError

PACKAGES: Final[dict[str, str]] = {
    "algorithm": "runtime.trainer.algorithms",
    "environment": "runtime.rollout.environments",
    "reward": "runtime.rollout.rewards",
    "engine": "runtime.rollout.engines",
}
"""Kind of plugin -> the package whose files are its plugins."""


def names(kind: str) -> list[str]:
    """The plugins of one kind that come with the project, sorted."""
    return files(PACKAGES[kind])


def files(package: str) -> list[str]:
    """Names of the modules in a package, sorted; none is imported."""
    path = importlib.import_module(package).__path__
    return sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))


def find(kind: str, name: str, where: str) -> ModuleType:
    """The plugin module called `name`.

    Args:
        kind: a key of PACKAGES.
        name: a file name in that package, or the dotted path of a module outside the tree.
        where: how an error names the place of `name`, such as "run.yaml: algorithm.name".

    Raises:
        ConfigError: there is no such module; the message lists near matches.
    """
    if "." in name:
        path = name
    elif name in names(kind):
        path = f"{PACKAGES[kind]}.{name}"
    else:
        near = difflib.get_close_matches(name, names(kind), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        choices = f"choose one of: {', '.join(names(kind))}"
        outside = f"a module outside the tree needs a dot in its name: my_project.my_{kind}"
        raise ConfigError(where, f"no {kind} named {name!r}", f"{hint}{choices}; {outside}")
    module = _import(path, f"{kind} {path!r}", where)
    for needed in ("Config", "build"):
        if not hasattr(module, needed):
            raise ConfigError(where, f"module {path!r} is no {kind}: it defines no `{needed}`", f"see docs/{kind}s.md")
    return module


def build(kind: str, name: str, given: dict[str, Any], where: str, where_options: str) -> Any:
    """What the plugin called `name` makes of its options. Arguments and errors as in `find` and `options`."""
    module = find(kind, name, where)
    return module.build(options(module, given, where_options))


def _import(path: str, what: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as e:
        fix = "write a dotted path, such as my_project.my_module, and start from the folder that holds it"
        raise ConfigError(where, f"cannot import {what}: {e}", f"{fix}, or set PYTHONPATH") from e
    except Exception as e:  # user code: a syntax error, say, or an import of its own that fails
        raise ConfigError(where, f"importing {what} failed: {type(e).__name__}: {e}", "mend that module") from e


def options(module: ModuleType, given: dict[str, Any], where: str) -> Any:
    """The plugin's `Config` made from the options in the run's config.

    Raises:
        ConfigError: an unknown key, a missing one or a wrong type; the message names the dotted path.
    """
    fields = [f.encode_name for f in msgspec.structs.fields(module.Config)]
    for key in given:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(fields) or 'none'}"
            raise ConfigError(f"{where}.{key}", f"unknown key (value {given[key]!r})", hint)
    try:
        return msgspec.convert(given, module.Config)
    except msgspec.ValidationError as e:
        problem, _, at = str(e).partition(" - at `$")
        raise ConfigError(where + at.rstrip("`"), problem, "see the plugin's Config") from e
