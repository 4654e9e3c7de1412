"""Messages for a broker: posted from any thread, bounded in bytes and age, handed to whichever connection there is.

Owns: posted messages, retained messages, and the queue that waits while a broker is slow or away. Two queues, because
QoS 1 may have to wait for acknowledgements while QoS 0 need not. Thread: the transport's, except `post`.
"""

from __future__ import annotations

import logging
from collections import deque

from edge_runtime.doors.mqtt.connection import MqttConnection
from edge_runtime.doors.mqtt.packets import Outgoing
from edge_runtime.telemetry.metrics import Counters

log = logging.getLogger(__name__)


class Outbox:
    """One client's outgoing messages, over every loss of its connection.

    First in, first out within a QoS; the oldest message is dropped when `bound_bytes` are full.
    """

    def __init__(self, client_id: str, bound_bytes: int, counters: Counters) -> None:
        self._client_id = client_id
        self._bound_bytes = bound_bytes
        self._counters = counters
        self._posted: deque[Outgoing] = deque()
        self._retained: dict[str, Outgoing] = {}
        self._queues: tuple[deque[Outgoing], deque[Outgoing]] = (deque(), deque())
        self.nbytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    # ---- in ---------------------------------------------------------------------------------------------------------

    @property
    def has_posted(self) -> bool:
        """Whether a message waits for `take_posted`."""
        return bool(self._posted)

    def post(self, message: Outgoing) -> None:
        """Publish a message soon; the caller wakes the transport. Thread: any."""
        self._posted.append(message)

    def take_posted(self) -> None:
        """Queue the posted messages."""
        posted = self._posted
        while posted:
            self.add(posted.popleft())

    def retain(self, message: Outgoing, *, is_online: bool) -> None:
        """Replace the retained message of its topic: published now, if online, and with each new connection.

        An empty one, which removes what the broker retains, is published once.
        """
        if not message.payload:
            self._retained.pop(message.topic, None)
            self.add(message)
            return
        self._retained[message.topic] = message
        if is_online:
            self.add(message)

    def add(self, message: Outgoing) -> None:
        """Queue a message; messages that no longer fit are dropped from the old end."""
        self._queues[message.qos > 0].append(message)
        self.nbytes += message.nbytes
        while self.nbytes > self._bound_bytes and len(self) > 1:
            self._take(self._queues[0] or self._queues[1])  # QoS 0 promises nothing, so it goes first
            self._counters.count("mqtt_replies_overflow")

    def put_back(self, messages: list[Outgoing]) -> None:
        """Queue messages that were taken and not acknowledged, first, in their order."""
        for message in reversed(messages):
            self._queues[message.qos > 0].appendleft(message)
            self.nbytes += message.nbytes

    # ---- out --------------------------------------------------------------------------------------------------------

    def take(self, now_s: float, *, with_qos1: bool) -> Outgoing | None:
        """The next message that has not expired; QoS 1 only when it may be sent now."""
        for queue in self._queues if with_qos1 else self._queues[:1]:
            while queue:
                message = self._take(queue)
                if message.expires_s >= now_s:
                    return message
                self._counters.count("mqtt_replies_expired")
        return None

    def has(self, *, with_qos1: bool) -> bool:
        """Whether `take` may find a message."""
        return bool(self._queues[0]) or (with_qos1 and bool(self._queues[1]))

    def expire(self, now_s: float) -> None:
        """Drop every expired message, wherever it stands."""
        for queue in self._queues:
            kept = [message for message in queue if message.expires_s >= now_s]
            if len(kept) < len(queue):
                self._counters.count("mqtt_replies_expired", len(queue) - len(kept))
                queue.clear()
                queue.extend(kept)
        self.nbytes = sum(message.nbytes for queue in self._queues for message in queue)

    # ---- a connection -----------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """Queue all retained messages for a new connection: the broker may have forgotten them."""
        for message in self._retained.values():
            self.add(message)

    def can_send(self, connection: MqttConnection) -> bool:
        """Whether `send` would hand a message over."""
        return connection.is_subscribed and connection.has_room() and self.has(with_qos1=connection.may_publish_qos1())

    def send(self, connection: MqttConnection, now_s: float) -> None:
        """Hand over messages to flush together, within a bound: a message that is handed over cannot be dropped."""
        if not connection.is_subscribed:
            return
        while connection.has_room():
            message = self.take(now_s, with_qos1=connection.may_publish_qos1())
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
        return not (len(self) or self._posted or connection.in_flight or connection.wants_write())

    def disconnected(self, connection: MqttConnection, now_s: float) -> None:
        """Queue unacknowledged messages again, but those that go out with each connection anyway."""
        in_flight = connection.in_flight.values()
        kept = [each for each in in_flight if each.expires_s >= now_s]
        self.put_back([each for each in kept if not (each.retain and each.topic in self._retained)])

    def report_refused(self, connection: MqttConnection) -> None:
        """Count and log the messages that the broker refused from this client."""
        if connection.refused_publishes:
            self._counters.count("mqtt_publish_refused", connection.refused_publishes)
            log.warning(
                "the broker refuses messages of this client; check its access list",
                extra={"client_id": self._client_id, "messages": connection.refused_publishes},
            )
            connection.refused_publishes = 0

    def _take(self, queue: deque[Outgoing]) -> Outgoing:
        message = queue.popleft()
        self.nbytes -= message.nbytes
        return message

    def _unsendable(self, message: Outgoing, reason: str) -> None:
        self._counters.count("mqtt_replies_unsendable")
        log.warning("a message cannot be published", extra={"topic": message.topic, "reason": reason})
