"""A real HTTP server on 127.0.0.1 for files that tests make, which notes every request and misbehaves on order."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Request:
    """One request as it came: `path` without the leading "/", still quoted."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def start(self) -> int:
        """The byte that the client wants to begin at."""
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(match[1]) if match else 0


@dataclass
class Answer:
    """What to send. `body` may be many pieces, made while they are sent; `headers` are sent as they are."""

    status: int = 200
    body: bytes | Iterable[bytes] = b""
    headers: dict[str, str] = field(default_factory=dict)
    says_length: bool = True


class HttpServer:
    """Serves `find(path)`; None is a 404. `answer`, where set, may take a request over: None leaves it to `find`."""

    def __init__(self, find: Callable[[str], bytes | None], *, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.find = find
        self.answer: Callable[[Request], Answer | None] = lambda _request: None
        self.has_ranges = True
        self.requests: list[Request] = []

    @property
    def url(self) -> str:
        """The address of the root, with "/" at its end."""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://127.0.0.1:{self._server.server_address[1]}/"

    @property
    def paths(self) -> list[str]:
        """What was asked for, in order."""
        return [request.path for request in self.requests]

    def start(self) -> Self:
        """Listen on a free port."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner._respond(self)

            def do_HEAD(self) -> None:
                owner._respond(self)

            def log_message(self, *_args: object) -> None:
                """Nothing on the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
            # A client that turns away during the handshake is not an error of the server.
            self._server.handle_error = lambda *_args: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="http-server")
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop listening and wait for what is being sent. Idempotent."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _respond(self, handler: BaseHTTPRequestHandler) -> None:
        request = Request(handler.command, handler.path.lstrip("/"), dict(handler.headers))
        self.requests.append(request)
        answer = self.answer(request) or self._file(request)
        pieces = [answer.body] if isinstance(answer.body, bytes) else answer.body
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        if answer.says_length and isinstance(answer.body, bytes) and "Content-Length" not in answer.headers:
            handler.send_header("Content-Length", str(len(answer.body)))
        try:
            handler.end_headers()
            for piece in pieces:
                handler.wfile.write(piece)
        except OSError:
            pass  # the client has had enough, which is what many a test is about
        handler.close_connection = True

    def _file(self, request: Request) -> Answer:
        data = self.find(request.path)
        if data is None:
            return Answer(404, b"not here")
        if self.has_ranges and "Range" in request.headers:
            if request.start >= len(data):
                return Answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            where = f"bytes {request.start}-{len(data) - 1}/{len(data)}"
            return Answer(206, data[request.start :], {"Content-Range": where})
        return Answer(200, data)
