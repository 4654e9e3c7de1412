"""Writes the clients' methods and the documents' table from the rows of `operations.py`.

`python -m tests.architecture.operation_texts` renews them between their markers; test_operations.py holds them.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from edge_runtime.operations import OPERATIONS, Operation, Parameter, Scope

ROOT = Path(__file__).parents[2]
WIDTH = 120

BLOCKING = "edge_runtime/client/blocking_client.py"
CLIENTS = (BLOCKING, "edge_runtime/doors/zmq/asyncio_client.py")
PAGE = "docs/clients.md"


def main() -> None:
    """Renew every text that is made from the table."""
    for path, text in texts().items():
        (ROOT / path).write_text(text)


def texts() -> dict[str, str]:
    """The files that hold such a text, by path, as they should be."""
    found = {path: (ROOT / path).read_text() for path in (*CLIENTS, PAGE)}
    for scope in Scope:
        for path in CLIENTS:
            found[path] = _renewed(found[path], f"operations of scope {scope.value}", methods(scope, path))
    return {**found, PAGE: _renewed(found[PAGE], "operations", table())}


def table() -> str:
    """The operations as a table in Markdown."""
    lines = ["| operation | scope | parameters | command | what it does |", "|---|---|---|---|---|"]
    for row in OPERATIONS.values():
        parameters = ", ".join(_parameter_text(each) for each in row.parameters)
        command = f"`edge-runtime {row.command}`" if row.command else ""
        lines.append(f"| `{row.name}` | {row.scope.value} | {parameters} | {command} | {row.summary} {row.notes} |")
    return "\n".join(line.replace("  |", " |") for line in lines) + "\n"


def methods(scope: Scope, path: str = BLOCKING) -> str:
    """The methods of one scope, as a client's file has them."""
    rows = [row for row in OPERATIONS.values() if row.has_method and row.scope is scope]
    return "\n".join(_method(row, is_async=path != BLOCKING) for row in rows)


def _method(row: Operation, *, is_async: bool) -> str:
    # The clients that block describe each operation whole; the other has its first sentence.
    head, docstring = _signature(row, is_async=is_async), _docstring(row, is_whole=not is_async)
    values = "".join(f", {each.name}={each.name}" for each in row.parameters)
    timeout = ", timeout_ms" if row.scope is Scope.CONTROL else ""
    call = f'{"await " if is_async else ""}self._call("{row.name}"{timeout}{values})'
    body = call if row.result == "Any" else f'cast("{row.result}", {call})'
    return f"{head}\n{textwrap.indent(docstring, ' ' * 8)}\n        return {body}\n"


def _signature(row: Operation, *, is_async: bool) -> str:
    parts = ["self", *(_parameter_code(each) for each in row.parameters)]
    if row.scope is Scope.CONTROL:
        parts += ["*", "timeout_ms: float | None = None"]
    head, end = f"    {'async ' if is_async else ''}def {row.name}(", f") -> {row.result}:"
    line = f"{head}{', '.join(parts)}{end}"
    return line if len(line) <= WIDTH else f"{head}\n        {', '.join(parts)}\n    {end}"


def _parameter_code(parameter: Parameter) -> str:
    kind = "str | os.PathLike[str]" if parameter.kind is Path else parameter.kind.__name__
    return f"{parameter.name}: {kind}" if parameter.is_required else f"{parameter.name}: {kind} | None = None"


def _parameter_text(parameter: Parameter) -> str:
    return f"`{parameter.name}`" if parameter.is_required else f"`{parameter.name}`?"


def _docstring(row: Operation, *, is_whole: bool) -> str:
    described = [f"{each.name}: {each.summary}." for each in row.parameters if not each.in_header]
    notes = " ".join([row.notes, *described]).strip()
    if not notes or not is_whole:
        return f'"""{row.summary}"""'
    return f'"""{row.summary}\n\n{textwrap.fill(notes, WIDTH - 8)}\n"""'


def _renewed(text: str, name: str, made: str) -> str:
    """A file with the text between the markers of this name replaced."""
    begin = text.index("\n", text.index(f"{name}: begin")) + 1
    end = text.rindex("\n", 0, text.index(f"{name}: end")) + 1
    return f"{text[:begin]}\n{made}\n{text[end:]}"


if __name__ == "__main__":
    main()
