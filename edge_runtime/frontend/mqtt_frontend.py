"""MQTT messages to requests, and replies to messages: what wire v1 means on a broker (DESIGN 5).

Owns: where a reply goes and in which form, duplicates, and what is done with messages that nobody can be answered for.
Thread: the MQTT transport's; replies are also posted from workers.

Invariant: a message ends as exactly one reply, or as a counted drop: retained, a duplicate, or nowhere to reply to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edge_runtime.clock import Clock
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, Forbidden, TensorMismatch
from edge_runtime.frontend.duplicates import Duplicates
from edge_runtime.frontend.forms import Form, Frames, Json
from edge_runtime.frontend.infer_frontend import Entry, InferFrontend, InferRoute
from edge_runtime.scheduling.queue import Answer
from edge_runtime.serving.request_plan import RequestPlan
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.tensors import Array
from edge_runtime.transports.mqtt_connection import Inbound
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
from edge_runtime.wire.topics import Address, DeviceTopics, check_reply_topic

REPLY_AGE_S = 30.0
"""A reply older than this is worth nothing: clients without a timeout wait 30 s."""

REPLY_SLACK_S = 1.0
"""And one to a request with a deadline, this long after it (DESIGN 3: clients wait their timeout and 1 s)."""

MAX_CORRELATION_BYTES = 1024
"""It is kept with each request that waits; ids are 16 to 40 bytes."""

KNOWN_TOPICS = 1024
"""Reply topics that were checked; forgotten all together when there are more."""

ERROR_INTERVAL_S = 1.0
"""Refusals that have no address are published at most so often, whatever floods in; all are counted."""

LEAST_PACKET_BYTES = 512
"""A broker that takes no payload of this size is of no use, so a smaller one is sent unmeasured."""

JSON_TYPE, MSGPACK_TYPE = "application/json", "application/msgpack"
_JSON_PROPERTIES = UTF8_PAYLOAD + text_property(CONTENT_TYPE, JSON_TYPE)
_MSGPACK_PROPERTIES = text_property(CONTENT_TYPE, MSGPACK_TYPE)

Listener = Callable[[Inbound], None]


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


class MqttFrontend:
    """The receiver of one device's messages."""

    def __init__(
        self,
        frontend: InferFrontend,
        topics: DeviceTopics,
        reply_prefixes: Sequence[str],
        clock: Clock,
        metrics: Metrics,
        *,
        max_packet_bytes: int,
    ) -> None:
        self._listeners: dict[str, Listener] = {}
        self._retained_listeners: dict[str, Listener] = {}
        self._frontend = frontend
        self._topics = topics
        self._reply_prefixes = reply_prefixes
        self._clock = clock
        self._metrics = metrics
        self._max_packet_bytes = max_packet_bytes
        self._duplicates = Duplicates()
        self._allowed: set[str] = set()
        self._endpoint: MqttEndpoint | None = None
        self._beats: list[Callable[[], None]] = []
        self._on_online: list[Callable[[], None]] = []
        self._error_due_s = 0.0

    def listen(self, topic: str, listener: Listener, *, takes_retained: bool = False) -> None:
        """Have messages of one topic that is no request's handed to a function. Before the transport starts.

        takes_retained: for what is a state rather than a command.
        """
        self._listeners[topic] = listener
        if takes_retained:
            self._retained_listeners[topic] = listener

    def every_beat(self, function: Callable[[], None]) -> None:
        """Call a function at each beat. Before the transport starts."""
        self._beats.append(function)

    def when_online(self, function: Callable[[], None]) -> None:
        """Call a function with each new connection. Before the transport starts."""
        self._on_online.append(function)

    # ---- the transport's receiver -----------------------------------------------------------------------------------

    def messages(self, transport: MqttTransport, messages: Sequence[Inbound]) -> None:
        """Gather requests of known headers, answer the others one by one, then the lots."""
        endpoint = self._endpoint
        if endpoint is None:
            endpoint = self._endpoint = MqttEndpoint(transport, self._max_packet_bytes)
        frontend = self._frontend
        routes = frontend.routes()
        now_s = self._clock.monotonic_s()
        touched: list[InferRoute] = []
        for message in messages:
            route = self._gather(message, routes, now_s)
            if route is None:
                self._message(endpoint, message, now_s)
            elif len(route.lot) == 1:
                touched.append(route)
        for route in touched:
            entries, route.lot = route.lot, []
            frontend.lot(endpoint, route, entries)

    def online(self) -> None:
        """See Receiver."""
        for function in self._on_online:
            function()

    def offline(self, reason: str) -> None:
        """See Receiver."""

    def beat(self) -> None:
        """See Receiver."""
        self._frontend.fold_tally()
        for function in self._beats:
            function()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _gather(self, message: Inbound, routes: Mapping[bytes, InferRoute], now_s: float) -> InferRoute | None:
        """Put a plain request of a known header into its route's lot; None for anything that is not just that."""
        topic = message.response_topic
        payload = message.payload
        if (
            message.qos
            or message.retain
            or topic not in self._allowed
            or message.user_properties
            or not payload
            or payload[0] not in codec.ARRAY_FIRST_BYTES
            or message.content_type not in {None, MSGPACK_TYPE}
        ):
            return None
        try:
            header, frames = codec.unpack_array(payload)
        except EdgeRuntimeError:
            return None
        route = routes.get(_key(message.topic, header))
        if route is None or len(message.correlation or b"") > MAX_CORRELATION_BYTES:
            return None
        if message.expiry_s is not None and _tightens(message.expiry_s, route.header):
            return None
        sizes = route.sizes
        if len(sizes) != len(frames) or any(len(frame) != size for frame, size in zip(frames, sizes, strict=True)):
            return None
        assert topic is not None
        address = ReplyAddress(
            topic, 0, message.correlation, is_json=False, expires_s=_expires_s(now_s, route.plan.timeout_s)
        )
        route.lot.append((address, b"", frames[0] if len(frames) == 1 else tuple(frames)))
        return route

    def _message(self, endpoint: MqttEndpoint, message: Inbound, now_s: float) -> None:
        """Answer any message by itself."""
        listener = (self._retained_listeners if message.retain else self._listeners).get(message.topic)
        if listener is not None:
            listener(message)
            return
        if message.retain:
            self._metrics.count("mqtt_retained_ignored")
            return
        is_json = _is_json(message)
        body = _read_json(message.payload) if is_json else _read_array(message.payload)
        try:
            topic, correlation = self._reply_place(message, body)
        except EdgeRuntimeError as error:
            self._homeless(endpoint, message, error, now_s)
            return
        address = ReplyAddress(
            topic, min(message.qos, 1), correlation, is_json=is_json, expires_s=_expires_s(now_s, math.inf)
        )
        key = (topic, correlation, hash(message.payload)) if message.qos and correlation is not None else None
        if key is not None and not self._duplicates.is_new(key, now_s):
            self._metrics.count("mqtt_duplicates")
            return
        self._answer(endpoint, message, body, address, key)

    def _answer(
        self, endpoint: MqttEndpoint, message: Inbound, body: _Body, address: ReplyAddress, key: Hashable | None
    ) -> None:
        form: Form = body.form
        if key is not None:
            form = Remembered(form, lambda: self._duplicates.forget(key))
        address.refusal = form.refusal
        if message.correlation is None:
            address.body_id = body.body_id
        inquiry = self._frontend.inquiry(endpoint, (address,), form)
        with self._frontend.answering(inquiry):
            if len(message.correlation or b"") > MAX_CORRELATION_BYTES:
                raise DecodeFailed(
                    f"the correlation data is {len(message.correlation or b'')} bytes; at most {MAX_CORRELATION_BYTES} "
                    "are taken"
                )
            if body.error is not None:
                raise body.error
            header = _completed(body.header, self._topics.address(message.topic), message)
            if header.timeout_ms is not None:
                address.expires_s = _expires_s(inquiry.arrived_s, header.timeout_ms / 1e3)
            self._frontend.ask(inquiry, header, _key(message.topic, body.packed) if _is_plain(message, body) else None)

    def _reply_place(self, message: Inbound, body: _Body) -> tuple[str, bytes | None]:
        """Reply topic and correlation data. Raises Forbidden, or DecodeFailed when there is no topic at all."""
        topic = message.response_topic or body.reply_to
        if topic is None:
            raise body.error or DecodeFailed(
                "the request has no Response Topic (MQTT 5) and no reply_to (3.1.1), so its answer could go nowhere"
            )
        if topic not in self._allowed:
            check_reply_topic(topic, self._reply_prefixes, self._topics.prefix)
            if len(self._allowed) >= KNOWN_TOPICS:
                self._allowed.clear()
            self._allowed.add(topic)
        return topic, message.correlation

    def _homeless(self, endpoint: MqttEndpoint, message: Inbound, error: EdgeRuntimeError, now_s: float) -> None:
        """A request whose reply has nowhere to go: counted, and told on the device's error topic now and then."""
        self._metrics.count("mqtt_forbidden_replies" if isinstance(error, Forbidden) else "mqtt_without_reply_topic")
        if now_s < self._error_due_s:
            return
        self._error_due_s = now_s + ERROR_INTERVAL_S
        payload = json.dumps({"topic": message.topic[:256], "error": codec.error_fields(error)}).encode()
        address = ReplyAddress(self._topics.errors, 0, None, is_json=True, expires_s=now_s + REPLY_AGE_S)
        endpoint.post((address,), (payload,))


class Remembered:
    """A form whose refusal, when worth another try, lets the same request come again."""

    def __init__(self, form: Form, forget: Callable[[], None]) -> None:
        self._form = form
        self._forget = forget
        self.nbytes = form.nbytes

    def arrays(self, plan: RequestPlan) -> list[Array]:
        """See Form."""
        return self._form.arrays(plan)

    def answer(self, plan: RequestPlan, answer: Answer) -> tuple[Any, ...]:
        """See Form."""
        return self._form.answer(plan, answer)

    def refusal(self, error: EdgeRuntimeError) -> tuple[Any, ...]:
        """See Form."""
        if error.retryable:
            self._forget()
        return self._form.refusal(error)

    def result(self, result: Any) -> tuple[Any, ...]:
        """See Form."""
        return self._form.result(result)


class _Body:
    """What a payload says, or why it could not be read; then `form`, `reply_to` and `body_id` as far as they could."""

    __slots__ = ("body_id", "error", "form", "header", "packed", "reply_to")

    def __init__(self) -> None:
        self.form: Form = Frames(b"")
        self.header = codec.RequestHeader()
        self.packed: bytes | None = None
        self.reply_to: str | None = None
        self.body_id: bytes | str | int | None = None
        self.error: EdgeRuntimeError | None = None


def _read_json(payload: bytes) -> _Body:
    body = _Body()
    try:
        request = codec.unpack_json_request(payload)
    except EdgeRuntimeError as error:
        body.reply_to, request_id = codec.json_reply_fields(payload)
        body.form, body.error = Json(request_id), error
        return body
    body.header, body.reply_to, body.form = request.header, request.reply_to, Json(request.id, request.arrays)
    return body


def _read_array(payload: bytes) -> _Body:
    body = _Body()
    try:
        body.packed, frames = codec.unpack_array(payload)
        body.form = Frames(b"", frames)
        body.reply_to, body.body_id = codec.reply_fields(body.packed)
        body.header = codec.unpack_request(body.packed)
    except EdgeRuntimeError as error:
        body.error = error
    return body


def _is_plain(message: Inbound, body: _Body) -> bool:
    """Whether the same topic and header mean the same request again, whatever else comes with them."""
    expiry_s = message.expiry_s
    has_own = bool(message.user_properties) or (expiry_s is not None and _tightens(expiry_s, body.header))
    return body.packed is not None and not has_own and body.reply_to is None and body.body_id is None


def _tightens(expiry_s: int, header: codec.RequestHeader) -> bool:
    """Whether a message's expiry says more than the timeout in its header, which it is rounded up from otherwise."""
    return header.timeout_ms is None or expiry_s * 1e3 < header.timeout_ms


def _is_json(message: Inbound) -> bool:
    """What the Content Type says, else the first byte."""
    kind = (message.content_type or "").split(";")[0].strip().lower()
    if kind in {JSON_TYPE, MSGPACK_TYPE}:
        return kind == JSON_TYPE
    return message.payload[:1] == b"{"


def _completed(header: codec.RequestHeader, address: Address, message: Inbound) -> codec.RequestHeader:
    """The header with what topic, expiry and user properties add. Raises DecodeFailed where they contradict it."""
    said = _user_properties(message.user_properties)
    if address.model and header.model not in {"", address.model}:
        raise DecodeFailed(f"the topic says model {address.model!r}, the body {header.model!r}")
    versions = {each for each in (address.version, header.version, said.get("version")) if each is not None}
    if len(versions) > 1:
        raise DecodeFailed(f"topic, body and user properties say different versions: {sorted(versions)}")
    if not address.model and header.op == "infer":
        raise DecodeFailed(f"topic {message.topic} names no model; wanted {message.topic}/<model>[/<version>]")
    timeout_ms = header.timeout_ms if header.timeout_ms is not None else said.get("timeout_ms")
    if message.expiry_s is not None:
        timeout_ms = min(message.expiry_s * 1e3, math.inf if timeout_ms is None else timeout_ms)
    return replace(
        header,
        model=address.model or header.model,
        version=next(iter(versions), None),
        timeout_ms=timeout_ms,
        priority=header.priority or said.get("priority", 0),
    )


_NUMBERS: dict[str, Callable[[str], int | float]] = {"version": int, "priority": int, "timeout_ms": float}


def _user_properties(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Those that wire v1 knows, checked as the same keys of a header; others are their senders' own."""
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
    return {name: getattr(checked, name) for name in found}


def _payload(address: ReplyAddress, frames: Sequence[Any]) -> bytes:
    if len(frames) == 1:
        return bytes(frames[0])
    header = frames[0] if address.body_id is None else codec.with_id(frames[0], address.body_id)
    return codec.pack_array(header, frames[2:])


def _key(topic: str, header: bytes | None) -> bytes:
    """What a request is known by when it comes again: two devices' headers may be equal, topics with them are not."""
    return topic.encode() + b"\x00" + (header or b"")


def _expires_s(arrived_s: float, timeout_s: float) -> float:
    return arrived_s + min(timeout_s + REPLY_SLACK_S, REPLY_AGE_S)
