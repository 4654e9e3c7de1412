"""Many client devices in one process: each with an MQTT connection of its own, asking once a second at its own phase.

    python -m bench.mqtt_devices '{"port": 1883, "topic": "edge/bench/infer/mlp", "payload": FILE, …}'

paho's clients, driven by one epoll loop. Every other device asks with QoS 1. Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import heapq
import json
import random
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paho.mqtt.client import Client, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from bench.mqtt_load import ANSWER_BYTE, code_of, quantile_ms

PERIOD_S = 1.0
CONNECT_LIMIT_S = 60.0
DRAIN_S = 5.0
"""How long after the last request replies are waited for."""

LINGER_S = 1.0
"""And how long after the last reply, for duplicates."""

SPARE_FILES = 64
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who asks what, for how long."""

    port: int
    topic: str
    payload: str
    devices: int = 1000
    seconds: float = 60.0
    seed: int = 0


@dataclass(slots=True)
class FleetCount:
    """What became of all requests. lag_p99_ms: how much later than due they were sent, at the 99th percentile."""

    devices: int = 0
    asked: int = 0
    answered: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    duplicated: int = 0
    disconnected: int = 0
    p50_ms: float = -1.0
    p99_ms: float = -1.0
    lag_p99_ms: float = -1.0


class Devices:
    """All clients and the loop that drives them."""

    def __init__(self, fleet: Fleet) -> None:
        self.count = FleetCount(devices=fleet.devices)
        self._fleet = fleet
        self._epoll = select.epoll()
        self._by_fd: dict[int, Device] = {}
        self._latencies_s: list[float] = []
        payload = Path(fleet.payload).read_bytes()
        self._devices = [Device(number, fleet.topic, payload, self) for number in range(fleet.devices)]

    def run(self) -> FleetCount:
        """Connect one after the other, ask, wait for what is still out, say goodbye."""
        self._connect()
        lags_s = self._ask()
        self._drain()
        for device in self._devices:
            device.client.disconnect()
        self.count.lost = sum(len(device.waiting) for device in self._devices)
        self.count.p50_ms = quantile_ms(self._latencies_s, 0.5)
        self.count.p99_ms = quantile_ms(self._latencies_s, 0.99)
        self.count.lag_p99_ms = quantile_ms(lags_s, 0.99)
        return self.count

    # ---- called by the devices --------------------------------------------------------------------------------------

    def opened(self, device: Device, sock: socket.socket) -> None:
        """A connection is there."""
        self._by_fd[sock.fileno()] = device
        self._epoll.register(sock, select.EPOLLIN)

    def writes(self, sock: socket.socket, *, is_wanted: bool) -> None:
        """A connection has something to write, or no longer."""
        self._epoll.modify(sock, select.EPOLLIN | (select.EPOLLOUT if is_wanted else 0))

    def closes(self, sock: socket.socket) -> None:
        """A connection ends."""
        self._by_fd.pop(sock.fileno(), None)
        self._epoll.unregister(sock)

    def replied(self, payload: bytes, took_s: float) -> None:
        """A reply came to a request that waited."""
        if payload[1] == ANSWER_BYTE:
            self.count.answered += 1
            self._latencies_s.append(took_s)
        else:
            code = code_of(payload)
            self.count.refused[code] = self.count.refused.get(code, 0) + 1

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        end_s = time.monotonic() + CONNECT_LIMIT_S
        for device in self._devices:
            device.client.connect("127.0.0.1", self._fleet.port)
            while not device.is_listening:
                self._turn(0.1)
                if time.monotonic() > end_s:
                    raise TimeoutError(f"{device.client_id} of {self._fleet.devices} does not listen in time")

    def _ask(self) -> list[float]:
        """Ask until the time is up; how late each request went out."""
        rng, begin_s = random.Random(self._fleet.seed), time.monotonic()
        due = [(begin_s + rng.random() * PERIOD_S, number) for number in range(len(self._devices))]
        heapq.heapify(due)
        end_s, lags_s = begin_s + self._fleet.seconds, []
        while due[0][0] < end_s:
            self._turn(max(0.0, due[0][0] - time.monotonic()))
            while due[0][0] <= min(time.monotonic(), end_s):
                due_s, number = due[0]
                self._devices[number].ask()
                self.count.asked += 1
                lags_s.append(time.monotonic() - due_s)
                heapq.heapreplace(due, (due_s + PERIOD_S, number))
        return lags_s

    def _drain(self) -> None:
        end_s = time.monotonic() + DRAIN_S
        while time.monotonic() < end_s and any(device.waiting for device in self._devices):
            self._turn(0.1)
        end_s = time.monotonic() + LINGER_S
        while time.monotonic() < end_s:
            self._turn(0.1)

    def _turn(self, wait_s: float) -> None:
        for fd, event in self._epoll.poll(wait_s):
            device = self._by_fd.get(fd)
            if device is not None and event & ~select.EPOLLOUT:
                device.client.loop_read()
            if fd in self._by_fd and event & select.EPOLLOUT:
                device.client.loop_write()


class Device:
    """One client. `waiting`: when each request without a reply was sent."""

    def __init__(self, number: int, topic: str, payload: bytes, devices: Devices) -> None:
        self.client_id = f"device-{number}"
        self.is_listening = False
        self.waiting: dict[bytes, float] = {}
        self._topic, self._payload, self._devices = topic, payload, devices
        self._qos = number % 2
        self._asked = 0
        self._reply_topic = f"reply/{self.client_id}"
        self.client = Client(CallbackAPIVersion.VERSION2, self.client_id, protocol=MQTTv5, reconnect_on_failure=False)
        self.client.on_socket_open = self._on_socket_open
        self.client.on_socket_close = lambda _client, _data, sock: devices.closes(sock)
        self.client.on_socket_register_write = lambda _client, _data, sock: devices.writes(sock, is_wanted=True)
        self.client.on_socket_unregister_write = lambda _client, _data, sock: devices.writes(sock, is_wanted=False)
        self.client.on_connect = lambda *_: self.client.subscribe(self._reply_topic, self._qos)
        self.client.on_subscribe = self._on_subscribe
        self.client.on_message = self._on_message
        self.client.on_disconnect = self._on_disconnect

    def ask(self) -> None:
        """Send one request, and see to the connection's keepalive."""
        self._asked += 1
        request_id = self._asked.to_bytes(8, "big")
        properties = Properties(PacketTypes.PUBLISH)
        properties.ResponseTopic = self._reply_topic
        properties.CorrelationData = request_id
        self.waiting[request_id] = time.monotonic()
        self.client.publish(self._topic, self._payload, self._qos, properties=properties)
        self.client.loop_misc()

    def _on_socket_open(self, _client: Client, _data: Any, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._devices.opened(self, sock)

    def _on_subscribe(self, *_: Any) -> None:
        self.is_listening = True

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        sent_s = self.waiting.pop(message.properties.CorrelationData, None)
        if sent_s is None:
            self._devices.count.duplicated += 1
        else:
            self._devices.replied(message.payload, time.monotonic() - sent_s)

    def _on_disconnect(self, _client: Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        if reason.is_failure:
            self._devices.count.disconnected += 1


def allow_connections(count: int) -> int:
    """Let this process and its children have so many connections; how many they may have, if that is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(count, soft - SPARE_FILES)


def end_with_parent() -> None:
    """Never outlive the bench."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Read a Fleet as JSON and print a FleetCount."""
    end_with_parent()
    fleet = Fleet(**json.loads(arguments[0]))
    allow_connections(fleet.devices)
    print(json.dumps(asdict(Devices(fleet).run())))


if __name__ == "__main__":
    main(sys.argv[1:])
