"""A fleet from its first token on: simulated devices that enrol, are told by one broker, and are seen through it.

    python -m bench.enrolled_fleet [--devices 10000] [--at-once 8]

Each device enrols at a real `authority serve` with a key of its own, comes to a mosquitto on deploy/broker's
configuration with the certificate that it got, publishes its status and state, and listens to its group's wake. Then
`edge-runtime fleet` shows them all, wakes the group, and each device that hears it publishes a new state.

Bar: enrolled, told and seen within 10 min, none lost. The devices share one process and a folder in memory: on a device
the writes are its own disk's. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.fleet import device_state, get
from bench.mqtt_devices import allow_connections
from bench.small_packets import PUBLISH, SUBACK, connect_packet, cut_packets, puback_packet, subscribe_packet
from edge_runtime.enrolment.device import Identity, enrol
from edge_runtime.enrolment.messages import Token, parse_token
from tests.fakes.broker import Broker

BROKER = Path(__file__).parents[1] / "deploy" / "broker"
GROUP = "line-1"
LIMIT_S = 600.0
BEFORE, AFTER = "1.0", "1.1"
"""The version that a device says it runs, before it is told and after."""

TEMPLATE = '[enrolment]\nurl = "@ENROLMENT_URL@"\nidentity = "@IDENTITY@"\n'


class Device:
    """One simulated device: its identity, and its connection to the broker."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"dev-{number:05}"
        self.number = number
        self.identity = Identity(folder / self.name)
        self.is_told = False
        self._data = b""

    def enrol(self, url: str, token: Token) -> None:
        """Get a certificate."""
        enrol(url, token, self.name, self.identity)

    def connect(self, port: int) -> None:
        """Come to the broker with it, say what the device is, and listen to its group."""
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.load_verify_locations(self.identity.trusted)
        tls.load_cert_chain(self.identity.device)
        plain = socket.create_connection(("127.0.0.1", port), LIMIT_S)
        self.socket = tls.wrap_socket(plain, server_hostname="127.0.0.1")
        self.socket.sendall(connect_packet(self.name) + subscribe_packet(f"fleet/{GROUP}/wake"))
        while not any(kind & 0xF0 == SUBACK for kind, _ in self.packets()):
            pass
        self.say("status", b"online")
        self.say_version(BEFORE)
        self.socket.setblocking(False)

    def say_version(self, version: str) -> None:
        """Publish the state of a device that runs a version."""
        fields = {"runtime_version": version, "groups": [GROUP], "update": {"state": "idle", "group": GROUP}}
        self.say("state", device_state(self.number, 2, random.Random(self.number), **fields))

    def say(self, what: str, payload: bytes) -> None:
        """Publish, retained, with QoS 1."""
        topic = f"edge/{self.name}/{what}".encode()
        body = len(topic).to_bytes(2, "big") + topic + b"\x00\x07\x00" + payload
        left = memoryview(b"\x33" + _varint(len(body)) + body)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                select.select([], [self.socket], [], LIMIT_S)

    def packets(self) -> list[tuple[int, bytes]]:
        """Read what is there."""
        data = self.socket.recv(16 << 10)
        if not data:
            raise ConnectionError(f"the broker ended the connection of {self.name}")
        found, self._data = cut_packets(self._data + data)
        return found

    def listen(self) -> None:
        """Take what came; the first wake is answered by a new state."""
        with suppress(ssl.SSLWantReadError):
            while True:
                for kind, body in self.packets():
                    if kind & 0xF0 == PUBLISH:
                        if kind & 0x06:
                            self.socket.sendall(puback_packet(body))
                        if not self.is_told:
                            self.is_told = True
                            self.say_version(AFTER)


def measure(count: int, at_once: int) -> dict[str, Any]:
    """Enrol, connect, tell and see so many devices."""
    found: dict[str, Any] = {"devices": count, "load": os.getloadavg()[0]}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        home = Path(folder)
        devices = [Device(number, home / "devices") for number in range(count)]
        (home / "devices").mkdir()
        began_s = time.monotonic()
        with _authority(home, count) as (url, token):
            found["enrolled_s"] = _each(devices, at_once, lambda device: device.enrol(url, token))
        with Broker(home / "broker", layout=lambda ports: _layout(home, ports, count), listeners=2) as broker:
            found["connected_s"] = _each(devices, at_once, lambda device: device.connect(broker.ports[0]))
            with _fleet(f"mqtt://127.0.0.1:{broker.ports[1]}") as page:
                found["seen_s"] = _until(page, lambda told: told["is_loaded"] and told["versions"] == {BEFORE: count})
                tell_s = time.monotonic()
                request = urllib.request.Request(
                    f"{page}/fleet/wake", json.dumps({"group": GROUP}).encode(),
                    {"Content-Type": "application/json", "x-edge-page": "1"},
                )  # fmt: skip
                urllib.request.urlopen(request, timeout=60).close()
                _listen(devices)
                found["told_s"] = round(time.monotonic() - tell_s, 2)
                found["seen_again_s"] = _until(page, lambda told: told["versions"] == {AFTER: count})
                overview = get(f"{page}/fleet/overview")
        found["whole_s"] = round(time.monotonic() - began_s, 1)
        found["not_told"] = sum(not device.is_told for device in devices)
        found["not_seen"] = count - overview["conditions"].get("ok", 0)
        for device in devices:
            device.socket.close()
    return found


# ---- private --------------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    found = bytearray()
    while True:
        number, rest = number >> 7, number & 0x7F
        found.append(rest | (0x80 if number else 0))
        if not number:
            return bytes(found)


def _each(devices: list[Device], at_once: int, act: Callable[[Device], None]) -> float:
    """Do something with all devices; how long it took."""
    began_s = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(act, devices))
    return round(time.monotonic() - began_s, 1)


def _listen(devices: list[Device]) -> None:
    """Let devices hear until all were told, or LIMIT_S."""
    end_s = time.monotonic() + LIMIT_S
    by_fd = {device.socket.fileno(): device for device in devices}
    with select.epoll() as epoll:
        for fd in by_fd:
            epoll.register(fd, select.EPOLLIN)
        left = len(devices)
        while left and time.monotonic() < end_s:
            for fd, _ in epoll.poll(1.0):
                was_told = by_fd[fd].is_told
                by_fd[fd].listen()
                left -= by_fd[fd].is_told and not was_told


def _until(page: str, is_so: Callable[[Any], bool]) -> float:
    began_s = time.monotonic()
    while not is_so(overview := get(f"{page}/fleet/overview")):
        if time.monotonic() > began_s + LIMIT_S:
            raise TimeoutError(f"not seen within {LIMIT_S:.0f} s: {overview}")
        time.sleep(0.2)
    return round(time.monotonic() - began_s, 2)


def _run(*words: str) -> str:
    command = [sys.executable, "-m", "edge_runtime", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def _authority(home: Path, count: int) -> Iterator[tuple[str, Token]]:
    """An authority that serves, and a token for all."""
    folder = str(home / "authority")
    (home / "root.json").write_bytes(b"{}")
    (home / "device.toml").write_text(TEMPLATE)
    sources = ["--root", str(home / "root.json"), "--config", str(home / "device.toml")]
    _run("authority", "init", folder, "--name", "127.0.0.1", *sources)
    at = ["--authority", folder]
    _run("authority", "certify", "127.0.0.1", "--out", str(home / "certificates"), *at)
    told = json.loads(_run("authority", "token", "--group", GROUP, "--uses", str(count), "--json", *at))
    with _child("authority", "serve", "--port", "0", "--json", *at) as said:
        yield json.loads(said)["url"], parse_token(told["token"])


@contextmanager
def _fleet(broker: str) -> Iterator[str]:
    """The address of the fleet's page."""
    with _child("fleet", "--mqtt", broker, "--http", "127.0.0.1:0", "--json") as said:
        yield json.loads(said)["endpoints"][0]


@contextmanager
def _child(*words: str) -> Iterator[str]:
    """A verb that serves, and the JSON that it prints first."""
    command = [sys.executable, "-m", "edge_runtime", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            said = ""
            while not said.endswith("}\n"):
                said += child.stdout.readline()
            yield said
        finally:
            child.terminate()


def _layout(home: Path, ports: tuple[int, ...], count: int) -> str:
    """deploy/broker for so many devices, with the listener for this machine in the place of the clients'."""
    text = (BROKER / "mosquitto.conf").read_text()
    head, _, rest = text.partition("# ---- clients, operators")
    text = head + "# ----" + rest.partition("# ---- a loopback")[2]
    (home / "broker" / "devices.acl").write_text((BROKER / "devices.acl").read_text())
    for old, new in {
        "/etc/mosquitto/certs/broker.": f"{home}/certificates/server.",
        "/etc/mosquitto/certs/": f"{home}/certificates/",
        "/etc/mosquitto/": f"{home}/broker/",
        "/var/lib/mosquitto/": f"{home}/broker/",
        "log_dest stderr": "log_dest stderr\nuser root" if os.geteuid() == 0 else "log_dest stderr",
        "listener 8883": f"listener {ports[0]} 127.0.0.1",
        "max_connections 800": f"max_connections {count + 100}",
        "max_keepalive 120": "max_keepalive 65535",  # these devices send no pings, and wait for the slowest
        "#listener 1883 127.0.0.1": f"listener {ports[1]} 127.0.0.1",
        "#allow_anonymous true": "allow_anonymous true",
    }.items():
        assert old in text, f"mosquitto.conf has no {old!r} any more"
        text = text.replace(old, new)
    return text


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=8)
    arguments = parser.parse_args()
    print(json.dumps(measure(allow_connections(arguments.devices), arguments.at_once)))


if __name__ == "__main__":
    main()
