"""See a fleet: the devices behind a broker, releases on them, who is slow; wake a group; serve a page of all of it.

It reads what devices retain on the broker, and with --repository the assignments there. It signs nothing and holds no
key: `edge-runtime repo assign` says what a group runs. Without an action it serves the page at --http: off this machine
that needs --http-cert, --http-key and --tokens. docs/fleet.md has an example.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from edge_runtime import plugins
from edge_runtime.cli.arguments import Parser, UsageError, add_options, positive
from edge_runtime.cli.screen import Screen, duration_text, ms_text, rate_text
from edge_runtime.errors import ConfigError
from edge_runtime.extras import install_advice

if TYPE_CHECKING:
    from edge_runtime.fleet.fleet import SignedFleet
    from edge_runtime.fleet.listener import FleetListener

ACTIONS = {
    "serve": "serve a page of the fleet, and its figures as JSON",
    "overview": "count all devices by condition, version, profile and group",
    "groups": "count the devices of each group by condition, version and profile",
    "devices": "list devices: group, version, health, since when silent",
    "device": "show one device",
    "releases": "count for each release: installed, refused, waiting, with the reasons",
    "slow": "list models by how slow they are on their slowest device, for each profile",
    "history": "list what happened to devices, of the file that a page's --history names",
    "wake": "have the devices of a group look for updates",
}

DEFAULT_HTTP = "127.0.0.1:8090"

LOAD_LIMIT_S = 60.0
"""How long a verb waits for what a broker retains: 10 000 devices take seconds."""

WAKE_S = 2.0
"""How long `wake` listens whether the broker refuses it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `fleet` and their options."""
    _add_broker(parser)
    _add_serving(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", parser_class=Parser)
    parsers = {name: actions.add_parser(name, help=text, description=text) for name, text in ACTIONS.items()}
    for name, action in parsers.items():
        if name != "history":
            _add_broker(action, default=argparse.SUPPRESS)
    _add_serving(parsers["serve"], default=argparse.SUPPRESS)
    _add_repository(parsers["releases"], default=argparse.SUPPRESS)
    devices = parsers["devices"]
    devices.add_argument("--search", metavar="WORDS", default="", help="in id, group, profile, version, model, health")
    devices.add_argument("--condition", metavar="C", default="", help="ok, degraded, offline, stopped, mute, …")
    devices.add_argument("--silent", action="store_true", help="only those that do not answer")
    devices.add_argument("--limit", metavar="N", type=positive, default=1_000, help="at most so many (default 1000)")
    for name in ("devices", "slow"):
        parsers[name].add_argument("--group", metavar="GROUP", default="", help="only devices of it")
    parsers["device"].add_argument("device", metavar="DEVICE")
    history = parsers["history"]
    history.add_argument("--history", metavar="FILE", required=True, help="SQLite file that the page's process writes")
    history.add_argument("--device", metavar="DEVICE", default="", help="only what happened to it")
    history.add_argument("--limit", metavar="N", type=positive, default=100, help="at most so many (default 100)")
    parsers["wake"].add_argument("group", metavar="GROUP")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run the action; returns 0. Raises ConnectionError: the broker is away, or does not tell of devices."""
    if arguments.action == "history":
        _history(arguments, screen)
        return 0
    if not arguments.mqtt:
        raise UsageError("fleet wants --mqtt mqtt[s]://[user@]host[:port], the broker of the devices")
    if arguments.action in (None, "serve"):
        return _serve(arguments, screen)
    with _listening(arguments) as listener:
        actions = {
            "overview": _overview,
            "groups": _groups,
            "devices": _devices,
            "device": _device,
            "releases": _releases,
            "slow": _slow,
            "wake": _wake,
        }
        actions[arguments.action](listener, arguments, screen)
    return 0


# ---- options --------------------------------------------------------------------------------------------------------


def _add_broker(parser: argparse.ArgumentParser, default: Any = None) -> None:
    group = parser.add_argument_group("broker")
    group.add_argument(
        "--mqtt", metavar="URL", default=default, help="the broker of the devices, mqtt[s]://[user@]host[:port]"
    )
    options = [each for each in plugins.options("connect") if "mqtt" in each.keys]
    add_options(group, options if default is None else [replace(each, default=default) for each in options])


def _add_repository(parser: argparse.ArgumentParser, default: Any = None) -> None:
    group = parser.add_argument_group("repository")
    group.add_argument("--repository", metavar="PLACE", default=default, help="its folder or URL: what groups run")
    group.add_argument(
        "--root-file", metavar="FILE", default=default, help="believe the repository by this root (1.root.json)"
    )


def _add_serving(parser: argparse.ArgumentParser, default: Any = None) -> None:
    _add_repository(parser, default)
    group = parser.add_argument_group("page")
    group.add_argument(
        "--http",
        metavar="A",
        default=DEFAULT_HTTP if default is None else default,
        help=f"where the page is: host:port or unix:/path (default {DEFAULT_HTTP})",
    )
    group.add_argument("--http-cert", metavar="FILE", default=default, help="PEM file of the page's certificate")
    group.add_argument("--http-key", metavar="FILE", default=default, help="PEM file of its key")
    group.add_argument("--tokens", metavar="FILE", default=default, help="tokens that `edge-runtime token` wrote")
    group.add_argument("--history", metavar="FILE", default=default, help="SQLite file of changes (default: memory)")


@contextmanager
def _listening(arguments: argparse.Namespace) -> Iterator[FleetListener]:
    listener = new_listener(arguments)
    listener.start()
    try:
        listener.wait_loaded(LOAD_LIMIT_S)
        yield listener
    finally:
        listener.close()


def new_listener(arguments: argparse.Namespace, on_change: Callable[[], None] = lambda: None) -> FleetListener:
    """Return the listener of a command line. on_change: as of `FleetListener`.

    Raises ConfigError: its options cannot be, or MQTT is not installed.
    """
    try:
        from edge_runtime.doors.mqtt.broker import broker_access
        from edge_runtime.doors.mqtt.settings import MqttSettings
        from edge_runtime.doors.mqtt.topics import check_prefix
        from edge_runtime.fleet.listener import FleetListener
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; {install_advice('mqtt')}") from None
    files = {name: getattr(arguments, name) for name in ("password_file", "ca_file", "cert_file", "key_file")}
    try:
        settings = MqttSettings(url=arguments.mqtt, **files)
    except ValueError as error:
        raise ConfigError(f"--mqtt: {error}") from None
    return FleetListener(broker_access(settings), check_prefix("--prefix", arguments.prefix), on_change=on_change)


# ---- actions --------------------------------------------------------------------------------------------------------


def _serve(arguments: argparse.Namespace, screen: Screen) -> int:
    try:
        from edge_runtime.fleet.server import serve_fleet  # the HTTP server
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; {install_advice('http')}") from None
    return serve_fleet(arguments, screen, new_listener(arguments))


def _overview(listener: FleetListener, _arguments: argparse.Namespace, screen: Screen) -> None:
    found = listener.ask(lambda fleet: fleet.overview(time.time()))
    if screen.wants_json:
        screen.json(found)
        return
    screen.heading(f"{found['devices']} devices of {listener.url}")
    ignored = sum(found["ignored"].values())
    screen.fields(
        {
            **{name: _counts_text(found[name]) for name in ("conditions", "versions", "profiles", "groups")},
            "requests": rate_text(found["rate_per_s"]) + "/s",
            "refused": f"{found['refusing']} devices refused a release" if found["refusing"] else "",
            "clocks": f"{found['clocks_off']} are off" if found["clocks_off"] else "",
            "ignored": f"{ignored} messages that are not a device's" if ignored else "",
        }
    )


def _groups(listener: FleetListener, _arguments: argparse.Namespace, screen: Screen) -> None:
    found = listener.ask(lambda fleet: fleet.groups(time.time()))
    if screen.wants_json:
        screen.json(found)
        return
    rows = [
        [
            each["group"] or "(none)",
            str(each["devices"]),
            str(each["conditions"].get("ok", 0)),
            str(each["silent"]),
            str(each["refusing"]),
            rate_text(each["rate_per_s"]),
            _counts_text(each["versions"]),
            _counts_text(each["profiles"]),
        ]
        for each in found
    ]
    columns = ("group", "devices", "ok", "silent", "refusing", "req/s", "versions", "profiles")
    screen.table(columns, rows, columns[1:6])


def _devices(listener: FleetListener, arguments: argparse.Namespace, screen: Screen) -> None:
    found = listener.ask(
        lambda fleet: fleet.devices(
            time.time(),
            search=arguments.search,
            group=arguments.group,
            condition="silent" if arguments.silent else arguments.condition,
            limit=arguments.limit,
        )
    )
    if screen.wants_json:
        screen.json(found)
        return
    rows = [
        [
            each["device"],
            " ".join(each["groups"]),
            each["version"],
            each["profile"],
            each["condition"],
            _ago(each["since"]),
            f"{each['ready']} of {each['models']}",
            each["health"],
        ]
        for each in found["devices"]
    ]
    columns = ("device", "groups", "version", "profile", "condition", "for", "loaded", "health")
    screen.table(columns, rows, ("for", "loaded"))
    left = found["count"] - len(rows)
    screen.line(f"{found['count']} devices{f', {left} more than shown; --limit N or --search' if left else ''}.")


def _device(listener: FleetListener, arguments: argparse.Namespace, screen: Screen) -> None:
    found = listener.ask(lambda fleet: fleet.device(arguments.device, time.time()))
    if found is None:
        raise ConfigError(f"the broker knows no device {arguments.device!r}; `edge-runtime fleet devices` lists them")
    if screen.wants_json:
        screen.json(found)
        return
    screen.heading(f"{found['device']}: {found['health']}")
    update, off_s = found["update"], found["clock_off_s"]
    screen.fields(
        {
            "groups": ", ".join(found["groups"]),
            "version": found["version"],
            "profile": found["profile"],
            "condition": f"{found['condition']} for {_ago(found['since'])}" if found["since"] else found["condition"],
            "reasons": "\n".join(found["reasons"]),
            "clock": f"it is off by {duration_text(abs(off_s))}" if off_s else "",
            "updates": update["trouble"] or (update["state"] if update["is_on"] else ""),
            "refused": "\n".join(map(_note_text, update["refused"])),
            "not installed": "\n".join(map(_note_text, update["open"])),
        }
    )
    rows = [
        [
            each["name"],
            str(each["version"] or ""),
            str(each["release"] or ""),
            each["state"],
            rate_text(each["rate_per_s"]),
            ms_text(each["p95_ms"]),
            each["reason"],
        ]
        for each in found["models"]
    ]
    if rows:
        screen.line()
        columns = ("model", "version", "release", "state", "req/s", "p95 ms", "reason")
        screen.table(columns, rows, ("version", "release", "req/s", "p95 ms"))


def _releases(listener: FleetListener, arguments: argparse.Namespace, screen: Screen) -> None:
    signed = _signed(arguments)
    found = listener.ask(lambda fleet: fleet.releases(time.time(), signed))
    if screen.wants_json:
        screen.json(found)
        return
    rows = [
        [
            each["group"],
            each["model"],
            str(each["version"] or ""),
            str(each["release"]),
            f"{each['percent']:g} %",
            *(str(each[key]) for key in ("devices", "installed", "refused", "waiting", "not_meant")),
        ]
        for each in found
    ]
    counts = ("devices", "installed", "refused", "waiting", "not meant")
    columns = ("group", "model", "version", "release", "percent", *counts)
    screen.table(columns, rows, columns[2:])
    for each in found:
        for reason in each["reasons"]:
            screen.line(
                f"  {each['group']} {each['model']} release {each['release']}: {reason['devices']} {reason['kind']}: "
                f"{reason['reason']}"
            )


def _signed(arguments: argparse.Namespace) -> SignedFleet | None:
    if not arguments.repository:
        return None
    from edge_runtime.fleet.repository import FleetRepository

    repository = FleetRepository(arguments.repository, arguments.root_file, arguments.ca_file)
    try:
        return repository.read()
    finally:
        repository.close()


def _slow(listener: FleetListener, arguments: argparse.Namespace, screen: Screen) -> None:
    found = listener.ask(lambda fleet: fleet.slow(group=arguments.group))
    if screen.wants_json:
        screen.json(found)
        return
    rows = [
        [
            each["profile"],
            each["model"],
            str(each["devices"]),
            ms_text(each["median_p95_ms"]),
            ms_text(each["worst_p95_ms"]),
            f"{each['worst_ratio']:.1f}",
            ", ".join(f"{slow['device']} {ms_text(slow['p95_ms'])}" for slow in each["slowest"][:3]),
        ]
        for each in found
    ]
    columns = ("profile", "model", "devices", "median ms", "worst ms", "ratio", "slowest")
    screen.table(columns, rows, columns[2:-1])


def _history(arguments: argparse.Namespace, screen: Screen) -> None:
    from edge_runtime.fleet.history import FleetHistory

    found = FleetHistory.read(arguments.history, arguments.limit, arguments.device)
    if screen.wants_json:
        screen.json(found)
        return
    screen.table(
        ("ago", "device", "what"), [[_ago(each["time"]), each["device"], each["what"]] for each in found], ("ago",)
    )


def _wake(listener: FleetListener, arguments: argparse.Namespace, screen: Screen) -> None:
    from edge_runtime.doors.mqtt.topics import ID_RULE, is_id

    group = arguments.group
    if not is_id(group):
        raise UsageError(f"group: got {group!r}, wanted {ID_RULE}")
    count = listener.ask(lambda fleet: fleet.devices(time.time(), group=group, limit=1))["count"]
    listener.wake(group)
    listener.close()  # which sends it
    if listener.refused_publishes:
        raise ConnectionError(f"{listener.url}: the broker does not let this client publish to fleet/{group}/wake")
    if screen.wants_json:
        screen.json({"group": group, "devices": count})
    else:
        screen.line(f"Woke {group}: {count} devices look for updates within seconds.")


def _note_text(note: Mapping[str, Any]) -> str:
    return f"{note['model']} release {note['release']} {note['action']}: {note['reason']}"


def _counts_text(counts: Mapping[str, int]) -> str:
    """Return counts of names as "ok 98, degraded 2"; an empty name is an unknown one."""
    return ", ".join(f"{name or 'unknown'} {count}" for name, count in counts.items())


def _ago(since_s: float | None) -> str:
    return "" if since_s is None else duration_text(max(time.time() - since_s, 0.0))
