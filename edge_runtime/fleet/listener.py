"""Listens to a broker for what devices say of themselves, and keeps a `Fleet` of it.

Owns: the connection, and the order in which retained messages are asked for. A broker drops, without a word, what its
queue for a slow reader has no room for, so states are asked for by name and few at a time, as in doors/mqtt/client.py,
and statuses again at intervals. After a lost connection everything is asked for anew: what a broker retains is the
truth. Thread: the transport's; `ask`, `wake` and the like: any.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from edge_runtime.doors.mqtt.broker import BrokerAccess
from edge_runtime.doors.mqtt.connection import ConnectOptions, Subscription
from edge_runtime.doors.mqtt.device_state import PARTS
from edge_runtime.doors.mqtt.packets import Inbound, Outgoing
from edge_runtime.doors.mqtt.topics import wake_topic
from edge_runtime.doors.mqtt.transport import MqttTransport
from edge_runtime.fleet.fleet import Fleet

log = logging.getLogger(__name__)

T = TypeVar("T")

STATES_AT_ONCE = 100
"""Fits into every broker's queue: doors/mqtt/client.py has the numbers."""

RELIST_S = 300.0
"""Between two looks at all statuses: one that a broker dropped is missed for no longer."""

MAX_PACKET_BYTES = 4 << 20
"""As deploy/broker has it; a larger state is not a device's."""

RECONNECT_S = (0.25, 10.0)


class FleetListener:
    """The receiver of a connection. on_change: called after messages that a person sees, on the transport's thread.

    now_s: Unix seconds. prefix: of the topics of all devices.
    """

    def __init__(
        self,
        access: BrokerAccess,
        prefix: str,
        *,
        on_change: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.is_loaded = threading.Event()
        """Set when all that is retained was asked for once."""
        self.reason = ""
        """Why the broker is away, or does not tell of devices; "" where it does."""
        self._access = access
        self._prefix = prefix
        self._now_s = now_s
        self._on_change = on_change
        self._lock = threading.Lock()
        self._fleet = Fleet(now_s())
        self._listed: set[str] = set()
        self._missed: set[str] = set()
        self._is_whole = False
        self._relist_due_s = 0.0
        self._refused = 0
        self._transport = MqttTransport(
            access,
            ConnectOptions(
                client_id=f"fleet-{secrets.token_hex(8)}",
                subscriptions=tuple(
                    Subscription(f"{prefix}/+/{what}", 0, retain_as_published=False, sends_retained=False)
                    for what in ("status", "state", "state/models/+")
                ),
                max_packet_bytes=MAX_PACKET_BYTES,
                takes_bursts=True,
            ),
            self,
            self,
            reconnect_min_s=RECONNECT_S[0],
            reconnect_max_s=RECONNECT_S[1],
            name="edge-fleet",
        )

    # ---- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect, and retry until closed."""
        self._transport.start()

    def close(self) -> None:
        """Send what was posted, and end the connection. Idempotent."""
        self._transport.close()

    @property
    def url(self) -> str:
        """The broker's address."""
        return self._access.address.url

    def ask(self, question: Callable[[Fleet], T]) -> T:
        """Return the answer of the fleet to a question; messages wait meanwhile."""
        with self._lock:
            return question(self._fleet)

    def wait_loaded(self, limit_s: float) -> None:
        """Wait until all that is retained is known. Raises ConnectionError where it is not, with the reason."""
        if not self.is_loaded.wait(limit_s):
            raise ConnectionError(self.reason or f"{self.url}: it told of its devices for over {limit_s:.0f} s")
        if self.reason:
            raise ConnectionError(self.reason)

    def wake(self, group: str) -> None:
        """Have the devices of a group look for updates. Raises ConnectionError: there is no broker now."""
        if not self._transport.is_online:
            raise ConnectionError(self.reason or f"{self.url}: there is no connection")
        self._transport.post(Outgoing(wake_topic(group), b"", qos=1))

    def look_again(self) -> None:
        """Look at all statuses soon, without waiting for the time."""
        self._transport.call(self._list)

    @property
    def refused_publishes(self) -> int:
        """How many messages of this client the broker refused."""
        return self._refused

    # ---- the transport's MqttReceiver, and its counters -------------------------------------------------------------

    def count(self, name: str, count: int = 1) -> None:
        """Count the messages that the broker refused, and nothing else."""
        if name == "mqtt_publish_refused":
            self._refused += count

    def messages(self, transport: MqttTransport, messages: Sequence[Inbound]) -> None:
        """Take what devices say."""
        del transport
        now_s, is_seen = self._now_s(), False
        with self._lock:
            for message in messages:
                is_seen |= self._take(message, now_s)
        if is_seen:
            self._on_change()

    def online(self) -> None:
        """Ask for all that is retained."""
        self.reason = ""
        with self._lock:
            self._fleet.listening_s = self._now_s()
        self._is_whole = False
        self._on_change()
        self._list()

    def offline(self, reason: str) -> None:
        """Tell no silence of devices while the broker is away."""
        self._away(reason)

    def unreachable(self, reason: str) -> None:
        """As `offline`; who waits for a first answer learns the reason."""
        self._away(reason)
        self.is_loaded.set()

    def beat(self) -> None:
        """Look at all statuses again when due."""
        if self._relist_due_s and self._transport.is_online and time.monotonic() >= self._relist_due_s:
            self._list()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _away(self, reason: str) -> None:
        self.reason = reason
        self._relist_due_s = 0.0
        with self._lock:
            self._fleet.listening_s = None
        self._on_change()

    def _take(self, message: Inbound, now_s: float) -> bool:
        levels = message.topic.removeprefix(f"{self._prefix}/").split("/")
        match levels:
            case [device_id, "status"]:
                self._listed.add(device_id)
                word = message.payload[:32].decode("utf-8", "replace")
                return self._fleet.say_status(device_id, word, now_s, is_retained=message.retain)
            case [device_id, "state"]:
                return self._fleet.say_state(device_id, message.payload, now_s, is_retained=message.retain)
            case [device_id, "state", "models", number]:
                return self._fleet.say_part(device_id, number, message.payload)
        self._fleet.ignored.topics += 1
        return False

    # ---- asking for what is retained: one fetch at a time, each called when the one before is done -------------------

    def _list(self) -> None:
        self._relist_due_s = 0.0
        self._listed = set()
        # As a filter of its own: the end of the fetch would end the subscription of the same name.
        self._fetch([f"{self._prefix}/+/status/#"], self._take_listing)

    def _take_listing(self) -> None:
        known = self.ask(lambda fleet: fleet.ids())
        missing = known - self._listed
        for device_id in missing & self._missed:  # in two looks: a broker may have dropped one
            self.ask(lambda fleet, each=device_id: fleet.forget(each))  # type: ignore[misc]
        self._missed = missing
        unread = self.ask(lambda fleet: fleet.without_state() if self._is_whole else fleet.ids())
        self._fetch_states(sorted(unread))

    def _fetch_states(self, left: list[str]) -> None:
        portion, rest = left[:STATES_AT_ONCE], left[STATES_AT_ONCE:]
        if portion:
            self._fetch([f"{self._prefix}/{each}/state" for each in portion], lambda: self._fetch_states(rest))
        else:
            self._fetch_parts(self.ask(lambda fleet: fleet.missing_parts()))

    def _fetch_parts(self, left: list[str]) -> None:
        at_once = STATES_AT_ONCE // PARTS
        portion, rest = left[:at_once], left[at_once:]
        if portion:
            self._fetch([f"{self._prefix}/{each}/state/models/+" for each in portion], lambda: self._fetch_parts(rest))
            return
        # A large fleet is looked at twice at once: a broker may have dropped some of it.
        looks_again = not self._is_whole and len(self._listed) >= STATES_AT_ONCE
        self._relist_due_s = time.monotonic() + (0.0 if looks_again else RELIST_S)
        self._is_whole = True
        self.is_loaded.set()
        self._on_change()

    def _fetch(self, filters: Iterable[str], then: Callable[[], None]) -> None:
        def done(reason: str) -> None:
            if not reason:
                then()
            elif self._transport.is_online:  # refused: a lost connection asks for everything again
                self.reason = reason
                log.warning("the broker does not tell of its devices", extra={"reason": reason})
                self.is_loaded.set()

        self._transport.fetch_retained(list(filters), done)
