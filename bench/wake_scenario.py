"""What is measured of a fleet that is woken: until all of it knows of an order, and that a broker's death loses none.

The repository is a static server of our own, as small as it can be (metadata_server.py): how long a check takes on a
device, or at a server that signs, is measured elsewhere.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.mqtt_devices import allow_connections
from bench.mqtt_wake import LISTEN_LIMIT_S, SPREAD_LIMIT_S, Spread, Wake
from bench.scenarios import Bench, say
from bench.servers import REPOSITORY, BenchError
from bench.small_packets import connect_packet, publish_packet
from tests.fakes.broker import Broker

TOPIC = "fleet/bench/wake"
DEVICES, QUICK_DEVICES = 10_000, 500
START_LIMIT_S = 20.0
LEAST_LOOKS = QUICK_DEVICES
"""That can be under way at once, whatever the limit of open files is."""

KILL_AFTER_S = 0.0, 0.02, 0.05, 0.1, 0.2
"""After the wake was handed over: before, while and after mosquitto has spread it."""

AWAY_S = 0.3
"""How long the broker stays away: as a service that systemd starts again."""


def mqtt_wake(bench: Bench) -> None:
    """10 000 devices are woken through one mosquitto, and all look at once; then again, and the broker is killed."""
    wanted = QUICK_DEVICES if bench.is_quick else DEVICES
    # Up to two files a device, in the devices' own process; the broker, started below, gets this process's limit.
    devices = min(allow_connections(2 * wanted) - LEAST_LOOKS, wanted)
    figures = bench.figures
    with _fleet(bench, devices) as fleet:
        for _ in bench.rounds("mqtt_wake"):
            figures.add("mqtt.wake.devices", devices)
            _add(bench, "mqtt.wake", fleet.order())
            for after_s in KILL_AFTER_S[:2] if bench.is_quick else KILL_AFTER_S:
                spread = fleet.order(kill_after_s=after_s)
                figures.add("mqtt.wake.kill.woken_ratio", spread.woken / devices)
                _add(bench, "mqtt.wake.kill", spread)
    reached = figures.values["mqtt.wake.kill.woken_ratio"]
    figures.note(
        "mqtt_wake",
        f"no jitter and no least time between looks; all listened after {fleet.listening_s:.1f} s; the broker was "
        f"killed {len(reached)} times, when the wake had reached {min(reached):.0%} to {max(reached):.0%}, and was "
        f"back {AWAY_S:g} s later; {fleet.failed_looks} looks met a refused connection",
    )


# ---- private --------------------------------------------------------------------------------------------------------


class _Fleet:
    """A broker, a repository, and the devices, each a process. Orders are versions of the timestamp, from 1 on."""

    def __init__(self, bench: Bench, broker: Broker, devices: int) -> None:
        self.listening_s = 0.0
        self.failed_looks = 0
        self._broker = broker
        self._version = 0
        self._folder = bench.children.folder / bench.children.new_name("repository")
        self._log = bench.children.log(bench.children.new_name("wake")).open("ab")
        self._devices = devices
        self._children: list[Any] = []

    def start(self) -> None:
        """Publish the first order, and wait until all know it and listen. Raises BenchError."""
        self._publish()
        self._server = self._start("bench.metadata_server", str(self._folder))
        port = int(self._told(self._server, START_LIMIT_S))
        wake = Wake(self._broker.port, port, TOPIC, self._devices)
        self._woken = self._start("bench.mqtt_wake", json.dumps(asdict(wake)))
        say(f"mqtt_wake: {self._devices} devices connect")
        self.listening_s = self._told(self._woken, LISTEN_LIMIT_S)["listening_s"]

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.kill()
            child.communicate()
        self._log.close()

    def order(self, kill_after_s: float | None = None) -> Spread:
        """Publish the next order, wake, and kill the broker where that is wanted; times are since the order."""
        self._woken.stdin.write(b"%d\n" % (self._version + 1))
        self._woken.stdin.flush()
        self._told(self._woken, START_LIMIT_S)
        began_s = time.monotonic()
        self._publish()
        with socket.create_connection(("127.0.0.1", self._broker.port)) as waker:
            waker.sendall(connect_packet("waker") + publish_packet(TOPIC))
            if kill_after_s is not None:
                time.sleep(kill_after_s)
                self._broker.kill()
                time.sleep(AWAY_S)
                self._broker.restart()
            spread = Spread(**self._told(self._woken, 2 * SPREAD_LIMIT_S))
        spread.woken_s = max(0.0, spread.woken_s - began_s)  # none may have been woken
        spread.known_s -= began_s
        self.failed_looks += spread.failed_looks
        return spread

    def _publish(self) -> None:
        self._version += 1
        metadata = self._folder / "metadata"
        metadata.mkdir(parents=True, exist_ok=True)
        part = metadata / "timestamp.part"
        signed = {"_type": "timestamp", "version": self._version, "meta": {"snapshot.json": {"version": self._version}}}
        part.write_text(json.dumps({"signatures": [{"keyid": "0" * 64, "sig": "0" * 128}], "signed": signed}))
        part.rename(metadata / "timestamp.json")

    def _start(self, module: str, argument: str) -> Any:
        child = subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=REPOSITORY,
        )
        self._children.append(child)
        return child

    def _told(self, child: Any, limit_s: float) -> Any:
        """The next line that a child says, as JSON. Raises BenchError."""
        line = child.stdout.readline() if select.select([child.stdout], [], [], limit_s)[0] else b""
        if not line:
            log = Path(self._log.name).read_text(errors="replace").strip()[-500:]
            raise BenchError(f"the woken fleet said nothing within {limit_s:.0f} s: {log}")
        return json.loads(line)


@contextmanager
def _fleet(bench: Bench, devices: int) -> Iterator[_Fleet]:
    folder = bench.children.folder / bench.children.new_name("broker")
    with Broker(folder) as broker:
        fleet = _Fleet(bench, broker, devices)
        try:
            fleet.start()
            yield fleet
        finally:
            fleet.close()


def _add(bench: Bench, key: str, spread: Spread) -> None:
    for name in ("woken_s", "known_s", "lost", "doubled", "looks", "reconnects"):
        bench.figures.add(f"{key}.{name}", getattr(spread, name))
