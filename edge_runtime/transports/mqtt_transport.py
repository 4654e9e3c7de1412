"""A broker's client on a thread of its own: messages in, messages out, over every loss of the connection.

Owns: the thread and the connection of the moment; mqtt_publisher.py owns what goes out, mqtt_attempts.py what came of
the attempts to connect. Knows no model and decodes nothing: what a message means is asked of the `Receiver`, which is
called between reads and never inside paho.

A thread of its own, rather than the I/O thread's poll: connecting, TLS and name look-ups block, and must never hold up
ZeroMQ. It answers by itself, with no hand-over to the I/O thread: in a prototype of an echo, 64 in flight on 2 cores,
hand-over and back gave 7 200-7 300 round trips/s, answering on the spot 7 500-9 800, paho's own loop 7 100-8 200.
"""

from __future__ import annotations

import logging
import os
import random
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.config.broker import BrokerAccess
from edge_runtime.errors import ConfigError
from edge_runtime.telemetry.counters import Counters
from edge_runtime.transports.backoff import Backoff
from edge_runtime.transports.mqtt_attempts import Attempts
from edge_runtime.transports.mqtt_connection import NO_LIMIT, MqttConnection, Session
from edge_runtime.transports.mqtt_packets import Inbound
from edge_runtime.transports.mqtt_publisher import Publisher
from edge_runtime.transports.mqtt_reasons import CONNECT_LIMIT_S, connect_failure
from edge_runtime.transports.outbox import Outgoing

log = logging.getLogger(__name__)

DRAIN_MESSAGES = 32
"""Messages read before their answers go out; as over ZeroMQ."""

OUTBOX_BYTES = 16 << 20
"""Replies that wait for a slow or absent broker: some ten thousand small ones."""

BEAT_S = 0.25
LINGER_S = 2.0
"""How long `close` tries to send what was posted."""


class Receiver(Protocol):
    """Who gives messages a meaning. Thread: every call comes from the transport's thread."""

    def messages(self, transport: MqttTransport, messages: Sequence[Inbound]) -> None:
        """Answer what came in one drain, in order of arrival."""
        ...

    def online(self) -> None:
        """A connection is there and its subscriptions are acknowledged."""
        ...

    def offline(self, reason: str) -> None:
        """It is lost."""
        ...

    def beat(self) -> None:
        """Called at least each BEAT_S, connected or not."""
        ...


class MqttTransport:
    """A lasting link to a broker. `start` returns at once; `post`, `retain` and `call` may be used from any thread."""

    def __init__(
        self,
        access: BrokerAccess,
        session: Session,
        receiver: Receiver,
        counters: Counters,
        *,
        reconnect_min_s: float,
        reconnect_max_s: float,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
        name: str = "edge-mqtt",
        outbox_bytes: int = OUTBOX_BYTES,
        attempt_failed: Callable[[str], None] | None = None,
        log_level: int = logging.WARNING,
    ) -> None:
        """attempt_failed: told, on the thread, why a try to connect came to nothing; losses are `Receiver.offline`'s.

        log_level: how loudly the log says that there is no broker.
        """
        self.access = access
        self.packet_limit = NO_LIMIT
        self._session = session
        self._receiver = receiver
        self._counters = counters
        self._clock = clock or SystemClock()
        self._attempts = Attempts(session.client_id, Backoff(reconnect_min_s, reconnect_max_s, jitter), log_level)
        self._publisher = Publisher(session.client_id, outbox_bytes, counters)
        self._attempt_failed = attempt_failed or (lambda _: None)
        self._inbox: list[Inbound] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = -1
        self._wake_lock = threading.Lock()
        self._connection: MqttConnection | None = None
        self._is_first = True
        self._is_online = False
        self._is_stopping = False
        self._frees_itself = False  # closed on the thread, which then gives its descriptor back
        self._linger_end_s = float("inf")
        self._online_s = 0.0
        self._must_read = False
        self._beat_due_s = 0.0
        self._keep_alive_due_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ---- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect, and go on for ever."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()

    def close(self) -> None:
        """Send what was posted and retained within LINGER_S, say goodbye, end the thread. Idempotent.

        On the thread itself it returns at once, and the thread ends soon.
        """
        if self._wake_fd < 0:
            return
        self._is_stopping = True
        if threading.current_thread() is self._thread:
            self._frees_itself = True
            return
        if self._thread.is_alive():
            self._wake()
            self._thread.join(2 * CONNECT_LIMIT_S + LINGER_S)
        self._free()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_online(self) -> bool:
        """Whether the broker has acknowledged this client's subscriptions and is still there."""
        return self._is_online

    @property
    def reason(self) -> str:
        """Why there is no connection; "" while there is one."""
        return self._attempts.reason

    @property
    def protocol(self) -> int:
        """MQTT's protocol level: 5, or 4 for 3.1.1, which is used once a broker has refused 5."""
        return self._attempts.protocol

    def post(self, message: Outgoing) -> None:
        """Publish a message; it waits while the broker is away, within the outbox's bounds."""
        self._publisher.post(message)
        if threading.current_thread() is not self._thread:
            self._wake()

    def retain(self, message: Outgoing) -> None:
        """Publish a retained message now, if online, and again with each new connection; the last of a topic counts."""
        self.call(lambda: self._publisher.retain(message, is_online=self.is_online))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the transport's thread soon."""
        self._calls.append(function)
        self._wake()

    def fetch_retained(self, filters: Sequence[str], done: Callable[[str], None]) -> None:
        """Have what the broker retains under filters handed to the receiver, then call `done("")`, or `done(reason)`.

        `done` is called on the transport's thread, and not at all once `close` was called.
        """
        self.call(lambda: self._fetch_retained(filters, done))

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            connection = self._connect()
            if connection is not None:
                self._converse(connection)
            if not self._is_stopping:
                self._idle(self._attempts.next_wait_s())
        if self._frees_itself:
            self._free()

    def _connect(self) -> MqttConnection | None:
        """A connection whose CONNECT is sent, or None with the reason."""
        connection: MqttConnection | None = None
        try:
            connection = MqttConnection(
                self.access,
                self._session,
                self._inbox.append,
                protocol=self._attempts.protocol,
                is_first=self._is_first,
            )
            connection.open()
        except (OSError, ValueError, ConfigError) as error:
            if connection is not None:
                connection.break_off()
            self._attempts.failed(connect_failure(error, self.access))
            self._counters.count("mqtt_connect_failures")
            self._attempt_failed(self.reason)
            return None
        return connection

    def _converse(self, connection: MqttConnection) -> None:
        """Serve one connection until it ends."""
        self._connection = connection
        try:
            if self._introduce(connection):
                self._serve(connection)
            if self._is_stopping and connection.is_open:
                connection.close()
        except Exception as error:
            log.exception("the MQTT loop caught what it should not have")
            self._counters.count("mqtt_errors")
            connection.lost(f"{type(error).__name__}: {error}")
        finally:
            self._connection = None
            connection.break_off()
            self._end(connection)

    def _introduce(self, connection: MqttConnection) -> bool:
        """CONNACK and SUBACK; False when they do not come."""
        if not connection.is_open:
            connection.lost(f"{self.access.address.url}: the connection ended at once")
            return False
        poller = self._new_poller(connection)
        end_s = self._clock.monotonic_s() + CONNECT_LIMIT_S
        while not connection.is_subscribed:
            if connection.reason or self._is_stopping:
                return False
            if self._clock.monotonic_s() >= end_s:
                connection.lost(f"{self.access.address.url}: a connection, but no word within {CONNECT_LIMIT_S:.0f} s")
                return False
            if not self._turn(connection, poller):
                connection.lost(f"{self.access.address.url}: the connection ended before the broker's answer")
                return False
        return True

    def _serve(self, connection: MqttConnection) -> None:
        self._is_first = False
        self.packet_limit = connection.packet_limit
        self._counters.count("mqtt_connections")
        self._attempts.succeeded()
        self._online_s = self._clock.monotonic_s()
        self._is_online = True
        log.info("MQTT broker reached", extra={"broker": self.access.address.url, "protocol": connection.protocol})
        self._receiver.online()
        self._publisher.connected()
        poller = self._new_poller(connection)
        while self._turn(connection, poller):
            if self._is_stopping and self._has_sent_all(connection):
                return
        connection.lost("the broker or the network ended the connection")

    def _turn(self, connection: MqttConnection, poller: select.poll) -> bool:
        """One round: wait, read, answer, write. False when the connection is lost."""
        wants_write = connection.wants_write()
        # What comes in while replies cannot go out would only grow old here: it is left to the broker, which bounds it.
        # Now and then something is read all the same, or the broker's word that it is alive would be missed.
        may_read = not wants_write or self._must_read
        poller.modify(connection.fd, (select.POLLIN if may_read else 0) | (select.POLLOUT if wants_write else 0))
        is_busy = bool(self._publisher.has_posted or self._calls) or (
            not wants_write and (connection.has_pending() or self._publisher.can_send(connection))
        )
        found = dict(poller.poll(0 if is_busy else int(BEAT_S * 1e3)))
        if self._wake_fd in found:
            os.eventfd_read(self._wake_fd)
        events = found.get(connection.fd, 0)
        if events & ~select.POLLOUT or (may_read and connection.has_pending()):
            self._must_read = False
            is_there = connection.read(DRAIN_MESSAGES)
            self._deliver()
            if not is_there:
                return False
        if wants_write and events & select.POLLOUT and not connection.flush():
            return False
        self._work()
        self._publisher.send(connection, self._clock.monotonic_s())
        return connection.flush() and self._beat(connection) and connection.is_open

    def _deliver(self) -> None:
        if self._inbox:
            inbox = list(self._inbox)
            self._inbox.clear()
            self._counters.count("mqtt_messages", len(inbox))
            try:
                self._receiver.messages(self, inbox)
            except Exception:  # a receiver's bug must not end the connection, and with it everybody's requests
                log.exception("messages were not answered")
                self._counters.count("mqtt_errors")

    def _work(self) -> None:
        """What other threads asked for."""
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        self._publisher.take_posted()

    def _has_sent_all(self, connection: MqttConnection) -> bool:
        self._linger_end_s = min(self._linger_end_s, self._clock.monotonic_s() + LINGER_S)
        return self._publisher.has_sent_all(connection) or self._clock.monotonic_s() >= self._linger_end_s

    def _beat(self, connection: MqttConnection | None) -> bool:
        """Timers; False when the broker no longer answers."""
        now_s = self._clock.monotonic_s()
        if now_s < self._beat_due_s:
            return True
        self._beat_due_s = now_s + BEAT_S
        self._receiver.beat()
        self._publisher.expire(now_s)
        if connection is None or now_s < self._keep_alive_due_s:
            return True
        self._keep_alive_due_s = now_s + 1.0
        self._must_read = True
        self._publisher.tell_refused(connection)
        if connection.keep_alive():
            return True
        connection.lost("the broker stopped answering")
        return False

    def _end(self, connection: MqttConnection) -> None:
        """Account for a connection that is gone."""
        self._deliver()
        now_s = self._clock.monotonic_s()
        self._publisher.disconnected(connection, now_s)
        goes_on_otherwise = connection.is_protocol_refused and self._attempts.refused_protocol()
        if self._is_stopping:
            return
        connection.end_fetches()
        if not self._is_online:
            self._attempts.failed(connection.reason)
            self._counters.count("mqtt_connect_failures")
            if not goes_on_otherwise:
                self._attempt_failed(connection.reason)
            return
        reason = self._attempts.lost(connection.reason, now_s - self._online_s)
        self._is_online = False
        self._counters.count("mqtt_connections_lost")
        self._receiver.offline(reason)

    def _idle(self, wait_s: float) -> None:
        """Wait for the next try; requests that were admitted still end, and what grows old is dropped."""
        end_s = self._clock.monotonic_s() + wait_s
        poller = self._new_poller(None)
        while not self._is_stopping and (left_s := end_s - self._clock.monotonic_s()) > 0:
            if poller.poll(int(min(left_s, BEAT_S) * 1e3) + 1):
                os.eventfd_read(self._wake_fd)
            self._work()
            self._beat(None)

    def _new_poller(self, connection: MqttConnection | None) -> select.poll:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        if connection is not None:
            poller.register(connection.fd, select.POLLIN)
        return poller

    def _fetch_retained(self, filters: Sequence[str], done: Callable[[str], None]) -> None:
        connection = self._connection
        if connection is None or not self.is_online:
            done(self.reason or "there is no connection")
            return
        # By way of `call`, because what was read together with the end is not delivered yet.
        connection.fetch_retained(filters, lambda reason: self.call(lambda: done(reason)))

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _free(self) -> None:
        with self._wake_lock:  # or another thread would write to whoever gets the descriptor's number next
            wake_fd, self._wake_fd = self._wake_fd, -1
            if wake_fd >= 0:
                os.close(wake_fd)
