"""Stands before Serve's proxy: the deadline counts from there, and what the proxy answers itself is in our words.

Serve takes it where the environment of its nodes has RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, of the value
edge_runtime.ray_serve.proxy:middlewares. Without it a deadline counts from the replica on, a late answer is Serve's
408, and a request whose replica ends is lost with 500. Imports nothing of a replica. Thread: the proxy's event loop.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.middleware import Middleware

from edge_runtime.errors import DeadlineExceeded, EdgeRuntimeError, NotReady
from edge_runtime.ray_serve.instant import Instant

BEGAN = b"x-edge-runtime-began"
"""The header by which a replica knows when a request came in; a client's own is dropped."""

TIMEOUT = b"x-request-timeout-seconds"

TRIES = 3
"""How often a request is sent whose replica ended before it answered; inference does no harm twice."""

LONGEST_S = 60.0
"""How long a request without a deadline is sent again."""

KEPT_BYTES = 64 << 20
"""A longer body is not sent again."""

OF_INFERENCE = ("/infer", "/generate")
"""Ends of the paths whose requests are sent again."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def middlewares() -> list[Middleware]:
    """Return the middleware that Serve's proxy puts before itself."""
    return [Middleware(OipIngress)]


class OipIngress:
    """The ASGI application around the proxy's."""

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or not scope["path"].partition("?")[0].endswith(OF_INFERENCE):
            await self._app(scope, receive, send)
            return
        began = Instant.now()
        headers = [each for each in scope["headers"] if each[0] != BEGAN]
        scope = {**scope, "headers": [*headers, (BEGAN, began.text().encode("latin-1"))]}
        longest_s = _timeout_s(headers)
        kept = _KeptBody(receive)
        for _ in range(TRIES):
            response = _Response(send)
            await self._app({**scope, "headers": list(scope["headers"])}, kept.receive, response.send)
            if response.has_begun or kept.has_left:
                return
            if not kept.is_whole or began.age_s() >= min(longest_s, LONGEST_S):
                break
            kept.rewind()
        await _send_error(send, NotReady("the replica that had this request ended; send it again", retry_after_ms=1e3))


class _KeptBody:
    """The messages of a request's body, which can be read again."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self._at = self._nbytes = 0
        self.has_left = False
        self.is_whole = True

    async def receive(self) -> Message:
        """The next message: one that came before, else a new one."""
        if self._at < len(self._messages):
            self._at += 1
            return self._messages[self._at - 1]
        message = await self._receive()
        if message["type"] != "http.request":
            self.has_left = True
            return message
        self._nbytes += len(message.get("body", b""))
        if self._nbytes > KEPT_BYTES:
            self.is_whole = False
            self._messages.clear()
            self._at = 0
        else:
            self._messages.append(message)
            self._at += 1
        return message

    def rewind(self) -> None:
        """Begin again."""
        self._at = 0


class _Response:
    """A response on its way: its own error stands for Serve's 408."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._drops_body = False
        self.has_begun = False

    async def send(self, message: Message) -> None:
        """Send a message on, or ours in its place."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            if message["status"] == 408:
                self._drops_body = True
                await _send_error(self._send, DeadlineExceeded("no answer came before the request's deadline"))
        if not self._drops_body:
            await self._send(message)


def read_head(head: bytes) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Read the head of a response of the HTTP door: its status, and its headers as ASGI has them."""
    status, *lines = head.split(b"\r\n")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    return int(status.split(b" ", 2)[1]), headers


async def _send_error(send: Send, error: EdgeRuntimeError) -> None:
    from edge_runtime.doors.http.answer import error_frames

    (frame,) = error_frames(error)
    head, _, body = frame.partition(b"\r\n\r\n")
    status, headers = read_head(head)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _timeout_s(headers: list[tuple[bytes, bytes]]) -> float:
    text = next((value for name, value in headers if name == TIMEOUT), b"")
    try:
        return float(text)
    except ValueError:
        return math.inf
