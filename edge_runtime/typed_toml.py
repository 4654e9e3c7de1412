"""TOML text to typed structs, with every mistake in a person's words. Pure: text in, values out.

Owns: the wording of a key's path, the value got and the value wanted. The only user of the TOML parser; config
(settings) and profiles (device profiles) read the files and share this module.
"""

from __future__ import annotations

import re
import reprlib
import sys
import threading
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from edge_runtime.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

_CONVERTS = threading.Lock()
"""Held while a struct is made: of a type that several threads convert to for the first time at once, msgspec 0.22 reads
what is half made, and ends the process."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_LINE = re.compile(r" \(at line (\d+), column (\d+)\)$")

_SECRET = re.compile("key|token|password|secret")
"""Keys whose values are not shown: the message goes to a log."""

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80


class Fault(Struct, frozen=True):
    """One mistake in a mapping: the key's path, and a sentence with got and wanted."""

    path: str
    message: str


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The mapping in a TOML text. Raises ConfigError `source:line:column: why` when it is not TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        parsed: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{source}: tables or lists are nested too deeply") from None
    except ValueError as error:
        # TOMLDecodeError is a ValueError; int() raises another for a number of ten thousand digits.
        raise ConfigError(_located(source, str(error), text)) from None
    return parsed


def build(kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """A struct from a mapping; a number where a list of numbers is wanted is a list of one.

    Raises only ConfigError, with `source` and every fault.
    """
    values = _with_lists(values, kind)
    try:
        with _CONVERTS:
            return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        # msgspec names only the first fault; find_faults names all, in words.
        faults = list(find_faults(kind, values)) or [Fault("", str(error))]
    raise ConfigError("\n".join(f"{source}: {_at(fault)}" for fault in faults))


def inner_table(kind: type[T], values: object, path: str) -> T:
    """As `build`, of a table in one that is being built, at this path. Raises ValueError with every fault."""
    values = _with_lists(values, kind)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        faults = list(_faults(values, kind, path)) or [Fault(path, str(error))]
    raise ValueError("; ".join(map(_at, faults)))


def joined(path: str, key: object) -> str:
    """The path of a key below another's."""
    text = str(key)
    name = text if _BARE_KEY.fullmatch(text) else _brief.repr(text)
    return f"{path}.{name}" if path else name


def find_faults(kind: type[msgspec.Struct], values: Mapping[str, Any]) -> Iterator[Fault]:
    """Every fault of a mapping as this struct, in the mapping's order; empty when it converts."""
    yield from _faults(values, kind, "")


def expected_value(kind: Any) -> str:
    """The values that a type allows, in words: "an integer, 1 or more", "one of 'text', 'json'"."""
    kind, limits = _bare(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(value) for value in typing.get_args(kind))
    if origin in (tuple, list):
        return f"a list, each {expected_value(typing.get_args(kind)[0])}"
    if origin is dict:
        return f"a table, each value {expected_value(typing.get_args(kind)[1])}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(expected_value(each) for each in typing.get_args(kind) if each is not type(None))
    if is_struct(kind):
        return "a table of " + ", ".join(kind.__struct_encode_fields__)
    return _PLAIN.get(kind, str(kind)) + _range(limits)


def bare_type(kind: Any) -> Any:
    """A field's type without `None`, annotations and limits."""
    return _bare(kind)[0]


def is_struct(kind: Any) -> bool:
    """Whether a type is a struct: a TOML table with known keys."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


# ---- private --------------------------------------------------------------------------------------------------------

_PLAIN = {str: "text", int: "an integer", float: "a number", bool: "true or false"}


def _faults(value: Any, kind: Any, path: str) -> Iterator[Fault]:
    try:
        msgspec.convert(value, kind)
        return
    except msgspec.ValidationError as error:
        failed = error
    bare, _ = _bare(kind)
    inner = list(_inner_faults(value, bare, path))
    if inner:
        yield from inner
    elif failed.__cause__ is not None:
        yield Fault(path, str(failed.__cause__))  # the message of the struct's own rule
    else:
        yield Fault(path, f"got {_brief.repr(value)}, wanted {expected_value(kind)}")


def _inner_faults(value: Any, kind: Any, path: str) -> Iterator[Fault]:
    """Faults inside a table or list, so that the message can name the innermost key."""
    if is_struct(kind) and isinstance(value, Mapping):
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        for key, item in value.items():
            if key in fields:
                yield from _faults(item, fields[key].type, joined(path, key))
            else:
                yield Fault(joined(path, key), _unknown(key, list(fields)))
        for name, field in fields.items():
            if name not in value and field.required:
                yield Fault(joined(path, name), f"is missing; wanted {expected_value(field.type)}")
    elif typing.get_origin(kind) is dict and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _faults(item, typing.get_args(kind)[1], joined(path, key))
    elif typing.get_origin(kind) in (tuple, list) and isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from _faults(item, typing.get_args(kind)[0], f"{path}[{index}]")


def _with_lists(value: Any, kind: Any) -> Any:
    """A value with lists in place of the lone numbers that stand for one: `fill = 114`."""
    kind, _ = _bare(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if is_struct(kind) and isinstance(value, Mapping):
        fields = _types_of(kind)
        return {key: _with_lists(item, fields[key]) if key in fields else item for key, item in value.items()}
    if origin is dict and isinstance(value, Mapping):
        return {key: _with_lists(item, inner[1]) for key, item in value.items()}
    if origin in (tuple, list) and isinstance(value, list):
        return [_with_lists(item, inner[0]) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and origin is tuple and inner[-1] is Ellipsis and _bare(inner[0])[0] in (int, float):
        return [value]
    return value


@cache  # msgspec compiles every annotation again: nine device profiles took most of the time that parts are made in
def _types_of(kind: type[Struct]) -> Mapping[str, Any]:
    """The types of a struct's fields, by key."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _unknown(key: object, known: Sequence[str]) -> str:
    import difflib  # seldom needed

    nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    if nearest:
        return f"unknown key {_brief.repr(key)}; did you mean {nearest[0]!r}?"
    return f"unknown key {_brief.repr(key)}; known here: {', '.join(known)}"


def _bare(kind: Any) -> tuple[Any, list[msgspec.Meta]]:
    """A type without Optional and Annotated, and its limits. TOML has no null, so None is never wanted."""
    limits: list[msgspec.Meta] = []
    while True:
        if typing.get_origin(kind) is typing.Annotated:
            kind, *extras = typing.get_args(kind)
            limits += [extra for extra in extras if isinstance(extra, msgspec.Meta)]
            continue
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        if typing.get_origin(kind) in (typing.Union, types.UnionType) and len(options) == 1:
            kind = options[0]
            continue
        return kind, limits


def _range(limits: Sequence[msgspec.Meta]) -> str:
    words = ""
    for limit in limits:
        for bound, sentence in (
            (limit.gt, ", above {}"), (limit.ge, ", {} or more"), (limit.lt, ", below {}"), (limit.le, ", {} or less"),
        ):  # fmt: skip
            if bound is not None:
                words += sentence.format(f"{bound:_}" if isinstance(bound, int) else f"{bound:_.12g}")
        if limit.min_length is not None:
            words += ", not empty"
        if limit.pattern is not None:
            words += f" like {limit.pattern}"
    return words


def _at(fault: Fault) -> str:
    return f"{fault.path}: {fault.message}" if fault.path else fault.message


def _cut(line: str, at: int) -> tuple[str, str]:
    return line[:at], line[at:]


def _invalid(rest: str) -> str:
    """Say what is wrong with a value of no kind that TOML has. rest: of its line, from where it begins."""
    word = re.split(r"[,\]}]", rest)[0].strip()
    if not word:
        return "the value is missing"
    shown = _brief.repr(word)
    if word.lower() in ("true", "false"):
        return f"got {shown}, wanted {word.lower()}, in small letters"
    if word.lower() in ("none", "null"):
        return f"got {shown}, which TOML does not have; leave the key out"
    if re.fullmatch(r"[+-]?\.[0-9]+", word):
        return f"got {shown}, wanted a digit before the point: {word.replace('.', '0.')}"
    plain = word.strip("\u201c\u201d\u201e\u2018\u2019\"'`")[: _brief.maxstring]
    quote = "'" if "\\" in plain else '"'
    return f"got {shown}; text stands in straight quotes: {quote}{plain}{quote}"


def _located(source: str, message: str, text: str) -> str:
    """`file:line:column: why`, which editors and terminals can follow; "end of document" becomes the last line."""
    found = _LINE.search(message)
    if found:
        line, column = int(found[1]), int(found[2])
        words = message[: found.start()]
        begun, rest = (part.strip() for part in _cut(text.split("\n")[line - 1], column - 1))
        rest = "…" if _SECRET.search(begun) else rest.partition("#")[0].strip()
        if words == "Invalid value":
            words = _invalid(rest)
        elif words.startswith("Expected newline"):
            words = f"got {_brief.repr(rest)} behind the value; wanted one key and one value a line, text in quotes"
        return f"{source}:{line}:{column}: {words}"
    if message.endswith(" (at end of document)"):
        message = message.replace("Invalid value", "the value is missing")
        return f"{source}:{max(text.count(chr(10)) + (not text.endswith(chr(10))), 1)}: {message}"
    return f"{source}: {message}"
