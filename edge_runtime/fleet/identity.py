"""Who this device is on a broker.

Owns: the choice of the device's id. An id names topics and is matched by access lists, so nothing but DESIGN 5's
characters is ever let through (a client id of `+` or `#` has opened other brokers: CVE-2017-7650).
"""

from __future__ import annotations

import re
import socket

from edge_runtime.config.broker import BrokerAddress
from edge_runtime.config.settings import MqttSettings
from edge_runtime.errors import ConfigError
from edge_runtime.wire.topics import ID_RULE, DeviceTopics, check_prefix, is_id


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
    """The first label of a host's name, with '-' for what an id cannot hold. Raises ConfigError: nothing is left."""
    found = re.sub(r"[^A-Za-z0-9_-]", "-", hostname.partition(".")[0])[:64]
    if not found.strip("-"):
        raise ConfigError(f"mqtt.device_id: the host's name {hostname!r} makes no id; set it to {ID_RULE}")
    return found


def reply_prefixes(settings: MqttSettings, topics: DeviceTopics) -> tuple[str, ...]:
    """Where replies may go, each ending in a slash. Raises ConfigError."""
    if not settings.reply_prefixes:
        return topics.reply_prefixes()
    return tuple(f"{check_prefix('mqtt.reply_prefixes', prefix)}/" for prefix in settings.reply_prefixes)


def check_groups(settings: MqttSettings) -> tuple[str, ...]:
    """The groups that this device belongs to. Raises ConfigError."""
    for group in settings.groups:
        if not is_id(group):
            raise ConfigError(f"mqtt.groups: got {group!r}, wanted {ID_RULE}")
    return settings.groups
