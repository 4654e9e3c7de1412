"""Writes the table of edge_runtime/shipped.py from the declarations in the source.

`python -m tests.architecture.shipped_table` renews it; test_shipped.py holds it. A declaration is a constant of a
module whose value is made by one of `KINDS`, with its name first:

    VERB = Verb("tune", "find what serves a model best on this device, and use it", "edge_runtime.tuning.command")

A row keeps its place; a new one comes last in its kind, and may be moved by hand.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from edge_runtime.shipped import SHIPPED
from tests.architecture.source_tree import ROOT, Module, own_modules

KINDS = {
    "AnswerLayout": "answers",
    "Declaration": "backends",
    "DoorDeclaration": "doors",
    "FolderFile": "kinds",
    "Importer": "importers",
    "OperationAnswer": "operations",
    "PartDeclaration": "parts",
    "StepsDeclaration": "steps",
    "Verb": "verbs",
}
"""The class of a declaration, and the kind that it declares."""

PACKAGES = ("edge_runtime", "edge_runtime_converters")
"""The packages of our distribution."""

PAGE = ROOT / "edge_runtime" / "shipped.py"


def main() -> None:
    """Renew the table."""
    PAGE.write_text(text())


def text() -> str:
    """The file as it should be."""
    written = PAGE.read_text()
    begin, end = written.index("# shipped: begin"), written.index("# shipped: end")
    return f"{written[:begin]}# shipped: begin\n{table(declarations(own_modules()))}{written[end:]}"


def declarations(modules: Iterable[Module]) -> dict[str, dict[str, str]]:
    """What the source declares: kind -> name -> "module:attribute"; the order is that of shipped.py."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in SHIPPED}
    for module in modules:
        if module.name.split(".")[0] in PACKAGES:
            for kind, name, attribute in _declared_in(module):
                assert name not in found[kind], f"{name} is declared twice: {found[kind][name]} and {module.name}"
                found[kind][name] = f"{module.name}:{attribute}"
    return {
        kind: dict(sorted(rows.items(), key=lambda row, order=[*SHIPPED[kind]]: _place(row[0], order)))
        for kind, rows in found.items()
    }


def table(found: dict[str, dict[str, str]]) -> str:
    """The table as Python."""
    lines = ["SHIPPED: Mapping[str, Mapping[str, str]] = {"]
    for kind, rows in found.items():
        lines.append(f'    "{kind}": {{' if rows else f'    "{kind}": {{}},')
        lines += [f'        "{name}": "{target}",' for name, target in rows.items()]
        lines += ["    },"] if rows else []
    return "\n".join((*lines, "}", '"""Kind -> name -> "module:attribute"."""', ""))


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
