"""Header blocks of HTTP/2: the meaning of a call's headers, and the headers and trailers of its answer.

Owns: HPACK (by hpack, for blocks that are not known), which calls are refused for their headers, and percent-encoding.
http2.py has the frames. The dynamic table of HPACK belongs to the sender: a block that came before means the same only
as long as no block changed that table since. This side's own blocks use no table. RFC 7541; gRPC's PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable
from msgspec import Struct

from edge_runtime.telemetry.tracing import TRACEPARENT, TraceParent, read_traceparent

MAX_METADATA_BYTES = 16 << 10
"""Headers of one call: as the HTTP door. A call with more is refused."""

MAX_BLOCK_BYTES, MAX_DECODED_BYTES = 256 << 10, 64 << 10
"""A header block with more, as sent or as decoded, ends its connection: its changes of the table are lost."""

SKIPPED_BYTES = 16 << 10
"""A longer text is not decoded: its call is refused, and no table holds it, as it was before it was packed."""

MAX_TEXT = 1024
"""Characters of an error's text: clients refuse trailers of more than 8 KiB, and each may take 9 bytes there."""

KNOWN_BLOCKS, KNOWN_BLOCK_BYTES = 256, 1 << 10
"""Header blocks that one connection has known by their bytes, and the longest of them."""

COST_FIELDS, COST_BYTES = 4, 32
"""Of a block that is read anew, that take some 8 us: one of credit, as http2.MOST_CREDIT has it."""

PROTOCOL_ERROR, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 1, 9, 11

REQUEST_FIELDS = frozenset((b":method", b":scheme", b":path", b":authority"))
"""The fields by which a request names itself, before its other headers (RFC 9113, 8.3.1)."""

CONNECTION_FIELDS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
"""Of HTTP/1.1's connections: a request with one is malformed (RFC 9113, 8.2.2)."""

STATUSES = {
    name: number
    for number, name in enumerate((
        "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
        "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
        "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
    ))
}  # fmt: skip
"""Statuses of gRPC, by name."""

ENCODINGS = ("identity", "deflate", "gzip")

TABLE_BYTES = 4096
"""The size of a table that a peer keeps unless it says otherwise."""

EMPTY_TABLE = b"\x20"
"""Before a block: the sender's table is empty (RFC 7541, 6.3)."""

_TIMEOUT = re.compile(rb" *([0-9]{1,9}) *([HMSmun]) *")
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_NAME = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2,3}={0,2})?(?:,[A-Za-z0-9+/]*={0,2})*")


class Http2Error(Exception):
    """Ends the connection of a peer. code: of GOAWAY."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class ServedMethod(Protocol):
    """A served method."""

    @property
    def is_stream(self) -> bool:
        """Whether a call sends any number of messages; else it sends one."""
        ...

    @property
    def room(self) -> Callable[[Any, bytes, int], memoryview | None] | None:
        """Gives memory for a large message of a call, of which the first bytes and the length are known; None: any."""
        ...


class CallHead(Struct, frozen=True):
    """The headers of a call.

    method: the finder's, of its path. authorization: None where there is none; authorizations: how many. code: of the
    reset that answers it, 0: none. status, text: of its refusal, "": none. traceparent: the span of its caller.
    """

    method: Any = None
    is_stream: bool = False
    timeout_s: float | None = None
    encoding: str = "identity"
    authorization: str | None = None
    authorizations: int = 0
    code: int = 0
    status: str = ""
    text: str = ""
    traceparent: TraceParent | None = None


class HeadReader:
    """Reads the blocks of one connection, in their order.

    find: the method of a path. known: heads by their blocks. cost: of the last block that was read, in credit.
    """

    def __init__(self, find: Callable[[str], ServedMethod | None]) -> None:
        self.known: dict[bytes, CallHead] = {}
        self.cost = 0
        self._find = find
        self._table = _CountedTable()
        self._decoder = Decoder(MAX_DECODED_BYTES)
        self._decoder.header_table = self._table

    def read(self, block: bytes) -> CallHead:
        """Read a block that is not known. Raises Http2Error: the table cannot be known any more."""
        before = self._table.changes
        if len(block) > SKIPPED_BYTES:
            block = without_long_texts(block)
        try:
            fields: list[tuple[bytes, bytes]] = list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            raise Http2Error(ENHANCE_YOUR_CALM, f"headers of over {MAX_DECODED_BYTES} bytes") from None
        except (HPACKError, IndexError, ValueError) as error:
            raise Http2Error(COMPRESSION_ERROR, f"headers cannot be read: {error}"[:200]) from None
        self.cost = len(fields) // COST_FIELDS + len(block) // COST_BYTES
        head = _read_head(fields, self._find)
        if self._table.changes != before or block[:1] in _RESIZES:
            # Invariant: a block is known by its bytes only while the table is what it was when it was read.
            self.known.clear()
        elif len(block) <= KNOWN_BLOCK_BYTES:
            if len(self.known) >= KNOWN_BLOCKS:
                self.known.clear()
            self.known[block] = head
        return head


def without_long_texts(block: bytes) -> bytes:
    """A block with a short stand-in for each text that is too long, which means the same to the table (RFC 7541, 6).

    Bytes that are not a block are returned as they are.
    """
    parts: list[bytes] = []
    at = begin = 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0x80:
                _, at = _number(block, at, 7)
                continue
            bits = 6 if first & 0x40 else 5 if first & 0x20 else 4
            index, at = _number(block, at, bits)
            for _ in range(0 if bits == 5 else 1 if index else 2):
                text = at
                length, at = _number(block, at, 7)
                at += length
                if length > SKIPPED_BYTES:
                    parts += (block[begin:text], _STAND_IN)
                    begin = at
    except (IndexError, ValueError):
        return block
    return b"".join((*parts, block[begin:])) if at == len(block) else block


def _number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number of HPACK's, and where it ends (RFC 7541, 5.1). Raises IndexError, ValueError."""
    most = (1 << bits) - 1
    number, at = block[at] & most, at + 1
    if number < most:
        return number, at
    for shift in range(0, 29, 7):
        byte = block[at]
        number, at = number + ((byte & 0x7F) << shift), at + 1
        if byte < 0x80:
            return number, at
    raise ValueError("a number that is too long")


class _CountedTable(HeaderTable):
    """HPACK's table of a peer, and how often it got an entry."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        """Add an entry."""
        self.changes += 1
        super().add(name, value)


_RESIZES = frozenset(bytes((first,)) for first in range(0x20, 0x40))
"""First bytes of blocks that change the size of the table, which only their beginning may."""


_TRACEPARENT = TRACEPARENT.encode()


def _read_head(fields: Sequence[tuple[bytes, bytes]], find: Callable[[str], ServedMethod | None]) -> CallHead:
    if sum(len(name) + len(value) + 32 for name, value in fields) > MAX_METADATA_BYTES:
        return CallHead(status="RESOURCE_EXHAUSTED", text=f"metadata has over {MAX_METADATA_BYTES} bytes")
    found: dict[bytes, bytes] = {}
    authorizations = 0
    for name, value in fields:
        if name in CONNECTION_FIELDS or (name[:1] == b":" and not _may_follow(name, found)):
            return CallHead(code=PROTOCOL_ERROR)
        if name[:1] != b":" and not _NAME.fullmatch(name):
            return _refused("INTERNAL", f"Illegal header key: {_brief(name)}")
        if name.endswith(b"-bin") and not _BASE64.fullmatch(value):
            return _unread(name, ": illegal base64 encoding")
        authorizations += name == b"authorization"
        found[name] = value if name != _TRACEPARENT or name not in found else b"%s, %s" % (found[name], value)
    is_whole = bool(found.get(b":path")) and all(name in found for name in (b":scheme", b"te"))
    if found.get(b":method") != b"POST" or not is_whole or not (b":authority" in found or b"host" in found):
        return CallHead(code=PROTOCOL_ERROR)
    return _read_call(found, authorizations, find)


def _may_follow(name: bytes, found: dict[bytes, bytes]) -> bool:
    """Whether a request may say this of itself behind what it said."""
    return name in REQUEST_FIELDS and name not in found and found.keys() <= REQUEST_FIELDS


def _read_call(found: dict[bytes, bytes], authorizations: int, find: Callable[[str], ServedMethod | None]) -> CallHead:
    """The head of a call that has all that it needs."""
    timeout = found.get(b"grpc-timeout")
    parts = None if timeout is None else _TIMEOUT.fullmatch(timeout)
    encoding = _text(found.get(b"grpc-encoding", b"identity"))
    method = find(_text(found[b":path"]))
    if found[b"te"] != b"trailers":
        return _unread(b"te")
    if timeout is not None and parts is None:
        return _unread(b"grpc-timeout")
    if encoding not in ENCODINGS:
        return _unread(b"grpc-encoding")
    if method is None:
        return _refused("UNIMPLEMENTED", "Method not found!")
    timeout_s = None if parts is None else int(parts[1]) * _UNITS_S[parts[2]]
    if timeout_s == 0:
        return _refused("DEADLINE_EXCEEDED", "Deadline Exceeded")
    authorization, traceparent = found.get(b"authorization"), found.get(_TRACEPARENT)
    return CallHead(
        method,
        method.is_stream,
        timeout_s,
        encoding,
        None if authorization is None else _text(authorization),
        authorizations,
        traceparent=None if traceparent is None else read_traceparent(_text(traceparent)),
    )


def _refused(status: str, text: str) -> CallHead:
    return CallHead(status=status, text=text)


def _unread(name: bytes, more: str = "") -> CallHead:
    return _refused("INTERNAL", f"Error parsing '{_brief(name)}' metadata{more}")


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _brief(name: bytes) -> str:
    return _text(name[:80])


# ---- written --------------------------------------------------------------------------------------------------------


def trailers(status: str, text: str, metadata: Iterable[tuple[str, str]]) -> bytes:
    """The trailers of a call that ended with an error. status: its name; text: of any characters."""
    block = _field(b"grpc-status", b"%d" % STATUSES[status])
    if text:
        block += _field(b"grpc-message", _percent_encoded(text[:MAX_TEXT]))
    return block + b"".join(_field(name.encode(), value.encode()) for name, value in metadata)


def trailer(name: str, value: str) -> bytes:
    """One more field of trailers."""
    return _field(name.encode(), value.encode())


def _percent_encoded(text: str) -> bytes:
    """A status message: printable ASCII but "%" as it is."""
    data = text.encode(errors="replace")
    return _ENCODED.sub(lambda found: b"%%%02X" % found[0][0], data)


_ENCODED = re.compile(rb"[^ -$&-~]")


def _field(name: bytes, value: bytes) -> bytes:
    """A header, written out and kept out of the peer's table (RFC 7541, 6.2.2)."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(number: int) -> bytes:
    """A length as HPACK writes it (RFC 7541, 5.1)."""
    if number < 127:
        return bytes((number,))
    parts = bytearray((127,))
    number -= 127
    while number >= 128:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


_STAND_IN = _length(MAX_METADATA_BYTES) + b"x" * MAX_METADATA_BYTES
"""A text in place of one that is too long: neither fits into a call's headers, nor into a table."""

OPEN_BLOCK_ALONE = b"\x88\x0f\x10" + _length(len(b"application/grpc")) + b"application/grpc"
""":status 200 (entry 8 of HPACK's own table) and content-type (31): before the trailers of a call without messages."""

OPEN_BLOCK = OPEN_BLOCK_ALONE + _field(b"grpc-accept-encoding", ", ".join(ENCODINGS).encode())
"""Before messages."""

OK_BLOCK = _field(b"grpc-status", b"0")
"""The trailers of a call that ended well."""
