"""What does not fit its type in a value that somebody wrote, in words for them: each mistake, not only the first one,
which is where msgspec stops."""

from __future__ import annotations

import contextlib
import math
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Final, Union, get_args, get_origin

import msgspec
from msgspec import inspect

from runtime.source import near_match

Place = tuple[str | int, ...]
Mistake = tuple[Place, str, str]
"""Path of the culprit, what is wrong with it, and what to do; that is empty if nobody knows."""

SHOWN_CHARS: Final = 60
"""Of a value in an error."""

UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""First letter of a unit of time -> seconds."""

PATTERNS: Final = {
    r"^(\d+-)?": "a time as [days-]hours:minutes:seconds, such as 04:00:00",
    r"^http": "an address with its port, such as http://10.0.0.7:30000",
    r"^\d+[": "an amount of memory, such as 480G, or 0 in quotes",
}
"""Beginnings of patterns of texts -> what they mean."""


def mistakes(value: Any, kind: Any, path: Place = (), top: Any = None) -> list[Mistake]:
    """All that do not follow from each other.

    Args:
        value: as YAML or JSON gives it.
        kind: the type that is expected of it.
        path: of the value.
        top: type of what it is a part of; None: of nothing.
    """
    if isinstance(value, int | float) and (fix := _no_number(value)):
        return [(path, found(value), fix)]
    top = top or kind
    if isinstance(value, str | int | float) and (key := _key_meant(value, _plain(kind))):
        return [(path, found(value), f"it is a section: did you mean {'.'.join(map(str, (*path, key)))}?")]
    below: list[Mistake] = []
    for key, member, of in _members(value, _plain(kind)):
        place = (*path, key)
        below += [(place, *unknown(key, member, _plain(kind), top))] if of is None else mistakes(member, of, place, top)
    below += [((*path, name), "is missing", f"give {what}") for name, what in _missing(value, _plain(kind))]
    if below:
        return below
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        at, problem, fix = refusal(e, value, inspect.type_info(kind))
        fix = _without_unit(path, value) or fix
        return [((*path, *at), problem, fix)]
    return []


def _no_number(value: float) -> str:
    """What to give instead of a number that no computation or message holds; empty: it is one."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else "give a finite number"
    return "" if -(2**63) <= value < 2**63 else "give an integer of 64 bits"


def _key_meant(value: Any, kind: Any) -> str:
    """Of a section that was given a plain value: the key that may have it; those first without which it is none."""
    if not _is_section(kind):
        return ""
    for f in sorted(msgspec.structs.fields(kind), key=lambda f: not f.required):
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(value, f.type)
            return f.encode_name
    return ""


def _without_unit(path: Place, value: Any) -> str:
    """What to give instead of a time with its unit; empty: it is none, or not asked for in seconds."""
    time = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d)", value.strip()) if isinstance(value, str) else None
    if not time or not path or not str(path[-1]).endswith("_s"):
        return ""
    return f"give it in seconds: {float(time.group(1)) * UNITS_S[time.group(2)[0]]:g}"


def _plain(kind: Any) -> Any:
    """Of a type that is annotated or may also be null: the type."""
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif get_origin(kind) in (Union, types.UnionType):
            others = [one for one in get_args(kind) if one is not types.NoneType]
            if len(others) != 1:
                return kind
            kind = others[0]
        else:
            return kind


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _members(value: Any, kind: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """What is below a value: key, value and the type that is expected of it; None: nothing of that name is."""
    of = next((one for one in get_args(kind)[-1:] if get_origin(kind) is dict), Any)
    if isinstance(value, dict) and _is_section(kind):
        fields = {f.encode_name: f.type for f in msgspec.structs.fields(kind)}
        is_open = not kind.__struct_config__.forbid_unknown_fields
        yield from ((key, member, fields.get(key)) for key, member in value.items() if key in fields or not is_open)
    elif isinstance(value, dict):
        yield from ((key, member, of) for key, member in value.items())
    elif isinstance(value, list):
        of = get_args(kind)[0] if get_origin(kind) in (list, tuple) and len(set(get_args(kind)) - {...}) == 1 else Any
        yield from ((i, member, of) for i, member in enumerate(value))


def _missing(value: Any, kind: Any) -> Iterator[tuple[str, str]]:
    """Keys that a section lacks, and what each is; but those that another key there may be meant for."""
    if isinstance(value, dict) and _is_section(kind):
        fields = msgspec.structs.fields(kind)
        unknown = [str(key) for key in set(value).difference(f.encode_name for f in fields)]
        for f in fields:
            if f.required and f.encode_name not in value and not near_match(f.encode_name, unknown):
                yield f.encode_name, described(inspect.type_info(f.type)) or "it"


def unknown(key: str | int, value: Any, kind: Any, top: Any) -> tuple[str, str]:
    """What is wrong with a key that a section `kind` does not have, and what to do. `top`: as in `mistakes`."""
    known = [f.encode_name for f in msgspec.structs.fields(kind)]
    fix = near_match(str(key), known).strip() or f"known keys here: {', '.join(known) or 'none'}"
    if elsewhere := list(_places(inspect.type_info(top), str(key), ())):
        fix = f"did you mean {' or '.join(elsewhere)}?"
    return f"unknown key (value {short(value)})", fix


def _places(kind: inspect.Type, key: str, path: Place) -> Iterator[str]:
    """The dotted keys of this name in a tree of sections."""
    kind = one(kind)
    for f in kind.fields if isinstance(kind, inspect.StructType) else ():
        if f.encode_name == key:
            yield ".".join(map(str, (*path, key)))
        yield from _places(f.type, key, (*path, f.encode_name))


def refusal(error: msgspec.ValidationError, value: Any, kind: inspect.Type) -> tuple[Place, str, str]:
    """
    Args:
        error: that `value` was answered with.
        kind: what was expected of all of it.

    Returns:
        Path of the culprit in `value`, what is wrong with it, and what to do; that is empty if nobody knows.
    """
    said, _, at = str(error).partition(" - at ")
    path = tuple(_path(at.partition("$")[2], value, kind))
    wanted = described(type_at(kind, path))
    if "`key`" in at or not said.startswith(("Expected", "Invalid enum")):
        return path, said, ""
    for key in path:
        value = value[key]
    return (path, found(value), f"give {wanted}") if wanted else (path, f"{found(value)}: {said}", "")


def _path(at: str, value: Any, kind: inspect.Type) -> Iterator[str | int]:
    """msgspec names no keys of mappings: the one that is meant is the first that does not fit."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", at):
        key = name or (int(index) if index.isdecimal() else next(_unfit(value, kind), ""))
        if key == "":
            return
        yield key
        value, kind = value[key], type_at(kind, (key,))


def _unfit(value: dict[str, Any], kind: inspect.Type) -> Iterator[str]:
    of = type_at(kind, ("",))
    if not isinstance(of, inspect.StructType):
        return
    for key, member in value.items():
        try:
            msgspec.convert(member, of.cls)
        except msgspec.ValidationError:
            yield key


def short(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def found(value: Any) -> str:
    if value is None:
        return "has no value"
    if isinstance(value, dict):
        keys = ", ".join(map(str, value)) or "none"
        return f"is a section (keys {keys if len(keys) <= SHOWN_CHARS else keys[: SHOWN_CHARS - 3] + '...'})"
    return "is a list" if isinstance(value, list) else f"cannot be {short(value)}"


def one(kind: inspect.Type) -> inspect.Type:
    """Of a type that may also be null: the type."""
    if not isinstance(kind, inspect.UnionType):
        return kind
    kinds = [k for k in kind.types if not isinstance(k, inspect.NoneType)]
    return kinds[0] if len(kinds) == 1 else kind


def type_at(kind: inspect.Type, path: Place) -> inspect.Type:
    """AnyType where there is no such place."""
    for key in path:
        match one(kind):
            case inspect.StructType(fields=fields):
                kind = next((f.type for f in fields if f.encode_name == key), inspect.AnyType())
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                kind = item
            case inspect.DictType(value_type=item):
                kind = item
            case _:
                kind = inspect.AnyType()
    return one(kind)


def described(kind: inspect.Type) -> str:
    """A type, to follow "give"; empty: there are no words for it."""
    match one(kind):
        case inspect.IntType() | inspect.FloatType() as number:
            word = "an integer" if isinstance(number, inspect.IntType) else "a number"
            limits = {"of at least": number.ge, "above": number.gt, "of at most": number.le, "below": number.lt}
            words = " and ".join(f"{k} {v:g}" for k, v in limits.items() if v is not None)
            return f"{word} {words}".strip()
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return f"one of: {', '.join(map(str, values))}"
        case inspect.StrType(pattern=None):
            return "text (in quotes if it looks like a number)"
        case inspect.StrType(pattern=pattern):
            known = (words for start, words in PATTERNS.items() if pattern and pattern.startswith(start))
            return next(known, f"text that matches {pattern}")
        case inspect.VarTupleType() | inspect.ListType():
            return "a list (lines that start with `- `)"
        case inspect.StructType() | inspect.DictType():
            return "a section (`key: value` lines)"
        case _:
            return ""
