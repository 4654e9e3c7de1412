"""Look for new releases, install them, go back to the one before, and see what runs (needs [update] in the daemon).

check installs nothing; apply installs the releases meant for this device, as the daemon does by itself unless it has
`auto = false`; import does so from a folder, such as a stick that `edge-runtime repo bundle` wrote. These and rollback
ask the daemon on its own machine; status and history work over MQTT too. A release is tried, and observed while it
serves: apply takes that long, and Ctrl-C leaves the daemon at work. Exit status 1: the check failed, or a release to be
installed was refused, now or before, or put off.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from edge_runtime.cli.actions import action_of, add_actions, run_action
from edge_runtime.cli.connection import connected_early, connected_over_zmq
from edge_runtime.cli.screen import Progress, Screen
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.updates.command_report import (
    failures,
    print_history,
    print_offers,
    print_status,
    step_detail,
    step_text,
)

DEFAULT_SHOWN = 20
"""Entries of the history: a screenful."""

ASK_S = 0.25
"""Between two looks at the release under way while an operation runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `update` and their options."""
    add_actions(parser, "update", {"count": DEFAULT_SHOWN})


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run the action; returns 0, or 1 when the check failed or a release is refused or put off."""
    actions = {
        "check": _check,
        "apply": _apply,
        "status": _status,
        "history": _history,
        "rollback": _rollback,
        "import": _import,
    }
    action = actions.get(action_of(arguments, "update"))
    return action(arguments, screen) if action else run_action(arguments, "update", screen)


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
    """Print what a check found and did; returns 1 when a part of it failed. imported: the folder, if one was."""
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


# ---- an operation that takes minutes --------------------------------------------------------------------------------


def _followed(client: Client, operation: Callable[[], dict[str, Any]], label: str, screen: Screen) -> dict[str, Any]:
    """Return the answer of an operation, and show meanwhile what the daemon does."""
    with ThreadPoolExecutor(1, "operation") as thread:
        try:
            answer = thread.submit(operation)
            with screen.progress(label) as progress:
                while not wait((answer,), ASK_S).done:
                    _show_step(client, label, progress)
        except BaseException as error:
            client.close()  # else the thread would wait for the answer
            if isinstance(error, KeyboardInterrupt):
                screen.note("The daemon continues; `edge-runtime update status` shows its progress.")
            raise
        return answer.result()


def _show_step(client: Client, label: str, progress: Progress) -> None:
    try:
        step = client.update_status().get("under_way")
    except (ConnectionError, TimeoutError, EdgeRuntimeError):
        return  # requests are not answered yet, or the daemon has gone, which the operation reports
    if step is None:
        progress.show(label)
        return
    total = step.get("total_bytes")
    progress.show(step_text(step), step_detail(step), step.get("done_bytes", 0) / total if total else None)
