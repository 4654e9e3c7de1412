"""Look for new releases, install them, go back to the one before, and see what runs (needs [update] in the daemon).

check installs nothing; apply installs what is meant for this device, as the daemon does by itself unless it has
`auto = false`; import does so from a folder, such as a stick with what `edge-runtime repo bundle` wrote. These and
rollback ask the daemon on its own machine; status and history go over MQTT as well. A release is tried, and observed
while it serves: apply takes that long, and Ctrl-C leaves the daemon at work. Exit status 1: a check failed, or a
release that was to be installed was refused, now or before, or put off.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from edge_runtime.cli.arguments import UsageError, add_connection, positive
from edge_runtime.cli.connection import connected_early, connected_over_zmq
from edge_runtime.cli.progress import Progress
from edge_runtime.cli.screen import Screen
from edge_runtime.cli.update_report import (
    failures,
    print_history,
    print_offers,
    print_status,
    step_detail,
    step_text,
)
from edge_runtime.client.zmq_client import Client
from edge_runtime.errors import EdgeRuntimeError

ACTIONS = {
    "check": "look now what the repository offers, and install nothing",
    "apply": "look now and install what is meant for this device",
    "status": "what runs, what is under way, what was refused and why",
    "history": "what happened, newest first",
    "rollback": "let the release before serve again, and refuse the one that does",
    "import": "install from a folder, such as a USB stick",
}

DEFAULT_SHOWN = 20
"""Entries of the history: a screenful."""

ASK_S = 0.25
"""How often what is under way is asked for while an order runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `update` and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    parsers = {name: actions.add_parser(name, help=text, description=text) for name, text in ACTIONS.items()}
    parsers["history"].add_argument(
        "--count", metavar="N", type=positive, default=DEFAULT_SHOWN, help=f"entries (default {DEFAULT_SHOWN})"
    )
    parsers["rollback"].add_argument("model", metavar="MODEL")
    parsers["import"].add_argument("folder", metavar="DIR", help="a folder that the daemon sees")
    for action in parsers.values():
        add_connection(action)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Do the action; 0 when it is done, 1 when the check failed or a release is refused or put off."""
    if arguments.action is None:
        raise UsageError("update wants an action: check, apply, status, history, rollback MODEL or import DIR")
    actions = {
        "check": _check,
        "apply": _apply,
        "status": _status,
        "history": _history,
        "rollback": _rollback,
        "import": _import,
    }
    return actions[arguments.action](arguments, screen)


def _check(arguments: argparse.Namespace, screen: Screen) -> int:
    with connected_over_zmq(arguments, "update check") as client:
        checked = _followed(client, client.update_check, "looking what is offered", screen)
    status = _print_checked(checked, screen, installs=False)
    if not screen.wants_json and any(each.get("action") == "available" for each in checked.get("offers", ())):
        screen.line("`edge-runtime update apply` installs what is available.")
    return status


def _apply(arguments: argparse.Namespace, screen: Screen) -> int:
    with connected_over_zmq(arguments, "update apply") as client:
        return _print_checked(_followed(client, client.update_apply, "looking what is offered", screen), screen)


def _import(arguments: argparse.Namespace, screen: Screen) -> int:
    with connected_over_zmq(arguments, "update import") as client:
        label = f"looking what is in {arguments.folder}"
        checked = _followed(client, lambda: client.update_import(arguments.folder), label, screen)
        return _print_checked(checked, screen, imported=arguments.folder)


def _status(arguments: argparse.Namespace, screen: Screen) -> int:
    with connected_early(arguments) as client:
        told = client.update_status()
    if screen.wants_json:
        screen.json(told)
    else:
        print_status(told, screen)
    return 0


def _history(arguments: argparse.Namespace, screen: Screen) -> int:
    with connected_early(arguments) as client:
        entries = client.update_history(arguments.count)
    if screen.wants_json:
        screen.json(entries)
    elif entries:
        print_history(entries, screen)
    else:
        screen.line("Nothing has happened yet.")
    return 0


def _rollback(arguments: argparse.Namespace, screen: Screen) -> int:
    model = arguments.model
    with connected_over_zmq(arguments, "update rollback") as client:
        done = _followed(client, lambda: client.update_rollback(model), f"rolling back {model}", screen)
    if screen.wants_json:
        screen.json(done)
    elif done.get("withdrawn"):
        screen.line(f"The release of {model} that is under way is taken back, and refused from now on.")
    else:
        screen.line(f"{model} release {done.get('release')} serves again; the one after it is refused from now on.")
    return 0


def _print_checked(checked: Mapping[str, Any], screen: Screen, *, installs: bool = True, imported: str = "") -> int:
    """What a check found and did; 1 when something did not go well. imported: the folder, if one was."""
    offers = checked.get("offers", ())
    if screen.wants_json:
        screen.json(checked)
    elif offers:
        print_offers(offers, screen)
    elif checked.get("is_ok"):
        screen.line(f"{imported or 'The repository'} names no release for this device's group.")
    wrong = failures(checked, installs=installs, imported=imported)
    for paragraph in wrong:
        screen.error(paragraph)
    return 1 if wrong else 0


# ---- an order that takes minutes ------------------------------------------------------------------------------------


def _followed(client: Client, order: Callable[[], dict[str, Any]], label: str, screen: Screen) -> dict[str, Any]:
    """What an order answers, with what the daemon does meanwhile shown."""
    with ThreadPoolExecutor(1, "order") as thread:
        try:
            answer = thread.submit(order)
            with screen.progress(label) as progress:
                while not wait((answer,), ASK_S).done:
                    _show_step(client, label, progress)
        except BaseException as error:
            client.close()  # else the thread would wait for the answer
            if isinstance(error, KeyboardInterrupt):
                screen.note("The daemon goes on with it; `edge-runtime update status` tells how it does.")
            raise
        return answer.result()


def _show_step(client: Client, label: str, progress: Progress) -> None:
    try:
        step = client.update_status().get("under_way")
    except (ConnectionError, TimeoutError, EdgeRuntimeError):
        return  # inference is not served yet, or the daemon has gone, which the order itself will say
    if step is None:
        progress.show(label)
        return
    total = step.get("total_bytes")
    progress.show(step_text(step), step_detail(step), step.get("done_bytes", 0) / total if total else None)
