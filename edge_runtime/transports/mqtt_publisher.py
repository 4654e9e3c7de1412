"""What goes to a broker: posted from any thread, retained over every loss, handed to a connection within its bounds.

Owns: what was posted, what is retained, and the outbox. Thread: the transport's, except `post`.
"""

from __future__ import annotations

import logging
from collections import deque

from edge_runtime.telemetry.counters import Counters
from edge_runtime.transports.mqtt_connection import MqttConnection
from edge_runtime.transports.outbox import Outbox, Outgoing

log = logging.getLogger(__name__)


class Publisher:
    """One client's messages, whatever becomes of its connections."""

    def __init__(self, client_id: str, outbox_bytes: int, counters: Counters) -> None:
        self._client_id = client_id
        self._counters = counters
        self._outbox = Outbox(outbox_bytes, lambda what, count: counters.count(f"mqtt_replies_{what}", count))
        self._posted: deque[Outgoing] = deque()
        self._retained: dict[str, Outgoing] = {}

    @property
    def has_posted(self) -> bool:
        """Whether something waits for `take_posted`."""
        return bool(self._posted)

    def post(self, message: Outgoing) -> None:
        """Publish it some time; whoever calls wakes the transport. Thread: any."""
        self._posted.append(message)

    def take_posted(self) -> None:
        """Put what was posted into the outbox."""
        posted = self._posted
        while posted:
            self._outbox.add(posted.popleft())

    def retain(self, message: Outgoing, *, is_online: bool) -> None:
        """The last word of its topic: published now, if online, and with each new connection."""
        self._retained[message.topic] = message
        if is_online:
            self._outbox.add(message)

    def connected(self) -> None:
        """A new connection is there: whatever the broker may have forgotten is published again."""
        for message in self._retained.values():
            self._outbox.add(message)

    def can_send(self, connection: MqttConnection) -> bool:
        """Whether `send` would hand something over."""
        return (
            connection.is_subscribed
            and connection.has_room()
            and self._outbox.has(with_qos1=connection.may_publish_qos1())
        )

    def send(self, connection: MqttConnection, now_s: float) -> None:
        """Hand over what will be flushed together, within a bound: nothing piles up where it cannot be dropped."""
        if not connection.is_subscribed:
            return
        while connection.has_room():
            message = self._outbox.take(now_s, with_qos1=connection.may_publish_qos1())
            if message is None:
                return
            if message.packet_bytes > connection.packet_limit:
                # Sent all the same, it would end the connection.
                self._unsendable(message, f"{message.packet_bytes} bytes; the broker takes {connection.packet_limit}")
                continue
            try:
                connection.publish(message)
            except ValueError as error:
                self._unsendable(message, str(error))

    def has_sent_all(self, connection: MqttConnection) -> bool:
        """Whether nothing is left, here or unacknowledged."""
        return not (self._outbox or self._posted or connection.in_flight or connection.wants_write())

    def expire(self, now_s: float) -> None:
        """Drop what is too old."""
        self._outbox.expire(now_s)

    def disconnected(self, connection: MqttConnection, now_s: float) -> None:
        """What was not acknowledged goes out first on the next connection; what is retained goes anyway."""
        again = [message for message in connection.in_flight.values() if message.expires_s >= now_s]
        self._outbox.put_back([message for message in again if not message.retain])

    def tell_refused(self, connection: MqttConnection) -> None:
        """Count and log what the broker would not take from this client."""
        if connection.refused_publishes:
            self._counters.count("mqtt_publish_refused", connection.refused_publishes)
            log.warning(
                "the broker refuses what this client publishes; see its access list",
                extra={"client_id": self._client_id, "messages": connection.refused_publishes},
            )
            connection.refused_publishes = 0

    def _unsendable(self, message: Outgoing, reason: str) -> None:
        self._counters.count("mqtt_replies_unsendable")
        log.warning("a message cannot be published", extra={"topic": message.topic, "reason": reason})
