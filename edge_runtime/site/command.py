"""List the cameras of a running daemon and what they give, add one, and remove one.

list shows each rule of [[publish]] that looks at a camera, with the camera's state and the reason of a loss. add and
remove count at once, until the daemon's next reload or restart, which take what config.toml says.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime.cli.actions import action_of, add_actions, run_action
from edge_runtime.cli.connection import connected, connected_over_zmq
from edge_runtime.cli.screen import Screen
from edge_runtime.operations import Scope, actions_of

COLUMNS = ("camera", "name", "model", "state", "from", "losses", "dropped", "reason")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `cameras` and their options."""
    add_actions(parser, "cameras")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Do the action, and show the cameras of then; 0 when it is done."""
    action = action_of(arguments, "cameras")
    if action == "results":
        return run_action(arguments, "cameras", screen)
    operation = actions_of("cameras")[action]
    values = {each.name: getattr(arguments, each.name) for each in operation.parameters}
    over_zmq = connected_over_zmq(arguments, operation.command)
    with over_zmq if operation.scope is Scope.CONTROL else connected(arguments) as client:
        cameras = getattr(client, operation.name)(**values)
    if screen.wants_json:
        screen.json(cameras)
    elif cameras:
        print_cameras(cameras, screen)
    else:
        screen.line("The daemon reads no camera: add [[camera]] and [[publish]] to its config.toml, or `cameras add`.")
    return 0


def print_cameras(cameras: Sequence[Mapping[str, Any]], screen: Screen) -> None:
    """Print the table of `cameras list`, without empty columns."""
    rows = [[str(entry.get(column, "")) for column in COLUMNS] for entry in cameras]
    kept = [index for index in range(len(COLUMNS)) if any(row[index] for row in rows)]
    columns = [COLUMNS[index] for index in kept]
    screen.table(columns, [[row[index] for index in kept] for row in rows], right=("losses", "dropped"))
