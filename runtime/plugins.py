"""Finds algorithms, rewards, environments, engines and trainers by file name, or by a dotted path outside the tree.

A plugin is one module. It defines `Config`, a frozen msgspec Struct of its options, and `build(...)`, whose arguments
its Protocol documents. Importing one must not load torch, so that the launcher can check its options before a job is
queued (a test imports each in a fresh process).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Mapping, Set
from types import ModuleType
from typing import Any, Final

import msgspec

from runtime import wording
from runtime.errors import Collector, ConfigError, SluiceError
from runtime.source import near_match

PACKAGES: Final[dict[str, str]] = {
    "algorithm": "runtime.trainer.algorithms",
    "environment": "runtime.rollout.environments",
    "reward": "runtime.rollout.rewards",
    "engine": "runtime.rollout.engines",
}
"""Kind of plugin -> the package whose files are its plugins."""

AWAITED: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "environment": ("run", ("prompt", "index", "generate", "tokenizer")),
    "reward": ("score", ("samples", "texts", "prompt", "ask")),
}
"""Kind of plugin -> the method that is awaited, and what it is given."""
CALLED: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "algorithm": {"advantages": ("rewards",), "refine": ("share", "all_sum")},
    "engine": {
        "command": ("launch",),
        "client": ("url=", "token=", "timeout_s="),
        "check": ("where",),
        "check_sleep": ("where",),
        "check_group": ("where",),
        "lacks": ("model",),
        "takes_deltas": ("model",),
    },
}
"""Kind of plugin -> its other methods, and what each is given; with = by name."""
SPLITTING: Final = {"fed_by": ("prefills",), "check_split": ("where",)}
"""Of an engine that `splits`."""
PARTS: Final[dict[str, tuple[str, ...]]] = {
    "algorithm": ("needs", "atom", "denominator", "losses"),
    "engine": ("runs_on_gpu", "spans_nodes", "takes_handles", "splits"),
}
"""Kind of plugin -> what else there must be of it; of an engine, True or False."""
ONE_OF: Final = {"atom": ("sample", "group"), "denominator": ("tokens", "answers", "groups", "fixed")}
"""What some parts of an algorithm may be."""
NEEDS: Final = ("old", "old_in_refine", "reference", "values", "entropy", "teacher", "divergence")
TRAINED: Final = ("policy", "critic")
"""Roles that an algorithm may have losses of."""
PLAIN: Final = ("text", "answer")
"""What a reward that is a function is given."""


def names(kind: str) -> list[str]:
    """The plugins of one kind that come with the project, sorted."""
    return files(PACKAGES[kind])


def files(package: str) -> list[str]:
    """Names of the modules in a package, sorted; none is imported."""
    path = importlib.import_module(package).__path__
    return sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))


def look_in(folder: str) -> None:
    """Let this process find modules in a folder too, last of all, so that nothing there hides a package."""
    if folder not in sys.path:
        sys.path.append(folder)


def find(kind: str, name: str, where: str) -> ModuleType:
    """The plugin module called `name`.

    Args:
        kind: a key of PACKAGES.
        name: a file name in that package, or the dotted path of a module outside the tree.
        where: how an error names the place of `name`, such as "run.yaml: algorithm.name".

    Raises:
        ConfigError: there is no such module; the message lists near matches.
    """
    if "/" in name or name.endswith(".py"):
        raise ConfigError(where, f"{name!r} is a path, and a {kind} outside the tree has a dotted name", _dotted(name))
    if "." in name:
        path = name
    elif name in names(kind):
        path = f"{PACKAGES[kind]}.{name}"
    else:
        choices = f"choose one of: {', '.join(names(kind))}"
        outside = f"a module outside the tree needs a dot in its name: my_project.my_{kind}"
        other = "".join(f"that is the name of an {other}; " for other in PACKAGES if name in names(other))
        near = near_match(name, names(kind)) or other
        raise ConfigError(where, f"no {kind} named {name!r}", f"{near}{choices}; {outside}")
    module = _import(path, f"{kind} {path!r}", where)
    for needed in ("Config", "build"):
        if not hasattr(module, needed):
            raise ConfigError(where, f"module {path!r} is no {kind}: it defines no `{needed}`", f"see docs/{kind}s.md")
    if not (isinstance(module.Config, type) and issubclass(module.Config, msgspec.Struct)):
        raise ConfigError(where, f"`Config` of {path!r} is no msgspec.Struct", f"see docs/{kind}s.md")
    return module


def _dotted(name: str) -> str:
    """What to write instead of the path of a module."""
    parts = [part for part in name.removesuffix(".py").split("/") if part not in ("", ".", "..", "~")]
    parts = parts[-2:] if name.startswith(("/", "~", "..")) else parts
    if len(parts) < 2:
        return f"put it into a folder, and write that folder's name too: my_project.{'.'.join(parts)}"
    return f"did you mean {'.'.join(parts)}?"


def build(kind: str, name: str, given: dict[str, Any], where: str, where_options: str) -> Any:
    """What the plugin called `name` makes of its options. Arguments and errors as in `find` and `options`.

    Raises:
        ConfigError: `build` raises, or what it returns cannot be called as one of this kind is.
    """
    module = find(kind, name, where)
    try:
        made_of = options(module, given, where_options)
    except ConfigError:  # as one of another kind may well answer to options of this one
        _refuse_misfit(kind, module, where)
        raise
    with calling(f"`build` of {kind} {module.__name__!r}", where, module.__file__):
        made = module.build(made_of)
    with calling(f"what {kind} {module.__name__!r} builds", where, module.__file__):
        problem = _misfit(kind, made)
    if problem:
        raise _no_such_kind(kind, module, problem, where)
    return made


def _refuse_misfit(kind: str, module: ModuleType, where: str) -> None:
    """
    Raises:
        ConfigError: what it makes of its default options is nothing of this kind.
    """
    problem = ""
    with contextlib.suppress(SluiceError), calling("a build of default options", where):
        problem = _misfit(kind, module.build(module.Config()))
    if problem:
        raise _no_such_kind(kind, module, problem, where)


def _no_such_kind(kind: str, module: ModuleType, problem: str, where: str) -> ConfigError:
    return ConfigError(where, f"what {module.__name__!r} builds is no {kind}: {problem}", f"see docs/{kind}s.md")


@contextlib.contextmanager
def calling(what: str, where: str, file: str | None = None) -> Iterator[None]:
    """A user's code runs in it, which shall neither raise nor leave.

    Raises:
        ConfigError: it did; a SluiceError of its own, which knows better, is raised as it is.
    """
    try:
        yield
    except (SluiceError, MemoryError):
        raise
    except (Exception, SystemExit) as e:
        fix = f"mend {file or 'that module'}, or what its options name"
        raise ConfigError(where, f"{what} raised {type(e).__name__}: {e}", fix) from e


def ask(made: Any, method: str, *given: Any, where: str, answer: Any = Any) -> Any:
    """What a method of something built says, before a run is submitted.

    Args:
        answer: type of it.

    Raises:
        ConfigError: it raises, or gives something else; one of its own is raised as it is.
    """
    what = f"`{method}` of {type(made).__module__!r}"
    with calling(what, where):
        said = getattr(made, method)(*given)
        try:
            return msgspec.convert(said, answer)
        except msgspec.ValidationError as e:
            raise ConfigError(where, f"{what} returned {wording.short(said)}: {e}", "mend that module") from e


def _misfit(kind: str, made: Any) -> str:
    """Why what a plugin built cannot be used as its kind is; empty: it can."""
    methods = CALLED.get(kind, {})
    missing = [part for part in (*PARTS.get(kind, ()), *methods) if not hasattr(made, part)]
    if missing:
        return f"{type(made).__name__} has no `{missing[0]}`"
    if kind == "engine":
        wrong = [name for name in PARTS[kind] if not isinstance(getattr(made, name), bool)]
        if wrong:
            return f"its `{wrong[0]}` is {wording.short(getattr(made, wrong[0]))}, neither True nor False"
        methods = methods | (SPLITTING if made.splits else {})
    unfit = [_unfit(getattr(made, name, None), given, f"its `{name}`") for name, given in methods.items()]
    if kind == "algorithm":
        unfit += _odd_parts(made)
    if kind in AWAITED:
        unfit.append(_unlike(kind, made))
    return next(filter(None, unfit), "")


def _odd_parts(algorithm: Any) -> Iterator[str]:
    for name, values in ONE_OF.items():
        if getattr(algorithm, name) not in values:
            yield f"its `{name}` is not of {', '.join(values)}"
    if not isinstance(algorithm.needs, Set):
        yield f"its `needs` is {wording.short(algorithm.needs)}, no frozenset"
    elif not algorithm.needs <= set(NEEDS):
        yield f"its `needs` is not of {', '.join(NEEDS)}"
    losses = algorithm.losses
    if not isinstance(losses, Mapping) or "policy" not in losses or not set(losses) <= set(TRAINED):
        yield f"its `losses` is {wording.short(losses)}, no dict of functions by {' and '.join(TRAINED)}"
        return
    yield from (_unfit(loss, ("scores", "batch"), f"its loss of the {role}") for role, loss in losses.items())


def _unlike(kind: str, made: Any) -> str:
    """As `_misfit`, of what is awaited, or is a plain function."""
    method, given = AWAITED[kind]
    call = getattr(made, method, None)
    if call is None and (kind == "environment" or not callable(made)):
        plain = "" if kind == "environment" else f"it is no function of {' and '.join(PLAIN)}, and "
        return f"{plain}{type(made).__name__} has no `async def {method}`"
    if call is None:
        return _unfit(made, PLAIN, "it")
    return _unfit(call, given, f"its `{method}`", is_async=True)


def _unfit(call: Any, given: tuple[str, ...], name: str, *, is_async: bool = False) -> str:
    """Why something cannot be called with what it is to be given."""
    if not callable(call):
        return f"{name} is {wording.short(call)}, no function"
    if _is_async(call) != is_async:
        return f"{name} is no `async def`" if is_async else f"{name} is async, which a plain function is not"
    named = {word.removesuffix("="): None for word in given if word.endswith("=")}
    try:
        inspect.signature(call).bind(*(word for word in given if not word.endswith("=")), **named)
    except TypeError as e:
        return f"{name} cannot be called with ({', '.join(given)}): {e}"
    except ValueError:  # a builtin may not say what it takes
        pass
    return ""


def _is_async(call: Any) -> bool:
    functions = (inspect.unwrap(call), type(call).__call__)
    return any(inspect.iscoroutinefunction(function) for function in functions)


def _import(path: str, what: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as e:
        if e.name and path != e.name and not path.startswith(f"{e.name}."):  # an import in it
            files = [f.filename for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith("<frozen")]
            problem = f"cannot import {what}: {files[-1]} imports {e.name!r}, which is not installed"
            fix = f"install it for {sys.executable}, or mend the import"
            raise ConfigError(where, problem, fix) from e
        fix = "write a dotted path, such as my_project.my_module, of a module in the current directory, on PYTHONPATH"
        raise ConfigError(where, f"cannot import {what}: {e}", f"{fix} or beside the config (or in code_dir)") from e
    except (Exception, SystemExit) as e:  # user code: a syntax error, say, or an import of its own that fails
        raise ConfigError(where, f"importing {what} failed: {type(e).__name__}: {e}", "mend that module") from e


def options(module: ModuleType, given: dict[str, Any], where: str) -> Any:
    """The plugin's `Config` made from the options in the run's config.

    Raises:
        ConfigError: an unknown key, a missing one or a wrong type; the message names the dotted path.
    """
    told = Collector()
    with calling(f"`Config` of {module.__name__!r}", where, module.__file__):
        for path, problem, fix in _mistakes(given, module.Config):
            place = ".".join(map(str, (where, *path)))
            told.found.append(ConfigError(place, problem, fix or f"see `Config` in {module.__file__}"))
        told.tell()
        return msgspec.convert(given, module.Config)


def _mistakes(given: dict[str, Any], config: type[msgspec.Struct]) -> list[wording.Mistake]:
    """An unknown option is always one, also where `Config` would let it pass."""
    if config.__struct_config__.forbid_unknown_fields:
        return wording.mistakes(given, config)
    known = {f.encode_name for f in msgspec.structs.fields(config)}
    unknown = [(key, value) for key, value in given.items() if key not in known]
    found: list[wording.Mistake] = [((key,), *wording.unknown(key, value, config, config)) for key, value in unknown]
    return found + wording.mistakes(given, config)
