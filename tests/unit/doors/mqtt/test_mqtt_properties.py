"""Properties packed here are what paho unpacks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from edge_runtime.doors.mqtt.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    RESPONSE_TOPIC,
    UTF8_PAYLOAD,
    expiry_property,
    packed_properties,
    text_property,
)


def unpacked(packed: bytes) -> dict[str, object]:
    """What paho reads; fails when it does not read all of it."""
    properties = Properties(PacketTypes.PUBLISH)
    _, length = properties.unpack(packed)
    assert length == len(packed)
    known = {"packetType", "types", "names", "properties"}
    return {name: value for name, value in vars(properties).items() if name not in known}


@given(st.binary(max_size=40_000), st.text("abc/ü", min_size=1, max_size=300), st.integers(0, 0xFFFFFFFF))
def test_paho_unpacks_what_was_packed(correlation: bytes, topic: str, expiry_s: int) -> None:
    packed = packed_properties(
        UTF8_PAYLOAD,
        text_property(CONTENT_TYPE, "application/json"),
        text_property(RESPONSE_TOPIC, topic),
        text_property(CORRELATION_DATA, correlation),
        expiry_property(expiry_s),
    )
    assert unpacked(packed) == {
        "PayloadFormatIndicator": 1,
        "ContentType": "application/json",
        "ResponseTopic": topic,
        "CorrelationData": correlation,
        "MessageExpiryInterval": expiry_s,
    }


def test_no_properties_are_one_byte() -> None:
    assert packed_properties() == b"\x00"
    assert unpacked(b"\x00") == {}
