"""A client of HTTP/2 in bytes: frames written out, whatever they say, and what came back taken apart.

Contract: tests/unit/doors/grpc/test_http2.py holds `Http2` against it, tests/attacks/test_hostile_grpc.py a daemon.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hpack import Decoder
from hpack.hpack import encode_integer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 1, 1, 4, 8, 0x20
INFER = "/inference.GRPCInferenceService/ModelInfer"


class Frame(NamedTuple):
    """One frame. payload: its bytes; of headers, the fields as pairs of text."""

    kind: int
    flags: int
    number: int
    payload: Any


def frame(kind: int, flags: int = 0, number: int = 0, payload: bytes = b"") -> bytes:
    """A frame's bytes."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, number) + payload


def settings(values: Mapping[int, int] = {}) -> bytes:
    """A frame of settings, by number."""
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", *each) for each in values.items()))


def window(count: int, number: int = 0) -> bytes:
    """A frame that lets the peer send more."""
    return frame(WINDOW, 0, number, struct.pack(">I", count))


BEGIN = PREFACE + settings()


def field(name: str | bytes, value: str | bytes, first: int = 0) -> bytes:
    """A header, written out (RFC 7541, 6.2). first: 0 keeps it out of the table, 0x40 adds it."""
    texts = [each.encode() if isinstance(each, str) else each for each in (name, value)]
    return bytes((first,)) + b"".join(bytes(encode_integer(len(each), 7)) + each for each in texts)


def block(path: str = INFER, more: Iterable[tuple[str, str]] = (), **changes: str | None) -> bytes:
    """The headers of a call. changes: of those that each call has, None: without it; `_` stands for `-` and `:`."""
    fields: dict[str, str | None] = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers",
        "content-type": "application/grpc",
    }  # fmt: skip
    for name, value in changes.items():
        key = name.replace("_", "-")
        fields[f":{key}" if f":{key}" in fields else key] = value
    return b"".join(field(name, value) for name, value in (*fields.items(), *more) if value is not None)


def message(data: bytes, flag: int = 0) -> bytes:
    """A message of gRPC in DATA."""
    return bytes((flag,)) + struct.pack(">I", len(data)) + data


def call(number: int, data: bytes = b"", headers: bytes | None = None) -> bytes:
    """A whole call with one message."""
    head = frame(HEADERS, END_HEADERS, number, block() if headers is None else headers)
    return head + frame(DATA, END_STREAM, number, message(data))


class Replies:
    """Takes what a server sends apart, as one connection's."""

    def __init__(self) -> None:
        self._rest = b""
        self._decoder = Decoder()

    def take(self, data: bytes) -> list[Frame]:
        """The frames that are whole now."""
        self._rest += data
        found = []
        while len(self._rest) >= 9:
            length = int.from_bytes(self._rest[:3], "big")
            if len(self._rest) < 9 + length:
                break
            kind, flags, number = struct.unpack(">BBI", self._rest[3:9])
            payload: Any = self._rest[9 : 9 + length]
            self._rest = self._rest[9 + length :]
            if kind == HEADERS:
                payload = [(str(name), str(value)) for name, value in self._decoder.decode(payload)]
            found.append(Frame(kind, flags, number, payload))
        return found
