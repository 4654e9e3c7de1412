"""Stands before Serve's proxy: the deadline counts from there, and what the proxy answers itself is in our words.

Serve takes it where the environment of its nodes has RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, of the value
edge_runtime.ray_serve.proxy:middlewares. Without it a deadline counts from the replica on, a late answer is Serve's
408, and a request whose replica ends is lost with 500. Behind Serve's HAProxy it stands in each replica instead, where
only the deadline and the words are its own. Imports nothing of a replica. Thread: the proxy's event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.middleware import Middleware

from edge_runtime.errors import DeadlineExceeded, EdgeRuntimeError, NotReady
from edge_runtime.ray_serve.instant import RETRY_S, Instant

BEGAN = b"x-edge-runtime-began"
"""The header by which a replica knows when a request came in; a client's own is dropped."""

TIMEOUT = b"x-request-timeout-seconds"

TRIES = 5
"""How often a request is sent whose replica ended before it answered; inference does no harm twice.

A bound, so that a request which ends its replicas does not end them all.
"""

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
        for _, pause_s in zip(range(TRIES), began.tries(min(longest_s, RETRY_S)), strict=False):
            if pause_s:
                await asyncio.sleep(pause_s)
                kept.rewind()
            response = _Response(send)
            await self._app({**scope, "headers": list(scope["headers"])}, kept.receive, response.send)
            if response.has_begun or kept.has_left:
                return
            if not kept.is_whole:
                break
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
    """A response on its way: errors of ours stand for Serve's 408, and for its 503 when no replica can start."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._drops_body = False
        self.has_begun = False

    async def send(self, message: Message) -> None:
        """Send a message on, or ours in its place."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            error = _own_error(message)
            if error is not None:
                self._drops_body = True
                await _send_error(self._send, error)
        if not self._drops_body:
            await self._send(message)


def _own_error(start: Message) -> EdgeRuntimeError | None:
    """The error for which Serve's proxy begins a response; None for a replica's response, and for 429."""
    if start["status"] == 408:
        return DeadlineExceeded("no answer came before the request's deadline")
    if start["status"] == 503 and _value(start["headers"], b"content-type").startswith(b"text/plain"):
        return NotReady("no replica of the deployment can be reached; send it again", retry_after_ms=1e3)
    return None


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


def _value(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for each, value in headers if each == name), b"")


def _timeout_s(headers: list[tuple[bytes, bytes]]) -> float:
    try:
        return float(_value(headers, TIMEOUT))
    except ValueError:
        return math.inf
