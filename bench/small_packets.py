"""The few packets of MQTT 5 that a device which is only woken needs, each as short as can be. Pure."""

from __future__ import annotations

PUBLISH, SUBACK = 0x30, 0x90
"""First bytes, less their flags."""


def connect_packet(client_id: str) -> bytes:
    """Clean start, no keepalive, no properties."""
    return _packet(0x10, _text("MQTT") + b"\x05\x02\x00\x00\x00" + _text(client_id))


def publish_packet(topic: str) -> bytes:
    """QoS 0 and nothing inside."""
    return _packet(PUBLISH, _text(topic) + b"\x00")


def subscribe_packet(topic: str) -> bytes:
    """One filter, QoS 1; of retained messages none is wanted."""
    return _packet(0x82, b"\x00\x01\x00" + _text(topic) + b"\x21")


def puback_packet(publish: bytes) -> bytes:
    """Of a QoS 1 message, given its body."""
    mid_at = 2 + int.from_bytes(publish[:2], "big")
    return _packet(0x40, publish[mid_at : mid_at + 2])


def cut_packets(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """The whole packets that bytes begin with, as first byte and body, and the bytes after them."""
    found: list[tuple[int, bytes]] = []
    while (end := _header_end(data)) is not None:
        length = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(data[1:end]))
        if len(data) < end + length:
            break
        found.append((data[0], data[end : end + length]))
        data = data[end + length :]
    return found, data


def _text(text: str) -> bytes:
    return len(text).to_bytes(2, "big") + text.encode()


def _packet(kind: int, body: bytes) -> bytes:
    assert len(body) < 0x80, "its length takes more than one byte"
    return bytes((kind, len(body))) + body


def _header_end(data: bytes) -> int | None:
    """Where the remaining length (MQTT 5, 2.1.4) ends; None when it is not whole."""
    return next((at for at in range(2, len(data) + 1) if data[at - 1] < 0x80), None)
