"""Two ways for a generator to ask over MQTT 5 and read what comes back, with the same few methods.

`PahoLink` is what a user has: paho's client, polled, one packet a message. `LeanLink` packs QoS 0 messages by itself
from one template, sends what is due in one write and cuts replies out of one read, at a tenth of paho's cost: it shows
the servers rather than the client, and can offer a server more than that server can take. Thread: one, the owner's.
"""

from __future__ import annotations

import select
import socket
from typing import Any, Protocol

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

CONNECT_LIMIT_S = 10.0
ID_BYTES = 8
"""Length of the correlation data that the generators use."""

READ_BYTES = 1 << 18
SEND_BUFFER_BYTES = 16 << 10
PAHO_PACKETS_A_READ = 64
CONNACK, PUBLISH, SUBACK = 0x20, 0x30, 0x90
CORRELATION_DATA = 0x09
FIXED_PROPERTY_BYTES = {0x01: 1, 0x02: 4, 0x23: 2}
"""Payload Format Indicator, Message Expiry Interval, Topic Alias (MQTT 5, 2.2.2.2)."""

Reply = tuple[bytes, bytes]
"""Correlation data and payload."""


class LinkError(Exception):
    """The broker refused or ended the connection."""


class Link(Protocol):
    """A connection that is subscribed to its own reply topic. It asks one thing of one topic again and again."""

    def ask(self, request_ids: list[bytes]) -> None:
        """Send the request once for each id (ID_BYTES long), or keep it until the socket takes more."""
        ...

    def wants_write(self) -> bool:
        """Whether something is kept so."""
        ...

    def replies(self, wait_s: float) -> list[Reply]:
        """What came, after waiting so long for the first, and sending what was kept. Raises LinkError."""
        ...

    def close(self) -> None:
        """Say goodbye."""
        ...


class PahoLink:
    """paho's client, as its documentation has it; polled, because its own loop wakes up for each packet anew."""

    def __init__(self, port: int, topic: str, reply_topic: str, payload: bytes, qos: int) -> None:
        self._topic, self._reply_topic, self._payload, self._qos = topic, reply_topic, payload, qos
        self._replies: list[Reply] = []
        self._is_subscribed = False
        self._client = Client(CallbackAPIVersion.VERSION2, protocol=MQTTv5, reconnect_on_failure=False)
        self._client.on_socket_open = lambda _client, _data, sock: _send_at_once(sock)
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = self._on_message
        self._client.connect("127.0.0.1", port)
        self._poller = select.poll()
        self._poller.register(self._client.socket(), select.POLLIN)
        while not self._client.is_connected():
            self.replies(CONNECT_LIMIT_S)
        self._client.subscribe(self._reply_topic, qos)
        while not self._is_subscribed:
            self.replies(CONNECT_LIMIT_S)

    def ask(self, request_ids: list[bytes]) -> None:
        """See Link."""
        for request_id in request_ids:
            properties = Properties(PacketTypes.PUBLISH)
            properties.ResponseTopic = self._reply_topic
            properties.CorrelationData = request_id
            self._client.publish(self._topic, self._payload, self._qos, properties=properties)

    def wants_write(self) -> bool:
        """See Link."""
        return bool(self._client.want_write())

    def replies(self, wait_s: float) -> list[Reply]:
        """See Link."""
        client, events = self._client, select.POLLIN | (select.POLLOUT if self.wants_write() else 0)
        self._poller.modify(client.socket(), events)
        for _, event in self._poller.poll(wait_s * 1e3):
            if event & select.POLLOUT and client.loop_write() != MQTT_ERR_SUCCESS:
                raise LinkError("the connection ended while writing")
            before = -1
            for _ in range(PAHO_PACKETS_A_READ if event & ~select.POLLOUT else 0):
                if client.loop_read() != MQTT_ERR_SUCCESS:
                    raise LinkError("the connection ended while reading")
                if len(self._replies) == before:
                    break
                before = len(self._replies)
        found, self._replies = self._replies, []
        return found

    def close(self) -> None:
        """See Link."""
        self._client.disconnect()

    def _on_subscribe(self, *_: Any) -> None:
        self._is_subscribed = True

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        self._replies.append((message.properties.CorrelationData, message.payload))


class LeanLink:
    """QoS 0 and no more of MQTT 5 than a request and its reply need."""

    def __init__(self, port: int, topic: str, reply_topic: str, payload: bytes) -> None:
        self._socket = _connected_socket(port)
        self._read = bytearray()
        self._before, self._after = _publish_template(topic, reply_topic, payload)
        self._socket.sendall(_packet(0x10, _text("MQTT"), b"\x05\x02\x00\x00\x00", _text("")))
        self._expect(CONNACK, failure_at=1)
        self._socket.sendall(_packet(0x82, b"\x00\x01\x00", _text(reply_topic), b"\x00"))
        self._expect(SUBACK, failure_at=-1)
        self._socket.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        self._unsent = bytearray()

    def ask(self, request_ids: list[bytes]) -> None:
        """See Link."""
        if request_ids:
            self._unsent += self._before + (self._after + self._before).join(request_ids) + self._after
            self._write()

    def wants_write(self) -> bool:
        """See Link."""
        return bool(self._unsent)

    def replies(self, wait_s: float) -> list[Reply]:
        """See Link."""
        self._poller.modify(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        for _, event in self._poller.poll(wait_s * 1e3):
            if event & select.POLLOUT:
                self._write()
            if event & ~select.POLLOUT:
                chunk = self._socket.recv(READ_BYTES)
                if not chunk:
                    raise LinkError("the broker ended the connection")
                self._read += chunk
        return [_reply(body) for kind, body in self._packets() if kind & 0xF0 == PUBLISH]

    def close(self) -> None:
        """See Link."""
        self._socket.setblocking(True)
        self._socket.sendall(b"\xe0\x00")
        self._socket.close()

    def _write(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return

    def _packets(self) -> list[tuple[int, bytes]]:
        """Whole packets that were read: first byte and what follows the length."""
        found, data, at = [], bytes(self._read), 0
        while at + 1 < len(data):
            try:
                length, begin = _length(data, at + 1)
            except IndexError:
                break
            if begin + length > len(data):
                break
            found.append((data[at], data[begin : begin + length]))
            at = begin + length
        del self._read[:at]
        return found

    def _expect(self, kind: int, failure_at: int) -> None:
        """Wait for one packet whose byte `failure_at` is a reason code under 0x80."""
        while not (found := self._packets()):
            chunk = self._socket.recv(READ_BYTES)
            if not chunk:
                raise LinkError("the broker ended the connection at once")
            self._read += chunk
        first, body = found[0]
        if first != kind or body[failure_at] >= 0x80:
            raise LinkError(f"wanted packet {kind:#x} without a failure, got {first:#x} {body.hex()}")


# ---- private --------------------------------------------------------------------------------------------------------


def _send_at_once(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _connected_socket(port: int) -> socket.socket:
    """A socket that takes little at once: what the broker is too slow for waits here, and counts as not sent yet."""
    sock = socket.socket()
    sock.settimeout(CONNECT_LIMIT_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.connect(("127.0.0.1", port))
    _send_at_once(sock)
    return sock


def _publish_template(topic: str, reply_topic: str, payload: bytes) -> tuple[bytes, bytes]:
    """A QoS 0 PUBLISH, cut where the correlation data stands."""
    properties = b"\x08" + _text(reply_topic) + bytes((CORRELATION_DATA, 0, ID_BYTES)) + bytes(ID_BYTES)
    whole = _packet(PUBLISH, _text(topic), _packed_length(len(properties)), properties, payload)
    return whole[: -len(payload) - ID_BYTES], payload


def _packet(first_byte: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return bytes((first_byte,)) + _packed_length(len(body)) + body


def _text(value: str) -> bytes:
    raw = value.encode()
    return len(raw).to_bytes(2, "big") + raw


def _packed_length(length: int) -> bytes:
    packed = bytearray()
    while True:
        length, byte = length >> 7, length & 0x7F
        packed.append(byte | (0x80 if length else 0))
        if not length:
            return bytes(packed)


def _length(data: bytes, at: int) -> tuple[int, int]:
    """A variable byte integer and where it ends. Raises IndexError when it is not all there."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _reply(body: bytes) -> Reply:
    """Correlation data (empty when there is none) and payload of a QoS 0 PUBLISH."""
    at = 2 + int.from_bytes(body[:2], "big")
    length, at = _length(body, at)
    end, correlation = at + length, b""
    while at < end:  # no User Property is among them, and those are the only pairs
        kind = body[at]
        if kind in FIXED_PROPERTY_BYTES:
            at += 1 + FIXED_PROPERTY_BYTES[kind]
            continue
        begin = at + 3
        at = begin + int.from_bytes(body[at + 1 : begin], "big")
        if kind == CORRELATION_DATA:
            correlation = body[begin:at]
    return correlation, body[end:]
