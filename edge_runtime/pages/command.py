"""Tell how the device is in one sentence, what happened last, and write the bundle for a bug report.

Without an action: the sentence, and the last warnings with what to do about each; the exit status is 1 where something
is wrong. --bundle writes what a bug report needs, without passwords, tokens and keys; look at it before you send it.
A daemon answers where its page is on: with the HTTP door on this machine, or [http] page = true.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_runtime.cli.actions import add_actions, run_action
from edge_runtime.cli.arguments import add_connection
from edge_runtime.cli.connection import connected
from edge_runtime.cli.screen import Screen
from edge_runtime.durable import write_atomically

SHOWN_EVENTS = 10
BUNDLE_MODE = 0o600
LEVELS = {"good": "green", "warning": "yellow", "bad": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `doctor` and its options."""
    parser.add_argument("--bundle", metavar="FILE", type=Path, help="write the bundle for a bug report, a .tar.gz")
    add_connection(parser)
    add_actions(parser, "doctor")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Do the action, or tell how the device is; 1 where something is wrong."""
    if arguments.action is not None:
        return _events(arguments, screen) if arguments.action == "events" else run_action(arguments, "doctor", screen)
    with connected(arguments) as client:
        told = client.overview()
        events = [each for each in client.events() if each["level"] != "info"][:SHOWN_EVENTS]
        files = client.doctor()["files"] if arguments.bundle is not None else {}
    if files:
        from edge_runtime.pages.report import bundle

        write_atomically(arguments.bundle, bundle(files), mode=BUNDLE_MODE)
    if screen.wants_json:
        screen.json({**told, "events": events, "bundle": str(arguments.bundle) if files else None})
    else:
        screen.line(f"{screen.painted(told['level'], LEVELS[told['level']])}  {told['sentence']}")
        _print_events(events, screen)
        if files:
            screen.note(f"{arguments.bundle} has {', '.join(files)}; look at it before you send it")
    return 1 if told["level"] == "bad" else 0


def _events(arguments: argparse.Namespace, screen: Screen) -> int:
    with connected(arguments) as client:
        events = client.events(count=arguments.count)
    if screen.wants_json:
        screen.json(events)
    else:
        _print_events(events, screen)
    return 0


def _print_events(events: Sequence[Mapping[str, Any]], screen: Screen) -> None:
    """Print each on a line, and below it what to do."""
    for event in events:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        of = " ".join(str(event[name]) for name in ("model", "version") if event[name] is not None)
        why = event["fields"].get("reason", "")
        screen.line(f"{at}  {event['level']:<7}  {'  '.join(filter(None, (event['what'], of, str(why))))}")
        if event["advice"]:
            screen.line(f"    {event['advice']} See {event['docs']}.")
