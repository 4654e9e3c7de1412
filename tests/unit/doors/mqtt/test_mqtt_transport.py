"""What a broker says when a client connects holds from the first message on."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from queue import SimpleQueue

from edge_runtime.doors.mqtt.broker import BrokerAccess, BrokerAddress
from edge_runtime.doors.mqtt.connection import ConnectOptions, Subscription
from edge_runtime.doors.mqtt.packets import Inbound, packed_publish
from edge_runtime.doors.mqtt.transport import MqttTransport
from edge_runtime.telemetry.metrics import Metrics

ANSWER_S = 60.0
PACKET_LIMIT = 2000


class Limits:
    """Notes what the broker takes at most when messages arrive."""

    def __init__(self) -> None:
        self.found: SimpleQueue[int] = SimpleQueue()

    def messages(self, transport: MqttTransport, messages: Sequence[Inbound]) -> None:
        assert [each.payload for each in messages] == [b"asked"]
        self.found.put(transport.packet_limit)

    def online(self) -> None:
        """Not asked."""

    def offline(self, reason: str) -> None:
        """Not asked."""

    def unreachable(self, reason: str) -> None:
        """Not asked."""

    def beat(self) -> None:
        """Not asked."""


def test_a_request_that_comes_with_the_first_acknowledgement_is_answered_within_the_brokers_limit() -> None:
    limits = Limits()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(ANSWER_S)
        host, port = listener.getsockname()
        access = BrokerAccess(BrokerAddress(host, port, is_tls=False))
        options = ConnectOptions("device", (Subscription("asked"),))
        transport = MqttTransport(access, options, limits, Metrics(), reconnect_min_s=0.05, reconnect_max_s=1.0)
        transport.start()
        try:
            broker, _ = listener.accept()
            with broker:
                broker.settimeout(ANSWER_S)
                assert broker.recv(4096)[0] == 0x10  # CONNECT
                # CONNACK: no session, accepted, properties: Maximum Packet Size (MQTT 5, 3.2.2.3.6).
                broker.sendall(bytes((0x20, 8, 0, 0, 5, 0x27)) + PACKET_LIMIT.to_bytes(4, "big"))
                subscribe = broker.recv(4096)
                assert subscribe[0] == 0x82
                # SUBACK: the packet's identifier, no properties, granted with QoS 0; the request follows at once.
                suback = bytes((0x90, 4, *subscribe[2:4], 0, 0))
                broker.sendall(suback + packed_publish("asked", b"\0", b"asked", retain=False))
                assert limits.found.get(timeout=ANSWER_S) == PACKET_LIMIT
        finally:
            transport.close()
