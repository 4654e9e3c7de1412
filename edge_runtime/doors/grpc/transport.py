"""gRPC's connections on an epoll loop: bytes to and from sockets and TLS, calls to their methods.

Owns: the listening sockets, the connections, and how long each may be silent, unread or under way. http2.py has the
protocol. Knows no protobuf and no model: `GrpcMethods` say what paths and bytes mean. Thread: the loop's, `edge-io`, or
`edge-grpc` where it has one of its own; `serve`, `call` and `stop` are called from others.

Why not grpcio: its threads and queues take 200 to 400 us of CPU for a call that answers a constant; this takes a tenth
(bench, data path). It is the clients' library, and tests hold this against it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import ssl
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from msgspec import Struct

from edge_runtime.clock import Clock
from edge_runtime.doors.access.addresses import DoorListener
from edge_runtime.doors.binding import unread_of
from edge_runtime.doors.grpc.http2 import ENDED, GONE, ROOM, Event, GrpcCall, Http2, PackedMessage
from edge_runtime.doors.grpc.http2_head import Http2Error
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.doors.large_bodies import LargeBodies
from edge_runtime.doors.sending import SENT_PARTS, keep_unsent, send_unsent
from edge_runtime.telemetry.metrics import Counters

log = logging.getLogger(__name__)

RECEIVE_BYTES = 64 << 10
"""Received at once where no large message is under way: some hundred small requests."""

AHEAD_BYTES = 1 << 10
"""Received at once of a connection that sends large messages: the bytes that come with a head are copied once more."""

ROUND_ACCEPTS = 16
"""Connections that one round accepts."""

JOINED_BYTES = 32 << 10
"""Less is joined and sent as one piece; more is sent from where it lies."""

MOST_UNSENT_BYTES = 1 << 20
"""No more is read from a connection that leaves so much unread of its answers."""

TLS_BYTES = 16 << 10
"""The largest piece that TLS encrypts at once."""

HANDSHAKE_S = 10.0
"""A connection that has not shaken hands and sent its settings is closed after this."""

IDLE_S, PING_S, PING_ANSWER_S = 900.0, 30.0, 20.0
"""A connection without calls ends after the first; one that does not answer a ping in time ends, so that a peer that
lost its network holds no place."""

UNREAD_S = 30.0
"""A peer that reads nothing of its answers for so long is closed: as over ZeroMQ and HTTP."""

LINGER_S = 2.0
"""A connection whose peer broke the protocol is read, and its bytes dropped, for so long: its peer learns why."""

INFLATED_BYTES = 64 << 10
"""A compressed message that is not larger is inflated at once, in under a millisecond; others by a thread."""

LEAVE_S, FLUSH_S = 0.25, 1.0
"""At `stop`, calls that come before their clients know are still answered for the first; answers have the second to go
out."""

BEAT_S = 0.25

_GONE = select.EPOLLHUP | select.EPOLLERR


class GrpcMethod(Struct, frozen=True):
    """One served method. take: gets each message, bytes or a view of memory of their own, with its call.

    is_stream: a call sends any number of messages, and `receiver.ended` is called behind the last; else it sends one.
    room: gives memory for a large message of a call: its first bytes have come, and its length is known; None: any.
    """

    take: Callable[[Any, GrpcCall], None]
    is_stream: bool = False
    room: Callable[[GrpcCall, bytes, int], memoryview | None] | None = None


class GrpcMethods(Protocol):
    """The served methods, by path. Thread: the transport's."""

    methods: Mapping[str, GrpcMethod]

    def end_round(self) -> None:
        """Answer the calls that this round gathered."""
        ...

    def beat(self) -> None:
        """Called at least each BEAT_S."""
        ...


class GrpcConnection:
    """One connection: its socket, its protocol, and its unsent bytes.

    peer: its name as a sender. tls: with the bytes that came and those to go; None without.
    """

    __slots__ = (
        "ahead", "began_s", "blocked_bytes", "endpoint", "fd", "held_bytes", "http2", "incoming", "is_deaf", "is_dirty",
        "is_lingering", "is_open", "is_shaking", "outgoing", "peer", "place", "socket", "tls", "unread_bytes", "unsent",
        "unsent_bytes", "unsent_s", "used_s",
    )  # fmt: skip

    def __init__(self, endpoint: GrpcTransport, accepted: socket.socket, listener: DoorListener, peer: str) -> None:
        self.endpoint = endpoint
        self.socket = accepted
        self.fd = accepted.fileno()
        self.place = listener.place
        self.peer = peer
        self.http2: Http2
        self.tls: ssl.SSLObject | None = None
        self.is_shaking = listener.context is not None
        if listener.context is not None:
            self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self.tls = listener.context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.ahead = RECEIVE_BYTES
        self.held_bytes = 0
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = self.unread_bytes = self.blocked_bytes = 0
        self.is_open = True
        self.is_dirty = self.is_deaf = self.is_lingering = False
        self.began_s = self.used_s = self.unsent_s = 0.0


class GrpcTransport:
    """The connections of one door: an endpoint of an `IoLoop`.

    loop: which serves them; None: one on a thread of its own. total_bytes: of messages that are not whole, and of
    answers that are not read, each. may_connect: whether one more connection may be kept, for all that is not this
    door's.
    """

    def __init__(
        self,
        listeners: Sequence[DoorListener],
        methods: GrpcMethods,
        counters: Counters,
        *,
        max_message_bytes: int,
        body_timeout_s: float,
        max_connections: int,
        may_connect: Callable[[], bool] = lambda: True,
        total_bytes: int,
        clock: Clock | None = None,
        loop: IoLoop | None = None,
    ) -> None:
        self.connections: dict[int, GrpcConnection] = {}
        self._listeners = listeners
        self._methods = methods
        self._find = methods.methods.get
        self._max_message_bytes = max_message_bytes
        self._body_timeout_s = body_timeout_s
        self._max_connections = max_connections
        self._may_connect = may_connect
        self._total_bytes = total_bytes
        self._clock = clock
        self._is_shared = loop is not None
        self._loop = loop or IoLoop(counters, clock, unfinished_bytes=total_bytes)
        self._dirty: list[GrpcConnection] = []
        self._unsent_bytes = 0
        self._numbers = itertools.count(1)
        self._is_deaf = False
        self._closed_full = 0
        self._beat_due_s = 0.0
        self._leave_s: float | None = None
        self._has_left = self._has_joined = self._is_stopping = self._is_called = False
        self._posted: deque[Callable[[], None]] = deque()
        self._thread_id = 0
        self.bodies = LargeBodies("edge-grpc-body", sys.maxsize)  # a connection's flow control bounds what waits
        self._thread: threading.Thread | None = None
        for each in listeners:
            _offer_http2(each.context)

    # ---- any thread -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer from now on."""
        for each in self._listeners:  # at once: who connects before the loop comes round waits
            each.socket.listen(self._max_connections)
        if self._is_shared:
            self._loop.call(self._join_loop)
            return
        self._loop.add(self)
        self._thread = threading.Thread(target=self._run, name="edge-grpc", daemon=True)
        self._thread.start()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is on the transport's thread."""
        return threading.get_ident() == self._thread_id

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Show new connections another certificate."""
        _offer_http2(context)
        for each in self._listeners:
            if each.context is not None:
                each.context = context

    def call(self, action: Callable[[], None]) -> None:
        """Run something on the thread, soon; nothing once it has stopped. Many calls wake it once."""
        self._posted.append(action)
        if not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._run_posted)

    def stop(self) -> None:
        """Send the answers that are there and close every connection. Idempotent."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._is_shared:
            self._leave_loop(self._loop)
        self._loop.call(self._begin_stop)
        self._loop.stop(FLUSH_S)
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        else:
            self._run()
        self.end(FLUSH_S)
        self.bodies.close()
        for each in self._listeners:
            each.socket.close()
        self._loop.close()

    def _leave_loop(self, shared: IoLoop) -> None:
        """Take the connections from the shared loop to one of this door's, which the caller runs to its end."""
        has_left = threading.Event()

        def leave() -> None:
            if self._has_joined:
                shared.remove(self)
                for each in self._listeners:
                    shared.unwatch(each.socket.fileno())
            self._loop = own = IoLoop(shared.counters, self._clock, unfinished_bytes=self._total_bytes)
            own.now_s = shared.now_s
            own.add(self)
            for connection in self.connections.values():
                shared.remove_connection(connection)
                own.add_connection(connection)
                self._watch(connection)
            own.call(self._run_posted)
            has_left.set()

        shared.call(leave)
        while not has_left.wait(LEAVE_S) and shared.is_running:
            pass
        if not has_left.is_set():  # the loop has ended; nobody else looks
            shared.send_rest()

    # ---- an endpoint of the loop ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Accept connections from now on."""
        for each in self._listeners:
            self._loop.watch(each.socket.fileno(), partial(self._accept, each))

    def begin_round(self) -> None:
        """Nothing: known heads are looked up call by call."""

    def take(self, connection: GrpcConnection, event: int) -> None:
        """Take the bytes that are ready of a connection. event: of epoll."""
        if not connection.is_open:
            return
        try:
            if connection.is_lingering:
                self._linger(connection, event)
                return
            if event & select.EPOLLOUT:
                self._send_unsent(connection)
            if event & select.EPOLLIN:
                self._receive(connection)
            elif event & _GONE:
                self.close(connection)
        except (BlockingIOError, InterruptedError):
            pass
        except Http2Error as error:
            self._turn_away(connection, error)
        except OSError:  # reset, or no TLS
            self.close(connection)
        except MemoryError:
            log.warning("a connection was closed: there is no memory for its message")
            self._loop.counters.count("connections_closed_unfinished")
            self.close(connection)
        except Exception:  # a bug: this connection ends, and what others gathered is answered
            log.exception("a connection is closed for a bug")
            self._loop.counters.count("io_errors")
            self.close(connection)

    def end_round(self) -> None:
        """Answer the gathered calls, and send the bytes that are to go out."""
        self._methods.end_round()
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for connection in dirty:
                connection.is_dirty = False
                if connection.is_open:
                    self._write(connection)

    def send(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Nothing: replies come by `call`."""

    def drop_unfinished(self, connection: GrpcConnection) -> None:
        """Refuse the calls of a connection whose messages are not whole: all of the door's hold too much memory."""
        self._drop_unfinished(connection, 0)
        self._hold(connection)

    @property
    def are_met(self) -> bool:
        """Whether the door may close: calls that came before their clients could know are answered."""
        return not self._is_stopping or (
            self._has_left and not any(each.http2.calls or each.unsent for each in self.connections.values())
        )

    def sweep(self, now_s: float) -> None:
        """Close connections that are silent, slow or unread, and end calls that are late. At each beat."""
        self._methods.beat()
        if self._is_deaf:
            self._is_deaf = False
            for each in self._listeners:
                self._loop.modify(each.socket.fileno(), select.EPOLLIN)
        for connection in list(self.connections.values()):
            try:
                self._look(connection, now_s)
            except OSError:
                self.close(connection)
        closed_full, self._closed_full = self._closed_full, 0
        if closed_full:
            self._loop.counters.count("connections_closed_full", closed_full)
            log.warning(
                "closed silent connections: there are as many as there may be",
                extra={"connections": closed_full, "kept": len(self.connections)},
            )

    def end(self, linger_s: float) -> None:
        """Send the waiting bytes, for at most `linger_s`, and close all connections. After the loop has ended."""
        for connection in list(self.connections.values()):
            with contextlib.suppress(OSError):
                connection.socket.settimeout(linger_s)
                while connection.unsent:
                    self._send_unsent(connection)
                # What its client sent meanwhile is read, or the end could overtake an answer (RFC 9293, 3.10.4).
                connection.socket.shutdown(socket.SHUT_WR)
                connection.socket.setblocking(False)
                while connection.socket.recv(RECEIVE_BYTES):
                    pass
            self.close(connection)

    def close(self, connection: GrpcConnection) -> None:
        """End a connection, and drop all that waits of it. Idempotent."""
        if not connection.is_open:
            return
        connection.is_open = False
        self._loop.remove_connection(connection)
        self.connections.pop(connection.fd, None)
        connection.socket.close()
        self._unsent_bytes -= connection.unsent_bytes + connection.blocked_bytes
        connection.unsent.clear()
        connection.unsent_bytes = connection.blocked_bytes = 0
        for call in connection.http2.forget_all():
            self._tell_gone(call)

    # ---- receiving --------------------------------------------------------------------------------------------------

    def _receive(self, connection: GrpcConnection) -> None:
        http2, now_s = connection.http2, self._loop.now_s
        place = http2.place if connection.tls is None else None
        if place is not None:
            count = connection.socket.recv_into(place)
            if not count:
                self.close(connection)
                return
            connection.used_s = now_s
            events = http2.placed(count, now_s)
            connection.ahead = AHEAD_BYTES
        else:
            data = connection.socket.recv(connection.ahead)
            if not data:
                self.close(connection)
                return
            connection.used_s = now_s
            if len(data) == connection.ahead:
                connection.ahead = RECEIVE_BYTES
            if connection.tls is not None:
                self._receive_tls(connection, connection.tls, data)
                return
            events = http2.receive(data, now_s)
        if events:
            self._dispatch(events)
        if http2.held_bytes != connection.held_bytes:
            self._hold(connection)

    def _receive_tls(self, connection: GrpcConnection, tls: ssl.SSLObject, data: bytes) -> None:
        connection.incoming.write(data)
        try:
            if connection.is_shaking:
                tls.do_handshake()
                connection.is_shaking = False
                if tls.selected_alpn_protocol() != "h2":
                    raise OSError("the peer speaks no HTTP/2")
                self._mark(connection)
            while connection.is_open:
                plain = tls.read(RECEIVE_BYTES)
                if not plain:
                    self.close(connection)
                    return
                events = connection.http2.receive(plain, self._loop.now_s)
                if events:
                    self._dispatch(events)
                if connection.http2.held_bytes != connection.held_bytes:
                    self._hold(connection)
        except ssl.SSLWantReadError:
            if connection.outgoing.pending:
                self._mark(connection)
        except ssl.SSLError:  # no TLS, or no certificate that it takes: TLS has said so
            self._mark(connection)
            self._write(connection)
            self.close(connection)

    def _dispatch(self, events: Sequence[Event]) -> None:
        """Hand calls' messages and marks on, in order."""
        for call, item in events:
            if item is GONE:
                self._tell_gone(call)
            elif not call.is_open:
                continue
            elif call.pauses and item is not ROOM:
                call.keep(item)
            elif type(item) is PackedMessage:
                self._inflate(call, item)
            elif item is ENDED:
                if call.receiver is None:
                    call.end()
                else:
                    call.receiver.ended()
            elif item is ROOM:
                if call.receiver is not None:
                    call.receiver.may_write()
            else:
                call.head.method.take(item, call)

    def resume(self, call: GrpcCall) -> None:
        """Take messages of a call again that was paused."""
        if call.is_open:
            self._dispatch([(call, each) for each in call.resume()])

    def _tell_gone(self, call: GrpcCall) -> None:
        if call.receiver is not None:
            call.receiver.gone()

    def _hold(self, connection: GrpcConnection) -> None:
        """Tell the loop how many bytes this connection holds that are not a request yet."""
        if connection.http2.held_bytes > self._total_bytes:
            self._drop_unfinished(connection, self._total_bytes)
        if not connection.held_bytes:
            connection.began_s = self._loop.now_s
        self._loop.hold(connection, connection.http2.held_bytes - connection.held_bytes)

    def _drop_unfinished(self, connection: GrpcConnection, most_bytes: int) -> None:
        for call in connection.http2.drop_unfinished(
            most_bytes, "too many large requests arrive at once; send it again"
        ):
            self._loop.counters.count("connections_closed_unfinished")
            self._tell_gone(call)

    # ---- compressed messages ----------------------------------------------------------------------------------------

    def _inflate(self, call: GrpcCall, packed: PackedMessage) -> None:
        """Inflate a message: at once where that takes no time, else by a thread, while the call's others wait."""
        try:
            data = inflate(packed, min(INFLATED_BYTES, self._max_message_bytes))
        except ValueError as error:
            self._refuse(call, "INTERNAL", str(error))
            return
        if data is not None:
            call.head.method.take(data, call)
            return
        call.pause()
        self.bodies.read(
            len(packed.data), partial(self._inflate_apart, call, packed), self.call, partial(self._take_inflated, call)
        )

    def _inflate_apart(self, call: GrpcCall, packed: PackedMessage) -> bytes | tuple[str, str]:
        """Inflate a large message; else return a status and its text. Thread: edge-grpc-body."""
        if not call.is_open:
            return b""
        try:
            data = inflate(packed, self._max_message_bytes)
        except (ValueError, MemoryError) as error:
            return "INTERNAL", str(error) or "no memory for this message"
        if data is None:
            text = f"SERVER: Received message larger than max (inflated, over {self._max_message_bytes} bytes)"
            return "RESOURCE_EXHAUSTED", text
        return data

    def _take_inflated(self, call: GrpcCall, inflated: bytes | tuple[str, str]) -> None:
        if not call.is_open:
            return
        if isinstance(inflated, tuple):
            self._refuse(call, *inflated)
            return
        call.connection.now_s = self._loop.now_s
        call.head.method.take(inflated, call)
        self.resume(call)

    def _refuse(self, call: GrpcCall, status: str, text: str) -> None:
        call.end(status, text)
        self._tell_gone(call)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _mark(self, connection: GrpcConnection) -> None:
        """Have the bytes that a connection is to send sent at the end of this round."""
        if not connection.is_dirty:
            connection.is_dirty = True
            self._dirty.append(connection)

    def _write(self, connection: GrpcConnection) -> None:
        """Send the parts of this round; those that the system does not take now wait."""
        parts = [] if connection.is_shaking else connection.http2.take()
        if connection.http2.blocked_bytes != connection.blocked_bytes:
            self._bound_unsent(connection)
        if connection.tls is not None:
            parts = self._sealed(connection, connection.tls, parts)
        nbytes = sum(map(len, parts))
        if not nbytes or not connection.is_open:
            return
        if nbytes < JOINED_BYTES and len(parts) > 1:
            parts = [b"".join(parts)]
        sent = 0
        if not connection.unsent:
            try:
                if len(parts) == 1:
                    sent = connection.socket.send(parts[0])
                else:
                    sent = connection.socket.sendmsg(parts[:SENT_PARTS])
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self.close(connection)
                return
        if sent != nbytes:
            self._keep(connection, parts, sent)

    @staticmethod
    def _sealed(connection: GrpcConnection, tls: ssl.SSLObject, parts: Sequence[Any]) -> list[Any]:
        """Parts as TLS sends them, behind its own messages."""
        whole = memoryview(b"".join(parts))
        for begin in range(0, len(whole), TLS_BYTES):
            tls.write(whole[begin : begin + TLS_BYTES])
        return [connection.outgoing.read()] if connection.outgoing.pending else []

    def _keep(self, connection: GrpcConnection, parts: Sequence[Any], sent: int) -> None:
        """Keep the unsent bytes, and watch for room."""
        had_none = not connection.unsent
        kept, _ = keep_unsent(connection.unsent, parts, sent)
        connection.unsent_bytes += kept
        self._unsent_bytes += kept
        if had_none:
            connection.unsent_s = self._loop.now_s
        if connection.unsent_bytes > MOST_UNSENT_BYTES:
            connection.http2.is_choked = connection.is_deaf = True
        self._watch(connection)
        self._bound_unsent(connection)

    def _bound_unsent(self, connection: GrpcConnection) -> None:
        """Count answers for which a peer has no window; over the bound, close who reads none for longest."""
        count = connection.http2.blocked_bytes - connection.blocked_bytes
        connection.blocked_bytes += count
        self._unsent_bytes += count
        while self._unsent_bytes > self._total_bytes:
            unread = [each for each in self.connections.values() if each.unsent or each.blocked_bytes]
            self._close_unread(min(unread, key=lambda each: each.unsent_s if each.unsent else each.http2.sent_s))

    def _close_unread(self, connection: GrpcConnection) -> None:
        self._loop.counters.count("connections_closed_unread")
        log.warning("closed connections whose peers read nothing", extra={"connections": 1})
        self.close(connection)

    def _watch(self, connection: GrpcConnection) -> None:
        if connection.is_open:
            events = 0 if connection.is_deaf else select.EPOLLIN
            self._loop.modify(connection.fd, events | (select.EPOLLOUT if connection.unsent else 0))

    def _send_unsent(self, connection: GrpcConnection) -> None:
        """Send the waiting bytes, as far as there is room."""
        unsent = connection.unsent
        if unsent:
            count, _ = send_unsent(connection.socket, unsent)
            connection.unsent_s = self._loop.now_s
            connection.unsent_bytes -= count
            self._unsent_bytes -= count
        if connection.is_deaf and connection.unsent_bytes < MOST_UNSENT_BYTES // 2:
            connection.is_deaf = False
            self._watch(connection)
            self._dispatch(connection.http2.drained())
        elif not unsent:
            self._watch(connection)

    # ---- connections ------------------------------------------------------------------------------------------------

    def _accept(self, listener: DoorListener) -> None:
        for _ in range(ROUND_ACCEPTS):
            try:
                accepted, address = listener.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left: the next beat tries again
                log.warning("no connection can be accepted", extra={"reason": str(error)})
                self._is_deaf = True
                self._give_way()
                for each in self._listeners:
                    self._loop.modify(each.socket.fileno(), 0)
                return
            is_full = len(self.connections) >= self._max_connections or not self._may_connect()
            if is_full:
                self._closed_full += 1
                if not self._give_way():
                    accepted.close()
                    continue
            self.adopt(accepted, listener, address)

    def adopt(self, accepted: socket.socket, listener: DoorListener, address: Any = None) -> None:
        """Serve one connection."""
        accepted.setblocking(False)
        if accepted.family == socket.AF_UNIX:
            peer = f"unix:{next(self._numbers)}"
        else:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host, port = address[:2]
            peer = f"ipv6:[{host}]:{port}" if accepted.family == socket.AF_INET6 else f"ipv4:{host}:{port}"
        connection = GrpcConnection(self, accepted, listener, peer)
        connection.used_s = connection.began_s = self._loop.now_s
        connection.http2 = Http2(
            self._find,
            partial(self._mark, connection),
            max_message_bytes=self._max_message_bytes,
            now_s=self._loop.now_s,
            owner=connection,
        )
        self.connections[connection.fd] = connection
        self._loop.add_connection(connection)

    def _give_way(self) -> bool:
        """Close the connection that is silent for longest, so that another is kept; False: all have calls.

        First those that have not shaken hands. A client that is closed connects again by itself.
        """
        silent = [each for each in self.connections.values() if not each.http2.calls and not each.unsent]
        if not silent:
            return False
        self._dismiss(min(silent, key=lambda each: (each.http2.is_met, each.used_s)), "too many connections")
        return True

    def _turn_away(self, connection: GrpcConnection, error: Http2Error) -> None:
        """Close a connection whose peer broke the protocol, or its bounds."""
        log.debug("a connection was closed", extra={"reason": str(error)})
        self._write(connection)
        for call in connection.http2.forget_all():
            self._tell_gone(call)
        self._hold(connection)
        if not connection.is_open:
            return
        # Closing with bytes unread would send a reset, which overtakes the reason (RFC 9112, 9.6).
        connection.is_lingering, connection.used_s = True, self._loop.now_s
        connection.is_deaf = False
        self._watch(connection)
        self._end_sending(connection)

    def _linger(self, connection: GrpcConnection, event: int) -> None:
        """Send the rest to a peer that was turned away, and drop the bytes that come of it."""
        if event & select.EPOLLOUT:
            self._send_unsent(connection)
            self._end_sending(connection)
        if event & (select.EPOLLIN | _GONE) and not connection.socket.recv(RECEIVE_BYTES):
            self.close(connection)

    @staticmethod
    def _end_sending(connection: GrpcConnection) -> None:
        if not connection.unsent:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)

    def _look(self, connection: GrpcConnection, now_s: float) -> None:
        """End a connection that is silent or unread, and calls of it that are late."""
        http2, silent_s = connection.http2, now_s - connection.used_s
        if connection.is_lingering or not http2.is_met:
            began_s, most_s = (
                (connection.used_s, LINGER_S) if connection.is_lingering else (connection.began_s, HANDSHAKE_S)
            )
            if now_s - began_s >= most_s:
                self.close(connection)
            return
        for call in list(http2.calls.values()):
            if call.deadline_s is not None and now_s >= call.deadline_s:
                self._end_late(call, "Deadline Exceeded")
            elif call.is_under_way and now_s - call.moved_s >= self._body_timeout_s:
                self._end_late(call, f"no byte of the message came for {self._body_timeout_s:g} s")
        self._hold(connection)
        self._bound_unsent(connection)
        if http2.calls:
            http2.idle_s = now_s
        if now_s - http2.idle_s >= IDLE_S:
            self._dismiss(connection, "max_idle")
        elif http2.ping_s is None:
            if silent_s >= PING_S:
                http2.ping(now_s)
        elif now_s - http2.ping_s >= PING_ANSWER_S:
            self.close(connection)
        if connection.is_open and self._is_unread(connection, now_s):
            self._close_unread(connection)

    def _is_unread(self, connection: GrpcConnection, now_s: float) -> bool:
        """Whether its peer reads nothing of its answers."""
        unread_bytes = unread_of(connection.fd) if connection.unsent else 0
        if unread_bytes != connection.unread_bytes:  # a slow peer reads long before the kernel has room for more
            connection.unread_bytes, connection.unsent_s = unread_bytes, now_s
        if connection.unsent and now_s - connection.unsent_s >= UNREAD_S:
            return True
        return bool(connection.http2.blocked_bytes) and now_s - connection.http2.sent_s >= UNREAD_S

    def _dismiss(self, connection: GrpcConnection, text: str) -> None:
        """Close a connection without calls; its client connects again when it has some."""
        connection.http2.leave(text, is_final=True)
        self._write(connection)
        self.close(connection)

    def _end_late(self, call: GrpcCall, text: str) -> None:
        call.cancel("DEADLINE_EXCEEDED", text)
        self._tell_gone(call)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _join_loop(self) -> None:
        self._thread_id = threading.get_ident()
        if not self._is_stopping:
            self._has_joined = True
            self._loop.add(self)

    def _run(self) -> None:
        """Run the loop of this door until `stop`."""
        self._thread_id = threading.get_ident()
        self._loop.run(self._beat, BEAT_S)

    def _beat(self) -> None:
        loop = self._loop
        if loop.now_s >= self._beat_due_s:
            self._beat_due_s = loop.now_s + BEAT_S
            loop.sweep()
        if self._leave_s is not None and loop.now_s >= self._leave_s and not self._has_left:
            self._has_left = True
            for each in self.connections.values():
                if not each.is_lingering:
                    each.http2.leave("the server stops", is_final=True)

    def _run_posted(self) -> None:
        self._is_called = False
        posted = self._posted
        while posted:
            try:
                posted.popleft()()
            except Exception:
                log.exception("a bug interrupted a call on the gRPC thread")

    def _begin_stop(self) -> None:
        """Listen no more, and notify clients; calls that they send before they know are answered."""
        for each in self._listeners:
            self._accept(each)
            self._loop.unwatch(each.socket.fileno())
            each.socket.close()
        for connection in self.connections.values():
            if connection.http2.is_met and not connection.is_lingering:
                connection.http2.leave("the server stops", is_final=False)
        self._leave_s = self._loop.now_s + LEAVE_S


def inflate(packed: PackedMessage, most_bytes: int) -> bytes | None:
    """A compressed message; None where it has more than `most_bytes`. Raises ValueError."""
    inflater = zlib.decompressobj(zlib.MAX_WBITS | (16 if packed.encoding == "gzip" else 0))
    try:
        data = inflater.decompress(packed.data, most_bytes + 1)
        if len(data) > most_bytes:
            return None
    except zlib.error:
        raise ValueError("Decompression failed due to zlib error") from None
    if not inflater.eof:
        raise ValueError("Decompression failed due to its end missing")
    if inflater.unused_data:
        raise ValueError("Decompression failed due to not all input consumed")
    return data


def _offer_http2(context: ssl.SSLContext | None) -> None:
    if context is not None:
        context.set_alpn_protocols(["h2"])
