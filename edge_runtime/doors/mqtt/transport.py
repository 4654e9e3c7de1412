"""An MQTT client: messages in, messages out, over every loss of the connection.

Owns: a thread and the current connection; outbox.py owns outgoing messages, state.py the connection state.
Knows no model and decodes nothing: it calls the `MqttReceiver` between reads, never inside paho.

Connecting, TLS and name look-ups block, so they happen on the thread. A connection whose subscriptions are acknowledged
is the I/O loop's until it ends, or `close` is called; without a loop the thread serves it. Either one of them or the
other acts, never both: "the transport's thread" is the one that does.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.doors.mqtt.broker import BrokerAccess
from edge_runtime.doors.mqtt.connection import ConnectOptions, MqttConnection, Subscription
from edge_runtime.doors.mqtt.outbox import Outbox
from edge_runtime.doors.mqtt.packets import MAX_PACKET_BYTES, Inbound, Outgoing
from edge_runtime.doors.mqtt.socket import CONNECT_LIMIT_S
from edge_runtime.doors.mqtt.state import Backoff, ConnectionState, connect_failure
from edge_runtime.errors import ConfigError
from edge_runtime.telemetry.metrics import Counters

log = logging.getLogger(__name__)

DRAIN_MESSAGES = 32
"""Messages read before their answers go out; as over ZeroMQ."""

OUTBOX_BYTES = 16 << 20
"""Bound of replies that wait for a slow or absent broker: some ten thousand small ones."""

BEAT_S = 0.25
LINGER_S = 2.0
"""How long `close` tries to send posted messages."""


class MqttReceiver(Protocol):
    """Takes received messages and learns of connections. Thread: the transport's, every call."""

    def messages(self, transport: MqttTransport, messages: Sequence[Inbound]) -> None:
        """Answer the messages of one read, in order of arrival."""
        ...

    def online(self) -> None:
        """The broker has accepted the client and acknowledged its subscriptions."""
        ...

    def offline(self, reason: str) -> None:
        """That connection is lost."""
        ...

    def unreachable(self, reason: str) -> None:
        """An attempt to connect failed."""
        ...

    def beat(self) -> None:
        """Called at least each BEAT_S, connected or not."""
        ...


class Sender(Protocol):
    """The way to a broker for a part that only publishes; `MqttTransport` is one. Thread: any."""

    packet_limit: int

    @property
    def is_online(self) -> bool:
        """Whether there is a connection."""
        ...

    def post(self, message: Outgoing) -> None:
        """Publish a message."""
        ...

    def retain(self, message: Outgoing) -> None:
        """Publish a retained message, and again with each new connection."""
        ...


class LentConnection:
    """A connection that the I/O loop serves. is_back: the loop serves it no more; has_ended, failure: why.

    turn: takes one round of it.
    """

    def __init__(self, connection: MqttConnection, poller: select.epoll) -> None:
        self.connection = connection
        self.poller = poller
        self.is_back = threading.Event()
        self.is_on_loop = self.has_ended = False
        self.failure: Exception | None = None
        self.turn: Callable[[], None] = self.is_back.set


class MqttTransport:
    """A lasting link to a broker. `start` returns at once; `post`, `retain` and `call` may be used from any thread.

    log_level: the level at which the log says that there is no broker.
    """

    def __init__(
        self,
        access: BrokerAccess,
        options: ConnectOptions,
        receiver: MqttReceiver,
        counters: Counters,
        *,
        reconnect_min_s: float,
        reconnect_max_s: float,
        clock: Clock | None = None,
        name: str = "edge-mqtt",
        outbox_bytes: int = OUTBOX_BYTES,
        log_level: int = logging.WARNING,
        loop: IoLoop | None = None,
    ) -> None:
        """loop: serves connections once they are there; None: the thread does, as it should where they speak TLS."""
        self.access = access
        self.packet_limit = MAX_PACKET_BYTES
        self._options = options
        self._receiver = receiver
        self._counters = counters
        self._clock = clock or SystemClock()
        backoff = Backoff(reconnect_min_s, reconnect_max_s)
        self._state = ConnectionState(options.client_id, backoff, log_level, access.protocol)
        self._outbox = Outbox(options.client_id, outbox_bytes, counters)
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = -1
        self._wake_lock = threading.RLock()
        self._connection: MqttConnection | None = None
        self._is_first = True
        self._is_online = False
        self._is_stopping = False
        self._frees_itself = False  # closed on the thread, which then closes the descriptor
        self._linger_end_s = float("inf")
        self._online_s = 0.0
        self._must_read = False
        self._beat_due_s = 0.0
        self._keep_alive_due_s = 0.0
        self._loop = loop
        self._lent: LentConnection | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._acting_thread = self._thread

    def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe to topics too, with each connection. Before `start`."""
        added = tuple(map(Subscription, topics))
        self._options = replace(self._options, subscriptions=(*self._options.subscriptions, *added))

    def subscribe_anew(self, topics: Sequence[str], before: Sequence[str]) -> None:
        """Subscribe to topics in place of those before, now and with each connection. Thread: the transport's own.

        A broker that refuses a new one keeps the connection: the log says so.
        """
        others = [each for each in self._options.subscriptions if each.filter not in {*before, *topics}]
        kept = [each for each in self._options.subscriptions if each.filter in {*before} & {*topics}]
        new = [Subscription(each, is_needed=False) for each in topics if each not in before]
        self._options = replace(self._options, subscriptions=(*others, *kept, *new))
        if self._is_online and self._connection is not None:
            self._connection.subscribe_anew(self._options)

    # ---- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect, and retry until closed."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()

    def close(self) -> None:
        """Send posted and retained messages within LINGER_S, disconnect, end the thread. Idempotent.

        Called on the thread itself, it returns at once and the thread ends soon.
        """
        if self._wake_fd < 0:
            return
        self._is_stopping = True
        if threading.current_thread() is self._thread:
            self._frees_itself = True
            return
        if self._thread.is_alive():
            if self._loop is not None:
                self._take_back(self._loop)
            self._wake()
            self._thread.join(2 * CONNECT_LIMIT_S + LINGER_S)
        self._free()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_online(self) -> bool:
        """Whether a connection is there and its subscriptions are acknowledged."""
        return self._is_online

    @property
    def reason(self) -> str:
        """Why there is no connection; "" while there is one."""
        return self._state.reason

    @property
    def protocol(self) -> int:
        """MQTT protocol level: 5, or 4 for 3.1.1."""
        return self._state.protocol

    def post(self, message: Outgoing) -> None:
        """Publish a message; it waits while the broker is away, within the outbox's bounds."""
        self._outbox.post(message)
        if threading.current_thread() is not self._acting_thread:
            self._wake()

    def retain(self, message: Outgoing) -> None:
        """Publish a retained message now, if online, and with each new connection, until its topic gets another."""
        self.call(lambda: self._outbox.retain(message, is_online=self.is_online))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the transport's thread soon."""
        self._calls.append(function)
        self._wake()

    def fetch_retained(self, filters: Sequence[str], done: Callable[[str], None]) -> None:
        """Hand the messages retained under `filters` to the receiver, then call `done("")`, or `done(reason)`.

        `done` is called on the transport's thread, and never after `close`.
        """
        self.call(lambda: self._fetch_retained(filters, done))

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            connection = self._connect()
            if connection is not None:
                self._converse(connection)
            if not self._is_stopping:
                self._idle(self._state.next_wait_s())
        if self._frees_itself:
            self._free()

    def _connect(self) -> MqttConnection | None:
        """A connection whose CONNECT is sent, or None with the reason."""
        connection: MqttConnection | None = None
        try:
            connection = MqttConnection(
                self.access, self._options, protocol=self._state.protocol, is_first=self._is_first
            )
            connection.open()
        except (OSError, ValueError, ConfigError) as error:
            if connection is not None:
                connection.break_off()
            self._state.failed(connect_failure(error, self.access))
            self._counters.count("mqtt_connect_failures")
            self._receiver.unreachable(self.reason)
            return None
        return connection

    def _converse(self, connection: MqttConnection) -> None:
        """Serve one connection until it ends."""
        self._connection = connection
        try:
            if self._shake_hands(connection):
                self._serve(connection)
            if self._is_stopping and connection.is_open:
                connection.close()
        except Exception as error:
            log.exception("a bug in the MQTT loop ended the connection")
            self._counters.count("mqtt_errors")
            connection.lost(f"{type(error).__name__}: {error}")
        finally:
            self._connection = None
            connection.break_off()
            self._end(connection)

    def _shake_hands(self, connection: MqttConnection) -> bool:
        """Wait for CONNACK and SUBACK; False when they do not come."""
        if not connection.is_open:
            connection.lost(f"{self.access.address.url}: the connection ended at once")
            return False
        end_s = self._clock.monotonic_s() + CONNECT_LIMIT_S
        with self._new_poller(connection) as poller:
            while not connection.is_subscribed:
                if connection.reason or self._is_stopping:
                    return False
                if self._clock.monotonic_s() >= end_s:
                    connection.lost(
                        f"{self.access.address.url}: connected, but no answer within {CONNECT_LIMIT_S:.0f} s"
                    )
                    return False
                if not self._turn(connection, poller):
                    connection.lost(f"{self.access.address.url}: the connection ended before the broker's answer")
                    return False
        return True

    def _serve(self, connection: MqttConnection) -> None:
        self._is_first = False
        self._counters.count("mqtt_connections")
        self._state.connected()
        self._online_s = self._clock.monotonic_s()
        self._is_online = True
        log.info("MQTT broker reached", extra={"broker": self.access.address.url, "protocol": connection.protocol})
        if connection.options is not self._options:  # they changed during its handshake
            connection.subscribe_anew(self._options)
        self._receiver.online()
        self._outbox.connected()
        with self._new_poller(connection) as poller:
            if self._loop is None or self._lend(connection, poller, self._loop):
                while self._turn(connection, poller):
                    if self._is_stopping and self._has_sent_all(connection):
                        return
        connection.lost("the broker or the network ended the connection")

    # ---- a connection on the I/O loop -------------------------------------------------------------------------------

    def _lend(self, connection: MqttConnection, poller: select.epoll, loop: IoLoop) -> bool:
        """Have the loop serve a connection until it has ended, or the transport closes; whether it is still there."""
        lent = self._lent = LentConnection(connection, poller)
        if loop.is_running and not self._is_stopping:
            loop.call(partial(self._join_loop, lent, loop))
            lent.is_back.wait()  # `close` sees to it where the loop has ended
        self._lent, self._acting_thread = None, self._thread
        if lent.failure is not None:
            raise lent.failure
        return not lent.has_ended

    def _join_loop(self, lent: LentConnection, loop: IoLoop) -> None:
        """Thread: I/O."""
        if self._is_stopping or not loop.is_running:
            lent.is_back.set()
            return
        self._acting_thread = threading.current_thread()
        lent.turn = partial(self._turn_on_loop, lent, loop)
        loop.add_door(lent.poller.fileno(), lent.turn, lent.turn)
        lent.is_on_loop = True
        lent.turn()

    def _turn_on_loop(self, lent: LentConnection, loop: IoLoop) -> None:
        """Take one round of a connection that is on the loop. Thread: I/O."""
        if not lent.is_on_loop:
            return
        try:
            lent.has_ended = not self._turn(lent.connection, lent.poller, 0.0)
        except Exception as error:  # noqa: BLE001 (the transport's thread raises it: it ends this connection)
            lent.failure = error
        if lent.has_ended or lent.failure is not None:
            self._leave_loop(lent, loop)
        elif self._is_busy(lent.connection):
            loop.calls.append(lent.turn)

    def _leave_loop(self, lent: LentConnection, loop: IoLoop) -> None:
        """Give a connection back to the transport's thread. Thread: I/O, or after the loop has ended."""
        if lent.is_on_loop:
            lent.is_on_loop = False
            loop.remove_door(lent.poller.fileno(), lent.turn)
        lent.is_back.set()

    def _take_back(self, loop: IoLoop) -> None:
        """Have the loop serve a connection no more. Thread: any but the loop's."""
        lent = self._lent
        if lent is None:
            return
        loop.call(partial(self._leave_loop, lent, loop))
        while loop.is_running and not lent.is_back.wait(BEAT_S):
            pass
        if not lent.is_back.is_set():  # the loop has ended; nobody else looks
            self._leave_loop(lent, loop)

    # ---- one round --------------------------------------------------------------------------------------------------

    def _turn(self, connection: MqttConnection, poller: select.epoll, wait_s: float = BEAT_S) -> bool:
        """One round: wait, read, answer, write. False when the connection is lost."""
        wants_write = connection.wants_write()
        # While replies cannot go out, requests would only age here: they stay in the broker, which bounds them. One
        # read now and then keeps the broker's PINGRESP from being missed.
        may_read = not wants_write or self._must_read
        poller.modify(connection.fd, (select.EPOLLIN if may_read else 0) | (select.EPOLLOUT if wants_write else 0))
        found = dict(poller.poll(0.0 if self._is_busy(connection) else wait_s))
        if self._wake_fd in found:
            os.eventfd_read(self._wake_fd)
        events = found.get(connection.fd, 0)
        if events & ~select.EPOLLOUT or (may_read and connection.has_pending()):
            self._must_read = False
            is_there = connection.read(DRAIN_MESSAGES)
            if connection.is_accepted:  # its bounds hold for the first answers, which may go out before `_serve`
                self.packet_limit = connection.packet_limit
            self._deliver(connection)
            if not is_there:
                return False
        if wants_write and events & select.EPOLLOUT and not connection.flush():
            return False
        self._work()
        self._outbox.send(connection, self._clock.monotonic_s())
        return connection.flush() and self._beat(connection) and connection.is_open

    def _is_busy(self, connection: MqttConnection) -> bool:
        """Whether there is work without an event of a descriptor."""
        return bool(self._outbox.has_posted or self._calls) or (
            not connection.wants_write() and (connection.has_pending() or self._outbox.can_send(connection))
        )

    def _deliver(self, connection: MqttConnection) -> None:
        messages, connection.received = connection.received, []
        if messages:
            self._counters.count("mqtt_messages", len(messages))
            try:
                self._receiver.messages(self, messages)
            except Exception:  # a receiver's bug must not end the connection, and with it all other requests
                log.exception("a bug left messages unanswered")
                self._counters.count("mqtt_errors")

    def _work(self) -> None:
        """Run the calls and queue the messages of other threads."""
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        self._outbox.take_posted()

    def _has_sent_all(self, connection: MqttConnection) -> bool:
        self._linger_end_s = min(self._linger_end_s, self._clock.monotonic_s() + LINGER_S)
        return self._outbox.has_sent_all(connection) or self._clock.monotonic_s() >= self._linger_end_s

    def _beat(self, connection: MqttConnection | None) -> bool:
        """Timers; False when the broker no longer answers."""
        now_s = self._clock.monotonic_s()
        if now_s < self._beat_due_s:
            return True
        self._beat_due_s = now_s + BEAT_S
        self._receiver.beat()
        self._outbox.expire(now_s)
        if connection is None or now_s < self._keep_alive_due_s:
            return True
        self._keep_alive_due_s = now_s + 1.0
        self._must_read = True
        self._outbox.report_refused(connection)
        if connection.keep_alive():
            return True
        connection.lost("the broker stopped answering")
        return False

    def _end(self, connection: MqttConnection) -> None:
        """Account for a connection that has ended."""
        self._deliver(connection)
        now_s = self._clock.monotonic_s()
        self._outbox.disconnected(connection, now_s)
        self._outbox.report_refused(connection)
        has_other_protocol = connection.is_protocol_refused and self._state.refused_protocol()
        if self._is_stopping:
            return
        connection.end_fetches()
        if not self._is_online:
            self._state.failed(connection.reason)
            if not connection.is_answered:
                self._state.unanswered()
            self._counters.count("mqtt_connect_failures")
            if not has_other_protocol:
                self._receiver.unreachable(connection.reason)
            return
        reason = self._state.lost(connection.reason, now_s - self._online_s)
        self._is_online = False
        self._counters.count("mqtt_connections_lost")
        self._receiver.offline(reason)

    def _idle(self, wait_s: float) -> None:
        """Wait for the next attempt; admitted requests still end, and expired messages are dropped."""
        end_s = self._clock.monotonic_s() + wait_s
        with self._new_poller(None) as poller:
            while not self._is_stopping and (left_s := end_s - self._clock.monotonic_s()) > 0:
                if poller.poll(min(left_s, BEAT_S) + 0.001):
                    os.eventfd_read(self._wake_fd)
                self._work()
                self._beat(None)

    def _new_poller(self, connection: MqttConnection | None) -> select.epoll:
        poller = select.epoll()
        poller.register(self._wake_fd, select.EPOLLIN)
        if connection is not None:
            poller.register(connection.fd, select.EPOLLIN)
        return poller

    def _fetch_retained(self, filters: Sequence[str], done: Callable[[str], None]) -> None:
        connection = self._connection
        if connection is None or not self.is_online:
            done(self.reason or "there is no connection")
            return
        # `call` delays it until the messages that were read together with the end are delivered.
        connection.fetch_retained(filters, lambda reason: self.call(lambda: done(reason)))

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _free(self) -> None:
        with self._wake_lock:  # or another thread could write to the next file with this number
            wake_fd, self._wake_fd = self._wake_fd, -1
            if wake_fd >= 0:
                os.close(wake_fd)
