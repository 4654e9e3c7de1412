"""MQTT messages as requests, and replies as MQTT messages.

Owns: reading a payload, be it JSON, a msgpack array or a picture, with topic, expiry and user properties; a
reply's address, age and size limit. Reading is pure, and raises only EdgeRuntimeErrors or keeps them in
`RequestBody.error`. Replies may be posted from any thread; the transport owns the waiting messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from edge_runtime.doors.mqtt.packets import Inbound, Outgoing
from edge_runtime.doors.mqtt.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    UTF8_PAYLOAD,
    packed_properties,
    text_property,
    user_property,
    with_properties,
)
from edge_runtime.doors.mqtt.topics import Address
from edge_runtime.doors.mqtt.transport import Sender
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, TensorMismatch
from edge_runtime.messages import TEXT, UNNAMED, RequestHeader, is_picture, is_sound, other_picture
from edge_runtime.request.replies import FRAMES, JSON, Entry, json_encoding
from edge_runtime.telemetry.tracing import TRACEPARENT, TraceParent
from edge_runtime.wire import codec, json_codec

if TYPE_CHECKING:
    from edge_runtime.request.infer_frontend import InferRoute

JSON_TYPE, MSGPACK_TYPE, TEXT_TYPE = "application/json", "application/msgpack", "text/plain"

A_PICTURE, A_TEXT = "a picture", "a text"
"""The keys of payloads that are pictures or texts, beside their topics: no JSON begins so."""

REPLY_AGE_S = 30.0
"""A reply older than this is of no use: clients without a timeout wait 30 s."""

REPLY_SLACK_S = 1.0
"""A reply to a request with a deadline is of use this long after it: clients wait for their timeout and 1 s."""

LEAST_PACKET_BYTES = 512
"""A broker that refuses payloads of this size is of no use, so smaller ones are sent unmeasured."""

_JSON_PROPERTIES = UTF8_PAYLOAD + text_property(CONTENT_TYPE, JSON_TYPE)
_MSGPACK_PROPERTIES = text_property(CONTENT_TYPE, MSGPACK_TYPE)

# ---- requests -------------------------------------------------------------------------------------------------------


class RequestBody:
    """A decoded payload, or the error with as much of `reply_to` and the ids as could be read.

    request_id: the id for a JSON reply. body_id: the id in the header map of an MQTT 3.1.1 request. is_element: the
    payload is a picture or a text, and has no place for a `reply_to`. known: the part common to equal requests, by
    which with their topic they are known; None where each must be read. route: of a known one, whose header is whole.
    """

    __slots__ = (
        "body_id", "encoding", "error", "header", "is_element", "known", "reply_to", "request_id", "route", "tensors",
    )  # fmt: skip

    def __init__(self) -> None:
        self.encoding = FRAMES
        self.request_id: Any = b""
        self.header = RequestHeader()
        self.tensors: Sequence[Any] = ()
        self.known: bytes | str | None = None
        self.route: InferRoute | None = None
        self.reply_to: str | None = None
        self.body_id: bytes | str | int | None = None
        self.error: EdgeRuntimeError | None = None
        self.is_element = False


RouteOf = Callable[[bytes | str], "InferRoute | None"]
"""The route of a message with a body that is known by this; None where there is none."""


def read_json(payload: bytes, route_of: RouteOf) -> RequestBody:
    """Read a JSON payload."""
    body = RequestBody()
    body.encoding = JSON
    try:
        fields = json_codec.loads(payload)
        known = json_codec.cut_known(payload, fields)
        if known is not None and "reply_to" not in fields:
            body.known, route = known.text, route_of(known.text)
            packed = json_codec.pack_tensors(route.header.inputs, known.data) if route is not None else None
            if route is not None and packed is not None:
                body.route, body.header, body.tensors, body.request_id = route, route.header, packed, known.id
                return body
        decoded = json_codec.unpack_json_request(payload, fields)
    except EdgeRuntimeError as error:
        body.reply_to, body.request_id = json_codec.json_reply_fields(payload)
        body.error = error
        return body
    body.header, body.tensors, body.request_id, body.reply_to = (
        decoded.header,
        decoded.arrays,
        decoded.id,
        decoded.reply_to,
    )
    body.encoding = json_encoding(decoded.elements)
    if decoded.elements is not None and body.reply_to is None:
        body.known = json_codec.known_elements(fields, decoded.elements)
    return body


def read_text(payload: bytes, route_of: RouteOf) -> RequestBody:
    """Read a payload that no Content Type calls JSON, and that looks like nothing else."""
    if not payload:
        return refused(
            DecodeFailed(
                "the message is empty; wanted JSON, a msgpack array or a picture (mosquitto_rr -f sends nothing before "
                "2.1)"
            )
        )
    # Editors and shells put blanks before JSON; what is nothing that is read was sent by no program of msgpack.
    body = read_json(payload, route_of)
    if payload[:64].lstrip()[:1] != b"{":
        body.error = DecodeFailed(
            f"the message begins with {payload[:8]!r}; wanted JSON, a msgpack array, or a picture: JPEG, PNG, WebP, "
            "BMP or GIF"
        )
    return body


def read_array(payload: bytes, route_of: RouteOf) -> RequestBody:  # noqa: ARG001 (a Reader; the frontend gathers these)
    """Read a payload that is a msgpack array."""
    body = RequestBody()
    try:
        packed, body.tensors = codec.unpack_array(payload)
        body.reply_to, body.body_id = codec.reply_fields(packed)
        body.known = packed if body.reply_to is None and body.body_id is None else None
        body.header = codec.unpack_request(packed)
    except EdgeRuntimeError as error:
        body.error = error
    return body


def read_picture(payload: bytes, route_of: RouteOf) -> RequestBody:
    """Take a payload that is an encoded picture: it is answered in JSON."""
    return _read_element(payload, UNNAMED, A_PICTURE, route_of)


def read_plain_text(payload: bytes, route_of: RouteOf) -> RequestBody:
    """Take a payload that is a text: it is answered in JSON."""
    return _read_element(payload, TEXT, A_TEXT, route_of)


def _read_element(payload: bytes, name: str, known: str, route_of: RouteOf) -> RequestBody:
    """name: of the tensor that the payload is."""
    body = RequestBody()
    elements = json_codec.Elements((payload,), as_list=False, name=name)
    body.encoding, body.request_id = json_encoding(elements), None
    body.tensors, body.is_element = (elements.array(),), True
    body.known, body.route = known, route_of(known)
    if body.route is not None:
        body.header = body.route.header
    else:
        body.header = codec.request_from_fields({"inputs": elements.inputs()})
    return body


def refused(error: EdgeRuntimeError) -> RequestBody:
    """Return the body of a payload in text that is not read."""
    body = RequestBody()
    body.encoding, body.request_id, body.error = JSON, None, error
    return body


Reader = Callable[[bytes, RouteOf], RequestBody]

TEXT_READERS = frozenset((read_json, read_text))
"""Those that take long where a payload is large."""


def reader_of(message: Inbound) -> Reader:
    """Return the reader of a payload: as its Content Type says, else as its first bytes look."""
    payload = message.payload
    kind = (message.content_type or "").split(";")[0].strip().lower()
    if kind == JSON_TYPE:
        return read_json
    if kind == MSGPACK_TYPE:
        return read_array
    is_file = is_picture(payload) or is_sound(payload) or (not kind and other_picture(payload))
    if is_file or kind.startswith(("image/", "audio/")):
        return read_picture
    is_array = bool(payload) and payload[0] in codec.ARRAY_FIRST_BYTES
    if kind == TEXT_TYPE and payload and not (is_array or payload[:64].lstrip().startswith(b"{")):
        return read_plain_text
    return read_array if is_array else read_text


def is_plain(message: Inbound, header: RequestHeader) -> bool:
    """Whether a message says no more than its topic and its body do. header: the body's, or that of its route."""
    expiry_s = message.expiry_s
    return not message.user_properties and (expiry_s is None or not tightens(expiry_s, header))


def tightens(expiry_s: int, header: RequestHeader) -> bool:
    """Whether a message's expiry is shorter than its header's timeout, which clients round up to whole seconds."""
    return header.timeout_ms is None or expiry_s * 1e3 < header.timeout_ms


def completed(header: RequestHeader, address: Address, message: Inbound) -> RequestHeader:
    """The header, completed by topic, expiry and user properties. Raises DecodeFailed where they contradict it."""
    extras = _user_properties(message.user_properties)
    if address.model and header.model not in {"", address.model}:
        raise DecodeFailed(f"the topic names model {address.model!r}, the body {header.model!r}")
    versions = {each for each in (address.version, header.version, extras.get("version")) if each is not None}
    if len(versions) > 1:
        raise DecodeFailed(f"topic, body and user properties name different versions: {sorted(versions)}")
    if not address.model and header.op == "infer":
        raise DecodeFailed(f"topic {message.topic} names no model; wanted {message.topic}/<model>[/<version>]")
    parameters = header.parameters
    if "raw" in extras:
        parameters = {"raw": extras["raw"], **parameters}
    timeout_ms = header.timeout_ms if header.timeout_ms is not None else extras.get("timeout_ms")
    if message.expiry_s is not None:
        timeout_ms = min(message.expiry_s * 1e3, math.inf if timeout_ms is None else timeout_ms)
    return replace(
        header,
        model=address.model or header.model,
        version=next(iter(versions), None),
        timeout_ms=timeout_ms,
        priority=header.priority or extras.get("priority", 0),
        parameters=parameters,
        stream=header.stream or extras.get("stream", False),
    )


_NUMBERS: dict[str, Callable[[str], int | float]] = {"version": int, "priority": int, "timeout_ms": float}
_BOOLEANS = {"true": True, "false": False}


def _user_properties(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The user properties of wire v1, checked as the same keys of a header; others are ignored."""
    if not pairs:
        return {}
    found: dict[str, int | float] = {}
    for name, text in pairs:
        kind = _NUMBERS.get(name)
        if kind is not None:
            try:
                found[name] = kind(text)
            except (ValueError, OverflowError):
                raise DecodeFailed(f"user property {name}: got {codec.short(text)}, wanted a number") from None
    checked = codec.request_from_fields(found)
    extras = {name: getattr(checked, name) for name in found}
    for name, text in pairs:
        if name in {"raw", "stream"}:
            if text not in _BOOLEANS:
                raise DecodeFailed(f"user property {name}: got {codec.short(text)}, wanted true or false")
            extras[name] = _BOOLEANS[text]
    return extras


# ---- replies --------------------------------------------------------------------------------------------------------


class ReplyAddress:
    """The address of one reply, as an envelope is in ZeroMQ.

    sender: the client that it belongs to. body_id: the id in the header map of an MQTT 3.1.1 request. encoding,
    request_id: of the reply. traceparent: the span of its caller.
    """

    __slots__ = (
        "body_id", "encoding", "expires_s", "properties", "qos", "request_id", "sender", "topic", "traceparent",
    )  # fmt: skip

    def __init__(
        self, topic: str, sender: str, qos: int, correlation: bytes | None, *, is_json: bool, expires_s: float
    ) -> None:
        kind = _JSON_PROPERTIES if is_json else _MSGPACK_PROPERTIES
        self.topic = topic
        self.sender = sender
        self.qos = qos
        self.properties = packed_properties(
            kind if correlation is None else kind + text_property(CORRELATION_DATA, correlation)
        )
        self.expires_s = expires_s
        self.body_id: bytes | str | int | None = None
        self.encoding = FRAMES
        self.request_id: Any = b""
        self.traceparent: TraceParent | None = None


class MqttEndpoint:
    """The endpoint of infer_frontend for MQTT: packs a reply's frames into one message."""

    is_control = False
    post_answers = None

    def __init__(self, transport: Sender, max_packet_bytes: int) -> None:
        self._transport = transport
        self._max_packet_bytes = max_packet_bytes

    @property
    def max_frame_bytes(self) -> int:
        """The smaller of the broker's limit and this daemon's."""
        return min(self._transport.packet_limit, self._max_packet_bytes)

    def sender(self, address: ReplyAddress) -> Hashable:
        """The client, by the topic of its replies: a broker does not say who published."""
        return address.sender

    def connection(self, address: ReplyAddress) -> None:  # noqa: ARG002 (as the protocol has it)
        """None: behind a broker there is no connection of a client."""
        return

    def traceparent(self, address: ReplyAddress) -> TraceParent | None:
        """The span of its caller."""
        return address.traceparent

    def tell_trace(self, address: ReplyAddress, traceparent: str) -> None:
        """Have a reply's properties say the span that its request became."""
        address.properties = with_properties(address.properties, user_property(TRACEPARENT, traceparent))

    def send_answers(
        self,
        entries: Sequence[Entry],
        header: bytes,
        payloads: Sequence[Sequence[bytes]],
        reply_bytes: int,  # noqa: ARG002 (the outbox counts by itself)
    ) -> None:
        """Post one message for each answered request."""
        if len(entries) != len(payloads):
            raise ValueError(f"{len(payloads)} answers for {len(entries)} requests")
        for (address, request_id, _), frames in zip(entries, payloads, strict=True):
            self.post((address,), (header, request_id, *frames))

    def post(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Post one reply, or an error in its place when the broker would refuse its size. Thread: any."""
        address: ReplyAddress = envelope[0]
        payload = _payload(address, frames)
        message = Outgoing(
            address.topic, payload, address.qos, properties=address.properties, expires_s=address.expires_s
        )
        if len(payload) > LEAST_PACKET_BYTES and message.packet_bytes > self._transport.packet_limit:
            error = TensorMismatch(
                f"the answer has {message.packet_bytes} bytes, and the broker takes at most "
                f"{self._transport.packet_limit} a message; ask for fewer outputs or rows, or over ZeroMQ"
            )
            message.payload = _payload(address, address.encoding.refusal(error, address.request_id))
        self._transport.post(message)

    send = post

    def post_part(self, envelope: Sequence[Any], frames: Sequence[Any], marks: Mapping[str, Any]) -> None:
        """Post one part of an answer, with its marks as user properties. Raises TensorMismatch over the broker's limit.

        Thread: any.
        """
        address: ReplyAddress = envelope[0]
        told = [user_property(name, str(value).lower()) for name, value in marks.items()]
        properties = with_properties(address.properties, *told) if told else address.properties
        message = Outgoing(
            address.topic, _payload(address, frames), address.qos, properties=properties, expires_s=address.expires_s
        )
        if message.packet_bytes > self._transport.packet_limit:
            raise TensorMismatch(
                f"a part of the answer has {message.packet_bytes} bytes, and the broker takes at most "
                f"{self._transport.packet_limit} a message; ask for fewer outputs, or over ZeroMQ"
            )
        self._transport.post(message)


def reply_expires_s(arrived_s: float, timeout_s: float) -> float:
    """The instant after which a reply is of no use."""
    return arrived_s + min(timeout_s + REPLY_SLACK_S, REPLY_AGE_S)


def _payload(address: ReplyAddress, frames: Sequence[Any]) -> bytes:
    if len(frames) == 1:
        return bytes(frames[0])
    header = frames[0] if address.body_id is None else codec.with_id(frames[0], address.body_id)
    return codec.pack_array(header, frames[2:])
