"""The Open Inference Protocol by Serve's proxy: each request goes the way of the HTTP door, without its sockets.

Owns: heads that came before, and what becomes of a response on its way to Serve. Paths, bodies, tensors, refusals and
their `Retry-After` are those of the door (doors/http/frontend.py). Thread: the replica's event loop; `post`,
`post_part`, `call` and `drop` any.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from edge_runtime.daemon.core import Core, DaemonStatus
from edge_runtime.doors.access.rules import DoorAccess, DoorAddress
from edge_runtime.doors.http.answer import BINARY
from edge_runtime.doors.http.call import INFER, HttpCall
from edge_runtime.doors.http.connection import Frames, HttpConnection, HttpRequest
from edge_runtime.doors.http.frontend import HttpFrontend
from edge_runtime.doors.http.head import HttpHead, too_large
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.open_inference.named_regions import NamedRegions
from edge_runtime.doors.open_inference.operations import OpenInference
from edge_runtime.ray_serve.instant import Instant
from edge_runtime.ray_serve.proxy import BEGAN, read_head
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.request.operation_handlers import OperationHandlers
from edge_runtime.telemetry.host import HostProbe

KNOWN_HEADS = 1024
"""One more forgets all, which only costs reading them again."""

BEAT_S = 0.25
"""Between two looks at what the door counts."""

PLACE = DoorAddress("0.0.0.0", 0)  # noqa: S104 (it listens nowhere)
"""The address of all requests, which the proxy listens on: any `Host` will do, and control needs a token."""

_OF_ITS_OWN = frozenset((b"content-length", b"x-request-id", BEGAN))
"""Headers in which requests of one meaning differ."""


class HttpIngress:
    """The HTTP door's frontend, and the responder that it answers by."""

    is_stopping = False

    def __init__(self, core: Core, loop: asyncio.AbstractEventLoop) -> None:
        settings = core.config.table("http") or HttpSettings()
        status = DaemonStatus(core, HostProbe())
        status.is_ready = True
        operations = OperationHandlers(core.table, core.loader, core.pending_loads, status, regions=core.regions)
        regions = NamedRegions(is_allowed=False, max_tensor_bytes=core.config.limits.message_bytes)
        protocol = OpenInference(
            core.table,
            operations,
            status,
            regions,
            server_name=settings.server_name,
            strict_readiness=settings.strict_readiness,
        )
        frontend = InferFrontend(
            core.table, core.infer, operations, core.clock, core.metrics, encoding=BINARY, door="http"
        )
        self._max_body_bytes = settings.max_body_bytes
        self._frontend = HttpFrontend(
            frontend,
            protocol,
            core.table,
            DoorAccess("http", settings, (PLACE,)),
            clock=core.clock,
            metrics=core.metrics,
            max_body_bytes=settings.max_body_bytes,
            inflated_bytes=max(core.config.limits.message_bytes, settings.max_body_bytes),
        )
        self._frontend.attach(self)
        self._clock = core.clock
        self._loop = loop
        self._heads: dict[Any, HttpHead] = {}
        self._timer = loop.call_later(BEAT_S, self._beat)

    def begin(self, request: Request) -> ServedCall:
        """Read the head of a request."""
        scope = request.scope
        raw = scope["headers"]
        began = next((Instant.of_text(value.decode("latin-1")) for name, value in raw if name == BEGAN), None)
        arrived_s = self._clock.monotonic_s() - (began.age_s() if began is not None else 0.0)
        own = tuple((name, value) for name, value in raw if name not in _OF_ITS_OWN)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        key = scope["method"], path, scope["query_string"], own
        head = self._heads.get(key)
        if head is None:
            head = _head_of(scope["method"], path, scope["query_string"], own, _length_of(raw))
            self._frontend.understand(head)
            if len(self._heads) >= KNOWN_HEADS:
                self._heads.clear()
            self._heads[key] = head
        return ServedCall(self._frontend, head, arrived_s, self._max_body_bytes)

    def close(self) -> None:
        """End the thread that prepares bodies."""
        self._timer.cancel()
        self._frontend.close()

    # ---- the responder of the frontend ------------------------------------------------------------------------------

    def answer(self, request: HttpRequest, frames: Frames, /) -> None:
        """Hand a response to its call."""
        cast("ServedCall", request.connection).take(request.adapted(frames), is_last=True)

    def post(self, request: HttpRequest, frames: Frames, /) -> None:
        """Hand a response, or the end of one in parts, to its call."""
        self._soon(self._take_last, request, frames)

    def post_part(self, request: HttpRequest, part: Any, /) -> None:
        """Hand a part of a response to its call."""
        self._soon(self._take_part, request, part)

    def drop(self, connection: HttpConnection, /) -> None:
        """Leave a call whose client does not read."""
        self._soon(cast("ServedCall", connection).leave)

    def call(self, function: Callable[[], None], /) -> None:
        """Run a function on the loop soon."""
        self._soon(function)

    def forget_heads(self) -> None:
        """Understand every head anew from now on."""
        self._heads.clear()

    def _soon(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the replica has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _take_last(self, request: HttpRequest, frames: Frames) -> None:
        if request.has_begun:
            cast("ServedCall", request.connection).take(frames, is_last=True)
        else:
            self.answer(request, frames)

    def _take_part(self, request: HttpRequest, part: Any) -> None:
        frames = (part,) if request.has_begun else request.adapted((part,))
        request.has_begun = True
        cast("ServedCall", request.connection).take(frames, is_last=False)

    def _beat(self) -> None:
        self._frontend.beat()
        self._timer = self._loop.call_later(BEAT_S, self._beat)


class ServedCall:
    """One request and its response. To the frontend it is a connection that ends with its only request."""

    unsent_bytes = 0

    def __init__(self, frontend: HttpFrontend, head: HttpHead, arrived_s: float, max_body_bytes: int) -> None:
        self.place = PLACE
        self.is_open = True
        self.waiting: deque[HttpRequest] = deque()
        self._frontend = frontend
        self._head = head
        self._arrived_s = arrived_s
        self._max_body_bytes = max_body_bytes
        self._parts: asyncio.Queue[tuple[Frames, bool]] = asyncio.Queue()

    @property
    def model(self) -> str | None:
        """The model that it asks for inference."""
        meaning: HttpCall = self._head.meaning
        return meaning.values.get("name") if meaning.name == INFER and meaning.refusal is None else None

    async def answer(self, body: bytes) -> Response:
        """Submit it and wait for its response, or for the first part of one. Cancelled, it leaves the queue."""
        request = HttpRequest(cast("HttpConnection", self), self._head, body, self._arrived_s)
        self.waiting.append(request)
        if len(body) > self._max_body_bytes:
            self.take(self._frontend.failure(too_large(len(body), self._max_body_bytes)), is_last=True)
        else:
            self._frontend.requests((request,))
        return ServedResponse(self, await self.next())

    def take(self, frames: Frames, *, is_last: bool) -> None:
        """Take a response, or a part of one."""
        if is_last:
            self.waiting.clear()
        self._parts.put_nowait((frames, is_last))

    async def next(self) -> tuple[Frames, bool]:
        """Wait for the next part, and whether it is the last."""
        try:
            return await self._parts.get()
        except asyncio.CancelledError:
            self.leave()
            raise

    def leave(self) -> None:
        """Take back what waits for a client that is gone. Idempotent."""
        self.is_open = False
        if self.waiting:
            self._frontend.gone(cast("HttpConnection", self))
            self.waiting.clear()


class ServedResponse(Response):  # type: ignore[misc]  # where starlette is not installed
    """A response as Serve sends it on: whole, or in parts as they come."""

    def __init__(self, call: ServedCall, first: tuple[Frames, bool]) -> None:
        frames, self._is_whole = first
        head, _, rest = bytes(frames[0]).partition(b"\r\n\r\n")
        self.status_code, self.raw_headers = read_head(head)
        self.background = None
        self.body = rest if len(frames) == 1 else b"".join((rest, *frames[1:]))
        self._call = call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG002 (the protocol's)
        """Send it."""
        headers = self.raw_headers if self._is_whole else [each for each in self.raw_headers if each != _CHUNKED]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        if self._is_whole:
            await send({"type": "http.response.body", "body": self.body})
            return
        data, is_last = self.body, False
        while True:
            body = b"".join(_chunks(data))
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            if is_last:
                return
            frames, is_last = await self._call.next()
            data = b"".join(bytes(each) for each in frames)


_CHUNKED = (b"transfer-encoding", b"chunked")


def _chunks(data: bytes) -> Iterator[bytes]:
    """The contents of chunks as the door writes them: Serve makes its own."""
    at = 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        begin, size = end + 2, int(data[at:end], 16)
        yield data[begin : begin + size]
        at = begin + size + 2


def _length_of(raw: Iterable[tuple[bytes, bytes]]) -> int:
    text = next((value for name, value in raw if name == b"content-length"), b"0")
    return int(text) if text.isdigit() else 0


def _head_of(method: str, path: str, query: bytes, raw: Iterable[tuple[bytes, bytes]], length: int) -> HttpHead:
    """The head of a request that Serve has read."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return HttpHead(
        method,
        path,
        query.decode("latin-1"),
        headers,
        length=length,
        is_chunked=False,
        keeps_alive=True,
        is_old=False,
        expects_continue=False,
        is_plain=True,
        takes_chunks=True,
    )
