"""The actions of `repo rollout`: start or go on, status, stop.

Owns: the loop between looks, and what a person reads meanwhile. `start` runs until the rollout is done or stopped, and
may be ended and started again at any time. With --json each prints one document, at its end.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime import plugins
from edge_runtime.cli.arguments import Parser, UsageError, add_options
from edge_runtime.cli.screen import Screen, duration_text
from edge_runtime.errors import PublishError
from edge_runtime.models.names import parse_version

if TYPE_CHECKING:
    from edge_runtime.fleet.listener import FleetListener
    from edge_runtime.publish.passphrases import Passphrases
    from edge_runtime.rollouts.conductor import Agree, Conductor
    from edge_runtime.rollouts.record import RolloutRecord

ACTIONS = {
    "start": "give a release to more and more devices of a group, or go on; stops itself where devices refuse it",
    "status": "show each rollout: its step, how many devices run it or refused it, why it stopped",
    "stop": "stop a rollout: no further device takes the release",
}

LOOK_S = 5.0
"""Between two looks where no device says anything."""

PAUSE_S = 0.5
"""Between two looks where devices say much: each counts all of them."""

_LENGTH = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|m|h|d)?")
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def add_arguments(action: argparse.ArgumentParser, finish: Callable[..., None]) -> None:
    """Add the actions of `repo rollout`. finish: adds the options that every action of `repo` has."""
    actions = action.add_subparsers(dest="rollout_action", metavar="ACTION", title="actions", parser_class=Parser)
    parsers = {name: actions.add_parser(name, help=text, description=text) for name, text in ACTIONS.items()}
    for name, parser in parsers.items():
        finish(parser, signs=name != "status")
        parser.add_argument("--group", metavar="GROUP", help="of devices (default: the repository's only one)")
    start = parsers["start"]
    start.add_argument("model", metavar="MODEL=VERSION", help="TEAM/MODEL=VERSION names the team as well")
    start.add_argument(
        "--steps", metavar="P,P", type=_percents, help="percent of the devices, rising (default 1,10,50,100)"
    )
    start.add_argument("--hold", metavar="TIME", type=_length_s, help="of each step: 45s, 30min, 1h, 2d (default 1h)")
    start.add_argument(
        "--stop-at", metavar="P%", type=_share, help="share of the devices that may refuse it (default 2%%)"
    )
    start.add_argument(
        "--go-back", action="store_true", help="where it stops, devices that took it go back to the release before"
    )
    start.add_argument("--anew", action="store_true", help="begin again where it was stopped or is done")
    start.add_argument("--once", action="store_true", help="look once, sign what is due, and end: for cron; wakes none")
    broker = start.add_argument_group("broker")
    broker.add_argument("--mqtt", metavar="URL", help="the broker of the devices, mqtt[s]://[user@]host[:port]")
    add_options(broker, [each for each in plugins.options("connect") if "mqtt" in each.keys])
    stop = parsers["stop"]
    stop.add_argument("model", metavar="MODEL")
    stop.add_argument("--go-back", action="store_true", help="devices that took it go back to the release before")


def run(arguments: argparse.Namespace, screen: Screen, passphrases: Passphrases, agree: Agree) -> int:
    """Run an action; returns 0, or 1 where a rollout was stopped. Raises PublishError, UsageError, ConnectionError."""
    if arguments.rollout_action is None:
        raise UsageError(f"repo rollout wants an action: {', '.join(ACTIONS)}")
    if arguments.rollout_action == "status":
        return _status(arguments, screen)
    if arguments.rollout_action == "stop":
        return _stop(arguments, screen, passphrases, agree)
    return _start(arguments, screen, passphrases, agree)


# ---- actions --------------------------------------------------------------------------------------------------------


def _start(arguments: argparse.Namespace, screen: Screen, passphrases: Passphrases, agree: Agree) -> int:
    if not arguments.mqtt:
        raise UsageError("repo rollout start wants --mqtt mqtt[s]://[user@]host[:port], the broker of the devices")
    named, equals, version = arguments.model.partition("=")
    number = parse_version(version)
    if not equals or number is None:
        raise UsageError(f"{arguments.model}: wanted MODEL=VERSION, for example digits=3")
    team, _, model = named.rpartition("/")
    from edge_runtime.fleet.command import LOAD_LIMIT_S, new_listener
    from edge_runtime.rollouts.conductor import Conductor

    conductor = Conductor(Path(arguments.repo), _group(arguments), model, passphrases, agree)
    changed = threading.Event()
    with conductor.file.driven():
        listener = new_listener(arguments, changed.set)
        listener.start()
        try:
            listener.wait_loaded(LOAD_LIMIT_S)
            record = _begin_or_go_on(conductor, listener, arguments, number, team)
            record = _drive(conductor, listener, changed, record, None if arguments.once else screen)
        finally:
            listener.close()
    _print_end(record, screen)
    return 1 if record.state == "stopped" else 0


def _begin_or_go_on(
    conductor: Conductor, listener: FleetListener, arguments: argparse.Namespace, version: int, team: str
) -> RolloutRecord:
    """Go on with the rollout that the repository has a record of, or begin one."""
    record = conductor.file.read()
    if record is not None and not arguments.anew:
        if record.state in ("running", "stopping"):
            _check_same(record, arguments, version)
            return conductor.go_on()
        if record.version == version:
            raise PublishError(
                f"the rollout of {record.name} to {record.group} is {record.state}: {record.reason}; "
                "--anew begins it again"
            )
    elif record is not None and record.state in ("running", "stopping"):
        raise PublishError(
            f"the rollout of {record.name} to {record.group} is under way; go on without --anew, or stop it first"
        )
    from edge_runtime.fleet.fleet import AssignedRelease
    from edge_runtime.rollouts.plan import RolloutPlan

    usual = RolloutPlan()
    plan = RolloutPlan(
        usual.percents if arguments.steps is None else arguments.steps,
        usual.hold_s if arguments.hold is None else arguments.hold,
        usual.stop_share if arguments.stop_at is None else arguments.stop_at,
    )
    group = conductor.file.path.parent.name
    nothing = AssignedRelease(group, "", 0, None, 100.0)
    moved = conductor.moved()
    now = listener.ask(lambda fleet: fleet.fates(time.time(), nothing, moved))
    silent_share = (now.went_silent + now.not_meant_silent) / now.devices if now.devices else 0.0
    return conductor.begin(version, plan, silent_share, goes_back=arguments.go_back, team=team)


def _check_same(record: RolloutRecord, arguments: argparse.Namespace, version: int) -> None:
    """Raise PublishError where a rollout under way is another one than the command line describes."""
    if record.version != version:
        raise PublishError(f"the rollout of {record.name} to {record.group} is under way; stop it first")
    for option, wanted, kept in (
        ("--steps", arguments.steps, record.plan.percents),
        ("--hold", arguments.hold, record.plan.hold_s),
        ("--stop-at", arguments.stop_at, record.plan.stop_share),
    ):
        if wanted is not None and wanted != kept:
            raise PublishError(
                f"{option} differs from that of the rollout under way; leave it out to go on, or stop the rollout first"
            )


def _drive(
    conductor: Conductor,
    listener: FleetListener,
    changed: threading.Event,
    record: RolloutRecord,
    screen: Screen | None,
) -> RolloutRecord:
    """Look and sign until the rollout is over. changed: set when devices say something. screen: None to look once."""
    if screen is None:
        return _look(conductor, listener, record)
    screen.note("Ctrl-C ends this process and leaves the rollout as it is; the same command goes on.")
    shown, percent = "", 0.0
    while record.state == "running":
        if record.percent != percent:
            percent = record.percent
            _wake(listener, record, screen)
        record = _look(conductor, listener, record)
        shown = _show(record, listener.reason, shown, screen)
        if record.state == "running" and record.percent == percent:
            changed.wait(_wait_s(record))
            changed.clear()
            threading.Event().wait(PAUSE_S)
    return record


def _look(conductor: Conductor, listener: FleetListener, record: RolloutRecord) -> RolloutRecord:
    """Count the devices, and let what follows be signed; nothing while the broker is away."""
    if record.state != "running" or listener.reason:
        return record
    release, moved = conductor.assigned(record), conductor.moved()
    return conductor.look(listener.ask(lambda fleet: fleet.fates(time.time(), release, moved)))


def _wait_s(record: RolloutRecord) -> float:
    """Return how long nothing happens by itself: until the hold is over, at most LOOK_S."""
    return LOOK_S if record.due_s is None else min(max(record.due_s - time.time(), 0.0), LOOK_S)


def _wake(listener: FleetListener, record: RolloutRecord, screen: Screen) -> None:
    """Have the devices of the group look now; without it they look when they are due."""
    try:
        listener.wake(record.group)
    except ConnectionError as error:
        screen.note(f"{record.group} is not woken, and looks when it is due: {error}")


def _status(arguments: argparse.Namespace, screen: Screen) -> int:
    from edge_runtime.rollouts.record import read_records, record_json

    found = [
        (record, file.is_driven)
        for record, file in read_records(_folder(arguments))
        if arguments.group in (None, record.group)
    ]
    if screen.wants_json:
        screen.json([record_json(record, is_driven=is_driven) for record, is_driven in found])
        return 0
    if not found:
        screen.line("There was no rollout; `edge-runtime repo rollout start` begins one.")
    for index, (record, is_driven) in enumerate(found):
        if index:
            screen.line()
        _print_record(record, screen, is_driven=is_driven)
    return 0


def _stop(arguments: argparse.Namespace, screen: Screen, passphrases: Passphrases, agree: Agree) -> int:
    from edge_runtime.rollouts.conductor import Conductor
    from edge_runtime.rollouts.record import record_json

    conductor = Conductor(Path(arguments.repo), _group(arguments), arguments.model, passphrases, agree)
    record = conductor.stop("stopped by an operator", goes_back=arguments.go_back or None)
    if screen.wants_json:
        screen.json(record_json(record, is_driven=False))
    else:
        screen.line(_end_text(record))
    return 0


# ---- what a person reads --------------------------------------------------------------------------------------------


def _show(record: RolloutRecord, away: str, shown: str, screen: Screen) -> str:
    """Print a line where something changed; returns the line. away: why the broker is not there."""
    text = f"{record.percent:g} %: {_counts_text(record.counts)}; {_reason_text(record, away)}"
    if text != shown:
        screen.note(f"{datetime.now().astimezone():%H:%M:%S}  {text}")
    return text


def _reason_text(record: RolloutRecord, away: str) -> str:
    if away and record.state == "running":
        return f"waits for the broker: {away}"
    if record.due_s is not None:
        return f"{record.reason} until {datetime.fromtimestamp(record.due_s).astimezone():%Y-%m-%d %H:%M:%S}"
    return record.reason or "looks"


def _counts_text(counts: Mapping[str, Any]) -> str:
    if not counts:
        return "no look yet"
    names = ("installed", "refused", "waiting", "silent", "passed_over")
    parts = [f"{counts[name]} {name.replace('_', ' ')}" for name in names if counts[name] or name == "installed"]
    return f"{', '.join(parts)} of {counts['devices']} devices"


def _print_end(record: RolloutRecord, screen: Screen) -> None:
    from edge_runtime.rollouts.record import record_json

    if screen.wants_json:
        screen.json(record_json(record, is_driven=False))
    else:
        screen.line(_end_text(record))


def _end_text(record: RolloutRecord) -> str:
    """Return how a rollout ended, and the next step."""
    what = f"the rollout of {record.name} to {record.group}"
    if record.state == "running":
        return f"{what.capitalize()} is at {record.percent:g} %; the same command goes on."
    if record.state == "done":
        return f"{what.capitalize()} is done: {record.reason}."
    if not record.before:
        kept = f"nothing was before, so {record.percent:g} % keep it: `edge-runtime repo unassign` takes it away"
    elif record.goes_back:
        kept = "devices that took it go back to the release before"
    else:
        kept = "no further device takes it; those that run it keep it, until `edge-runtime repo assign … --going-back`"
    return f"{what.capitalize()} is stopped at {record.percent:g} %: {record.reason}. Now {kept}."


def _print_record(record: RolloutRecord, screen: Screen, *, is_driven: bool) -> None:
    screen.heading(f"{record.group}: {record.name}")
    state: str = record.state
    if state == "running" and not is_driven:
        state = "running, and no process drives it: `edge-runtime repo rollout start` goes on"
    reasons = record.counts.get("reasons", ())
    began = f", begun at {record.began_percent:g} %" if record.began_percent else ""
    screen.fields(
        {
            "state": state,
            "step": f"{record.percent:g} % of {', '.join(f'{each:g}' for each in record.plan.percents)}{began}",
            "hold": duration_text(record.plan.hold_s),
            "stops at": f"{record.plan.stop_share:.1%}",
            "devices": _counts_text(record.counts),
            "now": _reason_text(record, ""),
            "reasons": "\n".join(f"{each['devices']} {each['kind']}: {each['reason']}" for each in reasons),
        }
    )


# ---- options --------------------------------------------------------------------------------------------------------


def _folder(arguments: argparse.Namespace) -> Path:
    from edge_runtime.publish.folder import RepositoryFolder

    folder = RepositoryFolder(Path(arguments.repo))
    if not folder.is_repository:
        raise PublishError(f"{folder.path}: is not a repository; make one with `edge-runtime repo init` or give --repo")
    return folder.path


def _group(arguments: argparse.Namespace) -> str:
    """Return the named group, or the only one. Raises PublishError: there are several, or none."""
    from edge_runtime.publish.passphrases import Passphrases
    from edge_runtime.publish.repository import open_repository

    with open_repository(Path(arguments.repo), Passphrases()) as repository:
        groups: Sequence[str] = repository.catalog.owners("fleet")
    if arguments.group is None and len(groups) == 1:
        return groups[0]
    if arguments.group not in groups:
        known = ", ".join(groups) or "none"
        what = "name one with --group" if arguments.group is None else f"there is no group {arguments.group[:80]!r}"
        raise PublishError(f"{what}; known: {known}; `edge-runtime repo add-group` makes one")
    return str(arguments.group)


def _percents(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.replace("%", "").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted percentages such as 1,10,50,100") from None


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / 100
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a percentage such as 2%") from None


def _length_s(text: str) -> float:
    found = _LENGTH.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a length of time such as 45s, 30min, 1h or 2d")
    return float(found[1]) * _UNITS[found[2] or "s"]
