"""The nouns of HTTP over a connection: connections, requests and the bytes of their responses.

Owns: the state of one connection, and how a part is handed to its socket. transport.py decides what happens when.
Thread: the transport's.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from edge_runtime.doors.access.addresses import DoorListener
from edge_runtime.doors.http.head import ChunkedBody, HttpHead

SENT_BYTES = 1 << 20
"""Handed to the system at once over TLS."""

TLS_RECORD_BYTES = 16 << 10
"""The largest piece that TLS encrypts at once."""

ALIGNMENT = 64
"""Alignment of tensors in a body, as much as any library may want."""

READ = select.EPOLLIN | select.EPOLLRDHUP
"""The events of a connection that is read."""

Frames = tuple[Any, ...]
"""A whole response: the first has status line and headers, and ends with or after the empty line."""


class HttpResponder(Protocol):
    """Takes the responses to requests: the transport that brought them. Thread: its own, where nothing else is said."""

    @property
    def is_stopping(self) -> bool:
        """Whether it brings no more requests. Thread: any."""
        ...

    def answer(self, request: HttpRequest, frames: Frames, /) -> None:
        """Send a response."""
        ...

    def post(self, request: HttpRequest, frames: Frames, /) -> None:
        """Send a response. Thread: any."""
        ...

    def post_part(self, request: HttpRequest, part: Any, /) -> None:
        """Send a part of a response, its head with the first; `post` sends the last. Thread: any."""
        ...

    def drop(self, connection: HttpConnection, /) -> None:
        """Close a connection whose peer does not read. Thread: any."""
        ...

    def call(self, function: Callable[[], None], /) -> None:
        """Run a function on its thread soon. Thread: any."""
        ...

    def forget_heads(self) -> None:
        """Understand every head anew from now on."""
        ...


class HttpRequest:
    """One request on its connection, and the place of its response. arrived_s: when its head was there.

    body: bytes, or a view of memory of its own where it is large, which the receiver may give before it comes. frames:
    its response, once there is one. closes: the connection ends with it. memory: the receiver's own. parts: of a
    response that comes in parts, those whose turn has not come; has_begun: some have gone.
    """

    __slots__ = ("arrived_s", "body", "closes", "connection", "frames", "has_begun", "head", "memory", "parts")

    def __init__(self, connection: HttpConnection, head: HttpHead | None, body: Any, arrived_s: float) -> None:
        self.connection = connection
        self.head = head
        self.body = body
        self.arrived_s = arrived_s
        self.frames: Frames | None = None
        self.memory: Any = ()
        self.parts: list[Any] | None = None
        self.has_begun = False
        self.closes = head is None or not head.keeps_alive

    def adapted(self, frames: Frames) -> Frames:
        """A response with the changes of this request: the connection ends with it, or it has no body."""
        first = bytes(frames[0])
        head = self.head
        if self.closes:
            first = first.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        elif head is not None and head.is_old:
            first = first.replace(b"\r\n", b"\r\nConnection: keep-alive\r\n", 1)
        if head is not None and head.adds:
            first = first.replace(b"\r\n", b"\r\n" + head.adds, 1)
        if head is not None and head.method == "HEAD":
            return (first[: first.index(b"\r\n\r\n") + 4],)
        return (first, *frames[1:])


class HttpConnection:
    """One connection and its requests under way.

    waiting: requests in their order, each until its response goes out.
    """

    __slots__ = (
        "began_s", "body", "chunked", "fd", "filled", "interest", "is_closing", "is_dirty", "is_lingering", "is_open",
        "is_shaking", "is_tls", "listener", "request", "rest", "socket", "unread_bytes", "unsent", "unsent_bytes",
        "used_s", "waiting",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, listener: DoorListener, now_s: float) -> None:
        self.socket = sock
        self.fd = sock.fileno()
        self.listener = listener
        self.is_tls = self.is_shaking = listener.context is not None
        self.rest = b""
        self.request: HttpRequest | None = None
        self.body: memoryview | None = None
        self.chunked: ChunkedBody | None = None
        self.filled = 0
        self.waiting: deque[HttpRequest] = deque()
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = self.unread_bytes = 0
        self.began_s: float | None = now_s if self.is_tls else None
        self.used_s = now_s
        self.interest = READ
        self.is_open = True
        self.is_closing = self.is_lingering = self.is_dirty = False

    @property
    def place(self) -> Any:
        """The receiver's own of the address that it came by."""
        return self.listener.place

    @property
    def held_bytes(self) -> int:
        """Bytes of a body that is not whole yet."""
        return self.filled if self.chunked is None else len(self.chunked.data)

    def send_now(self, part: Any) -> int:
        """Send as much of a part as the system takes; how many bytes. Raises OSError."""
        sent = 0
        try:
            if not self.is_tls:
                return self.socket.send(part)
            # One record at a time: a write that TLS could not finish has to be tried again with the same bytes.
            view = memoryview(part).cast("B")
            while sent < min(view.nbytes, SENT_BYTES):
                sent += self.socket.send(view[sent : sent + TLS_RECORD_BYTES])
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        return sent


def aligned(length: int, shift: int) -> memoryview:
    """Memory for a body, untouched as yet, whose byte `shift` lies aligned."""
    memory = np.empty(length + ALIGNMENT, np.uint8)
    begin = -(memory.ctypes.data + shift) % ALIGNMENT
    return memory[begin : begin + length].data
