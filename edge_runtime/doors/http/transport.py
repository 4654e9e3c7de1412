"""HTTP/1.1 on one loop: bytes in, requests out, responses in the order of their requests.

Owns: the listening sockets, the connections, and every bound on what a peer may make them hold. httptools (llhttp)
reads heads and chunk sizes; a head that came before is known by its bytes, and a body of known length is received
straight into its place. Knows no model: the `HttpReceiver` knows what paths and bodies mean. Anything that a peer sends
ends as a response or a closed connection. Thread: that of the I/O loop, which looks at this door's own epoll; with TLS,
whose handshakes take milliseconds, `edge-http`. `post`, `call` and `stop`: any.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.doors.access.addresses import DoorListener
from edge_runtime.doors.binding import unread_of
from edge_runtime.doors.http.connection import (
    READ,
    Frames,
    HttpConnection,
    HttpRequest,
    aligned,
)
from edge_runtime.doors.http.head import (
    MAX_HEAD_BYTES,
    BadMessage,
    ChunkedBody,
    HttpHead,
    check_beginning,
    parse_head,
    too_large,
)
from edge_runtime.doors.io_loop import ROUND_S, IoLoop
from edge_runtime.doors.sending import SENT_PARTS, drop_sent, keep_unsent, send_unsent
from edge_runtime.errors import EdgeRuntimeError, QueueFull
from edge_runtime.telemetry.metrics import Counters

log = logging.getLogger(__name__)

RECEIVE_BYTES = 64 << 10
"""Received at once where no body of known length is under way."""

CHUNKED_BYTES = 8 << 10
"""The same within a chunked body, whose chunks may have one byte each: a millisecond or two."""

KNOWN_HEADS = 4096
KNOWN_HEAD_BYTES = 4 << 20
"""Bounds of the heads that are known by their bytes; one more forgets all, which only costs parsing them again."""

ROUND_EVENTS = 128
"""Ready sockets that one round looks at: the requests that came by them are one burst."""

ROUND_ACCEPTS = 64

MOST_WAITING = 64
"""Requests of one connection that wait for their responses; no more is read from it until some have gone out."""

MOST_UNSENT_BYTES = 1 << 20
"""No more is read from a connection that leaves so much unread of its responses."""

UNREAD_S = 30.0
"""A peer that reads nothing of its responses for so long is closed: as over ZeroMQ."""

LINGER_S = 2.0
"""After a last response later bytes are read and dropped for so long: closing at once would send a reset, which
overtakes the response (RFC 9112, 9.6)."""

LEAVE_S = 0.25
"""At `stop`, peers that keep a connection have so long to ask once more, and learn that it ends: closing one on which a
request is under way would lose that request."""

FLUSH_S = 1.0
"""After `stop`, responses have this long to go out."""

BEAT_S = 0.25

TELL_S = 1.0
"""Between two lines of the log that say the same of connections."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_GONE = select.EPOLLHUP | select.EPOLLERR


class HttpReceiver(Protocol):
    """Knows the meaning of requests. Thread: the transport's."""

    def understand(self, head: HttpHead) -> None:
        """Set `meaning` and `body_shift` of a head that was not known."""
        ...

    def begin(self, request: HttpRequest) -> Frames | None:
        """Return a response to a request whose body has not come, and is then not read; None: read it."""
        ...

    def requests(self, requests: Sequence[HttpRequest]) -> None:
        """Take the requests of one round; each is answered once, now or later."""
        ...

    def failure(self, error: EdgeRuntimeError) -> Frames:
        """Return the response to bytes that are not a request."""
        ...

    def gone(self, connection: HttpConnection) -> None:
        """Drop the waiting requests of a connection that has ended: its `waiting`."""
        ...

    def beat(self) -> None:
        """Called at least each BEAT_S."""
        ...


class HttpTransport:
    """Every connection of every listener.

    total_bytes: of bodies that are not whole yet, and of responses that are not read, each. may_connect: whether one
    more connection may be kept, for all that is not this door's. loop: None for a thread of its own. Raises OSError.
    """

    def __init__(
        self,
        listeners: Sequence[DoorListener],
        receiver: HttpReceiver,
        counters: Counters,
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        max_connections: int,
        may_connect: Callable[[], bool] = lambda: True,
        total_bytes: int,
        clock: Clock | None = None,
        loop: IoLoop | None = None,
    ) -> None:
        self._loop = loop
        self._is_called = self._is_on_loop = False
        self._listeners = {each.socket.fileno(): each for each in listeners}
        self._receiver = receiver
        self._counters = counters
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._max_connections = max_connections
        self._may_connect = may_connect
        self._closed_full = 0
        self._tell_due_s = 0.0
        self._total_bytes = total_bytes
        self._monotonic_s = (clock or SystemClock()).monotonic_s
        self._connections: dict[int, HttpConnection] = {}
        self._heads: dict[bytes, HttpHead] = {}
        self._head_bytes = 0
        self._held_bytes = self._unsent_bytes = 0
        self._scratch = memoryview(bytearray(RECEIVE_BYTES))
        self._requests: list[HttpRequest] = []
        self._dirty: list[HttpConnection] = []
        self._again: list[HttpConnection] = []
        self._left: list[tuple[int, int]] = []
        self._outbox: deque[tuple[HttpRequest, Frames]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._now_s = self._monotonic_s()
        self._beat_due_s = self._now_s
        self._is_deaf = False
        self._is_asleep = self._is_stopping = False
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._thread: threading.Thread | None = None

    @property
    def connections(self) -> int:
        """The number of connections. Thread: any."""
        return len(self._connections)

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called. Thread: any."""
        return self._is_stopping

    def serve(self) -> None:
        """Listen, and answer from now on."""
        for each in self._listeners.values():
            each.socket.listen(self._max_connections)
        if self._loop is not None:
            self._loop.call(self._join_loop)
            return
        self._thread = threading.Thread(target=self._run, name="edge-http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer the requests on their way, send the rest, and close. Idempotent. Thread: any but its own."""
        self._is_stopping = True
        if self._loop is not None:
            loop, self._loop = self._loop, None
            self._leave_loop(loop)
        if self._thread is not None:
            self._wake()
            self._thread.join()
            self._thread = None
        if self._wake_fd < 0:
            return
        for each in self._listeners.values():
            each.socket.close()
        self._epoll.close()
        os.close(self._wake_fd)
        self._wake_fd = -1

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on its thread soon. Thread: any."""
        self._calls.append(function)
        self._wake(is_asleep=True)

    def answer(self, request: HttpRequest, frames: Frames) -> None:
        """Send a response when those before it have gone, in this round."""
        request.frames = frames
        connection = request.connection
        if not connection.is_dirty:
            connection.is_dirty = True
            self._dirty.append(connection)

    def post(self, request: HttpRequest, frames: Frames) -> None:
        """Send a response. Thread: any."""
        self._outbox.append((request, frames))
        self._wake(is_asleep=self._is_asleep)

    def post_part(self, request: HttpRequest, part: Any) -> None:
        """Send a part of a response, its head with the first, when those before it have gone; `post` sends the last.

        Only where the request's head takes chunks. Thread: any.
        """
        self.call(partial(self._take_part, request, part))

    def drop(self, connection: HttpConnection) -> None:
        """Close a connection whose peer does not read. Thread: any."""
        self._counters.count("http_connections_closed_unread")
        self.call(partial(self._close, connection))

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _join_loop(self) -> None:
        loop = self._loop
        if loop is not None and not self._is_stopping:
            for fd in self._listeners:
                self._epoll.register(fd, select.EPOLLIN)
            loop.add_door(self._epoll.fileno(), self._round_on_loop, self._beat_when_due)
            self._is_on_loop = True

    def _leave_loop(self, loop: IoLoop) -> None:
        """Have the loop look no more, then end on this thread."""
        has_left = threading.Event()

        def leave() -> None:
            if self._is_on_loop:
                loop.remove_door(self._epoll.fileno(), self._beat_when_due)
            has_left.set()

        loop.call(leave)
        while not has_left.wait(LEAVE_S) and loop.is_running:
            pass
        if not has_left.is_set():  # the loop has ended; nobody else looks
            loop.send_rest()
        self._end()

    def _guarded_round(self, wait_s: float = 0.0) -> None:
        try:
            self._round(wait_s)
        except Exception:  # one of the broad catches: serving goes on
            log.exception("an exception reached the HTTP loop")
            self._counters.count("http_errors")
        self._go_on()

    def _go_on(self) -> None:
        """Have the loop come back for requests there already: responses that went out let a connection read on."""
        loop = self._loop
        if loop is not None and (self._requests or self._again or self._left):
            loop.calls.append(self._round_on_loop)

    def _round_on_loop(self) -> None:
        if self._loop is not None:
            self._guarded_round()

    def _run(self) -> None:
        for fd in self._listeners:
            self._epoll.register(fd, select.EPOLLIN)
        while not self._is_stopping:
            self._beat_when_due()
            self._guarded_round(BEAT_S)
        self._end()

    def _end(self) -> None:
        """Answer the requests on their way, send the rest, and close every connection."""
        try:
            self._answer_last()
        except Exception:  # one of the broad catches: what is left is closed
            log.exception("an exception reached the end of the HTTP loop")
        until_s = self._monotonic_s() + FLUSH_S
        self._flush_outbox()
        while self._unsent_bytes and self._monotonic_s() < until_s:
            for fd, event in self._epoll.poll(BEAT_S):
                connection = self._connections.get(fd)
                if connection is not None and event & (select.EPOLLOUT | _GONE):
                    self._guarded(self._send, connection)
        for connection in list(self._connections.values()):
            self._close(connection)

    def _answer_last(self) -> None:
        """Accept the connections that wait, listen no more, and answer requests sent before their peers could know.

        Each response is its connection's last: its peer connects anew.
        """
        self._accept_last()
        began_s = now_s = time.monotonic()  # which goes on, whatever clock was given: this has to end
        while self._connections and now_s < began_s + FLUSH_S:
            is_owed = any(each.waiting or each.request is not None for each in self._connections.values())
            if now_s >= began_s + LEAVE_S and not is_owed:
                break
            self._beat_when_due()
            self._round(LEAVE_S / 5)
            now_s = time.monotonic()

    def _accept_last(self) -> None:
        for fd, listener in self._listeners.items():
            count = -1
            while count < len(self._connections) and not self._is_deaf:
                count = len(self._connections)
                self._accept(listener)
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            listener.socket.close()
        self._listeners.clear()

    def _beat_when_due(self) -> None:
        self._now_s = self._monotonic_s()
        if self._now_s >= self._beat_due_s:
            self._beat_due_s = self._now_s + BEAT_S
            self._receiver.beat()
            self._sweep()

    def _round(self, wait_s: float) -> None:
        # Invariant: asleep is set before the outbox is looked at, so a post after the look always wakes.
        self._is_asleep = True
        if self._outbox or self._calls or self._again or self._requests or self._left:
            wait_s = 0.0
        events = self._epoll.poll(wait_s, ROUND_EVENTS)
        self._is_asleep = False
        self._now_s = self._monotonic_s()
        if self._outbox or self._calls:  # first: what was called before a request was sent holds for it
            self._flush_outbox()
        again, self._again = self._again, []
        # Those that the last round had no time for come first: else the same connections would always be the last.
        pending = dict(self._left)
        for fd, event in events:
            pending.setdefault(fd, event)
        turns = iter(pending.items())
        for fd, event in turns:
            self._look_at(fd, event)
            if self._monotonic_s() - self._now_s >= ROUND_S:
                break
        self._left = list(turns)
        for connection in again:
            self._guarded(self._receive, connection)
        if self._requests:
            requests, self._requests = self._requests, []
            self._receiver.requests(requests)
        if self._dirty:
            self._write_dirty()

    def _look_at(self, fd: int, event: int) -> None:
        """Take the bytes that are ready of one descriptor."""
        connection = self._connections.get(fd)
        if connection is None:
            self._notice(fd)
            return
        if event & select.EPOLLOUT:
            self._guarded(self._send, connection)
        if event & select.EPOLLIN:
            self._guarded(self._receive, connection)
        elif event & (_GONE | select.EPOLLRDHUP):
            self._close(connection)

    def _notice(self, fd: int) -> None:
        if fd == self._wake_fd:
            os.eventfd_read(fd)
        elif fd in self._listeners:
            self._accept(self._listeners[fd])

    def _guarded(self, step: Callable[[HttpConnection], None], connection: HttpConnection) -> None:
        """Take a step of one connection; a fault there is its end, and no other's."""
        if not connection.is_open:
            return
        try:
            step(connection)
        except BadMessage as error:
            self._refuse(connection, error)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            pass
        except ssl.SSLWantWriteError:
            self._watch(connection, connection.interest | select.EPOLLOUT)
        except OSError:  # reset, broken, or no TLS
            self._close(connection)
        except MemoryError:
            self._refuse(connection, QueueFull("no memory for this request now"))
        except Exception:
            log.exception("a connection is closed for a bug")
            self._counters.count("http_errors")
            self._close(connection)

    # ---- connections ------------------------------------------------------------------------------------------------

    def _accept(self, listener: DoorListener) -> None:
        for _ in range(ROUND_ACCEPTS):
            try:
                accepted, _ = listener.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left: the next beat tries again
                log.warning("no connection can be accepted", extra={"reason": str(error)})
                self._is_deaf = True
                self._close_idlest()
                for fd in self._listeners:
                    self._epoll.modify(fd, 0)
                return
            accepted.setblocking(False)
            if accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            is_full = len(self._connections) >= self._max_connections or not self._may_connect()
            if is_full and not self._close_idlest():
                accepted.close()
                self._closed_full += 1
                self._counters.count("http_connections_refused")
                continue
            if listener.context is not None:
                try:
                    accepted = listener.context.wrap_socket(
                        accepted, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
                    )
                except OSError:  # gone already
                    accepted.close()
                    continue
            connection = HttpConnection(accepted, listener, self._now_s)
            self._connections[connection.fd] = connection
            self._epoll.register(connection.fd, connection.interest)

    def _close_idlest(self) -> bool:
        """Close the connection that is idle for longest, or at least owes none a response; False: all are owed one."""
        idle = [each for each in self._connections.values() if not each.waiting and not each.unsent]
        if not idle:
            return False
        self._close(min(idle, key=lambda each: (each.began_s is not None, each.used_s)))
        self._closed_full += 1
        self._counters.count("http_connections_closed_idle")
        return True

    def _close(self, connection: HttpConnection) -> None:
        if not connection.is_open:
            return
        connection.is_open = False
        self._forget_body(connection)
        self._unsent_bytes -= connection.unsent_bytes
        del self._connections[connection.fd]
        with contextlib.suppress(OSError):
            self._epoll.unregister(connection.fd)
        connection.socket.close()
        connection.unsent.clear()
        if connection.waiting:
            self._receiver.gone(connection)
            connection.waiting.clear()

    def _sweep(self) -> None:
        """Close slow connections: requests do not arrive, or responses are not read."""
        if self._is_deaf:
            self._is_deaf = False
            for fd in self._listeners:
                self._epoll.modify(fd, select.EPOLLIN)
        now_s = self._now_s
        for connection in list(self._connections.values()):
            # A slow peer reads long before the kernel has room for more.
            if connection.unsent and (unread_bytes := unread_of(connection.fd)) != connection.unread_bytes:
                connection.unread_bytes, connection.used_s = unread_bytes, now_s
            idle_s = now_s - connection.used_s
            if connection.is_lingering:
                if idle_s >= LINGER_S:
                    self._close(connection)
            elif connection.unsent and idle_s >= UNREAD_S:
                self._counters.count("http_connections_closed_unread")
                self._close(connection)
            elif connection.began_s is not None and now_s - connection.began_s >= self._body_timeout_s:
                self._counters.count("http_requests_too_slow")
                if connection.is_shaking:
                    self._close(connection)
                    continue
                text = f"the request did not arrive within {self._body_timeout_s:g} s (body_timeout_s)"
                self._refuse(connection, BadMessage(text, 408))
        if self._closed_full and now_s >= self._tell_due_s:
            log.warning(
                "closed idle connections, or new ones: there are as many as there may be",
                extra={"connections": self._closed_full, "kept": len(self._connections)},
            )
            self._closed_full, self._tell_due_s = 0, now_s + TELL_S
        if self._dirty:
            self._write_dirty()

    def _watch(self, connection: HttpConnection, interest: int) -> None:
        if connection.interest != interest and connection.is_open:
            connection.interest = interest
            self._epoll.modify(connection.fd, interest)

    # ---- receiving --------------------------------------------------------------------------------------------------

    def _receive(self, connection: HttpConnection) -> None:
        if connection.is_shaking:
            connection.socket.do_handshake()  # type: ignore[attr-defined]
            connection.is_shaking, connection.began_s = False, None
            self._watch(connection, READ)
        body = connection.body
        if body is not None:
            count = connection.socket.recv_into(body[connection.filled :])
        else:
            bound = CHUNKED_BYTES if connection.chunked is not None else RECEIVE_BYTES
            count = connection.socket.recv_into(self._scratch, bound)
        if not count:
            self._close(connection)
            return
        connection.used_s = self._now_s
        if connection.is_tls and connection.socket.pending():  # type: ignore[attr-defined]
            self._again.append(connection)
        if connection.is_lingering or connection.is_closing:
            return
        if body is None:
            data = bytes(self._scratch[:count])
            self._take(connection, connection.rest + data if connection.rest else data)
            return
        connection.filled += count
        self._hold(connection, count)
        if connection.filled == len(body):
            self._finish(connection, body)
            if connection.rest:
                self._take(connection, connection.rest)

    def _take(self, connection: HttpConnection, data: bytes) -> None:
        """Take bytes apart into requests, up to one whose body has not come."""
        connection.rest = b""
        at = 0
        if connection.chunked is not None:
            data = self._take_chunks(connection, connection.chunked, data)
        while at < len(data) and connection.request is None and not connection.is_closing:
            if len(connection.waiting) >= MOST_WAITING or connection.unsent_bytes > MOST_UNSENT_BYTES:
                self._watch(connection, connection.interest & ~select.EPOLLIN)
                break
            while data.startswith(b"\r\n", at):  # RFC 9112, 2.2: empty lines before a request
                at += 2
            end = data.find(b"\r\n\r\n", at) + 4
            if end < 4 or end - at > MAX_HEAD_BYTES:
                self._check_part(connection, data, at)
                break
            raw = data[at:end]
            head = self._heads.get(raw)
            if head is None:
                head = self._new_head(raw)
            connection.began_s = None
            length = head.length
            if not head.is_chunked and len(data) - end >= length:
                request = HttpRequest(connection, head, data[end : end + length], self._now_s)
                request.closes = request.closes or self._is_stopping
                at = end + length
                connection.waiting.append(request)
                self._requests.append(request)
                connection.is_closing = request.closes
                continue
            at = self._begin(connection, head, raw, data, end)
        connection.rest = data[at:] if at < len(data) and not connection.is_closing else b""

    def _check_part(self, connection: HttpConnection, data: bytes, at: int) -> None:
        """Refuse bytes that cannot become a head: too long, or wrong as far as they came."""
        if len(data) - at > MAX_HEAD_BYTES:
            raise BadMessage(f"request line and headers have over {MAX_HEAD_BYTES} bytes", 431)
        if at == len(data):
            return
        if connection.began_s is None:
            connection.began_s = self._now_s
            check_beginning(data[at:])
        elif data.count(b"\n", at) != data.count(b"\r\n", at):
            raise BadMessage("not HTTP/1.1: a line ends without a carriage return")

    def _new_head(self, raw: bytes) -> HttpHead:
        head = parse_head(raw)
        self._receiver.understand(head)
        if len(self._heads) >= KNOWN_HEADS or self._head_bytes + len(raw) > KNOWN_HEAD_BYTES:
            self.forget_heads()
        self._heads[raw] = head
        self._head_bytes += len(raw)
        return head

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Show new connections another certificate."""
        for each in self._listeners.values():
            if each.context is not None:
                each.context = context

    def forget_heads(self) -> None:
        """Understand every head anew from now on: who may do what has changed."""
        self._heads.clear()
        self._head_bytes = 0

    def _begin(self, connection: HttpConnection, head: HttpHead, raw: bytes, data: bytes, at: int) -> int:
        """Begin with a body that has not come, or refuse it; return how far `data` was taken."""
        request = HttpRequest(connection, head, b"", self._now_s)
        if head.length > self._max_body_bytes:
            raise too_large(head.length, self._max_body_bytes)
        refusal = self._receiver.begin(request)
        if refusal is not None:
            request.closes = True
            connection.is_closing = True
            connection.waiting.append(request)
            self.answer(request, refusal)
            return len(data)
        if head.expects_continue and at == len(data) and not connection.waiting:
            self._queue(connection, (_CONTINUE,))
        connection.request, connection.began_s = request, self._now_s
        if head.is_chunked:
            connection.chunked = ChunkedBody(raw, self._max_body_bytes)
            return len(data) - len(self._take_chunks(connection, connection.chunked, data[at:]))
        connection.body = request.body or aligned(head.length, head.body_shift)
        connection.filled = len(data) - at
        connection.body[: connection.filled] = memoryview(data)[at:]
        self._hold(connection, connection.filled)
        return len(data)

    def _take_chunks(self, connection: HttpConnection, chunked: ChunkedBody, data: bytes) -> bytes:
        before = len(chunked.data)
        rest = chunked.take(data)
        self._hold(connection, len(chunked.data) - before)
        if chunked.is_complete:
            self._finish(connection, memoryview(chunked.data))
        return rest

    def _hold(self, connection: HttpConnection, nbytes: int) -> None:
        """Count bytes of a body that is not whole; over the bound, the one that is longest under way is refused."""
        self._held_bytes += nbytes
        while self._held_bytes > self._total_bytes:
            bodies = [each for each in self._connections.values() if each.request is not None]
            oldest = min(bodies, key=lambda each: each.began_s or 0.0)
            if oldest is connection and len(bodies) == 1:
                return
            self._counters.count("http_bodies_refused")
            self._refuse(oldest, QueueFull("too many large requests arrive at once; send it again"))
            if oldest is connection:
                return

    def _forget_body(self, connection: HttpConnection) -> None:
        self._held_bytes -= connection.held_bytes
        connection.request = connection.body = connection.chunked = None
        connection.filled = 0
        connection.began_s = None

    def _finish(self, connection: HttpConnection, body: memoryview) -> None:
        request = connection.request
        assert request is not None
        self._forget_body(connection)
        request.body = body if len(body) > RECEIVE_BYTES else bytes(body)
        request.closes = request.closes or self._is_stopping
        connection.waiting.append(request)
        self._requests.append(request)
        connection.is_closing = request.closes

    def _refuse(self, connection: HttpConnection, error: EdgeRuntimeError) -> None:
        """Answer bytes that are not a request after the responses before them, and close."""
        if connection.is_shaking or connection.is_closing:
            self._close(connection)
            return
        self._counters.count("http_bad_requests")
        request = HttpRequest(connection, None, b"", self._now_s)
        self._forget_body(connection)
        connection.rest = b""
        connection.is_closing = True
        connection.waiting.append(request)
        self.answer(request, self._receiver.failure(error))

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _flush_outbox(self) -> None:
        self._is_called = False
        outbox, calls = self._outbox, self._calls
        for _ in range(len(outbox)):
            request, frames = outbox.popleft()
            if request.connection.is_open:
                self.answer(request, frames)
            else:
                self._counters.count("replies_dropped")
        for _ in range(len(calls)):  # what these ask for is the next round's
            try:
                calls.popleft()()
            except Exception:
                log.exception("a call on the HTTP thread failed")
                self._counters.count("http_errors")
        self._write_dirty()

    def _flush_on_loop(self) -> None:
        if self._loop is not None:  # else the thread that stops this looks
            self._flush_outbox()
            self._go_on()

    def _take_part(self, request: HttpRequest, part: Any) -> None:
        connection = request.connection
        if not request.has_begun:
            (part,) = request.adapted((part,))
            request.has_begun = True
        request.parts = [*(request.parts or ()), part]
        if connection.is_open and connection.waiting and connection.waiting[0] is request:
            parts, request.parts = request.parts, None
            self._guarded(partial(self._queue, parts=parts), connection)

    def _write_dirty(self) -> None:
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.is_dirty = False
            self._guarded(self._write, connection)

    def _write(self, connection: HttpConnection) -> None:
        """Send the responses whose turn it is."""
        waiting = connection.waiting
        if len(waiting) == 1 and not connection.unsent:
            # The lean path: one response of one part, which the system takes whole.
            request = waiting[0]
            frames, head = request.frames, request.head
            is_lean = head is not None and head.is_plain and not request.closes and request.parts is None
            if frames and len(frames) == 1 and is_lean:
                waiting.popleft()
                part = frames[0]
                sent = connection.send_now(part)
                if sent != len(part):
                    self._keep(connection, frames, sent)
                elif not connection.interest & select.EPOLLIN:
                    self._resume(connection)
                return
        parts: list[Any] = []
        ends = False
        while waiting and waiting[0].frames is not None:
            request = waiting.popleft()
            frames = request.frames
            assert frames is not None
            head = request.head
            if head is None or not head.is_plain or request.closes:
                frames = request.adapted(frames) if not request.has_begun else frames
                ends = ends or request.closes
            parts.extend(request.parts or ())
            parts.extend(frames)
            request.frames = ()
        if not parts:
            return
        if ends:
            connection.is_closing = True
        self._queue(connection, parts)
        if connection.is_open and not connection.is_closing and not connection.interest & select.EPOLLIN:
            self._resume(connection)

    def _queue(self, connection: HttpConnection, parts: Sequence[Any]) -> None:
        """Send parts behind those that wait; those that the system does not take now wait too."""
        if connection.unsent:
            self._keep(connection, parts, 0)
            return
        if len(parts) == 1 or connection.is_tls:
            whole = parts[0] if len(parts) == 1 else b"".join(parts)
            self._keep(connection, (whole,), connection.send_now(whole))
            return
        try:
            count = connection.socket.sendmsg(parts[:SENT_PARTS])
        except BlockingIOError:
            count = 0
        self._keep(connection, parts, count)

    def _keep(self, connection: HttpConnection, parts: Sequence[Any], sent: int) -> None:
        """Keep the unsent bytes of parts, and watch for room; end a connection that has sent its last."""
        kept_bytes, _ = keep_unsent(connection.unsent, parts, sent)
        connection.unsent_bytes += kept_bytes
        self._unsent_bytes += kept_bytes
        if not connection.unsent:
            self._sent_all(connection)
            return
        connection.used_s = self._now_s
        self._watch(connection, connection.interest | select.EPOLLOUT)
        while self._unsent_bytes > self._total_bytes:
            slowest = min((each for each in self._connections.values() if each.unsent), key=lambda each: each.used_s)
            self._counters.count("http_connections_closed_unread")
            self._close(slowest)

    def _send(self, connection: HttpConnection) -> None:
        """Send the waiting bytes, as far as there is room."""
        if connection.is_shaking:
            self._receive(connection)
            return
        unsent = connection.unsent
        if unsent:
            if connection.is_tls:
                count = connection.send_now(unsent[0])
                drop_sent(unsent, count)
            else:
                count, _ = send_unsent(connection.socket, unsent)
            connection.used_s = self._now_s
            connection.unsent_bytes -= count
            self._unsent_bytes -= count
        if not unsent:
            self._watch(connection, connection.interest & ~select.EPOLLOUT)
            self._sent_all(connection)
            if connection.is_open and not connection.is_closing:
                self._resume(connection)

    def _sent_all(self, connection: HttpConnection) -> None:
        """End a connection whose last response has gone: wait for the peer to close, and drop its later bytes."""
        if not connection.is_closing or connection.waiting or connection.is_lingering:
            return
        connection.is_lingering = True
        connection.used_s = self._now_s
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_WR)
        self._watch(connection, READ)

    def _resume(self, connection: HttpConnection) -> None:
        """Read on, beginning with the bytes that had come, once there is room for responses again."""
        if len(connection.waiting) >= MOST_WAITING or connection.unsent_bytes > MOST_UNSENT_BYTES:
            return
        self._watch(connection, connection.interest | select.EPOLLIN)
        if connection.rest:
            self._take(connection, connection.rest)
        if connection.is_tls and connection.socket.pending():  # type: ignore[attr-defined]
            self._again.append(connection)

    def _wake(self, *, is_asleep: bool = True) -> None:
        """Have the outbox and the calls looked at. Thread: any."""
        loop = self._loop
        if loop is not None:
            if not self._is_called:
                self._is_called = True
                loop.call_soon(self._flush_on_loop)
            return
        if not is_asleep:
            return
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)
