"""Requests and replies between many threads and one device behind a broker.

Owns: the connection, the encoding of requests and replies as messages, and retained messages. The transport's thread
reads and writes, and completes futures; a caller of `ask` waits on its own thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from edge_runtime.client import forks
from edge_runtime.client.in_flight import (
    LOOK_S,
    LOOKS,
    NEVER_S,
    Call,
    InFlight,
    acquire,
    all_in_flight,
    all_in_flight_in_callback,
    closed,
    closed_before_answer,
    inside_own_call,
    without_parts,
)
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.doors.mqtt.broker import BrokerAccess
from edge_runtime.doors.mqtt.connection import ConnectOptions, Subscription
from edge_runtime.doors.mqtt.packets import Inbound, Outgoing
from edge_runtime.doors.mqtt.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    RESPONSE_TOPIC,
    expiry_property,
    packed_properties,
    text_property,
    user_property,
    with_properties,
)
from edge_runtime.doors.mqtt.socket import CONNECT_LIMIT_S
from edge_runtime.doors.mqtt.topics import DeviceTopics
from edge_runtime.doors.mqtt.transport import MqttTransport
from edge_runtime.errors import DecodeFailed, QueueFull, TensorMismatch
from edge_runtime.telemetry.tracing import TRACEPARENT
from edge_runtime.wire import codec

RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 1.0
"""A restarted broker is found again within a second; a missing one costs an attempt a second."""

OUTBOX_BYTES = 1 << 62
"""No bound here: requests in flight are bounded, and none may be dropped silently."""


MSGPACK_TYPE = "application/msgpack"

MAX_EXPIRY_S = 0xFFFF_FFFF
"""The longest Message Expiry Interval (MQTT 5, 3.3.2.3.3), 136 years."""

WITHDRAWN_S = -math.inf
"""Expiry of a message whose call has failed, so that it is not sent any more."""


def new_in_flight(most: int) -> InFlight:
    """Make the book of one link. The one further look is the next beat.

    The first number is unpredictable: other clients and devices may know the reply topic.
    """
    return InFlight(most, looks=1, first_number=int.from_bytes(os.urandom(7), "big"))


class MqttLink:
    """Thread-safe requests through one broker, and its retained messages. Connects at the first use.

    device: the one whose status is followed; None where only `retained` is used. qos: of requests and their replies.
    in_flight: this link's own book. clock: of deadlines; asked from every thread that uses the link.
    """

    def __init__(
        self,
        access: BrokerAccess,
        client_id: str,
        reply_topic: str,
        device: DeviceTopics | None,
        *,
        qos: int,
        in_flight: InFlight,
        clock: Clock | None = None,
    ) -> None:
        self.reply_topic = reply_topic
        self.device_status = ""
        self._access = access
        self._client_id = client_id
        self._device = device
        self._now_s = (clock or SystemClock()).monotonic_s
        self._in_flight = in_flight
        self._forks = forks.count
        self._fetch: _RetainedFetch | None = None
        self._may_fetch = threading.Lock()  # two at once would be a burst of twice the size, and share their messages
        # Taken by `with` alone, which no interrupt tears; its owner tells a signal's handler where it interrupted.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # the connection
        self._has_slot = threading.Condition(self._lock)
        self._transport: MqttTransport | None = None
        self._thread_id: int | None = None  # the transport's, which must never wait
        self._is_online = False
        self._is_closed = False
        self._is_abandoned = False
        self._failed_attempts = 0
        self._reason = ""
        self._packer = MqttPacker(reply_topic, qos)

    # ---- any thread -------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The broker's address."""
        return self._access.address.url

    @property
    def is_online(self) -> bool:
        """Whether there is a connection now."""
        return self._is_online

    def ask(self, call: Call) -> Any:
        """Send one request, wait for its reply and return the decoded result.

        Raises TimeoutError after wait_s seconds without a slot, or without a reply since it was sent; ConnectionError
        without a broker or when the connection is lost meanwhile; TensorMismatch for a message above the broker's
        limit; RuntimeError inside a future's callback, and in a signal's handler that interrupts its own thread where
        that holds the link's lock; the error that the reply carries.
        """
        self._check_process()
        self._check_may_wait()
        call.gate = gate = threading.Lock()
        gate.acquire()
        self._start(call)
        try:
            is_over = acquire(gate, call.wait_s)
            if not is_over and self._give_up(call):
                raise self._no_reply(call)
            if not is_over:
                gate.acquire()  # it ends just now, on the transport's thread
        except BaseException:  # KeyboardInterrupt, most likely
            self._give_up(call)
            raise
        if call.error is None and call.parts is None:
            call.frames = _reply_parts(call.payload)
        return call.result()

    def next_part(self, call: Call) -> Any:
        """Wait for the next part of an answer, and return the decoded result. Raises as `ask`. One thread at a time."""
        self._check_process()
        self._check_may_wait()
        assert call.gate is not None
        try:
            while without_parts(call):
                end_s = self._now_s() + call.wait_s if call.timeout_ms is None else call.message.expires_s
                if not acquire(call.gate, end_s - self._now_s()) and self._give_up(call):
                    raise self._no_reply(call)
        except BaseException:  # KeyboardInterrupt, most likely
            self._give_up(call)
            raise
        return call.result()

    def leave(self, call: Call) -> None:
        """Have the device end an answer in parts that its caller leaves. Idempotent. Thread: any, inside any call."""
        if call.is_over or self._forks != forks.count:
            return
        if self._holds_lock():
            threading.Thread(target=self.leave, args=(call,), name="edge-runtime-client", daemon=True).start()
            return
        self._give_up(call)
        call.leave()
        _let_go_on(call)

    def submit(self, call: Call) -> Future[Any]:
        """Send one request; the future gets the result or the error. Blocks while `max_in_flight` are pending.

        Raises as `ask` when it cannot be sent, and QueueFull inside a future's callback, which must not block.
        """
        self._check_process()
        call.future = future = Future[Any]()
        self._start(call)
        return future

    def retained(self, filters: Sequence[str], limit_s: float) -> list[Inbound]:
        """Return the messages retained under some filters, but those that the broker drops. One call at a time.

        limit_s: for its turn, for the connection, and for the messages. Raises ConnectionError, TimeoutError and
        RuntimeError as `ask`.
        """
        self._check_process()
        self._check_may_wait()
        if not self._may_fetch.acquire(timeout=limit_s):
            raise self._no_retained(limit_s)
        try:
            return self._retained(self._wait_online(limit_s), filters, limit_s)
        finally:
            self._may_fetch.release()

    def abandon(self) -> None:
        """Close when no call is in flight any more. Thread: any, inside any call: its client was freed unclosed."""
        self._is_abandoned = True

    def _retained(self, transport: MqttTransport, filters: Sequence[str], limit_s: float) -> list[Inbound]:
        fetch = _RetainedFetch()
        with self._lock:
            self._check_open()
            self._fetch = fetch
        try:
            transport.fetch_retained(filters, fetch.end)
            if not fetch.is_over.wait(limit_s):
                raise self._no_retained(limit_s)
        finally:
            with self._lock:
                self._fetch = None
        if fetch.reason:
            raise ConnectionError(fetch.reason)
        return fetch.messages

    def _no_retained(self, limit_s: float) -> TimeoutError:
        return TimeoutError(f"{self.url} sent no retained messages within {limit_s:.1f} s; is it overloaded?")

    def close(self) -> None:
        """Fail pending calls with ConnectionError, disconnect, end the thread. Idempotent. Thread: any."""
        if self._forks != forks.count:
            self._is_closed = True  # the connection is the parent's, and stays open
            return
        if self._holds_lock():  # in a signal's handler, for which the transport's thread would wait
            threading.Thread(target=self.close, name="edge-runtime-client", daemon=True).start()
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._is_online = False
            fetch = self._fetch
            self._changed.notify_all()
        self._fail_all(closed_before_answer)
        if fetch is not None:
            fetch.end("the client was closed")
        if self._transport is not None:
            self._transport.close()

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _start(self, call: Call) -> None:
        in_flight = self._in_flight
        while True:
            with self._lock:
                if in_flight.is_full:
                    self._wait_for_slot(call)
            transport = self._wait_online(call.wait_s)
            in_flight.number(call)
            message = call.message = self._packer.pack(transport, call)
            with self._lock:
                self._check_open()
                if not self._is_online:
                    raise self._lost(self._reason)
                if len(in_flight.calls) >= in_flight.most:
                    continue  # another thread took the slot meanwhile
                # The wait starts now: a long wait for a slot must not shorten the time for the reply.
                message.expires_s = self._now_s() + call.wait_s
                in_flight.add(call, NEVER_S if call.future is None else message.expires_s)
            transport.post(message)
            return

    def _wait_for_slot(self, call: Call) -> None:
        """Wait for a slot. The lock is held, and released meanwhile."""
        in_flight = self._in_flight
        if not self._may_wait():
            raise QueueFull(all_in_flight_in_callback(in_flight.most))
        for limit_s in (min(max(call.wait_s, 0.0), threading.TIMEOUT_MAX), *[LOOK_S] * LOOKS):
            if self._has_slot.wait_for(lambda: self._is_closed or not in_flight.is_full, limit_s):
                return
        raise all_in_flight(in_flight.most, call.wait_s)

    def _give_up(self, call: Call) -> bool:
        """Take out the call of a caller that stops waiting; False when it has ended already."""
        with self._lock:
            if self._in_flight.take(call.number) is None:
                return False
            self._has_slot.notify()
        _withdraw(call)
        self._cancel(call)
        return True

    def _cancel(self, call: Call) -> None:
        """Have the device end an answer whose parts are not taken any more."""
        transport = self._transport
        if call.cancel_header is None or call.is_over or transport is None or not self._is_online:
            return
        call.is_over = True
        assert self._device is not None
        cancel = Call(call.cancel_header(call.number), (), 0.0, bytes)
        cancel.topic = self._device.infer()
        with self._lock:
            self._in_flight.number(cancel)
        transport.post(self._packer.pack(transport, cancel))

    def _fail_all(self, error: Callable[[], ConnectionError]) -> None:
        with self._lock:
            calls = self._in_flight.take_all()
            self._has_slot.notify_all()
        for call in calls:
            _withdraw(call)
            _end(call, error())

    def _check_process(self) -> None:
        """A link that was never used works in the child of a fork; any other raises RuntimeError."""
        if self._forks != forks.count:
            if self._transport is not None or not self._lock.acquire(blocking=False):
                raise forks.crossed()
            self._lock.release()
            self._forks = forks.count
        if self._holds_lock():
            raise inside_own_call()

    def _holds_lock(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001 (as Condition does)

    def _check_may_wait(self) -> None:
        if not self._may_wait():
            raise RuntimeError(
                "a future's callback runs on the thread that reads replies, so it cannot wait for one; use submit "
                "there, or ask from another thread"
            )

    def _may_wait(self) -> bool:
        return threading.get_ident() != self._thread_id

    # ---- the connection ---------------------------------------------------------------------------------------------

    def _wait_online(self, limit_s: float) -> MqttTransport:
        """Return the transport once it is connected. Raises ConnectionError when the next attempt fails."""
        if self._is_online:
            assert self._transport is not None
            return self._transport
        with self._lock:
            self._check_open()
            transport = self._transport
            if transport is None:
                transport = self._transport = self._new_transport()
                transport.start()
            failed = self._failed_attempts
            self._changed.wait_for(
                lambda: self.is_online or self._is_closed or self._failed_attempts > failed,
                min(CONNECT_LIMIT_S, limit_s) if self._may_wait() else 0.0,
            )
            self._check_open()
            if not self.is_online:
                raise ConnectionError(self._reason or f"{self.url}: no connection yet; {transport.reason}")
            return transport

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed()

    def _new_transport(self) -> MqttTransport:
        # Live messages come without the retain flag, so that it marks retained ones.
        subscriptions = [Subscription(self.reply_topic, retain_as_published=False)]
        if self._device is not None:
            subscriptions.append(Subscription(self._device.status, 0, retain_as_published=False, is_needed=False))
        return MqttTransport(
            self._access,
            ConnectOptions(client_id=self._client_id, subscriptions=tuple(subscriptions), takes_bursts=True),
            self,
            _NoCounters(),
            reconnect_min_s=RECONNECT_MIN_S,
            reconnect_max_s=RECONNECT_MAX_S,
            name="edge-runtime-client",
            outbox_bytes=OUTBOX_BYTES,
            log_level=logging.DEBUG,
        )

    def _lost(self, reason: str) -> ConnectionError:
        return ConnectionError(
            f"the connection to {self.url} was lost before an answer was there: {reason or 'no reason was given'}; "
            "it is safe to ask again"
        )

    # ---- the transport's MqttReceiver, on its thread -----------------------------------------------------------------

    def messages(self, transport: MqttTransport, messages: Sequence[Inbound]) -> None:
        """Take replies, the device's status and retained messages."""
        is_v5 = transport.protocol == 5
        for message in messages:
            if message.topic == self.reply_topic:
                self._reply(message.correlation if is_v5 else _body_id(message.payload), message)
            else:
                self._take_other(transport, message)

    def online(self) -> None:
        """Wake the callers that wait for a connection."""
        with self._lock:
            self._thread_id = threading.get_ident()
            self._is_online = not self._is_closed
            self._reason = ""
            self._changed.notify_all()

    def offline(self, reason: str) -> None:
        """Fail every call in flight."""
        with self._lock:
            self._is_online = False
            self._reason = reason
        self.device_status = ""
        self._fail_all(lambda: self._lost(reason))

    def beat(self) -> None:
        """Fail the futures whose replies are missing; a caller of `ask` looks at the clock itself."""
        with self._lock:
            missed = self._in_flight.take_missed(self._now_s())
            self._has_slot.notify(len(missed))
        for call, _ in missed:
            _withdraw(call)
            _end(call, self._no_reply(call))
        if self._is_abandoned and not self._in_flight.calls:
            self.close()

    def unreachable(self, reason: str) -> None:
        """Wake the callers that wait for a connection, with the reason."""
        with self._lock:
            self._failed_attempts += 1
            self._reason = reason
            self._changed.notify_all()

    def _reply(self, number: Any, message: Inbound) -> None:
        if message.retain or type(number) is not bytes:
            return  # no daemon retains a reply, or sends one without a number
        with self._lock:
            call = self._in_flight.take(number)
            goes_on = call is not None and call.parts is not None and self._take_part(call, message.payload)
            if not goes_on:
                self._has_slot.notify()
        if call is None or goes_on:  # its caller gave up, or QoS 1 delivered it twice; or more comes
            return
        if call.error is not None:
            self._cancel(call)
        call.payload = message.payload
        _end(call, call.error)

    def _take_part(self, call: Call, payload: bytes) -> bool:
        """Take a reply of an answer in parts; return whether more come. The lock is held."""
        try:
            goes_on = call.take_part(_reply_parts(payload))
        except DecodeFailed as failed:
            call.error = failed
            return False
        if goes_on:
            self._in_flight.put_back(call, self._now_s())
            _let_go_on(call)
        return goes_on

    def _take_other(self, transport: MqttTransport, message: Inbound) -> None:
        if self._device is not None and message.topic == self._device.status:
            self.device_status = message.payload[:32].decode("utf-8", "replace")
            if self.device_status == "online" and not message.retain:
                # The device has just subscribed; the broker had no subscriber for earlier requests. They are sent again
                # and not failed, since some may still be answered; of two replies the second is dropped.
                # An answer of which parts came cannot go on.
                with self._lock:
                    calls = [call for call in self._in_flight.calls.values() if call.message is not None]
                    begun = [call for call in calls if call.parts is not None and call.has_ended]
                    for call in begun:
                        self._in_flight.take(call.number)
                    self._has_slot.notify(len(begun))
                for call in calls:
                    if call not in begun:
                        transport.post(call.message)
                for call in begun:
                    call.is_over = True
                    _end(call, ConnectionError("the device came back before the last part of an answer; ask again"))
        fetch = self._fetch
        if message.retain and fetch is not None:
            fetch.messages.append(message)

    def _no_reply(self, call: Call) -> TimeoutError:
        why = _why_no_reply(self.device_status, call.topic, self.reply_topic)
        return TimeoutError(
            f"no reply from {_device_of(call.topic)} through {self.url} within {call.wait_s:.3f} s; {why}"
        )


def _withdraw(call: Call) -> None:
    """Keep a message that still waits for the broker from being sent after its call has failed."""
    assert call.message is not None
    call.message.expires_s = WITHDRAWN_S


def _end(call: Call, error: Exception | None = None) -> None:
    """End a call that was taken out; a future's callbacks run here."""
    call.error = error
    if call.gate is not None:
        _let_go_on(call)
        return
    if error is None:
        try:
            call.frames = _reply_parts(call.payload)
        except DecodeFailed as failed:
            call.error = failed
    call.complete()


def _let_go_on(call: Call) -> None:
    """Open the gate of a caller of `ask`; of an answer in parts it may be open."""
    assert call.gate is not None
    with contextlib.suppress(RuntimeError):
        call.gate.release()


class _RetainedFetch:
    """One listing of retained messages under way."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.reason = ""
        self.messages: list[Inbound] = []

    def end(self, reason: str) -> None:
        """Mark it finished, with a reason if it failed. Thread: any."""
        if not self.is_over.is_set():
            self.reason = reason
            self.is_over.set()


class _NoCounters:
    """Counters of a client, which has no metrics."""

    def count(self, name: str, count: int = 1) -> None:
        """Count nothing."""


class ReplyPart:
    """One part of a payload, with the attributes of a `zmq.Frame` that `ReplyDecoder` reads."""

    __slots__ = ("bytes",)

    def __init__(self, data: bytes) -> None:
        self.bytes = data

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def buffer(self) -> bytearray:
        """A writable copy."""
        return bytearray(self.bytes)


class MqttPacker:
    """Packs requests as messages. qos: of requests and so of replies. Thread: any."""

    def __init__(self, reply_topic: str, qos: int) -> None:
        self._reply_topic = reply_topic
        self._qos = qos
        self._properties: dict[int | None, bytes] = {}

    def pack(self, transport: MqttTransport, call: Call) -> Outgoing:
        """Pack one request for this connection's protocol. Raises TensorMismatch above the broker's limit."""
        if transport.protocol == 5:
            header, properties = call.header, self._packed_properties(_expiry_s(call.timeout_ms), call.number)
            if call.traceparent is not None:
                properties = with_properties(properties, user_property(TRACEPARENT, call.traceparent))
        else:
            header, properties = codec.with_reply_fields(call.header, self._reply_topic, call.number), b""
        message = Outgoing(call.topic, codec.pack_array(header, call.tensors), self._qos, properties=properties)
        if message.packet_bytes > transport.packet_limit:
            raise TensorMismatch(
                f"the request takes {message.packet_bytes} bytes and the broker {transport.access.address.url} takes "
                f"at most {transport.packet_limit} in one message; send fewer rows at once, or use ZeroMQ, which is "
                "made for large tensors"
            )
        return message

    def _packed_properties(self, expiry_s: int | None, number: bytes) -> bytes:
        """Return a request's properties; only the number at their end differs between requests."""
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


def _reply_parts(payload: bytes) -> list[ReplyPart]:
    """Cut a reply into frames. Raises DecodeFailed."""
    header, tensors = codec.unpack_array(payload, codec.MAX_REPLY_HEADER_BYTES)
    return [ReplyPart(header), ReplyPart(b""), *map(ReplyPart, tensors)]


def _body_id(payload: bytes) -> Any:
    """Return the id inside a reply of MQTT 3.1.1; None when there is none."""
    try:
        return codec.reply_id(codec.unpack_array(payload, codec.MAX_REPLY_HEADER_BYTES)[0])
    except DecodeFailed:
        return None


def _device_of(topic: str) -> str:
    """Return the prefix and id of the device in a request's topic: "edge/camera-7"."""
    return topic.partition("/infer")[0]


def _why_no_reply(device_status: str, topic: str, reply_topic: str) -> str:
    """Explain a missing reply and say what to check. device_status: as retained; "" without one."""
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


def _expiry_s(timeout_ms: float | None) -> int | None:
    """Return a timeout in whole seconds, rounded up; None without one that the daemon accepts."""
    if timeout_ms is None or not 0 < timeout_ms <= MAX_EXPIRY_S * 1e3:
        return None
    return math.ceil(timeout_ms / 1e3)
