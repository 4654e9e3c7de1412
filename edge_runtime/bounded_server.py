"""A small HTTP server of a verb, for strangers: each of its bounds is known.

Owns: the places of connections, a thread each, the time of each, and who has to leave where all places are taken. Never
decides an answer. Called by the servers of `authority serve` and `repo serve`.

A peer that sends a byte now and then holds its place no longer than `request_s`, and no longer than `spared_s` where
another peer wants it. A request that came whole is answered. Thread: `serve` the caller's; `stop` any.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

POLL_S = 0.1
PLACE_POLL_S = 0.02

CLOSE_S = 5.0
"""How long the end of threads is waited for: a commit of a slow disk may be under way."""


class ServerBounds(NamedTuple):
    """The bounds of a server. connections: at once; a further one waits for a place, at most `place_s`.

    request_s: from the connection, or the answer before, until a request has come whole, TLS included. spared_s: so
    long a connection without a whole request keeps its place though others wait. answer_s: to send an answer.
    request_bytes: of a request, its head included.
    """

    connections: int = 128
    request_s: float = 20.0
    spared_s: float = 2.0
    answer_s: float = 20.0
    place_s: float = 20.0
    request_bytes: int = 1 << 17


@dataclass(slots=True)
class _PeerConnection:
    """A connection that is open. is_asked: its request has come whole."""

    socket: socket.socket
    since_s: float
    due_s: float
    is_asked: bool = False
    thread: threading.Thread | None = field(default=None)


class BoundedServer(ThreadingHTTPServer):
    """A server with bounds. `serve` until `stop` or an interrupt; `server_close` ends all connections."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(
        self,
        address: tuple[str, int],
        calls: type[BoundedCalls],
        bounds: ServerBounds,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen. Raises OSError, OverflowError: the address is not available."""
        self.bounds = bounds
        self._monotonic_s = monotonic_s
        self._places = threading.BoundedSemaphore(bounds.connections)
        self._lock = threading.Lock()
        self._open: dict[int, _PeerConnection] = {}
        self._stops = threading.Event()
        super().__init__(address, calls)

    def serve(self) -> None:
        """Answer until `stop` or an interrupt."""
        with contextlib.suppress(KeyboardInterrupt):
            self.serve_forever(POLL_S)

    def stop(self) -> None:
        """Make `serve` return."""
        self._stops.set()
        self.shutdown()

    def secured(self, request: socket.socket) -> socket.socket:
        """Return a connection as its calls see it, without waiting for its peer: TLS shakes hands in `greet`."""
        return request

    def greet(self, peer: Any) -> None:
        """Do what comes before the first request, on the connection's own thread. Raises OSError."""

    def server_close(self) -> None:
        """End all connections, and wait for their threads. Idempotent."""
        super().server_close()
        with self._lock:
            left = list(self._open.values())
            for each in left:
                _end(each)
        for each in left:
            if each.thread is not None:
                each.thread.join(CLOSE_S)

    # ---- called by socketserver, on the thread of `serve` ------------------------------------------------------------

    def service_actions(self) -> None:
        """End connections whose time is over."""
        with self._lock:
            now_s = self._monotonic_s()
            for each in self._open.values():
                if now_s >= each.due_s:
                    _end(each)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a place and a thread, or close it where there is no place in time."""
        if not self._has_place():
            self.shutdown_request(request)
            return
        now_s = self._monotonic_s()
        connection = _PeerConnection(request, now_s, now_s + self.bounds.request_s)
        connection.thread = threading.Thread(
            target=self._answer, args=(connection, client_address), name="edge-call", daemon=True
        )
        with self._lock:
            self._open[id(connection)] = connection
        connection.thread.start()

    def _has_place(self) -> bool:
        end_s = self._monotonic_s() + self.bounds.place_s
        while not self._places.acquire(timeout=PLACE_POLL_S):
            self.service_actions()
            now_s = self._monotonic_s()
            if now_s >= end_s or self._stops.is_set():
                return False
            with self._lock:
                idle = [each for each in self._open.values() if not each.is_asked]
                oldest = min(idle, key=lambda each: each.since_s, default=None)
                if oldest is not None and now_s - oldest.since_s >= self.bounds.spared_s:
                    _end(oldest)
        return True

    # ---- on the connection's thread ---------------------------------------------------------------------------------

    def await_request(self, peer: socket.socket) -> None:
        """Note that a connection waits for its next request."""
        self._note(peer, self.bounds.request_s, is_asked=False)

    def begin_answer(self, peer: socket.socket) -> None:
        """Note that a request has come whole."""
        self._note(peer, self.bounds.answer_s, is_asked=True)

    def _note(self, peer: socket.socket, limit_s: float, *, is_asked: bool) -> None:
        with self._lock:
            for each in self._open.values():
                if each.socket is peer and each.is_asked != is_asked:
                    each.since_s = self._monotonic_s()
                    each.due_s, each.is_asked = each.since_s + limit_s, is_asked

    def _answer(self, connection: _PeerConnection, client_address: Any) -> None:
        try:
            peer = self.secured(connection.socket)
            with self._lock:
                connection.socket = peer
            self.greet(peer)
            self.finish_request(peer, client_address)
        except (OSError, ValueError):
            log.debug("a peer broke off")
        except Exception:
            log.exception("a request was not answered")
        finally:
            # Invariant: the socket is closed after nobody else can end it, whose number would be another's by then.
            with self._lock:
                del self._open[id(connection)]
            self.shutdown_request(connection.socket)
            self._places.release()


class BoundedCalls(BaseHTTPRequestHandler):
    """The requests of one connection. A subclass calls `begin_answer` when it has read all of one."""

    protocol_version = "HTTP/1.1"
    server: BoundedServer

    def setup(self) -> None:
        """Bound what is read."""
        super().setup()
        self.connection.settimeout(self.server.bounds.request_s)
        self._bounded = _Bounded(self.rfile)
        # As much of a file as is read here.
        self.rfile = self._bounded  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        """Answer one request."""
        self._bounded.left = self.server.bounds.request_bytes
        self.server.await_request(self.connection)
        super().handle_one_request()

    def begin_answer(self) -> None:
        """Note that the request has come whole: its connection keeps its place until the answer is sent."""
        self.server.begin_answer(self.connection)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name is the base class's)
        """Log nothing: a stranger would fill the log."""


class _Bounded:
    """A file of which at most `left` bytes are read. Raises ConnectionError beyond."""

    def __init__(self, file: BufferedIOBase) -> None:
        self.left = 0
        self._file = file

    def readline(self, limit: int) -> bytes:
        return self._count(self._file.readline(limit))

    def read(self, limit: int) -> bytes:
        return self._count(self._file.read(min(limit, self.left + 1)))

    def close(self) -> None:
        self._file.close()

    def _count(self, data: bytes) -> bytes:
        self.left -= len(data)
        if self.left < 0:
            raise ConnectionError("the request is longer than any that makes sense")
        return data


def _end(connection: _PeerConnection) -> None:
    """End a connection of which a thread reads or writes: it fails there. For TLS too, beneath its state."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection.socket, socket.SHUT_RDWR)
