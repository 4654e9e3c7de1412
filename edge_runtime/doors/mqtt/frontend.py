"""The MQTT door: takes messages as requests, which are gathered, admitted and refused as those of ZeroMQ are.

Owns: the allowed reply topics, duplicates, and the errors of messages that have no reply topic. message.py reads
messages and packs replies. Thread: the MQTT transport's; workers also post replies, `edge-mqtt-body` reads large JSON.

Invariant: a message ends as exactly one reply, or as a counted drop: retained, a duplicate, or without a reply topic.
"""

from __future__ import annotations

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from edge_runtime.clock import Clock
from edge_runtime.doors.large_bodies import LARGE_JSON_BYTES, LargeBodies
from edge_runtime.doors.mqtt.message import (
    MSGPACK_TYPE,
    REPLY_AGE_S,
    TEXT_READERS,
    MqttEndpoint,
    Reader,
    ReplyAddress,
    RequestBody,
    completed,
    is_plain,
    reader_of,
    refused,
    reply_expires_s,
    tightens,
)
from edge_runtime.doors.mqtt.packets import Inbound
from edge_runtime.doors.mqtt.topics import DeviceTopics, check_reply_topic, reply_owner
from edge_runtime.doors.mqtt.transport import MqttTransport
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, Forbidden, QueueFull
from edge_runtime.messages import RequestHeader
from edge_runtime.request.infer_frontend import InferFrontend, InferRoute
from edge_runtime.request.replies import FRAMES, PartsReply, TransportReply
from edge_runtime.request.request import Request, failure_of
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.telemetry.tracing import TRACEPARENT, joined_traceparents, read_traceparent
from edge_runtime.wire import codec

log = logging.getLogger(__name__)

MAX_CORRELATION_BYTES = 1024
"""Each waiting request keeps its correlation data; ids have 16 to 40 bytes."""

KNOWN_TOPICS = 1024
"""Checked reply topics that are remembered; one more clears them all."""

ERROR_INTERVAL_S = 1.0
"""Shortest time between two errors on the device's error topic, under any flood; all are counted."""

WINDOW_S = 60.0
"""A broker delivers again after a lost connection: within the session expiry, 60 s by default."""

MAX_REMEMBERED = 32_768
"""About 10 MB; at 1 000 QoS 1 requests a second it holds 30 s."""


class TopicListener(Protocol):
    """Takes messages that are not requests. Thread: the transport's, every call."""

    topics: tuple[str, ...]
    takes_retained: bool
    """Whether retained messages are taken too: they hold a state, never a command."""

    def message(self, payload: bytes) -> None:
        """Take the payload of a message of one of `topics`."""
        ...

    def online(self) -> None:
        """A connection is there."""
        ...

    def beat(self) -> None:
        """Called at least each BEAT_S of the transport."""
        ...


class MqttFrontend:
    """The MQTT receiver of one device."""

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
        self._listeners: list[TopicListener] = []
        self._listener_of: dict[str, TopicListener] = {}
        self._frontend = frontend
        self._topics = topics
        self._request_prefix = topics.infer()
        self._reply_prefixes = reply_prefixes
        self._clock = clock
        self._metrics = metrics
        self._max_packet_bytes = max_packet_bytes
        self._bodies = LargeBodies("edge-mqtt-body")
        self._duplicates = Duplicates()
        self._sender_of: dict[str, str] = {}
        self._endpoint: MqttEndpoint | None = None
        self._transport: MqttTransport
        self._error_due_s = 0.0

    def listen(self, listeners: Sequence[TopicListener]) -> None:
        """Hand messages, connections and beats to these listeners. Before the transport starts."""
        self._listeners.extend(listeners)
        for listener in listeners:
            self._listener_of.update(dict.fromkeys(listener.topics, listener))

    def listen_anew(self, listener: TopicListener, before: Sequence[str]) -> None:
        """Hand a listener the messages of its topics of now, in place of those before. Thread: the transport's."""
        for topic in before:
            self._listener_of.pop(topic, None)
        self._listener_of.update(dict.fromkeys(listener.topics, listener))

    def close(self) -> None:
        """End the thread that reads large bodies; those that it was given are handed to the transport."""
        self._bodies.close()

    # ---- the transport's receiver -----------------------------------------------------------------------------------

    def messages(self, transport: MqttTransport, messages: Sequence[Inbound]) -> None:
        """Gather requests of known headers into bursts, answer other messages one by one, then the bursts."""
        endpoint = self._endpoint
        if endpoint is None:
            self._transport = transport
            endpoint = self._endpoint = MqttEndpoint(transport, self._max_packet_bytes)
        frontend = self._frontend
        routes = frontend.routes()
        now_s = self._clock.monotonic_s()
        touched: list[InferRoute] = []
        for message in messages:
            try:
                route = self._gather(message, routes, now_s) or self._message(endpoint, message, now_s)
                if route is not None and len(route.burst) == 1:
                    touched.append(route)
            except Exception:  # a bug in one message must not lose the gathered requests
                log.exception("a bug left a message unanswered")
                self._metrics.count("mqtt_errors")
        for _ in frontend.answer_bursts(endpoint, touched):
            self._metrics.count("mqtt_errors")

    def online(self) -> None:
        """Tell the listeners."""
        for listener in self._listeners:
            listener.online()

    def offline(self, reason: str) -> None:
        """Nothing: the transport logs it and connects again."""

    def unreachable(self, reason: str) -> None:
        """Nothing: the transport logs it and tries again."""

    def beat(self) -> None:
        """Count answered requests, and run the listeners' timers."""
        self._frontend.count_runs()
        for listener in self._listeners:
            listener.beat()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _gather(self, message: Inbound, routes: Mapping[Any, InferRoute], now_s: float) -> InferRoute | None:
        """Add a plain request of a known header to its route's burst; None for any other message."""
        topic = message.response_topic
        payload = message.payload
        if (
            message.qos
            or message.retain
            or topic is None
            or (sender := self._sender_of.get(topic)) is None
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
        address = ReplyAddress(
            topic,
            sender,
            0,
            message.correlation,
            is_json=False,
            expires_s=reply_expires_s(now_s, route.plan.timeout_s),
        )
        route.burst.append((address, b"", frames[0] if len(frames) == 1 else tuple(frames)))
        return route

    def _message(self, endpoint: MqttEndpoint, message: Inbound, now_s: float) -> InferRoute | None:
        """Take one message by itself, or add it to the burst of the route that is returned."""
        listener = self._listener_of.get(message.topic)
        if listener is not None and (listener.takes_retained or not message.retain):
            listener.message(message.payload)
            return None
        if message.retain:
            self._metrics.count("mqtt_retained_ignored")
            return None
        if not message.topic.startswith(self._request_prefix):
            self._metrics.count("mqtt_unasked_ignored")  # no honest broker sends other topics
            return None
        read = reader_of(message)
        if len(message.payload) > LARGE_JSON_BYTES and read in TEXT_READERS:
            self._read_apart(endpoint, message, read, now_s)
            return None
        return self._take(endpoint, message, read(message.payload, partial(self._route_of, message)), now_s)

    def _read_apart(self, endpoint: MqttEndpoint, message: Inbound, read: Reader, now_s: float) -> None:
        """Have a large body read beside this thread, and take it then."""
        done = partial(self._take_large, endpoint, message, now_s)
        try:
            self._bodies.read(
                len(message.payload), partial(_read_large, read, message.payload), self._transport.call, done
            )
        except QueueFull as error:
            done(refused(error))

    def _take_large(self, endpoint: MqttEndpoint, message: Inbound, now_s: float, body: RequestBody) -> None:
        try:
            self._take(endpoint, message, body, now_s)
        except Exception:  # as in `messages`: it must not end the connection
            log.exception("a bug left a message unanswered")
            self._metrics.count("mqtt_errors")

    def _take(self, endpoint: MqttEndpoint, message: Inbound, body: RequestBody, now_s: float) -> InferRoute | None:
        """Take one request, or add it to the burst of the route that is returned. now_s: when it came."""
        try:
            topic, correlation = self._reply_place(message, body)
        except EdgeRuntimeError as error:
            self._drop(endpoint, message, error, now_s)
            return None
        address = ReplyAddress(
            topic,
            self._sender_of[topic],
            min(message.qos, 1),
            correlation,
            is_json=body.encoding is not FRAMES,
            expires_s=reply_expires_s(now_s, math.inf),
        )
        if message.user_properties:
            contexts = (value for name, value in message.user_properties if name == TRACEPARENT)
            address.traceparent = read_traceparent(joined_traceparents(contexts))
        # Overlong correlation data is refused in `_answer`, and never kept.
        may_repeat = message.qos > 0 and correlation is not None and len(correlation) <= MAX_CORRELATION_BYTES
        key = (topic, correlation, hash(message.payload)) if may_repeat else None
        if key is not None and not self._duplicates.is_new(key, now_s):
            self._metrics.count("mqtt_duplicates")
            return None
        return self._answer(endpoint, message, body, address, key, now_s)

    def _route_of(self, message: Inbound, known: bytes | str) -> InferRoute | None:
        """The route of a message whose body is known by this, where the message says no more than that one."""
        route = self._frontend.routes().get(_key(message.topic, known))
        return route if route is not None and is_plain(message, route.header) else None

    def _answer(  # noqa: PLR0917 (one message, and everything read from it)
        self,
        endpoint: MqttEndpoint,
        message: Inbound,
        body: RequestBody,
        address: ReplyAddress,
        key: Hashable | None,
        now_s: float,
    ) -> InferRoute | None:
        """Submit the request of a message, or add it to the burst of the route that is returned."""
        address.encoding, address.request_id = body.encoding, body.request_id
        if message.correlation is None:
            address.body_id = body.body_id
        reply: TransportReply
        if key is None:
            reply = TransportReply(self._frontend, endpoint, (address,), body.encoding, body.request_id)
        else:
            reply = RememberedReply(self._frontend, endpoint, address, partial(self._duplicates.forget, key))
        with self._frontend.answering(reply):
            if len(message.correlation or b"") > MAX_CORRELATION_BYTES:
                got = len(message.correlation or b"")
                raise DecodeFailed(f"the correlation data has {got} bytes; at most {MAX_CORRELATION_BYTES} are allowed")
            if body.error is not None:
                raise body.error
            route, header, known_by = body.route, body.header, None
            if route is None:
                header = completed(header, self._topics.address(message.topic), message)
                if body.known is not None and is_plain(message, body.header):
                    known_by = _key(message.topic, body.known)
            elif key is None and not body.is_element:
                address.expires_s = reply_expires_s(now_s, route.plan.timeout_s)
                tensors = body.tensors
                route.burst.append((address, body.request_id, tensors[0] if len(tensors) == 1 else tensors))
                return route
            elif body.known is not None:
                known_by = _key(message.topic, body.known)
            if header.stream and header.op == "infer":
                reply = MqttPartsReply(self._frontend, endpoint, address, reply, self._clock, message.correlation)
            ask = partial(self._ask, endpoint, address, reply, header, body, known_by, now_s)
            if header.sequence is not None and self._bodies.has_earlier:
                self._bodies.behind(len(message.payload), self._transport.call, ask)
            else:
                ask()
        return None

    def _ask(  # noqa: PLR0917 (as `InferFrontend.ask`)
        self,
        endpoint: MqttEndpoint,
        address: ReplyAddress,
        reply: TransportReply,
        header: RequestHeader,
        body: RequestBody,
        known_by: str | bytes | None,
        now_s: float,
    ) -> None:
        """Submit one request. now_s: when it came; its deadline counts from then."""
        with self._frontend.answering(reply):
            longest_s = math.inf
            if header.timeout_ms is not None:
                address.expires_s = reply_expires_s(now_s, header.timeout_ms / 1e3)
                longest_s = max(header.timeout_ms / 1e3 + now_s - self._clock.monotonic_s(), 0.0)
            self._frontend.ask(
                endpoint, address, reply, header, body.tensors, known_by, body.encoding, timeout_s=longest_s
            )

    def _reply_place(self, message: Inbound, body: RequestBody) -> tuple[str, bytes | None]:
        """Reply topic and correlation data. Raises Forbidden, or DecodeFailed without a topic."""
        topic = message.response_topic or body.reply_to
        if topic is None and body.is_element:
            topic = self._topics.reply(self._topics.address(message.topic).model)
        if topic is None:
            raise body.error or DecodeFailed(
                "got no Response Topic (MQTT 5) and no reply_to (3.1.1); name a topic for the reply"
            )
        if topic not in self._sender_of:
            check_reply_topic(topic, self._reply_prefixes, self._topics.prefix)
            if len(self._sender_of) >= KNOWN_TOPICS:
                self._sender_of.clear()
            self._sender_of[topic] = reply_owner(topic, self._reply_prefixes)
        return topic, message.correlation

    def _drop(self, endpoint: MqttEndpoint, message: Inbound, error: EdgeRuntimeError, now_s: float) -> None:
        """Count a request without an allowed reply topic; publish some of these on the device's error topic."""
        self._metrics.count("mqtt_forbidden_replies" if isinstance(error, Forbidden) else "mqtt_without_reply_topic")
        if now_s < self._error_due_s:
            return
        self._error_due_s = now_s + ERROR_INTERVAL_S
        payload = json.dumps({"topic": message.topic[:256], "error": codec.error_fields(error)}).encode()
        address = ReplyAddress(self._topics.errors, "", 0, None, is_json=True, expires_s=now_s + REPLY_AGE_S)
        endpoint.post((address,), (payload,))


def _read_large(read: Reader, payload: bytes) -> RequestBody:
    """Read a large body. No route is looked up: routes are the transport's thread's. Thread: edge-mqtt-body."""
    try:
        return read(payload, lambda _known: None)
    except Exception as bug:  # noqa: BLE001 (its client's answer; failure_of logs it)
        return refused(failure_of(bug, "a body could not be read"))


class RememberedReply(TransportReply):
    """The reply to a remembered request. A request that is refused and may be retried is forgotten."""

    __slots__ = ("_forget",)

    def __init__(
        self, frontend: InferFrontend, endpoint: MqttEndpoint, address: ReplyAddress, forget: Callable[[], None]
    ) -> None:
        super().__init__(frontend, endpoint, (address,), address.encoding, address.request_id)
        self._forget = forget

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Send the error, and forget the request when it may be retried."""
        self.may_come_again(error)
        super().refuse(error)

    def may_come_again(self, error: EdgeRuntimeError) -> None:
        """Forget the request where its error may be retried."""
        if error.retryable:
            self._forget()


class MqttPartsReply(PartsReply):
    """The reply to a request whose answer is wanted in parts, each of which is of use for as long as a whole one."""

    __slots__ = ("_address", "_clock", "_whole")

    def __init__(  # noqa: PLR0917 (one message, and everything read from it)
        self,
        frontend: InferFrontend,
        endpoint: MqttEndpoint,
        address: ReplyAddress,
        whole: TransportReply,
        clock: Clock,
        correlation: bytes | None,
    ) -> None:
        """whole: the reply to the request as one answer, which knows whether a refused one may be sent again."""
        super().__init__(frontend, endpoint, (address,), address.encoding, address.request_id)
        self._address = address
        self._whole = whole
        self._clock = clock
        own = correlation if correlation is not None else address.body_id or address.request_id
        self.name = own.hex() if isinstance(own, bytes) else str(own)

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Send the error, and forget the request when it may be retried."""
        self._address.expires_s = reply_expires_s(self._clock.monotonic_s(), math.inf)
        if isinstance(self._whole, RememberedReply):
            self._whole.may_come_again(error)
        super().refuse(error)

    def _send(self, request: Request, *, final: bool) -> None:
        self._address.expires_s = reply_expires_s(self._clock.monotonic_s(), math.inf)
        super()._send(request, final=final)


class Duplicates:
    """Requests seen in the last `window_s`, so that a request that the broker delivers twice is answered once.

    Bounded in time and number. Thread: the transport's, except `forget`.
    """

    def __init__(self, window_s: float = WINDOW_S, max_remembered: int = MAX_REMEMBERED) -> None:
        self._window_s = window_s
        self._max_remembered = max_remembered
        self._seen: OrderedDict[Hashable, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def is_new(self, key: Hashable, now_s: float) -> bool:
        """Whether a key was not seen within the window; it is remembered then."""
        self._expire(now_s)
        if key in self._seen:
            return False
        self._seen[key] = now_s
        if len(self._seen) > self._max_remembered:
            self._seen.popitem(last=False)
        return True

    def forget(self, key: Hashable) -> None:
        """Make a key new again: its request was refused, and may be retried. Thread: any."""
        self._seen.pop(key, None)

    def _expire(self, now_s: float) -> None:
        while self._seen:
            try:
                key, seen_s = next(iter(self._seen.items()))
            except (StopIteration, RuntimeError):
                return  # another thread forgot one just now
            if now_s - seen_s < self._window_s:
                return
            self._seen.pop(key, None)


def _key(topic: str, known: bytes | str) -> bytes | str:
    """The key of a known header: topic and body, since requests to two models may have equal ones. JSON's is text."""
    return topic.encode() + b"\x00" + known if isinstance(known, bytes) else f"{topic}\x00{known}"
