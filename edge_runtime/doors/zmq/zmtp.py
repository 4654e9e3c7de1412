"""ZMTP as a server speaks it, without I/O: greeting, handshake, frames.

Versions 3.0 and 3.1 (rfc.zeromq.org/spec/23, /spec/37), and 2.0 (/spec/15), which older clients speak. The mechanism is
NULL; curve.py has CURVE. Owns: the bytes of a connection up to its first frame, and how a frame is written.
transport.py cuts messages, on its lean path. Thread: any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame: another one follows; eight bytes of length; a command."""

COMMAND_BYTES = 64 << 10
"""Of one command: those of a handshake have some hundred bytes, and properties as a client likes."""

TTL_S = 0.1
"""Unit of the time to live that a PING names."""

_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_GREETING_BYTES = 64
_REVISION_2 = 1
"""How ZMTP 2.0 calls itself."""

_MECHANISM = slice(12, 32)
_PEERS = {b"DEALER": 5, b"REQ": 3, b"ROUTER": 6}
"""Kinds of sockets that talk to a ROUTER, and their numbers in ZMTP 2.0."""

SHORT_LAST, SHORT_MORE = ([bytes((flags, size)) for size in range(256)] for flags in (0, MORE))
"""Heads of short frames, by their size."""


class ZmtpError(Exception):
    """A peer that does not speak the protocol, or may not: its connection ends. reply: bytes for it before that."""

    def __init__(self, text: str, reply: bytes = b"") -> None:
        super().__init__(text)
        self.reply = reply


def frame_head(flags: int, size: int) -> bytes:
    """Return the bytes before a frame's own. flags: MORE, COMMAND or 0."""
    if size < 256:
        if flags == MORE:
            return SHORT_MORE[size]
        return bytes((flags, size)) if flags else SHORT_LAST[size]
    return bytes((flags | LONG,)) + size.to_bytes(8, "big")


def message(frames: Sequence[Any]) -> list[Any]:
    """Return the parts of a message: heads, and frames as they are."""
    parts: list[Any] = []
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        size = len(frame)
        if size < 256:
            parts.append(SHORT_MORE[size] if index < last else SHORT_LAST[size])
        else:
            parts.append(frame_head(MORE if index < last else 0, size))
        parts.append(frame)
    return parts


def cut_frame(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Return flags, begin and end of the frame at a place; None while its head is not whole. The end may lie beyond."""
    flags = data[at]
    if flags & LONG:
        if len(data) < at + 9:
            return None
        begin = at + 9
        return flags, begin, begin + int.from_bytes(data[at + 1 : begin], "big")
    if len(data) < at + 2:
        return None
    return flags, at + 2, at + 2 + data[at + 1]


def command(name: bytes, body: bytes) -> bytes:
    """Return a whole command frame."""
    return frame_head(COMMAND, 1 + len(name) + len(body)) + bytes((len(name),)) + name + body


def cut_command(body: bytes) -> tuple[bytes, bytes]:
    """Return a command's name and the bytes behind it. Raises ZmtpError."""
    end = 1 + body[0] if body else 0
    if end < 2 or end > len(body):
        raise ZmtpError("a command without a name")
    return body[1:end], body[end:]


def properties(of: Mapping[bytes, bytes]) -> bytes:
    """Return properties as READY carries them."""
    return b"".join(bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value for name, value in of.items())


def read_properties(data: bytes) -> dict[bytes, bytes]:
    """Read the properties of a peer, their names in small letters. Raises ZmtpError."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        begin = at + 1 + data[at]
        end = begin + 4 + int.from_bytes(data[begin : begin + 4], "big")
        if begin + 4 > len(data) or end > len(data):
            raise ZmtpError("properties that end in the middle")
        found[data[at + 1 : begin].lower()] = data[begin + 4 : end]
        at = end
    return found


def check_peer(greeting: Mapping[bytes, bytes]) -> bytes:
    """Return the identity that a peer chose, b"" for none, from its properties. Raises ZmtpError."""
    kind = greeting.get(b"socket-type", b"")
    if kind not in _PEERS:
        raise ZmtpError(f"a {kind[:20].decode('ascii', 'replace') or 'nameless'} socket; wanted DEALER, REQ or ROUTER")
    return greeting.get(b"identity", b"")[:255]


OURS = properties({b"Socket-Type": b"ROUTER", b"Identity": b""})
"""The properties that a server sends."""


class Sealing(Protocol):
    """The security of one connection, once its handshake is over."""

    def seal(self, frames: Sequence[Any]) -> list[Any]:
        """Return the parts of an encrypted message."""
        ...

    def seal_command(self, body: bytes) -> list[Any]:
        """Return the parts of an encrypted command."""
        ...

    def open(self, frame: bytes) -> tuple[int, bytes]:
        """Return flags and bytes of a frame that came. Raises ZmtpError."""
        ...


class Mechanism(Protocol):
    """The security handshake of one connection."""

    name: bytes
    has_server: bool

    def begin(self) -> bytes:
        """Return the bytes that go out behind the greeting."""
        ...

    def take(self, name: bytes, body: bytes) -> bytes:
        """Take a command; return the bytes that go out. Raises ZmtpError, whose `reply` goes out before the end."""
        ...

    @property
    def identity(self) -> bytes | None:
        """The identity that the peer chose; None while the handshake is not over."""
        ...

    @property
    def sealing(self) -> Sealing | None:
        """The encryption from here on; None without."""
        ...


class Null:
    """No security: each side says READY."""

    name = b"NULL"
    has_server = False
    sealing = None

    def __init__(self) -> None:
        self.identity: bytes | None = None

    def begin(self) -> bytes:
        """Say READY at once, as the other side does."""
        return command(b"READY", OURS)

    def take(self, name: bytes, body: bytes) -> bytes:
        """Take the peer's READY."""
        if name != b"READY":
            raise ZmtpError(f"{name[:20].decode('ascii', 'replace')} in place of READY")
        self.identity = check_peer(read_properties(body))
        return b""


class ZmtpHandshake:
    """A connection from its first byte to its first frame.

    identity: that the peer chose, b"" for none; None until the handshake is over. rest: the bytes that came behind it.
    sealing: encrypts from then on.
    """

    begins = _SIGNATURE + b"\x03"
    """Sent as soon as a connection is there. The next bytes depend on the peer's version."""

    def __init__(self, mechanism: Mechanism) -> None:
        self.identity: bytes | None = None
        self.sealing: Sealing | None = None
        self.rest = b""
        self._mechanism = mechanism
        self._is_greeted = self._is_told = False

    def take(self, data: bytes) -> bytes:
        """Take the bytes that came; return those that go out. Raises ZmtpError."""
        self.rest += data
        out = b""
        if not self._is_greeted:
            out = self._greet()
        while self._is_greeted and self.identity is None and self.rest:
            found = cut_frame(self.rest, 0)
            if found is None:
                break
            flags, begin, end = found
            if end - begin > COMMAND_BYTES:
                raise ZmtpError("a command over its limit")
            if len(self.rest) < end:
                break
            body, self.rest = self.rest[begin:end], self.rest[end:]
            out += self._take_frame(flags, body)
        return out

    def _greet(self) -> bytes:
        """Read a greeting, and return the rest of ours."""
        data = self.rest
        if (data and data[0] != _SIGNATURE[0]) or (len(data) > 9 and not data[9] & 1):
            raise ZmtpError("no greeting of ZMTP 2.0 or later")
        if len(data) < 11:
            return b""
        if data[10] < 3:
            return self._greet_2(data)
        out = b""
        if not self._is_told:
            self._is_told = True
            own = self._mechanism
            out = b"\x01" + own.name.ljust(20, b"\0") + bytes((own.has_server,)) + bytes(31)
        if len(data) < _GREETING_BYTES:
            return out
        name = data[_MECHANISM].rstrip(b"\0")
        if name != self._mechanism.name:
            theirs, ours = (each.decode("ascii", "replace") for each in (name, self._mechanism.name))
            raise ZmtpError(f"mechanism {theirs}; wanted {ours}")
        self._is_greeted = True
        self.rest = data[_GREETING_BYTES:]
        return out + self._mechanism.begin()

    def _greet_2(self, data: bytes) -> bytes:
        """Read a greeting of ZMTP 2.0: the kind of socket follows its revision, then the identity as a frame."""
        if data[10] != _REVISION_2 or not isinstance(self._mechanism, Null):
            raise ZmtpError(f"ZMTP revision {data[10]}; wanted 2.0 or later, and 3.0 with CURVE")
        if len(data) < 12:
            return b""
        if data[11] not in _PEERS.values():
            raise ZmtpError(f"a socket of kind {data[11]}; wanted DEALER, REQ or ROUTER")
        self._is_greeted = True
        self.rest = data[12:]
        return bytes((_PEERS[b"ROUTER"],)) + frame_head(0, 0)

    def _take_frame(self, flags: int, body: bytes) -> bytes:
        if not self._is_told:  # ZMTP 2.0
            if flags or len(body) > 255:
                raise ZmtpError("a long identity")
            self.identity = body
            return b""
        if not flags & COMMAND:
            raise ZmtpError("a message before the end of the handshake")
        name, rest = cut_command(body)
        if name == b"ERROR":
            raise ZmtpError("the client ended the handshake")
        out = self._mechanism.take(name, rest)
        self.identity, self.sealing = self._mechanism.identity, self._mechanism.sealing
        return out
