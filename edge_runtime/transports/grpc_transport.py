"""gRPC over HTTP/2 by grpcio: messages as bytes in and out, on one thread.

Owns: the servers, one an address, their event loop, and the bounds of what a peer may make them hold. The only user of
grpcio beside clients. Knows no protobuf and no model: `GrpcMethods` say what paths and bytes mean. Thread: `edge-grpc`,
which runs them; `start`, `call`, `post` and `stop` are called from others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# The library writes what peers do wrong to standard error, in a form of its own, as often as they do it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from grpc import aio

from edge_runtime.errors import Unauthenticated

log = logging.getLogger(__name__)

MAX_STREAMS = 1024
"""Calls of one connection at once; a client queues further ones. Many times of what keeps every core busy."""

MAX_METADATA_BYTES = 16 << 10
"""Headers of one call: what the HTTP door takes."""

MAX_TEXT = 1024
"""Characters of an error's text: clients refuse trailers of more than 8 KiB, and each may take 9 bytes there."""

IDLE_S, PING_S, PING_ANSWER_S = 900, 30, 20
"""A connection without calls ends after the first; one that does not answer a ping in time ends, so that a peer that
lost its network holds no place."""

PING_INTERVAL_S = 10
"""A client may ping this often, with or without calls; one that pings more is disconnected. Triton allows one in 300 s
without calls, so what its clients are set to is allowed here."""

FLUSH_S = 1.0
"""After `stop`, answers have this long to go out."""

BEAT_S = 0.25

STEP_S = 0.1
"""A wall clock that moved so much against the monotonic one was stepped: a time service slews by 0.5 ms a second."""

DISTRUST_S = 5.0
"""For how long after a step calls may lie here that came before it: many times what a loop under load lags."""


class WallClock:
    """Tells whether this machine's wall clock was stepped while calls lay here. Thread: `edge-grpc`."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()
        self._distrusted_until_s = 0.0

    def was_stepped(self) -> bool:
        """Whether it was stepped since it was looked at last, or shortly before."""
        now_s = time.monotonic()
        ahead_s = time.time() - now_s
        if abs(ahead_s - self._ahead_s) > STEP_S:
            self._ahead_s = ahead_s
            self._distrusted_until_s = now_s + DISTRUST_S
        return now_s < self._distrusted_until_s


class GrpcCall:
    """One call under way, as its method sees it. place: the listener's that took it."""

    __slots__ = ("_context", "_wall_clock", "place")

    def __init__(self, context: Any, place: Any, wall_clock: WallClock) -> None:
        self._context = context
        self._wall_clock = wall_clock
        self.place = place

    @property
    def peer(self) -> str:
        """The connection: address and port; all of one Unix socket are alike."""
        peer: str = self._context.peer()
        return peer

    @property
    def authorization(self) -> str | None:
        """The metadata of that name. Raises Unauthenticated: it came twice, so a proxy might have looked at another."""
        found = [value for key, value in self._context.invocation_metadata() or () if key == "authorization"]
        if len(found) > 1:
            raise Unauthenticated("authorization came twice; send one token")
        return found[0] if found and isinstance(found[0], str) else None

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None without one, and while nobody knows.

        The library keeps a deadline by the wall clock, and ends a call that is over by the monotonic one.
        """
        left_s: float | None = self._context.time_remaining()
        return None if left_s is None or self._wall_clock.was_stepped() else left_s

    def refuse(self, status: str, message: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        """End with a status other than OK. status: its name. What the method returns then is not sent."""
        self._context.set_code(grpc.StatusCode[status])
        self._context.set_details(message[:MAX_TEXT])
        if metadata:
            self._context.set_trailing_metadata(tuple(metadata))

    async def read(self) -> bytes | None:
        """The next message of a stream; None after the last."""
        message = await self._context.read()
        return message if isinstance(message, bytes) else None

    async def write(self, message: bytes) -> None:
        """Send one message of a stream, once the peer takes it."""
        await self._context.write(message)


Unary = Callable[[bytes, GrpcCall], Awaitable[bytes]]
Stream = Callable[[bytes | None, GrpcCall], Awaitable[None]]


class GrpcMethods(Protocol):
    """The served methods, by path. Thread: the transport's. None of them raises but CancelledError.

    unary: one message each way. answers: one message in, any number out; it is given as the first argument. streams:
    any number both ways; the first argument is None.
    """

    unary: Mapping[str, Unary]
    answers: Mapping[str, Stream]
    streams: Mapping[str, Stream]

    def beat(self) -> None:
        """Called at least each BEAT_S."""
        ...


Tls = tuple[bytes, bytes, bytes | None]
"""PEM bytes of certificate, key, and clients' authorities."""


@dataclass(frozen=True, slots=True)
class GrpcListener:
    """An address, `host:port` or `unix:/path`. place: what its calls carry."""

    address: str
    place: Any
    is_tls: bool = False


class GrpcTransport:
    """The servers of one door."""

    def __init__(
        self,
        listeners: Sequence[GrpcListener],
        methods: GrpcMethods,
        tls: Tls | None,
        *,
        max_message_bytes: int,
        max_connections: int,
    ) -> None:
        self._tls = tls
        self.ports: list[int] = []
        self._listeners = listeners
        self._methods = methods
        self._options = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.max_connection_idle_ms", IDLE_S * 1000),
            ("grpc.keepalive_time_ms", PING_S * 1000),
            ("grpc.keepalive_timeout_ms", PING_ANSWER_S * 1000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_INTERVAL_S * 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.server_handshake_timeout_ms", 10_000),
            # Two daemons on one port would share its connections.
            ("grpc.so_reuseport", 0),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._has_started = threading.Event()
        self._failed: BaseException | None = None
        self._posted: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def start(self) -> None:
        """Bind and answer from now on. Raises OSError for an address that cannot be bound."""
        self._thread = threading.Thread(target=self._run, name="edge-grpc", daemon=True)
        self._thread.start()
        self._has_started.wait()
        if self._failed is not None:
            self._thread.join()
            raise self._failed

    def use_tls(self, tls: Tls | None) -> None:
        """Show new connections another certificate. Whether clients need one stays as it was. Thread: any."""
        self._tls = tls

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is on the transport's thread."""
        return threading.current_thread() is self._thread

    def post(self, action: Callable[[], None]) -> None:
        """Run something on the thread, soon; nothing once it has stopped. Many posts wake it once. Thread: any."""
        self._posted.append(action)
        if not self._is_woken and self._loop is not None:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._run_posted)
            except RuntimeError:  # it has stopped
                self._posted.clear()

    def stop(self) -> None:
        """Send the answers that are there and close every connection. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._stop is None:
            return
        self.post(self._stop.set)
        thread.join()

    # ---- private: on the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._has_started.is_set():
                log.exception("gRPC has ended")
            self._failed = error
        finally:
            self._has_started.set()

    async def _serve(self) -> None:
        servers = []
        try:
            for listener in self._listeners:
                server = aio.server(options=self._options)
                servers.append(server)
                server.add_generic_rpc_handlers((_Handlers(self._methods, listener.place),))
                self.ports.append(self._bind(server, listener))
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            for server in servers:
                await server.start()
            self._has_started.set()
            while not self._stop.is_set():
                try:
                    await asyncio.wait_for(self._stop.wait(), BEAT_S)
                except asyncio.TimeoutError:
                    self._methods.beat()
        finally:
            for server in servers:
                await server.stop(FLUSH_S)

    def _bind(self, server: Any, listener: GrpcListener) -> int:
        """The bound port, 1 for a Unix socket. Raises OSError."""
        try:
            if not listener.is_tls:
                port: int = server.add_insecure_port(listener.address)
            else:
                assert self._tls is not None
                made = grpc.dynamic_ssl_server_credentials(
                    self._certificates(), self._certificates, require_client_authentication=self._tls[2] is not None
                )
                port = server.add_secure_port(listener.address, made)
        except RuntimeError as error:
            raise OSError(str(error)) from None
        return port

    def _certificates(self) -> Any:
        """The certificate for a new connection. Thread: any of the library's."""
        assert self._tls is not None
        certificate, key, ca = self._tls
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)

    def _run_posted(self) -> None:
        self._is_woken = False
        posted = self._posted
        while posted:
            try:
                posted.popleft()()
            except Exception:
                log.exception("a bug interrupted a call on the gRPC thread")


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the method of a path."""

    def __init__(self, methods: GrpcMethods, place: Any) -> None:
        wall_clock = WallClock()

        def unary(method: Unary) -> Any:
            async def answer(request: bytes, context: Any) -> bytes:
                return await method(request, GrpcCall(context, place, wall_clock))

            return grpc.unary_unary_rpc_method_handler(answer)

        def answers(method: Stream) -> Any:
            async def answer(request: bytes, context: Any) -> None:
                await method(request, GrpcCall(context, place, wall_clock))

            return grpc.unary_stream_rpc_method_handler(answer)

        def stream(method: Stream) -> Any:
            async def answer(_: Any, context: Any) -> None:
                await method(None, GrpcCall(context, place, wall_clock))

            return grpc.stream_stream_rpc_method_handler(answer)

        self._found = {
            **{path: unary(method) for path, method in methods.unary.items()},
            **{path: answers(method) for path, method in methods.answers.items()},
            **{path: stream(method) for path, method in methods.streams.items()},
        }

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a path; None: the library answers UNIMPLEMENTED."""
        return self._found.get(handler_call_details.method)
