"""List plug-ins: those that `plugins` in config.toml names, with why one cannot be used, and those that it could name.

Asks no daemon: it tries each plug-in as a daemon that starts now would. The exit status is 1 where one that is named
cannot be used. docs/plugins.md says how to write one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from edge_runtime import plugins
from edge_runtime.cli.screen import Screen
from edge_runtime.config.loading import named_plugins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration file."""
    parser.add_argument("--config", metavar="F", type=Path, help="the configuration that names them, as of serve")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Print the table. Returns the exit status."""
    plugins.use(named_plugins(arguments.config))
    with screen.progress("trying the plug-ins"):
        plugins.try_all()
    found = (*plugins.used(), *plugins.installed_unused())
    if screen.wants_json:
        screen.json([each.as_json() for each in found])
    elif found:
        screen.table(plugins.COLUMNS, [list(each.as_json().values()) for each in found])
    else:
        screen.note("there are no plug-ins; docs/plugins.md says how to write one")
    return 1 if any(not each.is_usable for each in plugins.used()) else 0
