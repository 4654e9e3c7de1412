"""The reference of `config.toml` and `model.toml`: each key's type, limits, default and meaning, as Markdown.

Everything comes from the settings' classes: types, limits and defaults from the fields, meanings from the string below
each field, a table's meaning from its class's docstring. `python -m edge_runtime.config.reference` prints the page, or
renews it between its markers in the files named. A tool for the documentation: no part of the daemon imports it.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_runtime import plugins
from edge_runtime.config.loading import config_kind
from edge_runtime.config.settings import LARGEST, LONGEST, ModelSettings
from edge_runtime.typed_toml import bare_type, expected_value, is_struct

BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"
"""The generated text stands between these lines of a page; the rest of the page is written by hand."""

DOORS = plugins.names("doors")
"""Tables that a door adds to `config.toml`; they stand behind those of the endpoints."""

_FIRST = ("zmq", "shared_memory", *DOORS)

UNITS = {"_bytes_per_s": "bytes/s", "_bytes": "bytes", "_ms": "ms", "_s": "s", "_percent": "%"}
"""The unit that a key's name ends in; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a table. value: its type, limits and unit in words. default: as TOML; None when there is none."""

    name: str
    value: str
    default: str | None
    is_required: bool
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    """One TOML table. path: `zmq.curve`, or "" for the file's top. is_list: it is written `[[path]]`, once an entry.

    mark: of several tables of one path, the key that this one has.
    """

    path: str
    is_list: bool
    meaning: str
    keys: tuple[Key, ...]
    mark: str = ""


def describe(kind: type[msgspec.Struct]) -> list[Table]:
    """The tables of a settings file, the top one first. Raises ValueError for a key without a meaning."""
    return list(_tables(kind, "", is_list=False))


def markdown(level: int = 2) -> str:
    """The reference of both files. level: of the two files' headings; their tables stand one below."""
    parts = [
        "An unknown key is an error that names the nearest known one.",
        f"Where no limit is named, an integer is at most {LARGEST:_} and another number at most {LONGEST:_.0f}.",
    ]
    for name, kind in (("config.toml", config_kind(DOORS)), ("model.toml", ModelSettings)):
        parts += [f"{'#' * level} `{name}`"]
        for table in describe(kind):
            if table.path:
                head = f"[[{table.path}]]" if table.is_list else f"[{table.path}]"
                parts.append(f"{'#' * (level + 1)} `{head}`{f' with `{table.mark}`' if table.mark else ''}")
            parts += [table.meaning, _rows(table.keys)]
    return "\n\n".join(parts) + "\n"


def renewed(page: str) -> str:
    """A page with the text between its markers generated anew. Raises ValueError when it lacks them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"wanted a line {BEGIN} and a line {END} below it")
    return f"{before}{BEGIN}\n\n{markdown()}\n{END}{after}"


def main(paths: Sequence[str]) -> None:
    """Print the reference, or renew it in these files."""
    if not paths:
        sys.stdout.write(markdown())
    for path in map(Path, paths):
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


# ---- private --------------------------------------------------------------------------------------------------------


def _tables(kind: type[msgspec.Struct], path: str, *, is_list: bool, mark: str = "") -> Iterator[Table]:
    meanings = _meanings(kind)
    keys, inner = [], []
    for field in sorted(msgspec.structs.fields(kind), key=_place):
        table = _inner_table(field)
        if declared := _declared_kind(field):
            found = [plugins.declared(declared, name) for name in plugins.names(declared)]
            inner += [(plugins.named(each.table), f"{field.name}.NAME", False, each.mark) for each in found]
        elif table is not None:
            is_named = typing.get_origin(bare_type(field.type)) is dict
            is_inner_list = not is_named and table is not bare_type(field.type) and not _extra(field, "table")
            name = f"{field.name}.NAME" if is_named else field.name
            inner.append((table, f"{path}.{name}" if path else name, is_inner_list, ""))
        elif field.name in meanings:
            keys.append(_key(field, meanings[field.name]))
        else:
            raise ValueError(f"{kind.__name__}.{field.name}: wanted a string below it that describes it")
    yield Table(path, is_list, _paragraphs(inspect.getdoc(kind) or ""), tuple(keys), mark)
    for inner_kind, inner_path, is_inner_list, inner_mark in inner:
        yield from _tables(inner_kind, inner_path, is_list=is_inner_list, mark=inner_mark)


def _place(field: msgspec.structs.FieldInfo) -> int:
    """Where a field stands: the others keep their order behind the first tables."""
    return _FIRST.index(field.name) if field.name in _FIRST else len(_FIRST)


def _key(field: msgspec.structs.FieldInfo, meaning: str) -> Key:
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    # The guards against slips stand once at the top of the page.
    value = expected_value(field.type).replace(f", {LARGEST:_} or less", "").replace(f", {LONGEST:_.12g} or less", "")
    unit = next((f" ({unit})" for suffix, unit in UNITS.items() if field.name.endswith(suffix)), "")
    text = None if default is msgspec.NODEFAULT or default is None else _toml(default)
    return Key(field.encode_name, value + unit, text, field.required, meaning)


def _meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field, on one line; read from the source, as Python keeps none of them."""
    names = {(each.__module__, each.__name__) for each in kind.__mro__ if is_struct(each)}
    meanings = {}
    for module in {module for module, _ in names if module.startswith("edge_runtime.")}:
        for node in ast.parse(inspect.getsource(sys.modules[module])).body:
            if not isinstance(node, ast.ClassDef) or (module, node.name) not in names:
                continue
            for field, below in itertools.pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    meanings[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(below.value)).split())
    return meanings


def _declared_kind(field: msgspec.structs.FieldInfo) -> str:
    """The kind of declarations that name the tables of a field; "" of any other."""
    return _extra(field, "declared")


def _extra(field: msgspec.structs.FieldInfo, key: str) -> str:
    """The note of a field's type under a key; "" where there is none."""
    for each in (field.type, *typing.get_args(field.type)):
        for extra in getattr(each, "__metadata__", ()):
            if isinstance(extra, msgspec.Meta) and extra.extra:
                return str(extra.extra.get(key, ""))
    return ""


def _inner_table(field: msgspec.structs.FieldInfo) -> type[msgspec.Struct] | None:
    """The struct of a field that is a table, or a list of tables."""
    if name := _extra(field, "table"):
        found: type[msgspec.Struct] = plugins.named(plugins.declared("tables", name).table)
        return found
    for kind in (bare_type(field.type), *typing.get_args(bare_type(field.type))):
        if is_struct(kind):
            return kind  # type: ignore[no-any-return]
    return None


def _rows(keys: Sequence[Key]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        default = f"`{key.default}`" if key.default is not None else "required" if key.is_required else "absent"
        lines.append(f"| `{key.name}` | {key.value} | {default} | {key.meaning} |")
    return "\n".join(lines)


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _toml(value: object) -> str:
    """A default as TOML, which these values share with JSON; large whole numbers with `_` between thousands."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:_}" if is_whole else json.dumps(value)


if __name__ == "__main__":
    main(sys.argv[1:])
