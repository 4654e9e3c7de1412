"""A static HTTP server over a repository's `metadata/` and `targets/`, with Range, for trying it.

Serves regular files below these two folders and nothing else: no listing, no link, never `keys/`. Plain HTTP is enough,
since devices believe signatures only; in production any server or bucket does it better (deploy/repository).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from http import HTTPStatus
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import unquote, urlsplit

from edge_runtime.bounded_server import BoundedCalls, BoundedServer, ServerBounds
from edge_runtime.errors import PublishError

if TYPE_CHECKING:
    from typing_extensions import Self

SHOWN = ("metadata", "targets")

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{0,19})")
BOUNDS = ServerBounds(request_s=30.0, answer_s=inf, request_bytes=64 << 10)
"""A large file over a poor link takes any time, as long as some of it is taken each 30 s."""

_PIECE_BYTES = 1 << 18


class StaticServer:
    """The server of one repository. `serve` runs until `stop` (any thread) or an interrupt; leaving closes it."""

    def __init__(
        self, folder: Path, address: str = "127.0.0.1", port: int = 0, *, bounds: ServerBounds = BOUNDS
    ) -> None:
        """Listen. Raises PublishError: the address is not available."""

        class Handler(_Handler):
            root = folder.resolve()

        try:
            self._server = BoundedServer((address, port), Handler, bounds)
        except (OSError, OverflowError) as error:
            raise PublishError(f"{address}:{port}: cannot be listened on: {error}; give --bind and --port") from error

    @property
    def url(self) -> str:
        """Return the address, with "/" at its end."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/"

    def serve(self) -> None:
        """Answer requests until `stop` or an interrupt."""
        self._server.serve()

    def stop(self) -> None:
        """Make `serve` return."""
        self._server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.server_close()


class _Handler(BoundedCalls):
    root: Path

    def do_GET(self) -> None:  # noqa: N802 (the name is http.server's)
        self._answer(has_body=True)

    def do_HEAD(self) -> None:  # noqa: N802 (the name is http.server's)
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        self.begin_answer()
        try:
            descriptor = _open_below(self.root, unquote(urlsplit(self.path).path))
        except OSError:
            self._plain(HTTPStatus.NOT_FOUND)
            return
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            span = _span(self.headers.get("Range"), size)
            if span is None:
                self._plain(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"bytes */{size}")
                return
            start, end = span
            self.send_response(HTTPStatus.PARTIAL_CONTENT if end - start < size else HTTPStatus.OK)
            if end - start < size:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(end - start))
            # The timestamp changes under its name; all else has a version or a hash in it.
            is_fixed = not self.path.endswith("/timestamp.json")
            self.send_header("Cache-Control", "max-age=31536000, immutable" if is_fixed else "no-cache")
            self.end_headers()
            if has_body:
                self._send(file, start, end)

    def _send(self, file: BinaryIO, start: int, end: int) -> None:
        file.seek(start)
        left = end - start
        with contextlib.suppress(OSError):  # the client has left
            while left and (piece := file.read(min(left, _PIECE_BYTES))):
                self.wfile.write(piece)
                left -= len(piece)
        self.close_connection = self.close_connection or bool(left)

    def _plain(self, status: HTTPStatus, content_range: str | None = None) -> None:
        self.send_response(status)
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _open_below(root: Path, path: str) -> int:
    """Open a served file, part by part, so that no link is followed. Raises OSError: there is no such file."""
    parts = path.removeprefix("/").split("/")
    if parts[0] not in SHOWN or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise FileNotFoundError(path)
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts:
        try:
            below = os.open(part, _FLAGS, dir_fd=at)
        finally:
            os.close(at)
        at = below
    if not stat.S_ISREG(os.fstat(at).st_mode):
        os.close(at)
        raise FileNotFoundError(path)
    return at


def _span(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the first byte and the end; None: the file has no such range. A header of several ranges is ignored."""
    match = _RANGE.fullmatch(header or "")
    if match is None:
        return 0, size
    start, end = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
    if start >= size:
        return None
    return (start, end) if start < end else (0, size)
