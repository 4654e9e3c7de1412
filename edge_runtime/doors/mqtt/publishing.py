"""A device on its broker, as the MQTT door offers it to parts of other doors that publish there: site/ imports no more.

Owns: how their messages are packed, and whether the broker takes their size. Knows no rule of when to publish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from edge_runtime.doors.mqtt.frontend import TopicListener
from edge_runtime.doors.mqtt.message import JSON_TYPE
from edge_runtime.doors.mqtt.packets import Outgoing
from edge_runtime.doors.mqtt.properties import CONTENT_TYPE, UTF8_PAYLOAD, packed_properties, text_property
from edge_runtime.doors.mqtt.topics import ONLINE, DeviceTopics, check_prefix, check_result_topic
from edge_runtime.doors.mqtt.transport import Sender

__all__ = [
    "JSON_TYPE",
    "ONLINE",
    "BrokerPart",
    "DevicePublisher",
    "DeviceTopics",
    "PublishingDoor",
    "check_prefix",
    "check_result_topic",
]


class DevicePublisher:
    """Publishes messages of one device. topics: the device's. Thread: any.

    topic_of: the topic whose JSON has a model, by its name, in `models`; None: the device's state has all.
    """

    def __init__(self, topics: DeviceTopics, sender: Sender, topic_of: Callable[[str], str] | None = None) -> None:
        self.topics = topics
        self.topic_of = topic_of or (lambda _model: topics.state)
        self._sender = sender

    @property
    def is_online(self) -> bool:
        """Whether there is a connection to the broker."""
        return self._sender.is_online

    def post(
        self,
        topic: str,
        payload: bytes,
        content_type: str,
        *,
        qos: int = 0,
        retain: bool = False,
        expires_s: float = math.inf,
    ) -> str:
        """Publish a message, and return ""; or publish nothing, and return why: the broker takes none of its size.

        expires_s: the monotonic instant from which it is dropped where it still waits for the broker.
        """
        message = Outgoing(topic, payload, qos, retain, _properties(content_type), expires_s)
        reason = self._too_large(message)
        if not reason:
            self._sender.post(message)
        return reason

    def retain(self, topic: str, payload: bytes, content_type: str = "", *, qos: int = 0) -> str:
        """Publish a retained message now and with each new connection. Returns as `post`. content_type: "" for none."""
        message = Outgoing(topic, payload, qos, retain=True, properties=_properties(content_type))
        reason = self._too_large(message)
        if not reason:
            self._sender.retain(message)
        return reason

    def _too_large(self, message: Outgoing) -> str:
        limit, nbytes = self._sender.packet_limit, message.packet_bytes
        return f"{nbytes} bytes, and the broker takes at most {limit} a message" if nbytes > limit else ""


class BrokerPart(TopicListener, Protocol):
    """Another door's part over the same broker: messages of its topics, and a place in the broker's status."""

    def states(self) -> Mapping[str, Mapping[str, Mapping[str, str]]]:
        """Return the sources that may be lost, by table (`cameras`) and name. Thread: any.

        Of each `state` (`starting`, `online`, `lost`) and `reason`.
        """
        ...

    def sources(self) -> Sequence[dict[str, Any]]:
        """Return the status of each of its folders and cameras, as JSON values. Thread: any."""
        ...


class PublishingDoor(Protocol):
    """The MQTT door, as another door uses it."""

    publisher: DevicePublisher

    def attach(self, part: BrokerPart) -> None:
        """Subscribe to the topics of a part, and hand it their messages. Before `ready`, where it has topics."""
        ...


@cache
def _properties(content_type: str) -> bytes:
    if not content_type:
        return packed_properties()
    is_text = content_type == JSON_TYPE
    return packed_properties(UTF8_PAYLOAD if is_text else b"", text_property(CONTENT_TYPE, content_type))
