"""The client over MQTT: arrays in, arrays out, through a broker to one device; and a listing of the devices.

Owns: the topics, and what is shown of devices. client/core.py builds the calls and decodes the replies, link.py carries
them. The public names are `MqttClient` and `Device`. Needs the `mqtt` extra.

What a device retains is shown, never trusted: ids are checked by wire v1's rule. A listing is whole or fails, as far as
a broker lets that be known. MQTT has no pages: a broker sends everything that a filter matches in one burst, and
mosquitto drops, without a word, what its kernel does not take and its queue (`max_queued_messages`) has no room for.
So statuses, of some fifty bytes each, come in one burst; states are a hundred times as large, and come by name and few
at a time, and so do the parts of those that are in parts.
"""

from __future__ import annotations

import json
import secrets
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from edge_runtime.client.blocking_client import BlockingClient
from edge_runtime.client.core import MAX_IN_FLIGHT, ClientCore, DaemonCalls, Flow
from edge_runtime.client.in_flight import Call
from edge_runtime.doors.mqtt.broker import BrokerAccess, broker_access
from edge_runtime.doors.mqtt.device_state import PARTS, joined
from edge_runtime.doors.mqtt.link import MqttLink, new_in_flight
from edge_runtime.doors.mqtt.packets import Inbound
from edge_runtime.doors.mqtt.settings import MqttProtocol, MqttSettings
from edge_runtime.doors.mqtt.topics import (
    DEFAULT_PREFIX,
    ID_RULE,
    OFFLINE,
    ONLINE,
    STOPPED,
    DeviceTopics,
    check_prefix,
    check_reply_topic,
    is_id,
)
from edge_runtime.errors import ConfigError, EdgeRuntimeError

__all__ = ["Device", "MqttClient"]

T = TypeVar("T")

HEALTH = ("live", "ready")
"""Operations that a device which is away answers by its retained status."""

RETAINED_LIMIT_S = 10.0
"""How long `devices` waits for each answer of the broker; a thousand devices take milliseconds."""

AWAY = frozenset((STOPPED, OFFLINE))
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


class MqttClient(BlockingClient):
    """A connection to a broker and a device behind it; thread-safe, one for all threads of a process is enough.

    Once used, it belongs to its process: in the child of a fork every call raises RuntimeError.

    url: `mqtt[s]://[user@]host[:port][/device]`. device: its id, where the URL names none; only `devices` does without.
    prefix: what the site's topics begin with. username, password_file, ca_file, cert_file, key_file: as in `[mqtt]`;
    where the broker takes the user from the certificate, username is the certificate's CN. timeout_ms: for requests
    that name none; None: the model's default. max_in_flight: requests on their way at once. qos: 0, or 1 to have the
    broker and the device acknowledge each message. reply_topic: None for `reply/<username or client id>/<random>`.

    Errors of every call: the EdgeRuntimeError that the daemon answered, rebuilt (`errors.py`); TimeoutError when
    nothing came within timeout_ms + 1 s (30 s when there is no timeout at all); ConnectionError when there is no
    broker, or the connection to it is lost before the answer. Requests that a device left unanswered are sent again
    when it comes back within that time; TensorMismatch before sending where the broker or the device takes no such
    size; RuntimeError where a future's callback waits for an answer. Operations with scope control are not offered.

        with MqttClient("mqtt://broker.site/dev1") as client:
            scores = client.infer("digits", {"image": x}, timeout_ms=200)["scores"]
    """

    def __init__(
        self,
        url: str,
        device: str | None = None,
        *,
        prefix: str = DEFAULT_PREFIX,
        username: str | None = None,
        password_file: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        protocol: MqttProtocol = "auto",
        timeout_ms: float | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        qos: int = 0,
        reply_topic: str | None = None,
    ) -> None:
        access = _access(
            url,
            username=username,
            password_file=password_file,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            protocol=protocol,
        )
        self._prefix = check_prefix("prefix", prefix)
        self._topics = _device_topics(access.address.device_id, device, self._prefix)
        self.endpoint = f"{access.address.url}/{self._topics.device_id}" if self._topics else access.address.url
        self.device_id = self._topics.device_id if self._topics else None
        if qos not in (0, 1):
            raise ConfigError(f"qos: got {qos}, wanted 0 or 1")
        client_id = f"edge-client-{secrets.token_hex(8)}"
        self._link = MqttLink(
            access,
            client_id,
            _reply_topic(reply_topic, access.address.username or access.username or client_id, self._prefix),
            self._topics,
            qos=qos,
            in_flight=new_in_flight(max_in_flight),
        )
        weakref.finalize(self, self._link.abandon).atexit = False
        self._listing = DeviceListing(self._link, self._prefix)
        self._core = ClientCore(timeout_ms, DaemonCalls(self.endpoint, self._topics))

    def close(self) -> None:
        """Fail pending calls with ConnectionError, disconnect, end the thread. Idempotent. Thread: any.

        Waits for a running attempt to connect, at most seconds.
        """
        self._link.close()

    def device_status(self) -> str:
        """Return the retained status of the device: "online", "stopped", "offline"; "" without one.

        Sends the device no request. Raises as `devices`.
        """
        status_topic = self._device_topics().status
        if not self._link.device_status:
            # The same topic under another filter, so that its unsubscription does not end the link's own.
            self._link.retained((f"{status_topic}/#",), RETAINED_LIMIT_S)
        return self._link.device_status

    def devices(self) -> list[Device]:
        """List every device of which the broker retains a status, by id. Works without a named device.

        One listing runs at a time, and threads that ask meanwhile share the next. The broker sends all statuses at
        once, and drops silently what fits neither the connection's buffers (on one machine some 4 MB) nor its queue
        (mosquitto's `max_queued_messages`). 60 000 devices of a mosquitto on the same machine, with a queue of 200,
        were listed completely. States are fetched a hundred at a time, in two round trips each.

        Raises ConnectionError, also when the broker forbids it or when listings differ because the broker drops
        messages; TimeoutError after 10 s of silence.
        """
        return self._listing.devices()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _run(self, flow: Flow[T]) -> T:
        self._device_topics()  # a call without a device is an error, not an answer
        return super()._run(flow)

    def _ask(self, call: Call) -> Any:
        if call.operation is not None and call.operation.name in HEALTH and self.device_status() in AWAY:
            return False
        return self._link.ask(call)

    def _submit(self, call: Call) -> Future[Any]:
        return self._link.submit(call)

    def _next_part(self, call: Call) -> Any:
        return self._link.next_part(call)

    def _leave(self, call: Call) -> None:
        self._link.leave(call)

    def _device_topics(self) -> DeviceTopics:
        if self._topics is None:
            raise ConfigError(
                f"{self.endpoint} names no device; wanted {self.endpoint}/DEVICE, or device=; devices() lists them"
            )
        return self._topics


class DeviceListing:
    """Lists the devices under a prefix. link: asks the broker what it retains. Thread: any.

    One listing runs at a time. Threads that ask meanwhile share the next one.
    """

    def __init__(self, link: MqttLink, prefix: str) -> None:
        self._link = link
        self._prefix = prefix
        self._running = threading.Lock()
        self._lock = threading.Lock()
        self._next: Future[list[Device]] | None = None

    def devices(self) -> list[Device]:
        """List the devices by id, as retained since the call.

        Raises as `MqttLink.retained`, and ConnectionError after losses.
        """
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
        devices = devices_told_by(told, self._prefix)
        large = [device.device_id for device in devices if device.state and device.state.get("parts")]
        at_once = STATES_AT_ONCE // PARTS
        for begin in range(0, len(large), at_once):
            told += self._retained(part_filters(large[begin : begin + at_once], self._prefix))
        return devices_told_by(told, self._prefix) if large else devices

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

    def _retained(self, filters: Sequence[str]) -> list[Inbound]:
        return self._link.retained(filters, RETAINED_LIMIT_S)


def status_filter(prefix: str) -> str:
    """Return the filter of every device's status."""
    return f"{prefix}/+/status"


def state_topics(device_ids: Iterable[str], prefix: str) -> list[str]:
    """Return the topics of some devices' states."""
    return [DeviceTopics(device_id, prefix).state for device_id in device_ids]


def part_filters(device_ids: Iterable[str], prefix: str) -> list[str]:
    """Return the filters of all parts of some devices' states."""
    return [f"{topic}/models/+" for topic in state_topics(device_ids, prefix)]


def devices_told_by(messages: Iterable[Inbound], prefix: str) -> list[Device]:
    """Return the devices that have a status, by id. The last message of a topic counts."""
    statuses: dict[str, str] = {}
    states: dict[str, Mapping[str, Any]] = {}
    parts: dict[str, dict[str, Mapping[str, Any]]] = {}
    for message in messages:
        device_id, _, kind = message.topic.removeprefix(f"{prefix}/").partition("/")
        if not message.topic.startswith(f"{prefix}/") or not is_id(device_id):
            continue
        if kind == "status":
            statuses[device_id] = message.payload[:MAX_STATUS_BYTES].decode("utf-8", "replace")
        elif kind == "state" and (state := _state(message.payload)) is not None:
            states[device_id] = state
        elif kind.startswith("state/models/") and (part := _state(message.payload)) is not None:
            parts.setdefault(device_id, {})[kind] = part
    for device_id in parts.keys() & states.keys():
        states[device_id] = joined(states[device_id], parts[device_id].values())
    return [Device(device_id, status, states.get(device_id)) for device_id, status in sorted(statuses.items())]


def _state(payload: bytes) -> Mapping[str, Any] | None:
    try:
        state = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) else None


def _access(url: str, **shown: str | None) -> BrokerAccess:
    """Build the broker's address and credentials by the rules of `[mqtt]`. Raises ConfigError."""
    try:
        settings = MqttSettings(url=url, **shown)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"mqtt: {error}") from None
    return broker_access(settings)


def _device_topics(in_url: str | None, given: str | None, prefix: str) -> DeviceTopics | None:
    if in_url is not None and given is not None and in_url != given:
        raise ConfigError(f"device: got {given!r}, and the URL says {in_url!r}; name one device")
    device = given if given is not None else in_url
    if device is None:
        return None
    if not is_id(device):
        raise ConfigError(f"device: got {device!r}, wanted {ID_RULE}")
    return DeviceTopics(device, prefix)


def _reply_topic(given: str | None, owner: str, prefix: str) -> str:
    """Return the reply topic. Raises Forbidden for one that no device accepts, ConfigError where none can be made."""
    if given is not None:
        check_reply_topic(given, ("",), prefix)
        return given
    topic = f"reply/{owner}/{secrets.token_hex(8)}"
    try:
        check_reply_topic(topic, ("reply/",), prefix)
    except EdgeRuntimeError as error:
        raise ConfigError(f"username: got {owner!r}, which cannot be part of a topic; give reply_topic=") from error
    return topic
