"""What another door's part publishes: packed as its content type wants, and never larger than the broker takes."""

from __future__ import annotations

import pytest

from edge_runtime.doors.mqtt.packets import Outgoing
from edge_runtime.doors.mqtt.publishing import JSON_TYPE, DevicePublisher
from edge_runtime.doors.mqtt.topics import DeviceTopics


class KeptMessages:
    """A way to a broker that keeps what is sent."""

    is_online = True

    def __init__(self, packet_limit: int = 1 << 20) -> None:
        self.packet_limit = packet_limit
        self.posted: list[Outgoing] = []
        self.retained: list[Outgoing] = []

    def post(self, message: Outgoing) -> None:
        self.posted.append(message)

    def retain(self, message: Outgoing) -> None:
        self.retained.append(message)


@pytest.mark.parametrize(
    ("content_type", "properties"),
    [
        ("", b"\0"),
        ("image/jpeg", b"\x0d\x03\0\x0aimage/jpeg"),
        (JSON_TYPE, b"\x15\x01\x01\x03\0\x10application/json"),  # with the mark of UTF-8 text
    ],
)
def test_a_message_says_of_what_type_it_is(content_type: str, properties: bytes) -> None:
    sender = KeptMessages()
    publisher = DevicePublisher(DeviceTopics("dev1"), sender)
    assert publisher.post("t", b"{}", content_type, qos=1, retain=True, expires_s=3.0) == ""
    assert publisher.retain("t", b"{}", content_type) == ""
    assert sender.posted == [Outgoing("t", b"{}", 1, True, properties, 3.0)]
    assert sender.retained == [Outgoing("t", b"{}", 0, True, properties)]


def test_a_message_that_the_broker_would_not_take_is_not_sent_and_its_size_is_told() -> None:
    sender = KeptMessages(packet_limit=1000)
    publisher = DevicePublisher(DeviceTopics("dev1"), sender)
    wanted = "1011 bytes, and the broker takes at most 1000 a message"
    assert (publisher.post("t", bytes(1000), ""), publisher.retain("t", bytes(1000))) == (wanted, wanted)
    assert (sender.posted, sender.retained) == ([], [])
    assert publisher.post("t", bytes(989), "") == ""
