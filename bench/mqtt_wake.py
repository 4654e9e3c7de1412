"""Many devices in one process that a broker wakes to look at a repository, each with an MQTT connection of its own.

    python -m bench.mqtt_wake '{"broker_port": 1883, "repository_port": 8080, "topic": "fleet/bench/wake", …}'

A device does what a daemon with `[update]` does, and no more: it subscribes with QoS 1, looks when woken and when a
connection has come about, comes back with the daemon's own waits, and a look is the two requests of a check:
the next root, which is not there, and the timestamp. No jitter, and no least time between looks. MQTT 5 packets of our
own, one epoll loop.

Prints {"listening_s": …} when every device listens and knows version 1; then, for each line with a version that it
reads, {"following": …} and a Spread of it. Times are of CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import heapq
import json
import random
import select
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from bench.mqtt_devices import allow_connections, end_with_parent
from bench.small_packets import PUBLISH, SUBACK, connect_packet, cut_packets, puback_packet, subscribe_packet
from edge_runtime.doors.mqtt.socket import CONNECT_LIMIT_S
from edge_runtime.doors.mqtt.state import STEADY_S, Backoff

LISTEN_LIMIT_S = 120.0
SPREAD_LIMIT_S = 60.0
SETTLE_S = 0.5
"""How long after everybody knows a second wake or look may still come."""

RECONNECT_MIN_S, RECONNECT_MAX_S = 0.5, 60.0
"""The daemon's (MqttSettings)."""

CONNECTS_AT_ONCE = 64
"""While the bench is set up: below mosquitto's backlog of 100."""

READ_BYTES = 16 << 10
EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET


@dataclass(frozen=True, slots=True)
class Wake:
    """Who is woken, and where they look."""

    broker_port: int
    repository_port: int
    topic: str
    devices: int = 10_000
    seed: int = 0


@dataclass(slots=True)
class Spread:
    """How an order reached the devices. lost, doubled: those that applied it never, and more than once."""

    version: int = 0
    woken: int = 0
    woken_s: float = 0.0
    known_s: float = 0.0
    lost: int = 0
    doubled: int = 0
    looks: int = 0
    failed_looks: int = 0
    reconnects: int = 0


class Fleet:
    """All devices and the loop that drives them."""

    def __init__(self, wake: Wake, files: int) -> None:
        self.wake = wake
        self.spread = Spread()
        self.jitter = random.Random(wake.seed)
        self._epoll = select.epoll()
        self._by_fd: dict[int, tuple[Device, socket.socket]] = {}
        self._due: list[tuple[float, int, int, Device]] = []
        self._free_files = files - wake.devices
        self._waiting: list[Device] = []
        self._devices = [Device(number, self) for number in range(wake.devices)]

    def listen(self) -> float:
        """Connect all, some at a time; how long it took."""
        begin_s = time.monotonic()
        ahead = iter(self._devices)
        on_the_way: list[Device] = []
        while True:
            on_the_way = [device for device in on_the_way if not (device.is_listening and device.version)]
            for device in ahead:
                device.connect()
                on_the_way.append(device)
                if len(on_the_way) >= CONNECTS_AT_ONCE:
                    break
            if not on_the_way:
                return time.monotonic() - begin_s
            if time.monotonic() > begin_s + LISTEN_LIMIT_S:
                raise TimeoutError(f"{on_the_way[0].number} of {self.wake.devices} devices does not listen in time")
            self.turn(0.05)

    def follow(self, version: int) -> Spread:
        """Run until all have applied a version and listen again, or SPREAD_LIMIT_S; then a little longer.

        Whatever happened to them before, they have been connected for a good while now.
        """
        self.spread = Spread(version)
        for device in self._devices:
            device.backoff.lasted(STEADY_S)
        end_s = time.monotonic() + SPREAD_LIMIT_S
        while time.monotonic() < end_s:
            self.turn(0.05)
            if all(version in device.applied and device.is_listening for device in self._devices):
                break
        end_s = time.monotonic() + SETTLE_S
        while (now_s := time.monotonic()) < end_s:
            self.turn(end_s - now_s)
        counts = [device.applied.get(version, 0) for device in self._devices]
        self.spread.lost, self.spread.doubled = counts.count(0), sum(count > 1 for count in counts)
        return self.spread

    def turn(self, wait_s: float) -> None:
        """One round of the loop."""
        now_s = time.monotonic()
        if self._due:
            wait_s = max(0.0, min(wait_s, self._due[0][0] - now_s))
        for fd, events in self._epoll.poll(wait_s, 1024):
            found = self._by_fd.get(fd)
            if found is not None:
                found[0].ready(found[1], events)
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            _, _, attempt, device = heapq.heappop(self._due)
            device.again(attempt)

    # ---- called by the devices --------------------------------------------------------------------------------------

    def connected(self, device: Device, port: int) -> socket.socket:
        """A connection that begins to be; its events are the device's."""
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", port))
        self._by_fd[connection.fileno()] = device, connection
        self._epoll.register(connection, EVENTS)
        return connection

    def closed(self, connection: socket.socket) -> None:
        """It is no more."""
        del self._by_fd[connection.fileno()]
        connection.close()

    def later(self, device: Device, attempt: int, wait_s: float) -> None:
        """Call `device.again(attempt)` in so long."""
        heapq.heappush(self._due, (time.monotonic() + wait_s, device.number, attempt, device))

    def may_look(self, device: Device) -> bool:
        """Whether there is a file left for one more connection; if not, it is told to look later."""
        if self._free_files:
            self._free_files -= 1
            return True
        self._waiting.append(device)
        return False

    def looked(self) -> None:
        """A look is over, and its file free."""
        self._free_files += 1
        if self._waiting:
            self._waiting.pop().look()


class Device:
    """One device. version: what it knows of; applied: how often it applied each; backoff: of the broker."""

    __slots__ = (
        "_attempt", "_fleet", "_has_asked", "_has_looked", "_is_due", "_link", "_link_bytes", "_look", "_online_s",
        "applied", "backoff", "is_listening", "number", "version",
    )  # fmt: skip

    def __init__(self, number: int, fleet: Fleet) -> None:
        self.number = number
        self.version = 0
        self.applied: dict[int, int] = {}
        self.is_listening = False
        self._fleet = fleet
        self.backoff = Backoff(RECONNECT_MIN_S, RECONNECT_MAX_S, fleet.jitter)
        self._attempt = 0
        self._online_s = 0.0
        self._link: socket.socket | None = None
        self._link_bytes = b""
        self._look: socket.socket | None = None
        self._has_asked = False
        self._has_looked = False
        self._is_due = False

    def connect(self) -> None:
        """Begin to connect to the broker, and give up after as long as the daemon does."""
        self._attempt += 1
        self._fleet.later(self, self._attempt, CONNECT_LIMIT_S)
        self._link_bytes, self._has_asked = b"", False
        self._link = self._fleet.connected(self, self._fleet.wake.broker_port)

    def look(self) -> None:
        """Look at the repository; once more afterwards where a look is under way."""
        if self._look is not None:
            self._is_due = True
            return
        if not self._fleet.may_look(self):
            return
        self._fleet.spread.looks += 1
        self._has_looked = False
        self._look = self._fleet.connected(self, self._fleet.wake.repository_port)

    def again(self, attempt: int) -> None:
        """A wait of that attempt to connect is over: for the next one, or for the broker's word."""
        if attempt != self._attempt:
            return
        if self._link is None:
            self.connect()
        elif not self.is_listening:
            self._lost(self._link)

    def ready(self, connection: socket.socket, events: int) -> None:
        """A connection can be read or written."""
        if connection is self._link:
            self._serve_link(connection, events)
        elif connection is self._look:
            self._serve_look(connection, events)

    # ---- the broker -------------------------------------------------------------------------------------------------

    def _serve_link(self, link: socket.socket, events: int) -> None:
        try:
            if not self._has_asked and events & select.EPOLLOUT:
                self._has_asked = True
                link.send(connect_packet(f"device-{self.number}") + subscribe_packet(self._fleet.wake.topic))
        except OSError:
            pass  # which reading will tell of
        found, has_ended = _read(link)
        packets, self._link_bytes = cut_packets(self._link_bytes + found)
        for kind, body in packets:
            if kind & 0xF0 == SUBACK:
                self.is_listening = True
                self._online_s = time.monotonic()
                self.look()
            elif kind & 0xF0 == PUBLISH:
                self._woken(link, kind, body)
        if has_ended:
            self._lost(link)

    def _woken(self, link: socket.socket, kind: int, body: bytes) -> None:
        spread = self._fleet.spread
        spread.woken += 1
        spread.woken_s = time.monotonic()
        if kind & 0x06:
            with suppress(OSError):
                link.send(puback_packet(body))
        self.look()

    def _lost(self, link: socket.socket) -> None:
        self._fleet.closed(link)
        self._link = None
        if self.is_listening:
            self.is_listening = False
            self._fleet.spread.reconnects += 1
            self.backoff.lasted(time.monotonic() - self._online_s)
        self._fleet.later(self, self._attempt, self.backoff.next_s())

    # ---- the repository ---------------------------------------------------------------------------------------------

    def _serve_look(self, look: socket.socket, events: int) -> None:
        try:
            if not self._has_looked and events & select.EPOLLOUT:
                self._has_looked = True
                look.send(b"GET /metadata/2.root.json HTTP/1.1\r\nHost: repository\r\n\r\n")
        except OSError:
            pass  # which reading will tell of
        found, has_ended = _read(look)
        if has_ended:
            self._fleet.spread.failed_looks += 1
            self._is_due = True
            self._end_look(look)
        elif b" 404 " in found:
            look.send(b"GET /metadata/timestamp.json HTTP/1.1\r\nHost: repository\r\n\r\n")
        elif found:
            self._learn(json.loads(found.partition(b"\r\n\r\n")[2])["signed"]["version"])
            self._end_look(look)

    def _learn(self, version: int) -> None:
        if version > self.version:
            self.version = version
            self.applied[version] = self.applied.get(version, 0) + 1
            self._fleet.spread.known_s = time.monotonic()

    def _end_look(self, look: socket.socket) -> None:
        self._fleet.closed(look)
        self._look = None
        is_due, self._is_due = self._is_due, False
        self._fleet.looked()
        if is_due:
            self.look()


def _read(connection: socket.socket) -> tuple[bytes, bool]:
    """All that is there, since epoll tells of it once; and whether that was the end."""
    found = b""
    try:
        while data := connection.recv(READ_BYTES):
            found += data
    except BlockingIOError:
        return found, False
    except OSError:
        pass
    return found, True


def main(arguments: list[str]) -> None:
    """Read a Wake as JSON; then versions, a line each, and print a Spread for each."""
    end_with_parent()
    wake = Wake(**json.loads(arguments[0]))
    fleet = Fleet(wake, allow_connections(2 * wake.devices))
    print(json.dumps({"listening_s": fleet.listen()}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"following": int(line)}), flush=True)
        print(json.dumps(asdict(fleet.follow(int(line)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
