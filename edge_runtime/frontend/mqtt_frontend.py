"""MQTT messages to requests: gathered, admitted or refused as those of ZeroMQ are (DESIGN 5).

Owns: which reply topics are allowed, duplicates, and what is done with messages that nobody can be answered for. What a
message says is mqtt_request.py's, how a reply goes out mqtt_endpoint.py's.
Thread: the MQTT transport's; replies are also posted from workers.

Invariant: a message ends as exactly one reply, or as a counted drop: retained, a duplicate, or nowhere to reply to.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

from edge_runtime.clock import Clock
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, Forbidden
from edge_runtime.frontend.duplicates import Duplicates
from edge_runtime.frontend.forms import Form, Remembered
from edge_runtime.frontend.infer_frontend import InferFrontend, InferRoute
from edge_runtime.frontend.mqtt_endpoint import REPLY_AGE_S, MqttEndpoint, ReplyAddress, reply_expires_s
from edge_runtime.frontend.mqtt_request import (
    MSGPACK_TYPE,
    Body,
    completed,
    is_json,
    is_plain,
    read_array,
    read_json,
    tightens,
)
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.transports.mqtt_packets import Inbound
from edge_runtime.transports.mqtt_transport import MqttTransport
from edge_runtime.wire import codec
from edge_runtime.wire.topics import DeviceTopics, check_reply_topic

log = logging.getLogger(__name__)

MAX_CORRELATION_BYTES = 1024
"""It is kept with each request that waits; ids are 16 to 40 bytes."""

KNOWN_TOPICS = 1024
"""Reply topics that were checked; forgotten all together when there are more."""

ERROR_INTERVAL_S = 1.0
"""Refusals that have no address are published at most so often, whatever floods in; all are counted."""

Listener = Callable[[Inbound], None]


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
        self._asked = topics.infer()
        self._reply_prefixes = reply_prefixes
        self._clock = clock
        self._metrics = metrics
        self._max_packet_bytes = max_packet_bytes
        self._duplicates = Duplicates()
        self._allowed: set[str] = set()
        self._endpoint: MqttEndpoint | None = None
        self._beats: list[Callable[[], None]] = []
        self._connected: list[Callable[[], None]] = []
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

    def every_connection(self, function: Callable[[], None]) -> None:
        """Call a function when a connection has come about, the first included. Before the transport starts."""
        self._connected.append(function)

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
                self._message_or_log(endpoint, message, now_s)
            elif len(route.lot) == 1:
                touched.append(route)
        for route in touched:
            entries, route.lot = route.lot, []
            frontend.lot(endpoint, route, entries)

    def online(self) -> None:
        """See Receiver."""
        for function in self._connected:
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
        if message.expiry_s is not None and tightens(message.expiry_s, route.header):
            return None
        sizes = route.sizes
        if len(sizes) != len(frames) or any(len(frame) != size for frame, size in zip(frames, sizes, strict=True)):
            return None
        assert topic is not None
        address = ReplyAddress(
            topic, 0, message.correlation, is_json=False, expires_s=reply_expires_s(now_s, route.plan.timeout_s)
        )
        route.lot.append((address, b"", frames[0] if len(frames) == 1 else tuple(frames)))
        return route

    def _message_or_log(self, endpoint: MqttEndpoint, message: Inbound, now_s: float) -> None:
        """The same; a bug that one message meets must not lose the requests gathered beside it."""
        try:
            self._message(endpoint, message, now_s)
        except Exception:
            log.exception("a message was not answered")
            self._metrics.count("mqtt_errors")

    def _message(self, endpoint: MqttEndpoint, message: Inbound, now_s: float) -> None:
        """Answer any message by itself."""
        listener = (self._retained_listeners if message.retain else self._listeners).get(message.topic)
        if listener is not None:
            listener(message)
            return
        if message.retain:
            self._metrics.count("mqtt_retained_ignored")
            return
        if not message.topic.startswith(self._asked):
            self._metrics.count("mqtt_unasked_ignored")  # no honest broker sends what was not subscribed to
            return
        has_json = is_json(message)
        body = read_json(message.payload) if has_json else read_array(message.payload)
        try:
            topic, correlation = self._reply_place(message, body)
        except EdgeRuntimeError as error:
            self._homeless(endpoint, message, error, now_s)
            return
        address = ReplyAddress(
            topic, min(message.qos, 1), correlation, is_json=has_json, expires_s=reply_expires_s(now_s, math.inf)
        )
        # What is too long is refused below, and never kept.
        is_known_by = message.qos > 0 and correlation is not None and len(correlation) <= MAX_CORRELATION_BYTES
        key = (topic, correlation, hash(message.payload)) if is_known_by else None
        if key is not None and not self._duplicates.is_new(key, now_s):
            self._metrics.count("mqtt_duplicates")
            return
        self._answer(endpoint, message, body, address, key)

    def _answer(
        self, endpoint: MqttEndpoint, message: Inbound, body: Body, address: ReplyAddress, key: Hashable | None
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
            header = completed(body.header, self._topics.address(message.topic), message)
            if header.timeout_ms is not None:
                address.expires_s = reply_expires_s(inquiry.arrived_s, header.timeout_ms / 1e3)
            self._frontend.ask(inquiry, header, _key(message.topic, body.packed) if is_plain(message, body) else None)

    def _reply_place(self, message: Inbound, body: Body) -> tuple[str, bytes | None]:
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


def _key(topic: str, header: bytes | None) -> bytes:
    """What a request is known by when it comes again: two devices' headers may be equal, topics with them are not."""
    return topic.encode() + b"\x00" + (header or b"")
