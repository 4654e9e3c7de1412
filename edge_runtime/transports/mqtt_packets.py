"""MQTT packets, many to a system call: what a broker sends is cut here, and what goes to it leaves together.

Owns: bytes read and not cut yet, bytes written and not sent yet. paho reads each packet with four calls, makes two
dictionaries for the properties of each, and sends each with a call of its own: two thirds of what a small request cost,
and more than twice the rate without. It still says all that a session needs; only messages pass it by. Knows no broker
and no model. Thread: the connection's owner.
"""

from __future__ import annotations

import socket as sockets
import ssl
from dataclasses import dataclass

READ_BYTES = 16 << 10
"""Of one read: some ninety small requests. More would wait here, where nobody counts or drops it."""

LARGEST_READ_BYTES = 256 << 10
"""Of one read while a large packet is under way."""

MAX_USER_PROPERTIES = 64
"""Of one message that are kept; the others are passed over. Three mean something (wire v1)."""

PUBLISH = 0x30
_FIXED_BYTES = {0x01: 1, 0x02: 4, 0x23: 2}
_EXPIRY, _CONTENT_TYPE, _RESPONSE_TOPIC, _CORRELATION, _SUBSCRIPTION, _USER = 0x02, 0x03, 0x08, 0x09, 0x0B, 0x26
_WITH_LENGTH = frozenset((_CONTENT_TYPE, _RESPONSE_TOPIC, _CORRELATION, _USER))
"""Identifiers of properties (MQTT 5, 2.2.2.2); these begin with a length."""


@dataclass(slots=True)
class Inbound:
    """One message that came, with what MQTT 5 says beside it."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    response_topic: str | None = None
    correlation: bytes | None = None
    content_type: str | None = None
    expiry_s: int | None = None
    user_properties: tuple[tuple[str, str], ...] = ()


class PacketSocket:
    """What paho takes for its socket. Nothing blocks; `send` only keeps, and `flush` sends."""

    def __init__(self, socket: sockets.socket, max_packet_bytes: int) -> None:
        self._socket = socket
        self._max_packet_bytes = max_packet_bytes
        self._read = bytearray()
        self._at = 0
        self._end_for_paho = 0
        self._unsent = bytearray()
        self._has_ended = False
        self._error: OSError | None = None

    # ---- what paho calls --------------------------------------------------------------------------------------------

    def recv(self, count: int) -> bytes:
        """Bytes of the packet that is paho's, or none when the connection ended. Raises BlockingIOError without one."""
        begin = self._at
        if begin < self._end_for_paho:
            self._at = min(begin + count, self._end_for_paho)
            return bytes(self._read[begin : self._at])
        if self._error is not None:
            raise self._error
        if self._has_ended:
            return b""
        raise BlockingIOError

    def send(self, data: bytes | bytearray) -> int:
        """Keep bytes for `flush`."""
        self._unsent += data
        return len(data)

    def close(self) -> None:
        """Send what the kernel takes, and end it. Idempotent."""
        if self.fileno() >= 0:
            self.flush()
        self._socket.close()

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed."""
        return self._socket.fileno()

    def setblocking(self, flag: bool) -> None:
        """Of the socket below."""
        self._socket.setblocking(flag)

    # ---- what the connection calls ----------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        """What waits for `flush`, or for the kernel."""
        return len(self._unsent)

    def flush(self) -> bool:
        """Send what the kernel takes. False when the connection is lost."""
        if self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return True
            except OSError as error:
                self._error = self._error or error
                self._unsent.clear()
        return self._error is None

    def fill(self) -> bool:
        """Read once. False when there was nothing but the connection's end, which `recv` then tells.

        Raises ValueError as `has_packet`.
        """
        wanted = READ_BYTES
        front = self._front()
        if front is not None:
            # Of a large packet, what is missing.
            wanted = max(wanted, min(front[2] - len(self._read), LARGEST_READ_BYTES))
        try:
            chunk = self._socket.recv(wanted)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError as error:
            self._error = error
            return False
        if not chunk:
            self._has_ended = True
            return False
        del self._read[: self._at]
        self._read += chunk
        self._at = self._end_for_paho = 0
        return True

    def has_packet(self) -> bool:
        """Whether a whole packet was read. Raises ValueError for bytes that are no MQTT."""
        front = self._front()
        return front is not None and front[2] <= len(self._read)

    def has_pending(self) -> bool:
        """Whether there is something to read that the descriptor no longer tells of."""
        try:
            return self.has_packet() or bool(isinstance(self._socket, ssl.SSLSocket) and self._socket.pending())
        except ValueError:
            return True  # reading says so

    def next_message(self, *, with_properties: bool) -> tuple[Inbound, int] | None:
        """The message at the front, and its packet identifier; None when something else is there, which is paho's.

        To be called only while `has_packet`. Raises ValueError for a packet that breaks the protocol, or is a message
        of QoS 2, which nobody here asks for and paho would keep.
        """
        front = self._front()
        assert front is not None
        first, begin, end = front
        if first & 0xF0 != PUBLISH:
            self._end_for_paho = end
            return None
        if first & 0x06 > 0x02:
            raise ValueError("a message of QoS 2 or 3, which was not asked for")
        self._at = end
        try:
            return _message(first, self._read, begin, end, with_properties=with_properties)
        except IndexError:
            raise ValueError("a message is cut short") from None

    def _front(self) -> tuple[int, int, int] | None:
        """First byte, begin and end of the packet at the front, as far as its length is there."""
        data, at = self._read, self._at
        try:
            first = data[at]
            length, begin = _varint(data, at + 1)
        except IndexError:
            return None
        if length > self._max_packet_bytes:
            raise ValueError(f"a packet of {length} bytes; at most {self._max_packet_bytes} were asked for")
        return first, begin, begin + length


def packed_publish(topic: str, properties: bytes | None, payload: bytes, *, retain: bool) -> bytes:
    """A QoS 0 PUBLISH. properties: packed, with their length; None for MQTT 3.1.1. Raises ValueError."""
    name = topic.encode()
    if not name or len(name) > 0xFFFF or b"+" in name or b"#" in name:
        raise ValueError(f"topic {topic!r} cannot be published to")
    said = b"" if properties is None else properties
    length = 2 + len(name) + len(said) + len(payload)
    if length > 268_435_455:
        raise ValueError(f"a packet of {length} bytes, and MQTT has 268 435 455 at most")
    return b"%c%b%c%c%b%b%b" % (
        PUBLISH | retain, packed_length(length), len(name) >> 8, len(name) & 0xFF, name, said, payload,
    )  # fmt: skip


def packed_length(length: int) -> bytes:
    """A variable byte integer (MQTT 5, 1.5.5)."""
    if length < 0x80:
        return bytes((length,))
    if length < 0x4000:
        return bytes((length & 0x7F | 0x80, length >> 7))
    head = bytearray()
    while True:
        length, byte = length >> 7, length & 0x7F
        head.append(byte | (0x80 if length else 0))
        if not length:
            return bytes(head)


# ---- private --------------------------------------------------------------------------------------------------------


def _varint(data: bytearray, at: int) -> tuple[int, int]:
    """A variable byte integer and where it ends. Raises IndexError when it is not all there, or has over four bytes."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while shift < 28:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise ValueError("a length has over four bytes")


def _message(first: int, data: bytearray, at: int, end: int, *, with_properties: bool) -> tuple[Inbound, int]:
    topic_end = at + 2 + (data[at] << 8 | data[at + 1])
    topic = data[at + 2 : topic_end].decode()
    qos, mid, at = first >> 1 & 3, 0, topic_end
    if qos:
        mid = data[at] << 8 | data[at + 1]
        at += 2
    message = Inbound(topic, b"", qos, bool(first & 1))
    if with_properties:
        length, at = _varint(data, at)
        if length:
            _read_properties(message, data, at, at + length)
            at += length
    if at > end:
        raise IndexError
    message.payload = bytes(data[at:end])
    return message, mid


def _read_properties(message: Inbound, data: bytearray, at: int, end: int) -> None:
    said: list[tuple[str, str]] = []
    while at < end:
        kind = data[at]
        at += 1
        if kind in _FIXED_BYTES:
            begin, at = at, at + _FIXED_BYTES[kind]
            if kind == _EXPIRY:
                message.expiry_s = int.from_bytes(data[begin:at], "big")
        elif kind == _SUBSCRIPTION:
            _, at = _varint(data, at)
        elif kind in _WITH_LENGTH:
            begin = at + 2
            at = begin + (data[at] << 8 | data[at + 1])
            raw = data[begin:at]
            if kind == _CORRELATION:
                message.correlation = bytes(raw)
            elif kind == _RESPONSE_TOPIC:
                message.response_topic = raw.decode()
            elif kind == _CONTENT_TYPE:
                message.content_type = raw.decode()
            else:
                begin = at + 2
                at = begin + (data[at] << 8 | data[at + 1])
                if len(said) < MAX_USER_PROPERTIES:
                    said.append((raw.decode(), data[begin:at].decode()))
        else:
            raise ValueError(f"a message has a property {kind:#x}")
        if at > end:
            raise IndexError
    message.user_properties = tuple(said)
