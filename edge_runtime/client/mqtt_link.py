"""Requests and replies between many threads and one device behind a broker.

Owns: the connection, and what the broker tells beside replies. The transport's thread reads and writes; whoever asked
waits for it, except that a future is completed on that thread. What is in flight is mqtt_in_flight.py's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any

from edge_runtime.client.lateness import acquire
from edge_runtime.client.mqtt_in_flight import Asked, InFlight
from edge_runtime.client.mqtt_requests import (
    Part,
    Request,
    RequestPacker,
    body_id,
    device_of,
    reply_parts,
    why_no_reply,
)
from edge_runtime.config.broker import BrokerAccess
from edge_runtime.transports.mqtt_connection import Session, Subscription
from edge_runtime.transports.mqtt_packets import Inbound
from edge_runtime.transports.mqtt_reasons import CONNECT_LIMIT_S
from edge_runtime.transports.mqtt_transport import MqttTransport
from edge_runtime.wire.topics import DeviceTopics

RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 1.0
"""A broker that restarts is found again within a second; a missing one costs a try a second."""

OUTBOX_BYTES = 1 << 62
"""No bound here: what is in flight is bounded in requests, and none may be dropped without a word."""


class MqttLink:
    """Thread-safe requests through one broker, and what it retains. Connects at the first use; `close` is idempotent.

    device: whose status is followed; None where only `retained` is used. qos: of requests, and so of their replies.
    in_flight: this link's own. monotonic_s: the clock that deadlines are judged by; asked from every thread that uses
    the link.
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
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reply_topic = reply_topic
        self.device_status = ""
        self._access = access
        self._client_id = client_id
        self._device = device
        self._now_s = monotonic_s
        # From where nobody can guess it: other clients and devices may know the reply topic.
        self._numbers = count(int.from_bytes(os.urandom(7), "big"))
        self._in_flight = in_flight
        self._fetch: _Fetch | None = None
        self._may_fetch = threading.Lock()  # two at once would be a burst of twice the size, and each have the other's
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._transport: MqttTransport | None = None
        self._thread_id: int | None = None  # the transport's, which must never wait
        self._is_online = False
        self._is_closed = False
        self._failed_attempts = 0
        self._reason = ""
        self._packer = RequestPacker(reply_topic, qos)

    # ---- any thread -------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The broker."""
        return self._access.address.url

    @property
    def is_online(self) -> bool:
        """Whether there is a connection now."""
        return self._is_online

    def ask(self, request: Request, wait_s: float) -> list[Part]:
        """Send one request and wait for its reply: header, an empty id, tensors.

        Raises TimeoutError when wait_s seconds went by without a slot, or since it was sent; ConnectionError when there
        is no broker or the connection is lost meanwhile, TensorMismatch for what the broker does not take, RuntimeError
        inside a future's callback.
        """
        self._check_may_wait()
        asked = Asked(request.topic, wait_s)
        asked.gate = gate = threading.Lock()
        gate.acquire()
        self._start(asked, request)
        try:
            is_over = acquire(gate, wait_s)
            if not is_over and self._in_flight.give_up(asked):
                raise self._no_reply(asked)
            if not is_over:
                gate.acquire()  # its end came just now, and is being told
        except BaseException:  # KeyboardInterrupt, most likely
            self._in_flight.give_up(asked)
            raise
        if asked.error is not None:
            raise asked.error
        return reply_parts(asked.payload)

    def submit(self, request: Request, wait_s: float, decode: Callable[[list[Part]], Any]) -> Future[Any]:
        """Send one request; the future gets `decode(parts)`, or the error. Blocks while `max_in_flight` are pending.

        Raises as `ask` when it cannot be sent, and QueueFull inside a future's callback, which must not block.
        """
        asked = Asked(request.topic, wait_s)
        asked.decode = decode
        asked.future = future = Future[Any]()
        self._start(asked, request)
        return future

    def retained(self, filters: Sequence[str], limit_s: float) -> list[Inbound]:
        """What the broker retains under some filters, and did not drop on the way; one call after the other.

        limit_s: for its turn, for the connection, and for the answer. Raises ConnectionError, TimeoutError and
        RuntimeError as `ask`.
        """
        self._check_may_wait()
        if not self._may_fetch.acquire(timeout=limit_s):
            raise self._untold(limit_s)
        try:
            return self._retained(self._wait_online(limit_s), filters, limit_s)
        finally:
            self._may_fetch.release()

    def _retained(self, transport: MqttTransport, filters: Sequence[str], limit_s: float) -> list[Inbound]:
        fetch = _Fetch()
        with self._lock:
            self._check_open()
            self._fetch = fetch
        try:
            transport.fetch_retained(filters, fetch.end)
            if not fetch.is_over.wait(limit_s):
                raise self._untold(limit_s)
        finally:
            with self._lock:
                self._fetch = None
        if fetch.reason:
            raise ConnectionError(fetch.reason)
        return fetch.messages

    def _untold(self, limit_s: float) -> TimeoutError:
        return TimeoutError(f"{self.url} did not tell within {limit_s:.1f} s what it retains; is it overloaded?")

    def close(self) -> None:
        """Fail what is pending with ConnectionError, say goodbye to the broker, end the thread. Thread: any."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._is_online = False
            fetch = self._fetch
            self._changed.notify_all()
        self._in_flight.fail_all("closed before an answer was there")
        if fetch is not None:
            fetch.end("the client was closed")
        if self._transport is not None:
            self._transport.close()

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _start(self, asked: Asked, request: Request) -> None:
        self._in_flight.take_slot(asked.wait_s, self._may_wait)
        try:
            transport = self._wait_online(asked.wait_s)
            # Only now: what waited long for its slot has to be given time for its answer, too.
            asked.deadline_s = self._now_s() + asked.wait_s
            asked.number = next(self._numbers).to_bytes(8, "big")
            asked.message = self._packer.pack(transport, request, asked.number, asked.deadline_s)
            with self._lock:
                self._check_open()
                if not self._is_online:
                    raise ConnectionError(self._lost(self._reason))
                self._in_flight.add(asked)
        except BaseException:
            self._in_flight.leave_slot()
            raise
        transport.post(asked.message)

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
        """The transport once there is a connection. Raises ConnectionError when the next try to get one fails."""
        if self._is_online:
            assert self._transport is not None
            return self._transport
        with self._changed:
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
            raise ConnectionError("the client is closed; make a new one")

    def _new_transport(self) -> MqttTransport:
        # Live messages come without the retain flag, so that what has it is what the broker kept.
        subscriptions = [Subscription(self.reply_topic, retain_as_published=False)]
        if self._device is not None:
            subscriptions.append(Subscription(self._device.status, 0, retain_as_published=False, is_needed=False))
        return MqttTransport(
            self._access,
            Session(client_id=self._client_id, subscriptions=tuple(subscriptions), takes_bursts=True),
            self,
            _NoCounters(),
            reconnect_min_s=RECONNECT_MIN_S,
            reconnect_max_s=RECONNECT_MAX_S,
            name="edge-runtime-client",
            outbox_bytes=OUTBOX_BYTES,
            attempt_failed=self._attempt_failed,
            log_level=logging.DEBUG,
        )

    def _lost(self, reason: str) -> str:
        return (
            f"the connection to {self.url} was lost before an answer was there: {reason or 'no reason was given'}; "
            "it is safe to ask again"
        )

    # ---- the transport's receiver, on its thread --------------------------------------------------------------------

    def messages(self, transport: MqttTransport, messages: Sequence[Inbound]) -> None:
        """See Receiver."""
        is_v5 = transport.protocol == 5
        for message in messages:
            if message.topic == self.reply_topic:
                self._reply(message.correlation if is_v5 else body_id(message.payload), message)
            else:
                self._told(transport, message)

    def online(self) -> None:
        """See Receiver."""
        with self._changed:
            self._thread_id = threading.get_ident()
            self._is_online = not self._is_closed
            self._reason = ""
            self._changed.notify_all()

    def offline(self, reason: str) -> None:
        """See Receiver."""
        with self._changed:
            self._is_online = False
            self._reason = reason
        self.device_status = ""
        self._in_flight.fail_all(self._lost(reason))

    def beat(self) -> None:
        """See Receiver: futures whose time is up; who waits in `ask` looks at the clock alone."""
        for asked in self._in_flight.take_missed(self._now_s()):
            self._in_flight.fail(asked, self._no_reply(asked))

    def _attempt_failed(self, reason: str) -> None:
        with self._changed:
            self._failed_attempts += 1
            self._reason = reason
            self._changed.notify_all()

    def _reply(self, number: Any, message: Inbound) -> None:
        if message.retain or type(number) is not bytes:
            return  # nobody's reply is retained; what has no number is no reply of a daemon
        self._in_flight.answer(number, message.payload)

    def _told(self, transport: MqttTransport, message: Inbound) -> None:
        if self._device is not None and message.topic == self._device.status:
            self.device_status = message.payload[:32].decode("utf-8", "replace")
            if self.device_status == "online" and not message.retain:
                # It listens since just now: what was sent before, the broker had nobody to give to. Sent again rather
                # than failed, for some may be answered yet; of two replies the second is dropped.
                for unanswered in self._in_flight.messages():
                    transport.post(unanswered)
        fetch = self._fetch
        if message.retain and fetch is not None:
            fetch.messages.append(message)

    def _no_reply(self, asked: Asked) -> TimeoutError:
        why = why_no_reply(self.device_status, asked.topic, self.reply_topic)
        return TimeoutError(
            f"no reply from {device_of(asked.topic)} through {self.url} within {asked.wait_s:.3f} s; {why}"
        )


class _Fetch:
    """What one `retained` waits for."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.reason = ""
        self.messages: list[Inbound] = []

    def end(self, reason: str) -> None:
        """It is complete, or for some reason will not be. Thread: any."""
        if not self.is_over.is_set():
            self.reason = reason
            self.is_over.set()


class _NoCounters:
    """A client counts nothing."""

    def count(self, name: str, count: int = 1) -> None:
        """See Counters."""
