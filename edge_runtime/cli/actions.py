"""Actions of a verb, made from the rows of the table of operations: their parsers, and output for those without one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_runtime.cli.arguments import UsageError, add_connection, positive
from edge_runtime.cli.connection import connected, connected_over_zmq
from edge_runtime.cli.screen import Screen
from edge_runtime.operations import Operation, Parameter, Scope, actions_of


def add_actions(
    parser: argparse.ArgumentParser,
    verb: str,
    defaults: Mapping[str, int] | None = None,
    own: Mapping[str, str] | None = None,
) -> dict[str, argparse.ArgumentParser]:
    """Add a parser for each operation of a verb. defaults: of parameters, where they differ from the daemon's.

    own: actions of the verb's own, with their help.
    """
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    parsers = {}
    for name, operation in actions_of(verb).items():
        text = operation.summary[0].lower() + operation.summary[1:-1]
        parsers[name] = actions.add_parser(name, help=text, description=operation.summary)
        for parameter in operation.parameters:
            _add_parameter(parsers[name], parameter, (defaults or {}).get(parameter.name))
        add_connection(parsers[name])
    for name, text in (own or {}).items():
        parsers[name] = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        add_connection(parsers[name])
    return parsers


def action_of(arguments: argparse.Namespace, verb: str, *own: str) -> str:
    """The action that was named. own: how the verb's own ones are written. Raises UsageError without one."""
    if arguments.action is None:
        wanted = [*(_usage(name, operation) for name, operation in actions_of(verb).items()), *own]
        raise UsageError(f"{verb} wants an action: {', '.join(wanted[:-1])} or {wanted[-1]}")
    return str(arguments.action)


def run_action(arguments: argparse.Namespace, verb: str, screen: Screen) -> int:
    """Call the operation of an action and print its result: as JSON, or a mapping as fields."""
    operation = actions_of(verb)[arguments.action]
    values = {each.name: getattr(arguments, each.name) for each in operation.parameters}
    over_zmq = connected_over_zmq(arguments, operation.command)
    with over_zmq if operation.scope is Scope.CONTROL else connected(arguments) as client:
        result: Any = getattr(client, operation.name)(**values)
    if isinstance(result, dict) and not screen.wants_json:
        screen.fields({name: str(value) for name, value in result.items()})
    else:
        screen.json(result)
    return 0


def _add_parameter(parser: argparse.ArgumentParser, parameter: Parameter, default: int | None) -> None:
    kind = positive if parameter.kind is int else str
    if parameter.is_required:
        parser.add_argument(parameter.name, metavar=_metavar(parameter), type=kind, help=parameter.summary)
        return
    text = parameter.summary if default is None else f"{parameter.summary} (default {default})"
    parser.add_argument(f"--{parameter.name}", metavar=_metavar(parameter), type=kind, default=default, help=text)


def _metavar(parameter: Parameter) -> str:
    return "DIR" if parameter.kind is Path else "N" if parameter.kind is int else parameter.name.upper()


def _usage(name: str, operation: Operation) -> str:
    return " ".join([name, *(_metavar(each) for each in operation.parameters if each.is_required)])
