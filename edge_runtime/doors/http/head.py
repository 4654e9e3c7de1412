"""Heads and chunked bodies of HTTP/1.1: what is a request, and what two readers would read differently.

Owns: every rule of request lines, headers and chunks; the only user of httptools (llhttp). Pure: bytes in, values out,
or a BadMessage. Thread: any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools

from edge_runtime.errors import DecodeFailed

MAX_HEAD_BYTES = 16 << 10
"""Request line and headers together: as nginx and Node."""

MAX_CHUNK_LINE_BYTES = 4 << 10
"""A chunk's size with its extensions, or a line of the trailer; the whole trailer may be a head's length."""


class BadMessage(DecodeFailed):
    """Bytes of a peer that are not a request to be served; its connection is closed. status: of the response."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class HttpHead:
    """A request line and its headers, checked. Equal heads of any connection are one object.

    headers: by name in lower case. length: of the body, 0 without one. is_plain: the connection goes on after it, and
    its response is sent as it is. takes_chunks: its response may come in parts. meaning: the receiver's, made once.
    body_shift: the byte of the body that is to lie aligned. adds: headers of every response to it, each with its line's
    end.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    length: int
    is_chunked: bool
    keeps_alive: bool
    is_old: bool
    expects_continue: bool
    is_plain: bool
    takes_chunks: bool
    meaning: Any = None
    body_shift: int = 0
    adds: bytes = b""


@dataclass(slots=True)
class _HeadEvents:
    """The parser's events of a head."""

    url: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    is_complete: bool = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


_ONCE = frozenset(("host", "content-length", "authorization", "origin"))
"""Headers that a request has at most once: two of them are read differently by proxies."""


def parse_head(raw: bytes) -> HttpHead:
    """Check a request line and its headers up to the empty line. Pure. Raises BadMessage.

    llhttp refuses heads that smuggle: two lengths, a length beside a transfer encoding, folded lines, bare line feeds.
    """
    events = _HeadEvents()
    parser = httptools.HttpRequestParser(events)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # an offer to change the protocol, which is not taken
    except httptools.HttpParserError as error:
        raise BadMessage(f"not HTTP/1.1: {error}") from None
    version = parser.get_http_version()
    method = parser.get_method().decode("ascii")
    if not events.is_complete or version not in {"1.0", "1.1"}:
        raise BadMessage("not HTTP/1.1: wanted a request line and headers", 505 if events.is_complete else 400)
    headers: dict[str, str] = {}
    for raw_name, raw_value in events.headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1").strip()
        if name in headers:
            if name in _ONCE:
                raise BadMessage(f"the header {name} came twice")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    is_old = version == "1.0"
    if "host" not in headers and not is_old:
        raise BadMessage("the header Host is missing")
    coding = headers.get("transfer-encoding")
    if coding is not None and (is_old or coding.lower() != "chunked"):
        raise BadMessage(f"Transfer-Encoding: got {coding[:40]!r}, wanted chunked", 400 if is_old else 501)
    expect = headers.get("expect", "").lower()
    if expect not in {"", "100-continue"}:
        raise BadMessage(f"Expect: got {expect[:40]!r}, wanted 100-continue", 417)
    target = events.url.decode("ascii", "replace")
    if not target.startswith("/"):
        raise BadMessage(f"got the target {target[:40]!r}, wanted a path", 404 if "://" in target else 400)
    path, _, query = target.partition("#")[0].partition("?")
    connection = {each.strip() for each in headers.get("connection", "").lower().split(",")}
    keeps_alive = "keep-alive" in connection if is_old else "close" not in connection
    return HttpHead(
        method,
        path,
        query,
        headers,
        length=int(headers.get("content-length", 0)),
        is_chunked=coding is not None,
        keeps_alive=keeps_alive,
        is_old=is_old,
        expects_continue=bool(expect) and not is_old,
        is_plain=keeps_alive and not is_old and method != "HEAD",
        takes_chunks=not is_old and method != "HEAD",
    )


def check_beginning(raw: bytes) -> None:
    """Raise BadMessage for the beginning of a head that cannot become one."""
    try:
        httptools.HttpRequestParser(_HeadEvents()).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise BadMessage(f"not HTTP/1.1: {error}") from None


class ChunkedBody:
    """Takes a chunked body apart. data: its bytes that came. is_complete: its end was there.

    The parser is fed line by line between chunks, so that it ends where the body does: it reports no position.
    """

    def __init__(self, head: bytes, max_bytes: int) -> None:
        self.data = bytearray()
        self.is_complete = False
        self._max_bytes = max_bytes
        self._line = b""
        self._left = 0
        self._has_size = False
        self._is_trailer = False
        self._trailer_bytes = 0
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(head)

    def on_chunk_header(self) -> None:
        """A chunk's size was read."""
        self._has_size = True

    def on_body(self, body: bytes) -> None:
        """A part of a chunk."""
        self.data += body

    def on_message_complete(self) -> None:
        """The body's end."""
        self.is_complete = True

    def take(self, data: bytes) -> bytes:
        """Take new bytes; return those that follow the body's end. Raises BadMessage."""
        at = 0
        while at < len(data) and not self.is_complete:
            if self._left:
                piece = data[at : at + self._left]
                self._feed(piece)
                self._left -= len(piece)
                at += len(piece)
                continue
            end = data.find(b"\n", at) + 1
            line = self._line + (data[at:end] if end else data[at:])
            self._trailer_bytes += len(line) if self._is_trailer else 0
            if len(line) > MAX_CHUNK_LINE_BYTES or self._trailer_bytes > MAX_HEAD_BYTES:
                raise BadMessage("a chunk's size, or the trailer, is too long", 431)
            if not end:
                self._line = line
                return b""
            self._line, at = b"", end
            self._take_line(line)
        return data[at:]

    def _take_line(self, line: bytes) -> None:
        self._has_size = False
        self._feed(line)
        if not self._has_size:
            return
        size = int(line.partition(b";")[0], 16)  # checked by the parser just now
        if len(self.data) + size > self._max_bytes:
            raise too_large(len(self.data) + size, self._max_bytes)
        self._left = size + 2 if size else 0
        self._is_trailer = not size

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BadMessage(f"not a chunked body: {error}") from None


def too_large(nbytes: int, max_bytes: int) -> BadMessage:
    """The error of a body over the bound."""
    return BadMessage(
        f"request body of {nbytes} bytes exceeds the maximum allowed input size of {max_bytes} bytes; "
        "raise max_body_bytes",
        413,
    )
