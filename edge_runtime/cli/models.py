"""List the models of a running daemon, show what one takes and gives, load and unload.

list shows every version with its state and, where it failed, why. load and unload return when it is done.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime.cli.arguments import UsageError, add_connection, positive
from edge_runtime.cli.connection import connected, connected_early, connected_over_zmq
from edge_runtime.cli.screen import Screen, size_text

COLUMNS = ("name", "version", "state", "backend", "device", "precision", "mode", "memory", "reason")

BATCHES = {None: "", True: "yes, axis 0 is rows", False: "no, requests run alone"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `models` and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    for name, summary in (
        ("list", "every version the daemon knows"),
        ("show", "what a model takes and gives"),
        ("load", "load a model, or load it anew"),
        ("unload", "take a model out of service"),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        if name == "list":
            action.add_argument("--names", action="store_true", help="names only, one a line")
        else:
            action.add_argument("model", metavar="MODEL")
            action.add_argument(
                "--version", metavar="N", type=positive, help="one version (default: the daemon's choice)"
            )
        add_connection(action)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Do the action; 0 when it is done."""
    if arguments.action is None:
        raise UsageError("models wants an action: list, show MODEL, load MODEL or unload MODEL")
    actions = {"list": _list, "show": _show, "load": _load, "unload": _unload}
    actions[arguments.action](arguments, screen)
    return 0


def print_models(models: Sequence[Mapping[str, Any]], screen: Screen) -> None:
    """The table of `models list`; columns that are empty everywhere are left out."""
    rows = [[_cell(entry, column) for column in COLUMNS] for entry in models]
    kept = [index for index, column in enumerate(COLUMNS) if any(row[index] for row in rows) or column == "name"]
    screen.table(
        [COLUMNS[index] for index in kept],
        [[row[index] for index in kept] for row in rows],
        right=("version", "memory"),
    )


def _list(arguments: argparse.Namespace, screen: Screen) -> None:
    with connected_early(arguments) as client:
        models = client.models()
    if screen.wants_json:
        screen.json(models)
    elif arguments.names:
        for name in sorted({str(entry["name"]) for entry in models}):
            screen.line(name)
    elif models:
        print_models(models, screen)
    else:
        screen.line("The daemon's models folder is empty: put a model at <models>/<name>/1/model.onnx.")


def _show(arguments: argparse.Namespace, screen: Screen) -> None:
    with connected(arguments) as client:
        metadata = client.metadata(arguments.model, arguments.version)
    if screen.wants_json:
        screen.json(metadata)
        return
    screen.heading(str(metadata.get("name", arguments.model)))
    screen.fields(
        {
            "version": str(metadata.get("version", "")),
            "versions": ", ".join(map(str, metadata.get("versions", ()))),
            "platform": str(metadata.get("platform", "")),
            "batches": BATCHES[metadata.get("batches")],
            "most rows": str(metadata.get("max_batch_rows", "")),
            "largest tensor": size_text(metadata.get("max_frame_bytes")),
        }
    )
    rows = [
        [kind, str(spec["name"]), str(spec["datatype"]), shape_text(spec["shape"])]
        for kind, key in (("input", "inputs"), ("output", "outputs"))
        for spec in metadata.get(key, ())
    ]
    screen.line()
    screen.table(("", "name", "datatype", "shape"), rows)


def _load(arguments: argparse.Namespace, screen: Screen) -> None:
    with connected_over_zmq(arguments, "models load") as client, screen.progress(f"loading {arguments.model}"):
        result = client.load(arguments.model, arguments.version)
    _print_result(result, screen)


def _unload(arguments: argparse.Namespace, screen: Screen) -> None:
    with connected_over_zmq(arguments, "models unload") as client, screen.progress(f"unloading {arguments.model}"):
        result = client.unload(arguments.model, arguments.version)
    _print_result(result, screen)


def _print_result(result: Any, screen: Screen) -> None:
    if screen.wants_json:
        screen.json(result)
    elif isinstance(result, list) and result:
        print_models(result, screen)
    else:
        screen.line("done")


def shape_text(shape: Sequence[int]) -> str:
    """A shape as it is read: an open dimension is a question mark."""
    return f"[{', '.join('?' if length < 0 else str(length) for length in shape)}]"


def _cell(entry: Mapping[str, Any], column: str) -> str:
    if column == "memory":
        nbytes = entry.get("memory_bytes")
        return size_text(nbytes) if nbytes else ""
    value = entry.get(column)
    return "" if value is None else str(value)
