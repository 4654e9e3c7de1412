"""Packets as bytes: what paho packs is read as it was meant, however it is cut; what is not MQTT is refused."""

from __future__ import annotations

import contextlib
import socket as sockets
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from edge_runtime.doors.mqtt.packets import (
    MAX_USER_PROPERTIES,
    Inbound,
    PacketSocket,
    packed_length,
    packed_publish,
)

LIMIT = 1 << 20

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
MESSAGES = st.builds(
    Inbound,
    topic=TEXT.filter(bool),
    payload=st.binary(max_size=400),
    qos=st.sampled_from([0, 1]),
    retain=st.booleans(),
    response_topic=st.none() | TEXT,
    correlation=st.none() | st.binary(max_size=40),
    content_type=st.none() | TEXT,
    expiry_s=st.none() | st.integers(0, 0xFFFFFFFF),
    user_properties=st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple),
)


@contextlib.contextmanager
def pair(limit: int = LIMIT) -> Iterator[tuple[sockets.socket, PacketSocket]]:
    """A broker's end, and ours."""
    theirs, ours = sockets.socketpair()
    ours.setblocking(False)
    packets = PacketSocket(ours, limit)
    try:
        yield theirs, packets
    finally:
        packets.close()
        theirs.close()


def packed(message: Inbound, mid: int = 7, *, is_v5: bool = True) -> bytes:
    """A PUBLISH with its properties packed by paho."""
    properties = Properties(PacketTypes.PUBLISH)
    said = {
        "ResponseTopic": message.response_topic,
        "CorrelationData": message.correlation,
        "ContentType": message.content_type,
        "MessageExpiryInterval": message.expiry_s,
        "UserProperty": list(message.user_properties) or None,
        "PayloadFormatIndicator": 1,
        "SubscriptionIdentifier": 300,
        "TopicAlias": 5,
    }
    for name, value in said.items():
        if value is not None:
            setattr(properties, name, value)
    name = message.topic.encode()
    body = len(name).to_bytes(2, "big") + name + (mid.to_bytes(2, "big") if message.qos else b"")
    body += (properties.pack() if is_v5 else b"") + message.payload
    return bytes((0x30 | message.qos << 1 | message.retain,)) + packed_length(len(body)) + body


@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(1, 200), min_size=1))
def test_messages_are_read_as_they_were_meant_however_they_are_cut(messages: list[Inbound], cuts: list[int]) -> None:
    stream = b"".join(map(packed, messages))
    found = []
    with pair() as (theirs, packets):
        at = 0
        while at < len(stream):
            size = cuts[at % len(cuts)]
            theirs.sendall(stream[at : at + size])
            at += size
            assert packets.fill()
            while packets.has_packet():
                found.append(packets.next_message(with_properties=True))
    assert found == [(message, 7 if message.qos else 0) for message in messages]


@given(MESSAGES)
def test_a_message_of_mqtt_3_has_no_properties(message: Inbound) -> None:
    with pair() as (theirs, packets):
        theirs.sendall(packed(message, is_v5=False))
        packets.fill()
        found = packets.next_message(with_properties=False)
    assert found is not None
    plain = Inbound(message.topic, message.payload, message.qos, message.retain)
    assert found[0] == plain


@given(MESSAGES)
def test_a_message_that_is_packed_here_is_read_here(message: Inbound) -> None:
    topic = message.topic.replace("+", "x").replace("#", "x")
    with pair() as (theirs, packets):
        theirs.sendall(packed_publish(topic, b"\x00", message.payload, retain=message.retain))
        packets.fill()
        assert packets.next_message(with_properties=True) == (Inbound(topic, message.payload, 0, message.retain), 0)


@given(st.binary(max_size=200))
def test_any_bytes_are_packets_or_refused_and_nothing_else_is_raised(stream: bytes) -> None:
    with pair() as (theirs, packets):
        theirs.sendall(stream)
        if not stream:
            return
        packets.fill()
        try:
            while packets.has_packet():
                if packets.next_message(with_properties=True) is None:
                    while True:
                        packets.recv(1)
        except (ValueError, BlockingIOError):
            return


@pytest.mark.parametrize(
    "stream",
    [
        b"\x30\xff\xff\xff\xff\x01",  # a length of five bytes
        b"\x30\x80\x80\x80\x01",  # two MiB, where one was asked for
        b"\x30\x01\x00",  # no room for a topic
        b"\x30\x04\x00\x09ab",  # a topic longer than its packet
        b"\x30\x05\x00\x01a\x09\x02",  # properties longer than their packet
        b"\x30\x06\x00\x01a\x02\x7f\x00",  # a property that there is none of
        b"\x30\x04\x00\x01\xff\x00",  # a topic that is not UTF-8
        b"\x34\x06\x00\x01a\x00\x01\x00",  # QoS 2
    ],
)
def test_a_packet_that_breaks_the_protocol_is_refused(stream: bytes) -> None:
    with pair() as (theirs, packets):
        theirs.sendall(stream)
        packets.fill()
        with pytest.raises(ValueError):  # noqa: PT011 (UnicodeDecodeError is one)
            drain(packets)


def drain(packets: PacketSocket) -> None:
    while packets.has_packet():
        packets.next_message(with_properties=True)


def test_other_packets_are_left_to_paho_byte_by_byte_and_messages_are_not() -> None:
    message = Inbound("t", b"p", 0, retain=False)
    with pair() as (theirs, packets):
        theirs.sendall(b"\xd0\x00" + packed(message))
        packets.fill()
        assert packets.next_message(with_properties=True) is None
        assert packets.recv(1) + packets.recv(5) == b"\xd0\x00"
        with pytest.raises(BlockingIOError):
            packets.recv(1)
        assert packets.next_message(with_properties=True) == (message, 0)


def test_sent_packets_leave_together_when_they_are_flushed() -> None:
    with pair() as (theirs, packets):
        packets.send(b"one ")
        packets.send(b"two")
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(10)
        assert packets.unsent_bytes == 7
        assert packets.flush()
        assert (theirs.recv(10), packets.unsent_bytes) == (b"one two", 0)


def test_bytes_that_the_kernel_does_not_take_wait() -> None:
    with pair() as (theirs, packets):
        packets.send(bytes(8 << 20))
        assert packets.flush()
        left = packets.unsent_bytes
        assert 0 < left < 8 << 20
        theirs.recv(1 << 20)
        assert packets.flush()
        assert packets.unsent_bytes < left


def test_the_end_of_a_connection_is_handed_to_paho() -> None:
    with pair() as (theirs, packets):
        theirs.close()
        assert not packets.fill()
        assert packets.recv(1) == b""
        packets.send(b"x")
        assert not packets.flush()
        with pytest.raises(OSError, match=r"pipe|reset"):
            packets.recv(1)


@pytest.mark.parametrize("topic", ["", "a/+", "#", "x" * 70_000])
def test_a_topic_that_cannot_be_published_to_is_refused(topic: str) -> None:
    with pytest.raises(ValueError, match="cannot be published to"):
        packed_publish(topic, None, b"", retain=False)


@pytest.mark.parametrize(
    ("length", "bytes_"),
    [(0, b"\x00"), (127, b"\x7f"), (128, b"\x80\x01"), (16_383, b"\xff\x7f"), (16_384, b"\x80\x80\x01"),
     (268_435_455, b"\xff\xff\xff\x7f")],
)  # fmt: skip
def test_lengths_are_as_the_standard_has_them(length: int, bytes_: bytes) -> None:
    assert packed_length(length) == bytes_


def test_a_flood_of_user_properties_is_passed_over_in_one_go() -> None:
    """By work and not by time: joining tuples took minutes for these."""
    count = 200_000
    body = b"\x00\x01a" + packed_length(5 * count) + b"\x26\x00\x00\x00\x00" * count + b"payload"
    with pair(LIMIT * 4) as (theirs, packets):
        stream = b"\x30" + packed_length(len(body)) + body
        for at in range(0, len(stream), 1 << 15):
            theirs.sendall(stream[at : at + (1 << 15)])
            packets.fill()
        while not packets.has_packet():
            packets.fill()
        found = packets.next_message(with_properties=True)
    assert found is not None
    assert found[0].payload == b"payload"
    assert len(found[0].user_properties) == MAX_USER_PROPERTIES
