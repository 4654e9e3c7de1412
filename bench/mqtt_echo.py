"""The MQTT yardstick: a plain paho server that gives each request's payload back, and does nothing else.

    python mqtt_echo.py PORT TOPIC_PREFIX

It listens to TOPIC_PREFIX/infer/# and says `online`, retained, on TOPIC_PREFIX/status once it does. The distance to it
is what decoding, admission, a model's run, deadlines and metrics cost the daemon.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import sys
from typing import Any

from paho.mqtt.client import Client, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

PR_SET_PDEATHSIG = 1


def echo(client: Client, userdata: Any, message: MQTTMessage) -> None:
    """Send a payload back to its Response Topic with its Correlation Data and QoS."""
    properties = Properties(PacketTypes.PUBLISH)
    properties.CorrelationData = message.properties.CorrelationData
    client.publish(message.properties.ResponseTopic, message.payload, message.qos, properties=properties)


def main(arguments: list[str]) -> None:
    """Serve until killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the bench
    port, prefix = int(arguments[0]), arguments[1]
    client = Client(CallbackAPIVersion.VERSION2, protocol=MQTTv5)
    client.on_socket_open = lambda _client, _data, sock: sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.on_connect = lambda *_: client.subscribe(f"{prefix}/infer/#", 1)
    client.on_subscribe = lambda *_: client.publish(f"{prefix}/status", "online", retain=True)
    client.on_message = echo
    client.connect("127.0.0.1", port)
    client.loop_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
