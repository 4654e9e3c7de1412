"""The devices behind a broker, as their retained status and state tell of them (DESIGN 5).

Pure: messages in, a list out. What devices say is shown, never trusted: an id is one only if wire v1 lets it be.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edge_runtime.transports.mqtt_packets import Inbound
from edge_runtime.wire.topics import DeviceTopics, is_id

ONLINE = "online"
AWAY = frozenset(("stopped", "offline"))
"""Statuses of a device that answers nothing now."""

MAX_STATUS_BYTES = 32
"""`online`, `stopped` and `offline` are shorter; what is longer is cut."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device. status: "online", "stopped" on purpose, or "offline" when it was lost.

    state: what it told last of its models, versions, health and profile; None when it told nothing that can be read.
    """

    device_id: str
    status: str
    state: Mapping[str, Any] | None = None

    @property
    def is_online(self) -> bool:
        """Whether it answers requests, as far as the broker knows."""
        return self.status == ONLINE


def status_filter(prefix: str) -> str:
    """Where the status of every device is retained."""
    return f"{prefix}/+/status"


def state_topics(device_ids: Iterable[str], prefix: str) -> list[str]:
    """Where the states of some devices are retained."""
    return [DeviceTopics(device_id, prefix).state for device_id in device_ids]


def devices_told_by(messages: Iterable[Inbound], prefix: str) -> list[Device]:
    """The devices that have a status, by id. A later message of a topic counts more than an earlier one."""
    statuses: dict[str, str] = {}
    states: dict[str, Mapping[str, Any]] = {}
    for message in messages:
        device_id, _, kind = message.topic.removeprefix(f"{prefix}/").partition("/")
        if not message.topic.startswith(f"{prefix}/") or not is_id(device_id):
            continue
        if kind == "status":
            statuses[device_id] = message.payload[:MAX_STATUS_BYTES].decode("utf-8", "replace")
        elif kind == "state" and (state := _state(message.payload)) is not None:
            states[device_id] = state
    return [Device(device_id, status, states.get(device_id)) for device_id, status in sorted(statuses.items())]


def _state(payload: bytes) -> Mapping[str, Any] | None:
    try:
        state = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) else None
