"""What is promised in words: options of every verb, settings, operations, the public API, names of metrics."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import edge_runtime
from edge_runtime import errors
from edge_runtime.cli.main import overview, parser_of, verb_names
from edge_runtime.config.reference import markdown
from edge_runtime.operations import OPERATIONS
from tests.contract.running_daemon import ANSWER_S


def help_of_every_verb() -> str:
    """What `edge-runtime VERB --help` says. Not as argparse prints it, which differs from Python to Python."""
    lines = [overview()]
    for verb in verb_names():
        for parser in parser_of(verb).all_parsers():
            lines += ["", parser.prog, parser.description or ""]
            lines += [f"  {each}" for action in parser._actions for each in _action(action)]
    return "\n".join(lines) + "\n"


def _action(action: Any) -> Iterator[str]:
    name = ", ".join(action.option_strings) or action.dest
    if action.choices is not None:
        name += f" {{{', '.join(map(str, action.choices))}}}"
    nargs = "" if action.nargs is None else f" ({action.nargs})"
    metavar = "" if action.metavar is None else f" {action.metavar}"
    needed = " required" if action.required else ""
    yield f"{name}{metavar}{nargs}{needed}: {action.help}"


def settings() -> str:
    """The reference of config.toml and model.toml."""
    return markdown()


def operations() -> str:
    """The table of operations."""
    lines = []
    for row in OPERATIONS.values():
        lines += [f"{row.name} ({row.scope.value}) -> {row.result}: {row.summary} {row.notes}", f"  {row.command}"]
        lines += [f"  {each.name}: {each}" for each in row.parameters]
    return "\n".join(lines) + "\n"


def public_api() -> str:
    """Signatures of what `import edge_runtime` offers, and the errors with their codes."""
    lines = []
    for name in edge_runtime.__all__:
        if name == "__version__":
            continue
        kind = getattr(edge_runtime, name)
        lines.append(f"{name}{inspect.signature(kind)}")
        for method, value in sorted(inspect.getmembers(kind)):
            if not method.startswith("_"):
                lines.append(f"  {method}{inspect.signature(value) if callable(value) else ''}")
    for name, kind in sorted(vars(errors).items()):
        if inspect.isclass(kind) and issubclass(kind, errors.EdgeRuntimeError):
            base = kind.__mro__[1].__name__
            lines.append(f"{name}({base}) code={kind.code} retryable={kind.retryable}")
    return "\n".join(lines) + "\n"


def metric_names(url: str) -> str:
    """Type and name of each family that a daemon tells, with the names of its labels."""
    with urlopen(url, timeout=ANSWER_S) as answer:
        lines = answer.read().decode().splitlines()
    found = {line.removeprefix("# TYPE ") for line in lines if line.startswith("# TYPE ")}
    for line in lines:
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            labels = (
                sorted(each.partition("=")[0] for each in rest.rpartition("}")[0].split('",') if each) if rest else []
            )
            found.add(f"{name.split(' ')[0]} {' '.join(labels)}".strip())
    return "\n".join(sorted(found)) + "\n"
