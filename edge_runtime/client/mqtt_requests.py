"""What a client sends to a device behind a broker and reads of it: requests as packets, replies as frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime.client.frames import Frame
from edge_runtime.errors import DecodeFailed, TensorMismatch
from edge_runtime.transports.mqtt_transport import MqttTransport
from edge_runtime.transports.outbox import Outgoing
from edge_runtime.wire import codec
from edge_runtime.wire.mqtt_properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    RESPONSE_TOPIC,
    expiry_property,
    packed_properties,
    text_property,
)

MSGPACK_TYPE = "application/msgpack"

MAX_EXPIRY_S = 0xFFFF_FFFF
"""The longest Message Expiry Interval (MQTT 5, 3.3.2.3.3), 136 years."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent. expiry_s: whole seconds after which the broker need not deliver it; None: no bound."""

    topic: str
    header: bytes
    tensors: Sequence[Frame] = ()
    expiry_s: int | None = None


class Part:
    """One part of a payload, as `frames.ReplyDecoder` takes a frame of ZeroMQ's."""

    __slots__ = ("bytes",)

    def __init__(self, data: bytes) -> None:
        self.bytes = data

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def buffer(self) -> bytearray:
        """Memory of its own, writable."""
        return bytearray(self.bytes)


class RequestPacker:
    """Makes the messages of requests that are answered on one topic. qos: theirs, and their replies'. Thread: any."""

    def __init__(self, reply_topic: str, qos: int) -> None:
        self._reply_topic = reply_topic
        self._qos = qos
        self._properties: dict[int | None, bytes] = {}

    def pack(self, transport: MqttTransport, request: Request, number: bytes, deadline_s: float) -> Outgoing:
        """One request as this connection takes it. number: 8 bytes, by which its reply is known.

        Raises TensorMismatch for what is larger than the broker takes.
        """
        if transport.protocol == 5:
            header, properties = request.header, self._packed_properties(request.expiry_s, number)
        else:
            header, properties = codec.with_reply_fields(request.header, self._reply_topic, number), b""
        message = Outgoing(
            request.topic,
            codec.pack_array(header, request.tensors),
            self._qos,
            properties=properties,
            expires_s=deadline_s,
        )
        if message.packet_bytes > transport.packet_limit:
            raise TensorMismatch(
                f"the request takes {message.packet_bytes} bytes and the broker {transport.access.address.url} takes "
                f"at most {transport.packet_limit} in one message; send fewer rows at once, or use ZeroMQ, which is "
                "made for large tensors"
            )
        return message

    def _packed_properties(self, expiry_s: int | None, number: bytes) -> bytes:
        """Those of a request; all but the number at their end are the same again and again."""
        packed = self._properties.get(expiry_s)
        if packed is None:
            parts = [text_property(RESPONSE_TOPIC, self._reply_topic), text_property(CONTENT_TYPE, MSGPACK_TYPE)]
            if expiry_s is not None:
                parts.append(expiry_property(expiry_s))
            packed = packed_properties(*parts, text_property(CORRELATION_DATA, bytes(8)))[:-8]
            if len(self._properties) > 64:
                self._properties.clear()
            self._properties[expiry_s] = packed
        return packed + number


def reply_parts(payload: bytes) -> list[Part]:
    """A reply as frames. Raises DecodeFailed."""
    header, tensors = codec.unpack_array(payload, codec.MAX_REPLY_HEADER_BYTES)
    return [Part(header), Part(b""), *map(Part, tensors)]


def body_id(payload: bytes) -> Any:
    """The id inside a reply of MQTT 3.1.1; None when there is none to be read."""
    try:
        return codec.reply_id(codec.unpack_array(payload, codec.MAX_REPLY_HEADER_BYTES)[0])
    except DecodeFailed:
        return None


def device_of(topic: str) -> str:
    """The prefix and id of the device that a request's topic names, "edge/camera-7"."""
    return topic.partition("/infer")[0]


def why_no_reply(device_status: str, topic: str, reply_topic: str) -> str:
    """What may be wrong where a request had no reply, and what to look at. device_status: as retained; "" is none."""
    match device_status:
        case "":
            return (
                "the broker retains no status of it: check the device's id and the prefix, and that the broker's "
                f"ACL lets this client publish to {topic} and read {reply_topic}"
            )
        case "online":
            return (
                f"it is online: it is overloaded or stuck, the broker dropped a message, or the broker's ACL keeps "
                f"this client from publishing to {topic} or reading {reply_topic}"
            )
        case status:
            return f"its retained status is {status!r}: it does not answer until it is online again"
