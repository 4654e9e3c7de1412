"""This device on a broker: its id and topics, where replies may go, and the wakes that reach it.

Owns: the choice of the device's id, and the topics whose messages make it check for updates. An id names topics and
access lists match it, so it has no character beyond those of the wire (a client id of `+` or `#` has opened other
brokers: CVE-2017-7650).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from edge_runtime.doors.mqtt.topics import ID_RULE, DeviceTopics, check_prefix, is_id, wake_topic
from edge_runtime.errors import ConfigError
from edge_runtime.telemetry.metrics import Counters

if TYPE_CHECKING:  # updates read the device's id, and may have no broker
    from edge_runtime.doors.mqtt.broker import BrokerAddress
    from edge_runtime.doors.mqtt.settings import MqttSettings


def device_topics(settings: MqttSettings, address: BrokerAddress, hostname: str | None = None) -> DeviceTopics:
    """The topics of this device: the id of the URL, else `device_id`, else the host's name. Raises ConfigError."""
    prefix = check_prefix("mqtt.prefix", settings.prefix)
    given = address.device_id or settings.device_id
    if given is not None:
        if not is_id(given):
            raise ConfigError(f"mqtt.device_id: got {given!r}, wanted {ID_RULE}")
        return DeviceTopics(given, prefix)
    return DeviceTopics(id_from_hostname(hostname if hostname is not None else socket.gethostname()), prefix)


def id_from_hostname(hostname: str) -> str:
    """The first label of a host's name, with '-' for characters that an id lacks. Raises ConfigError for no id."""
    found = re.sub(r"[^A-Za-z0-9_-]", "-", hostname.partition(".")[0])[:64]
    if not found.strip("-"):
        raise ConfigError(f"mqtt.device_id: the host's name {hostname!r} makes no id; set it to {ID_RULE}")
    return found


def reply_prefixes(settings: MqttSettings, topics: DeviceTopics) -> tuple[str, ...]:
    """The allowed beginnings of reply topics, each ending in a slash. Raises ConfigError."""
    if not settings.reply_prefixes:
        return topics.reply_prefixes()
    return tuple(f"{check_prefix('mqtt.reply_prefixes', prefix)}/" for prefix in settings.reply_prefixes)


def check_groups(settings: MqttSettings) -> tuple[str, ...]:
    """The groups that this device belongs to. Raises ConfigError."""
    for group in settings.groups:
        if not is_id(group):
            raise ConfigError(f"mqtt.groups: got {group!r}, wanted {ID_RULE}")
    return settings.groups


class UpdateSource(Protocol):
    """The device's updates, as far as its fleet needs them. Thread: the MQTT transport's; nothing blocks."""

    @property
    def groups(self) -> Sequence[str]:
        """The groups of updates that the device is in now."""
        ...

    def look(self) -> None:
        """Check soon. It may be called often, and bounds how often it really checks (`min_check_s`)."""
        ...

    def summary(self) -> Mapping[str, Any]:
        """The state of updates, as JSON values."""
        ...


class WakeCommands:
    """Checks for updates when woken, and with each connection, since a wake may have been lost without one.

    A wake is a hint: nothing in it is read, since everyone who reaches the broker may have written it; the repository
    alone names the release to install, and only signed. Retained wakes are ignored and counted before they get here.
    A device that its repository moves to another group hears the new one's from the next beat on.
    Thread: the MQTT transport's.
    """

    takes_retained = False

    def __init__(
        self,
        topics: DeviceTopics,
        groups: Iterable[str],
        updates: UpdateSource,
        counters: Counters,
        listen_anew: Callable[[WakeCommands, tuple[str, ...]], None],
    ) -> None:
        """groups: of the device's own settings. listen_anew: called when `topics` are others; gets those before."""
        self._check_update, self._groups = topics.check_update, tuple(groups)
        self._updates = updates
        self._counters = counters
        self._listen_anew = listen_anew
        self._updated_groups = tuple(updates.groups)
        self.topics = self._topics()

    def message(self, payload: bytes) -> None:  # noqa: ARG002 (a hint: nothing in it is read)
        """Check for updates."""
        self._counters.count("mqtt_wakes")
        self._updates.look()

    def online(self) -> None:
        """Check for updates."""
        self._updates.look()

    def beat(self) -> None:
        """Listen to the groups of now; check, since a wake of a new one may have been before that."""
        groups = tuple(self._updates.groups)
        if groups != self._updated_groups:
            self._updated_groups, before = groups, self.topics
            self.topics = self._topics()
            self._listen_anew(self, before)
            self._updates.look()

    def _topics(self) -> tuple[str, ...]:
        """Return each once: a broker may refuse a client that names a filter twice."""
        return tuple(dict.fromkeys((self._check_update, *map(wake_topic, (*self._groups, *self._updated_groups)))))
