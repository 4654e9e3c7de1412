"""Messages that are to be published, bounded in bytes and in age.

Owns: what waits while a broker is slow or away, and what is given up. Two queues, because QoS 1 may have to wait for
acknowledgements while QoS 0 need not. Thread: the one that owns the connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MESSAGE_BYTES = 512
"""What a message costs beside its payload: its objects here and in paho."""

PACKET_HEAD_BYTES = 9
"""A PUBLISH's fixed header, with its length in four bytes, the topic's length and the packet's number (MQTT 5, 3.3)."""


@dataclass(slots=True)
class Outgoing:
    """One message on its way out. `properties`: MQTT 5's, packed, with their length. `expires_s`: monotonic."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: bytes = b"\x00"
    expires_s: float = float("inf")

    @property
    def packet_bytes(self) -> int:
        """Length of its packet, or a few bytes more."""
        return PACKET_HEAD_BYTES + len(self.topic.encode()) + len(self.properties) + len(self.payload)

    @property
    def nbytes(self) -> int:
        """Memory that it takes, about."""
        return len(self.payload) + len(self.properties) + len(self.topic) + MESSAGE_BYTES


class Outbox:
    """First in, first out within a QoS; the oldest is dropped when it is full."""

    def __init__(self, bound_bytes: int, dropped: Callable[[str, int], None]) -> None:
        """dropped: told ("expired" or "overflow", how many)."""
        self._bound_bytes = bound_bytes
        self._dropped = dropped
        self._queues: tuple[deque[Outgoing], deque[Outgoing]] = (deque(), deque())
        self.nbytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, message: Outgoing) -> None:
        """Append; what no longer fits is dropped from the other end."""
        self._queues[message.qos > 0].append(message)
        self.nbytes += message.nbytes
        while self.nbytes > self._bound_bytes and len(self) > 1:
            self._take(self._oldest())
            self._dropped("overflow", 1)

    def put_back(self, messages: list[Outgoing]) -> None:
        """Messages that were taken and not acknowledged go out first, in their order."""
        for message in reversed(messages):
            self._queues[message.qos > 0].appendleft(message)
            self.nbytes += message.nbytes

    def take(self, now_s: float, *, with_qos1: bool) -> Outgoing | None:
        """The next message that is not too old; QoS 1 only when it may be sent now."""
        for queue in self._queues if with_qos1 else self._queues[:1]:
            while queue:
                message = self._take(queue)
                if message.expires_s >= now_s:
                    return message
                self._dropped("expired", 1)
        return None

    def has(self, *, with_qos1: bool) -> bool:
        """Whether `take` may find something."""
        return bool(self._queues[0]) or (with_qos1 and bool(self._queues[1]))

    def expire(self, now_s: float) -> None:
        """Drop what is too old, wherever it stands."""
        for queue in self._queues:
            kept = [message for message in queue if message.expires_s >= now_s]
            if len(kept) < len(queue):
                self._dropped("expired", len(queue) - len(kept))
                queue.clear()
                queue.extend(kept)
        self.nbytes = sum(message.nbytes for queue in self._queues for message in queue)

    def _oldest(self) -> deque[Outgoing]:
        """The queue to drop from: QoS 0 promises nothing, so it goes first."""
        return self._queues[0] or self._queues[1]

    def _take(self, queue: deque[Outgoing]) -> Outgoing:
        message = queue.popleft()
        self.nbytes -= message.nbytes
        return message
