"""Replies as MQTT messages: where one goes, in which form, until when, and what if it is too large for the broker.

Thread: any; the transport owns what waits to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from edge_runtime.errors import EdgeRuntimeError, TensorMismatch
from edge_runtime.frontend.forms import Frames
from edge_runtime.frontend.infer_frontend import Entry
from edge_runtime.frontend.mqtt_request import JSON_TYPE, MSGPACK_TYPE
from edge_runtime.transports.mqtt_transport import MqttTransport
from edge_runtime.transports.outbox import Outgoing
from edge_runtime.wire import codec
from edge_runtime.wire.mqtt_properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    UTF8_PAYLOAD,
    packed_properties,
    text_property,
)

REPLY_AGE_S = 30.0
"""A reply older than this is worth nothing: clients without a timeout wait 30 s."""

REPLY_SLACK_S = 1.0
"""And one to a request with a deadline, this long after it (DESIGN 3: clients wait their timeout and 1 s)."""

LEAST_PACKET_BYTES = 512
"""A broker that takes no payload of this size is of no use, so a smaller one is sent unmeasured."""

_JSON_PROPERTIES = UTF8_PAYLOAD + text_property(CONTENT_TYPE, JSON_TYPE)
_MSGPACK_PROPERTIES = text_property(CONTENT_TYPE, MSGPACK_TYPE)


class ReplyAddress:
    """Where one reply goes: what a ZeroMQ envelope is to MQTT.

    body_id: the id that a request of MQTT 3.1.1 had inside its header map. refusal: packs an error in its form.
    """

    __slots__ = ("body_id", "expires_s", "properties", "qos", "refusal", "topic")

    def __init__(self, topic: str, qos: int, correlation: bytes | None, *, is_json: bool, expires_s: float) -> None:
        form = _JSON_PROPERTIES if is_json else _MSGPACK_PROPERTIES
        self.topic = topic
        self.qos = qos
        self.properties = packed_properties(
            form if correlation is None else form + text_property(CORRELATION_DATA, correlation)
        )
        self.expires_s = expires_s
        self.body_id: bytes | str | int | None = None
        self.refusal: Callable[[EdgeRuntimeError], Sequence[Any]] = Frames(b"").refusal


class MqttEndpoint:
    """A device's request topics as infer_frontend sees them: frames in, one payload out."""

    is_control = False

    def __init__(self, transport: MqttTransport, max_packet_bytes: int) -> None:
        self._transport = transport
        self._max_packet_bytes = max_packet_bytes
        self.call = transport.call

    @property
    def max_frame_bytes(self) -> int:
        """The smaller of what the broker takes and what this daemon lets it send."""
        return min(self._transport.packet_limit, self._max_packet_bytes)

    def answer_lot(
        self,
        entries: Sequence[Entry],
        header: bytes,
        payloads: Iterable[Sequence[bytes]],
        reply_bytes: int,  # noqa: ARG002 (the outbox counts by itself)
    ) -> None:
        """See Endpoint."""
        for (address, request_id, _), frames in zip(entries, payloads, strict=True):
            self.post((address,), (header, request_id, *frames))

    def post(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """See Endpoint. Thread: any."""
        address: ReplyAddress = envelope[0]
        payload = _payload(address, frames)
        message = Outgoing(
            address.topic, payload, address.qos, properties=address.properties, expires_s=address.expires_s
        )
        if len(payload) > LEAST_PACKET_BYTES and message.packet_bytes > self._transport.packet_limit:
            error = TensorMismatch(
                f"the answer takes {message.packet_bytes} bytes, and the broker takes at most "
                f"{self._transport.packet_limit} a message; ask for fewer outputs or rows, or over ZeroMQ"
            )
            message.payload = _payload(address, address.refusal(error))
        self._transport.post(message)

    send = post


def reply_expires_s(arrived_s: float, timeout_s: float) -> float:
    """When a reply to a request that came then, with such a timeout, is worth nothing any more."""
    return arrived_s + min(timeout_s + REPLY_SLACK_S, REPLY_AGE_S)


def _payload(address: ReplyAddress, frames: Sequence[Any]) -> bytes:
    if len(frames) == 1:
        return bytes(frames[0])
    header = frames[0] if address.body_id is None else codec.with_id(frames[0], address.body_id)
    return codec.pack_array(header, frames[2:])
