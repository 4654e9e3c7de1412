"""The door: each connection's thread reads a line, the core answers it, and the answer is the next line back."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.door import drain
from edge_runtime.errors import ConfigError, DecodeFailed, EdgeRuntimeError
from edge_runtime.request.replies import JSON, json_encoding
from edge_runtime.request.request import Request
from edge_runtime.wire import json_codec


class LineReply:
    """The answer to one line. The core calls one of its methods, once, from any thread."""

    user_id, writes_text = "", True

    def __init__(self) -> None:
        self.line, self.request_id, self.encoding = b"", None, JSON
        self.is_there = threading.Event()

    def answer(self, request: Request) -> None:
        """Keep the outputs."""
        self._keep(self.encoding.answer(request, self.request_id))

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Keep the error, with its code."""
        self._keep(self.encoding.refusal(error, self.request_id))

    def result(self, result: Any) -> None:
        """Keep the result of another operation, such as `metadata`."""
        is_error = isinstance(result, EdgeRuntimeError)
        self._keep((self.encoding.refusal if is_error else self.encoding.result)(result, self.request_id))

    def _keep(self, frames: tuple[Any, ...]) -> None:
        self.line = bytes(frames[0]) + b"\n"
        self.is_there.set()


class LinesDoor:
    """The door as the daemon has it (edge_runtime.doors.door.Door), and the endpoint as requests see it."""

    is_control = False

    def __init__(self, context: DoorContext) -> None:
        self._settings = context.settings("lines")
        self.max_frame_bytes: int = self._settings.max_line_bytes
        self._frontend = context.new_frontend("lines", encoding=JSON)
        self._lock = threading.Lock()  # the frontend is one thread's at a time
        self._open: set[socket.socket] = set()
        self._server: socketserver.ThreadingTCPServer | None = None

    def start(self) -> None:
        """Bind, and answer from now on. Raises ConfigError."""
        host, _, port = self._settings.endpoint.rpartition(":")
        try:
            self._server = socketserver.ThreadingTCPServer((host, int(port)), self._serve)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"lines.endpoint: cannot bind {self._settings.endpoint!r}: {error}") from error
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="lines-door").start()

    def ready(self) -> None:
        """Nothing: it answers from the start on."""

    def reload(self) -> None:
        """Nothing: it reads no files."""

    def stop_admitting(self, limit_s: float) -> None:
        """Refuse new requests, and wait until the connections' threads do."""
        drain(self._call, self._frontend, limit_s)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            for connection in list(self._open):  # it waits for another line
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)
            server.server_close()  # waits for the connections' threads

    def status(self) -> Mapping[str, Any]:
        """Where it listens, in the result of `stats`."""
        return {} if self._server is None else {"lines": "{}:{}".format(*self._server.server_address[:2])}

    def sender(self, origin: socket.socket) -> Hashable:
        """Return whose queue a request joins: that of its connection."""
        return origin

    connection = sender

    def _call(self, function: Callable[[], None]) -> None:
        with self._lock:
            function()

    def _serve(self, connection: socket.socket, address: object, server: object) -> None:
        self._open.add(connection)
        with contextlib.suppress(OSError), connection.makefile("rwb") as file:
            while line := file.readline(self.max_frame_bytes + 1):
                file.write(self._answer(connection, line))
                file.flush()
        self._call(lambda: self._frontend.gone(connection))
        self._open.discard(connection)

    def _answer(self, connection: socket.socket, line: bytes) -> bytes:
        reply = LineReply()
        with self._lock, self._frontend.answering(reply):  # an error here becomes the reply
            if len(line) > self.max_frame_bytes:
                raise DecodeFailed(f"a line has more than {self.max_frame_bytes} bytes")
            asked = json_codec.unpack_json_request(line, json_codec.loads(line))
            reply.request_id, reply.encoding = asked.id, json_encoding(asked.elements)
            self._frontend.ask(self, connection, reply, asked.header, asked.arrays, None, reply.encoding)
        reply.is_there.wait()
        return reply.line
