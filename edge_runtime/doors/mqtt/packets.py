"""MQTT messages, and their packets: many packets are read, and many written, with one system call.

Owns: bytes read and not cut into packets yet, bytes written and not sent yet. paho reads each packet with four calls,
makes two dictionaries for its properties, and sends each with a call of its own: paho 2.2 alone takes 66 us of CPU to
read a small request and 13 us to send its reply, this module 3.3 and 1.4, so that paho alone served .79 to .92 of the
bare paho echo's rate, against 1.9 to 2.1 (bench, `mqtt_rate`, QoS 0, 64 in flight, a busy machine), and it bounds no
packet's length. paho still speaks every other packet; only messages bypass it. Knows no broker and no model.
Thread: the connection's owner.
"""

from __future__ import annotations

import socket as sockets
import ssl
from dataclasses import dataclass

READ_BYTES = 16 << 10
"""Bytes of one read: some ninety small requests. More would wait here, uncounted and with no bound."""

LARGEST_READ_BYTES = 256 << 10
"""Bytes of one read while a large packet arrives."""

MAX_USER_PROPERTIES = 64
"""User properties kept of one message; further ones are skipped. Three have a meaning (wire v1)."""

MESSAGE_BYTES = 512
"""Memory of a waiting message beside its payload: its objects here and in paho."""

PACKET_HEAD_BYTES = 9
"""A PUBLISH's fixed header with a length of four bytes, the topic's length, the packet identifier (MQTT 5, 3.3)."""

MAX_PACKET_BYTES = 268_435_455
"""The largest MQTT packet (MQTT 5, 2.1.4)."""

PUBLISH = 0x30
_FIXED_BYTES = {0x01: 1, 0x02: 4, 0x23: 2}
_EXPIRY, _CONTENT_TYPE, _RESPONSE_TOPIC, _CORRELATION, _SUBSCRIPTION, _USER = 0x02, 0x03, 0x08, 0x09, 0x0B, 0x26
_WITH_LENGTH = frozenset((_CONTENT_TYPE, _RESPONSE_TOPIC, _CORRELATION, _USER))
"""Identifiers of properties (MQTT 5, 2.2.2.2); these begin with a length."""


@dataclass(slots=True)
class Inbound:
    """One received message, with its MQTT 5 properties."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    response_topic: str | None = None
    correlation: bytes | None = None
    content_type: str | None = None
    expiry_s: int | None = None
    user_properties: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Outgoing:
    """One message to publish. `properties`: MQTT 5's, packed, with their length. `expires_s`: monotonic."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: bytes = b"\x00"
    expires_s: float = float("inf")

    @property
    def packet_bytes(self) -> int:
        """Length of its packet, or a few bytes more."""
        return PACKET_HEAD_BYTES + len(self.topic.encode()) + len(self.properties) + len(self.payload)

    @property
    def nbytes(self) -> int:
        """About the memory that it takes."""
        return len(self.payload) + len(self.properties) + len(self.topic) + MESSAGE_BYTES


class PacketSocket:
    """The socket that paho is given. It never blocks: `send` only keeps bytes, `flush` sends them."""

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
        """Bytes of the packet left to paho; none when the connection ended. Raises BlockingIOError without a packet."""
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
        """Send as much as the kernel takes, and close the socket. Idempotent."""
        if self.fileno() >= 0:
            self.flush()
        self._socket.close()

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""
        return self._socket.fileno()

    def setblocking(self, flag: bool) -> None:
        """Set the mode of the socket below."""
        self._socket.setblocking(flag)

    # ---- what the connection calls ----------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for `flush`, or for the kernel."""
        return len(self._unsent)

    def flush(self) -> bool:
        """Send as much as the kernel takes. Return False when the connection is lost."""
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
        """Read once. Return False when the connection has ended; `recv` then says how.

        Raises ValueError as `has_packet`.
        """
        wanted = READ_BYTES
        front = self._front()
        if front is not None:
            # Ask for the rest of a large packet at once.
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
        """Whether a whole packet was read. Raises ValueError for bytes that are not MQTT."""
        front = self._front()
        return front is not None and front[2] <= len(self._read)

    def has_pending(self) -> bool:
        """Whether something can be read without the descriptor becoming readable."""
        try:
            return self.has_packet() or bool(isinstance(self._socket, ssl.SSLSocket) and self._socket.pending())
        except ValueError:
            return True  # reading raises it

    def next_message(self, *, with_properties: bool) -> tuple[Inbound, int] | None:
        """The message at the front and its packet identifier; None when another packet is there, which paho reads.

        Call only while `has_packet`. Raises ValueError for a packet that breaks the protocol, and for a message of
        QoS 2: no subscription asks for it, and paho would keep it.
        """
        front = self._front()
        assert front is not None
        first, begin, end = front
        if first & 0xF0 != PUBLISH:
            self._end_for_paho = end
            return None
        if first & 0x06 > 0x02:
            raise ValueError("got a message of QoS 2 or 3; no subscription asked for one")
        self._at = end
        try:
            return _message(first, self._read, begin, end, with_properties=with_properties)
        except IndexError:
            raise ValueError("a message is cut short") from None

    def _front(self) -> tuple[int, int, int] | None:
        """First byte, begin and end of the packet at the front; None until its length has arrived."""
        data, at = self._read, self._at
        try:
            first = data[at]
            length, begin = _varint(data, at + 1)
        except IndexError:
            return None
        if length > self._max_packet_bytes:
            raise ValueError(f"got a packet of {length} bytes; at most {self._max_packet_bytes} were allowed")
        return first, begin, begin + length


def packed_publish(topic: str, properties: bytes | None, payload: bytes, *, retain: bool) -> bytes:
    """A QoS 0 PUBLISH packet. properties: packed, with their length; None for MQTT 3.1.1. Raises ValueError."""
    name = topic.encode()
    if not name or len(name) > 0xFFFF or b"+" in name or b"#" in name:
        raise ValueError(f"topic {topic!r} cannot be published to")
    properties = b"" if properties is None else properties
    length = 2 + len(name) + len(properties) + len(payload)
    if length > MAX_PACKET_BYTES:
        raise ValueError(f"a packet of {length} bytes; MQTT allows {MAX_PACKET_BYTES}")
    return b"%c%b%c%c%b%b%b" % (
        PUBLISH | retain, packed_length(length), len(name) >> 8, len(name) & 0xFF, name, properties, payload,
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
    """A variable byte integer and its end. Raises IndexError when it is incomplete, ValueError above four bytes."""
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
    message.payload = bytes(memoryview(data)[at:end])  # one copy: 600 KB take 20 us, by way of a bytearray 580
    return message, mid


def _read_properties(message: Inbound, data: bytearray, at: int, end: int) -> None:
    user: list[tuple[str, str]] = []
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
                if len(user) < MAX_USER_PROPERTIES:
                    user.append((raw.decode(), data[begin:at].decode()))
        else:
            raise ValueError(f"a message has a property {kind:#x}")
        if at > end:
            raise IndexError
    message.user_properties = tuple(user)
