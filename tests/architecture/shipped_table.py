"""Writes the table of edge_runtime/shipped.py from the declarations in the source.

`python -m tests.architecture.shipped_table` renews it; test_shipped.py holds it. A declaration is a constant of a
module whose value is made by one of `KINDS`, with its name first:

    VERB = Verb("tune", "find what serves a model best on this device, and use it", "edge_runtime.tuning.command")

A row keeps its place; a new one comes last in its kind, and may be moved by hand. The options, addresses and entries of
doors are written whole.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator

from edge_runtime import plugins
from edge_runtime.doors.door import DoorDeclaration
from edge_runtime.shipped import ADDRESSES, OPTIONS, SHIPPED
from tests.architecture.source_tree import ROOT, Module, own_modules

KINDS = {
    "AnswerLayout": "answers",
    "Declaration": "backends",
    "DoorDeclaration": "doors",
    "FolderFile": "kinds",
    "Importer": "importers",
    "MetricsDeclaration": "metrics",
    "OperationAnswer": "operations",
    "PartDeclaration": "parts",
    "ProtocolDeclaration": "protocols",
    "StateDeclaration": "states",
    "StageDeclaration": "stages",
    "StepsDeclaration": "steps",
    "TableDeclaration": "tables",
    "Verb": "verbs",
}
"""The class of a declaration, and the kind that it declares."""

PACKAGES = ("edge_runtime", "edge_runtime_converters")
"""The packages of our distribution."""

WIDTH = 100
"""Of a piece of a text."""

PAGE = ROOT / "edge_runtime" / "shipped.py"


def main() -> None:
    """Renew the table."""
    PAGE.write_text(text())


def text() -> str:
    """The file as it should be."""
    written = PAGE.read_text()
    begin, end = written.index("# shipped: begin"), written.index("# shipped: end")
    made = (
        table(declarations(own_modules())),
        doors_table([plugins.declared("doors", name) for name in SHIPPED["doors"]]),
    )
    return f"{written[:begin]}# shipped: begin\n{''.join(made)}{written[end:]}"


def declarations(modules: Iterable[Module]) -> dict[str, dict[str, str]]:
    """What the source declares: kind -> name -> "module:attribute"; the order is that of shipped.py."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in SHIPPED}
    for module in modules:
        if module.name.split(".")[0] in PACKAGES:
            for kind, name, attribute in _declared_in(module):
                assert name not in found[kind], f"{name} is declared twice: {found[kind][name]} and {module.name}"
                found[kind][name] = f"{module.name}:{attribute}"
    return {kind: {name: rows[name] for name in _in_order(rows, [*SHIPPED[kind]])} for kind, rows in found.items()}


def table(found: dict[str, dict[str, str]]) -> str:
    """The table as Python."""
    lines = ["SHIPPED: Mapping[str, Mapping[str, str]] = {"]
    for kind, rows in found.items():
        lines.append(f'    "{kind}": {{' if rows else f'    "{kind}": {{}},')
        lines += [f'        "{name}": "{target}",' for name, target in rows.items()]
        lines += ["    },"] if rows else []
    return "\n".join((*lines, "}", '"""Kind -> name -> "module:attribute"."""', ""))


def doors_table(doors: Iterable[DoorDeclaration]) -> str:
    """What verbs and the start need of doors, as Python."""
    doors = list(doors)
    addresses = {each.name: (each.form, each.schemes, each.client_class) for each in doors if each.schemes}
    lines = ["", "OPTIONS: Mapping[str, Mapping[str, tuple[str, str, tuple[str, ...], str | None]]] = {"]
    for verb, rows in _options(doors).items():
        lines.append(f'    "{verb}": {{')
        for name, row in rows.items():
            lines += [f'        "{name}": (', *(_element(each) for each in row), "        ),"]
        lines.append("    },")
    lines += [
        "}",
        '""""serve", or "connect" for verbs that ask a daemon -> the fields of an `Option` of a door, by name."""',
        "",
    ]
    lines.append("ADDRESSES: Mapping[str, tuple[str, tuple[str, ...], str]] = {")
    lines += [f'    "{name}": {_text(addresses[name])},' for name in _in_order(addresses, [*ADDRESSES])]
    lines += ["}", '"""Door -> the other fields of its `ClientAddress`."""', ""]
    lines.append(f"ENTRIES = {_text(tuple(entry for each in doors for entry in each.entries))}")
    return "\n".join((*lines, '"""Of the result of `stats`, null where no door fills them."""', ""))


def _options(doors: list[DoorDeclaration]) -> dict[str, dict[str, tuple[object, ...]]]:
    """The rows of `OPTIONS`. An option of several doors is declared alike by each."""
    found: dict[str, dict[str, tuple[object, ...]]] = {verb: {} for verb in OPTIONS}
    for door in doors:
        for verb, options in (("serve", door.options), ("connect", door.client_options)):
            for each in options:
                before = found[verb].get(each.name, ("", "", (), None))
                keys = (*before[2], *(each.keys or (door.name,)))
                found[verb][each.name] = (each.metavar, each.help, keys, each.default)
    return {verb: {name: rows[name] for name in _in_order(rows, [*OPTIONS[verb]])} for verb, rows in found.items()}


def _in_order(names: Iterable[str], order: list[str]) -> list[str]:
    return sorted(names, key=lambda name: _place(name, order))


def _element(value: object) -> str:
    """A field of an option's row; a long text in pieces."""
    indent = " " * 12
    pieces = textwrap.wrap(value, WIDTH, drop_whitespace=False) if isinstance(value, str) else []
    if len(pieces) < 2:
        return f"{indent}{_text(value)},"
    return "\n".join((f"{indent}(", *(f"{indent}    {_text(each)}" for each in pieces), f"{indent}),"))


def _text(value: object) -> str:
    """A value as ruff lays it out."""
    match value:
        case str(text):
            return f'"{text}"'
        case tuple(values):
            return f"({', '.join(map(_text, values))}{',' if len(values) == 1 else ''})"
        case _:
            return repr(value)


def _declared_in(module: Module) -> Iterator[tuple[str, str, str]]:
    """Kind, name and attribute of each declaration of a module."""
    for node in module.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(attribute)], value=ast.Call(func=ast.Name(made_by)) as call):
                pass
            case ast.AnnAssign(target=ast.Name(attribute), value=ast.Call(func=ast.Name(made_by)) as call):
                pass
            case _:
                continue
        if made_by in KINDS:
            named = next((each.value for each in call.keywords if each.arg == "name"), None)
            yield KINDS[made_by], ast.literal_eval(named or call.args[0]), attribute


def _place(name: str, order: list[str]) -> tuple[int, str]:
    return (order.index(name), "") if name in order else (len(order), name)


if __name__ == "__main__":
    main()
