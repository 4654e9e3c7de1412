"""The devices behind a broker: their retained status and state, and a complete listing.

The content is shown, never trusted: ids are checked by wire v1's rule. A listing is whole or fails, as far
as a broker lets that be known. MQTT has no pages: a broker sends everything that a filter matches in one burst, and
mosquitto drops, without a word, what its kernel does not take and its queue (`max_queued_messages`) has no room for.
So statuses, of some fifty bytes each, come in one burst; states are a hundred times as large, and come by name and few
at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from edge_runtime.transports.mqtt_packets import Inbound
from edge_runtime.wire.topics import DeviceTopics, is_id

ONLINE = "online"
AWAY = frozenset(("stopped", "offline"))
"""Statuses of a device that answers no requests."""

MAX_STATUS_BYTES = 32
"""`online`, `stopped` and `offline` are shorter; a longer status is cut."""

STATES_AT_ONCE = 100
"""mosquitto's queue holds 100 messages by default before version 2, 1 000 since, and 200 in deploy/broker: 100 fit
everywhere."""

LISTINGS = 4
"""Two listings in a row must show the same devices; at most four are made."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device. status: "online", "stopped" on purpose, or "offline" when it was lost.

    state: the last that it published of its models, versions, health and profile; None when it is absent or unreadable.
    """

    device_id: str
    status: str
    state: Mapping[str, Any] | None = None

    @property
    def is_online(self) -> bool:
        """Whether the device answers requests, as far as the broker knows."""
        return self.status == ONLINE


def status_filter(prefix: str) -> str:
    """Return the filter of every device's status."""
    return f"{prefix}/+/status"


def state_topics(device_ids: Iterable[str], prefix: str) -> list[str]:
    """Return the topics of some devices' states."""
    return [DeviceTopics(device_id, prefix).state for device_id in device_ids]


def devices_told_by(messages: Iterable[Inbound], prefix: str) -> list[Device]:
    """Return the devices that have a status, by id. The last message of a topic counts."""
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


class DeviceListing:
    """Lists the devices under a prefix. retained: returns the messages retained under filters. Thread: any.

    One listing runs at a time. Threads that ask meanwhile share the next one.
    """

    def __init__(self, retained: Callable[[Sequence[str]], list[Inbound]], prefix: str) -> None:
        self._retained = retained
        self._prefix = prefix
        self._running = threading.Lock()
        self._lock = threading.Lock()
        self._next: Future[list[Device]] | None = None

    def devices(self) -> list[Device]:
        """List the devices by id, as retained since the call. Raises as `retained`; ConnectionError after losses."""
        with self._lock:
            shared, is_mine = self._next, self._next is None
            if shared is None:
                shared = self._next = Future()
        if is_mine:
            self._list_into(shared)
        return list(shared.result())

    def _list_into(self, shared: Future[list[Device]]) -> None:
        """Invariant: when this returns or raises, the future has ended and no new thread waits for it."""
        try:
            with self._running:
                self._take_off(shared)
                listed = self._listed()
        except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to all who wait)
            shared.set_exception(error)
        except BaseException:  # KeyboardInterrupt is this thread's alone
            self._take_off(shared)
            shared.set_exception(ConnectionError("the thread that listed devices for this one too was interrupted"))
            raise
        else:
            shared.set_result(listed)

    def _take_off(self, shared: Future[list[Device]]) -> None:
        with self._lock:
            if self._next is shared:
                self._next = None

    def _listed(self) -> list[Device]:
        told = self._statuses()
        found = [device.device_id for device in devices_told_by(told, self._prefix)]
        for begin in range(0, len(found), STATES_AT_ONCE):
            told += self._retained(state_topics(found[begin : begin + STATES_AT_ONCE], self._prefix))
        return devices_told_by(told, self._prefix)

    def _statuses(self) -> list[Inbound]:
        told = self._retained((status_filter(self._prefix),))
        for _ in range(LISTINGS - 1):
            if len(told) < STATES_AT_ONCE:
                return told
            before, told = told, self._retained((status_filter(self._prefix),))
            if {message.topic for message in before} == {message.topic for message in told}:
                return told
        raise ConnectionError(
            f"{LISTINGS} looks at what the broker retains under {status_filter(self._prefix)} all showed other "
            f"devices, {len(told)} in the last: it drops messages because this client reads too slowly for so many; "
            "raise its max_queued_messages, or give parts of the fleet prefixes of their own"
        )
