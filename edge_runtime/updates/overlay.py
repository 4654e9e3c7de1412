"""The signed configuration of a group of devices: what it may say, and a device's own settings with it laid over.

Owns: the tables and keys that it may have, the bounds of its limits, and where its cameras may be. Pure, but that a
device looks how much memory it has where a limit hangs on that. An overlay is a piece of `config.toml`.
Publisher and device read it by the same rules, so that what is signed is taken; the device's own settings decide the
rest.

Decision: what a signed configuration may change.
Context: who holds the key of `config-<group>` can change every device of a group at once, and may be a thief.
Options: all settings but a list of dangerous ones: each new setting is open until it is added there. A list of what
is allowed, key by key.
Decision: the list. Nothing in it names a folder, removes a file, opens a door, names a server or a key, or allows code.
A topic is the device's own. A camera or a microphone must lie under a prefix that the device's own `config.toml` lists.
A limit has a floor, below which a daemon serves next to nothing, and where memory hangs on it the device's own value is
its ceiling: its `config.toml` says it, else its profile.
Cost: a new setting must be added here before a group can be given it.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from edge_runtime.config.loading import config_kind, configured
from edge_runtime.config.settings import Config
from edge_runtime.errors import ConfigError
from edge_runtime.profiles.detect import detect
from edge_runtime.profiles.facts import Facts
from edge_runtime.profiles.match import match_profile
from edge_runtime.profiles.profile import (
    LEAST_HOST_BYTES,
    load_profiles,
    resolve_limits,
    usual_host_bytes,
    usual_unanswered_bytes,
)
from edge_runtime.typed_toml import build, parse_toml

MAX_OVERLAY_BYTES = 64 << 10
"""Of hundreds of rules and cameras; the file is read at each start."""

TABLES: Mapping[str, frozenset[str]] = {
    "log": frozenset({"level"}),
    "limits": frozenset({
        "memory_bytes", "cores", "queue_rows", "queue_bytes", "max_run_ms", "message_frames", "message_bytes",
        "unanswered_bytes", "total_unanswered_bytes", "host_memory_bytes", "run_limit_ms",
    }),
    "camera": frozenset({"name", "url", "rotate", "crop", "fps"}),
    "publish": frozenset({
        "model", "name", "source", "camera", "audio", "every_s", "fps", "steady", "on", "interval_s", "outputs", "qos",
        "retain", "picture", "track", "track_score", "lost_s", "zone", "line", "alarm",
    }),
    "update": frozenset({"windows"}),
}  # fmt: skip
"""By table, the keys that an overlay may set."""

FLOORS: Mapping[str, float] = {
    "memory_bytes": 64 << 20,
    "host_memory_bytes": LEAST_HOST_BYTES,
    "queue_bytes": 1 << 20,
    "message_bytes": 1 << 20,
    "message_frames": 64,
    "unanswered_bytes": 1 << 20,
    "total_unanswered_bytes": 16 << 20,
    "max_run_ms": 1.0,
    "run_limit_ms": 1000.0,
}
"""The least of each limit: a picture of 600 x 600 pixels as numbers, a small model, the shortest default of a run."""

HANG_ON_MEMORY = (
    "memory_bytes", "host_memory_bytes", "queue_bytes", "message_bytes", "message_frames", "unanswered_bytes",
    "total_unanswered_bytes",
)  # fmt: skip
"""Limits that an overlay may lower, and not raise."""

MOST_SOURCES, MOST_RULES = 64, 256
"""Of one overlay. Each camera is a child process."""

OVERLAY = "the group's configuration"
"""Its name in messages."""

LISTS = ("camera", "publish")

SOURCES = ("zmq", "mqtt", "camera", "audio")
"""Of a rule: never a folder."""

_STANDS_FOR_ROOT = {"root_file": "of the device"}
"""`[update]` of an overlay is checked alone, without what only the device has."""

_ADDRESS = re.compile(
    r"(?P<scheme>rtsps?|https?)://(?:[^\s/?#@\\]+@)?(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?P<port>:[0-9]{1,5})?"
    r"(?P<path>/[!-\[\]-~]*)?",
)
"""An address that every library reads alike: one `@`, no backslash, nothing before the path that may be one."""


def read_overlay(text: str, source: str) -> dict[str, Any]:
    """Return the tables of an overlay, checked. source: for messages.

    Raises ConfigError: it is not TOML, a value is wrong, or it has a key that an overlay may not set.
    """
    tables = parse_toml(text, source)
    for name, keys in tables.items():
        allowed = TABLES.get(name)
        if allowed is None:
            raise ConfigError(
                f"{source}: {name}: a signed configuration may not say this; wanted one of {', '.join(TABLES)}"
            )
        for each in keys if isinstance(keys, list) else [keys]:
            _check_keys(name, each, allowed, source)
    _check_amounts(_typed(tables, source), tables, source)
    return tables


def laid_over(config: Config, text: str, source: str = OVERLAY, *, facts: Facts | None = None) -> Config:
    """Return a device's own settings with an overlay on top.

    Tables are merged key by key. Cameras and rules are added to the device's own; one of the same name takes its place.
    facts: of the device; None looks for them where a limit needs them. Raises ConfigError as `read_overlay`, and where
    the overlay does not go together with the device's own settings.
    """
    tables = read_overlay(text, source)
    typed = _typed(tables, source)
    _check_ceilings(config, tables.get("limits", {}), facts, source)
    changed: dict[str, Any] = {}
    for name, keys in tables.items():
        if name in LISTS:
            changed[name] = _joined(config.table(name) or (), typed.table(name))
        elif name != "update":  # the updater asks the overlay itself (GroupConfiguration.windows)
            said = getattr(typed, name)
            changed[name] = replace(getattr(config, name), **{key: getattr(said, key) for key in keys})
    _check_sources(config, changed, typed, source)
    settings = {name: getattr(config, name) for name in type(config).__struct_fields__}
    try:
        return configured(**{**settings, **changed})
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def is_under(address: str, prefixes: Sequence[str]) -> bool:
    """Return whether the address of a camera or a microphone lies under one of the prefixes.

    A path lies under a path's beginning. Of an address the scheme, the host and the port must be a prefix's own, and
    its path must begin as the prefix's; a `*` in a prefix's host stands for a number, `rtsp://10.0.4.*/`. A user in the
    address does not count.
    """
    return any(_is_under(address, prefix) for prefix in prefixes)


# ---- private --------------------------------------------------------------------------------------------------------


def _check_keys(table: str, keys: object, allowed: frozenset[str], source: str) -> None:
    if not isinstance(keys, dict):
        raise ConfigError(f"{source}: {table}: wanted a table")
    for key in keys:
        if key not in allowed:
            raise ConfigError(
                f"{source}: {table}.{key}: a signed configuration may not say this; wanted one of "
                f"{', '.join(sorted(allowed))}"
            )
    if table == "publish" and keys.get("source", "zmq") not in SOURCES:
        raise ConfigError(
            f"{source}: publish.source: got {str(keys['source'])[:80]!r}; in a signed configuration wanted one of "
            f"{', '.join(SOURCES)}"
        )


def _check_amounts(typed: Config, tables: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for a limit below its floor, and for a list without an entry or with too many."""
    for key in tables.get("limits", {}):
        got, least = getattr(typed.limits, key), FLOORS.get(key, 1)
        if got < least:
            raise ConfigError(
                f"{source}: limits.{key}: got {got}; in a signed configuration wanted {least} or more, since the "
                "daemon serves next to nothing with less"
            )
    cameras, rules = typed.table("camera") or (), typed.table("publish") or ()
    for name, listed in (("camera", cameras), ("publish", rules)):
        if name in tables and not listed:
            raise ConfigError(f"{source}: {name}: got an empty list; leave it out, or name what is to be added")
    names = {each.name for each in cameras}
    sources = {at for each in rules for at in (each.camera, each.audio) if at} - names | {each.url for each in cameras}
    for key, number, most in (("camera", len(sources), MOST_SOURCES), ("publish", len(rules), MOST_RULES)):
        if number > most:
            raise ConfigError(f"{source}: {key}: got {number}; in a signed configuration wanted at most {most}")


def _check_ceilings(config: Config, said: Mapping[str, Any], facts: Facts | None, source: str) -> None:
    """Raise ConfigError where an overlay raises a limit of a device that memory hangs on."""
    said = {key: value for key, value in said.items() if key in HANG_ON_MEMORY}
    own = {key: getattr(config.limits, key) for key in said}
    if None in own.values():
        usual = _usual_limits(config, facts or detect())
        own = {key: usual[key] if value is None else value for key, value in own.items()}
    for key, value in said.items():
        most = own[key]
        if most is not None and value > most:
            raise ConfigError(
                f"{source}: limits.{key}: got {value}; wanted at most {most}, which this device has without it: what "
                "memory hangs on is raised in its own config.toml alone"
            )


def _usual_limits(config: Config, facts: Facts) -> dict[str, int | None]:
    """Return a device's limits where its `config.toml` does not say them; None for one that nothing bounds."""
    profile = match_profile(facts, load_profiles(), config.profile).profile
    resolved = resolve_limits(profile.limits, facts, config.limits)
    unanswered_bytes = usual_unanswered_bytes(facts)
    return {
        "memory_bytes": resolved.memory_bytes,
        "host_memory_bytes": usual_host_bytes(resolved.memory_bytes),
        "queue_bytes": max(resolved.queue_bytes, unanswered_bytes),
        "total_unanswered_bytes": unanswered_bytes,
    }


def _typed(tables: Mapping[str, Any], source: str) -> Config:
    """Return the tables as settings, the rest by default. Raises ConfigError."""
    values = dict(tables)
    if "update" in values:
        values["update"] = {**_STANDS_FOR_ROOT, **values["update"]}
    return build(config_kind(values), values, source)


def _joined(own: Sequence[Any], said: Sequence[Any]) -> tuple[Any, ...]:
    names = {each.name for each in said if each.name is not None}
    return (*(each for each in own if each.name not in names), *said)


def _check_sources(config: Config, changed: Mapping[str, Any], typed: Config, source: str) -> None:
    """Raise ConfigError where an overlay's cameras and rules cannot be on this device, or may not."""
    cameras, rules = typed.table("camera") or (), typed.table("publish") or ()
    if not (cameras or rules):
        return
    if config.table("mqtt") is None:
        raise ConfigError(f"{source}: publish: results go to a broker, and this device has no [mqtt]")
    own = changed["camera"] if "camera" in changed else config.table("camera") or ()
    named = {each.name for each in own}
    looked_at = [("camera.url", each.url) for each in cameras]
    looked_at += [("publish.camera", each.camera) for each in rules if each.camera and each.camera not in named]
    looked_at += [("publish.audio", each.audio) for each in rules if each.audio]
    prefixes = config.update.camera_prefixes if config.update is not None else ()
    for key, address in looked_at:
        if not is_under(address, prefixes):
            listed = ", ".join(prefixes) or "none"
            raise ConfigError(
                f"{source}: {key}: {_shown(address)!r} is under no prefix that this device lists; "
                f"update.camera_prefixes: {listed}"
            )


def _is_under(address: str, prefix: str) -> bool:
    if "://" not in prefix:
        is_plain = os.path.normpath(address) == address and "://" not in address
        return is_plain and bool(prefix) and address.startswith(prefix)
    wanted, got = _ADDRESS.fullmatch(prefix.replace("*", "0")), _ADDRESS.fullmatch(address)
    if wanted is None or got is None:
        return False
    host = re.escape(prefix[wanted.start("host") : wanted.end("host")].lower()).replace(r"\*", "[0-9]{1,3}")
    path = got["path"] or "/"
    is_plain = ".." not in path and "%2e" not in path.lower()
    return (
        (got["scheme"], got["port"] or "") == (wanted["scheme"], wanted["port"] or "")
        and re.fullmatch(host, got["host"].lower()) is not None
        and is_plain
        and path.startswith(wanted["path"] or "/")
    )


def _shown(address: str) -> str:
    """Return an address without its user."""
    scheme, there, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"[:200] if there else address[:200]
