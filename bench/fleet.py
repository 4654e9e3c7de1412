"""A fleet of simulated devices on one broker, and the process that shows them: its memory, first answer, and changes.

    python -m bench.fleet [--devices 10000] [--models 5] [--changes 20]

One process retains a state for each device on a mosquitto of its own, as a daemon would publish it, and then goes on to
publish states as that many devices do in their intervals. Bars: memory <= 150 MiB, the first answer with all devices
<= 0.5 s after it is asked, a change seen <= 3 s, and in Chromium, where there is one, the page's first paint and its
first hundred devices <= 1.5 s. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.browser import browser, missing, paint
from tests.fakes.broker import Broker
from tests.fakes.mqtt_peer import Peer

PROFILES = ("orin", "pi5", "gateway")
INTERVAL_S = 15.0
LOAD_LIMIT_S = 300.0
PAGE = 100
"""Devices that the page lists at once."""

VISITS = 5


def device_state(index: int, models: int, chance: random.Random, **fields: Any) -> bytes:
    """A state as a daemon publishes it."""
    told = {
        f"model-{number}": {
            "version": 3,
            "rate_per_s": 12.5,
            "p95_ms": round(chance.uniform(5.0, 40.0), 3),
            "versions": [
                {
                    "version": 3,
                    "state": "ready",
                    "reason": "",
                    "backend": "onnxruntime",
                    "device": "cpu",
                    "precision": "fp32",
                    "mode": "workers",
                    "memory_bytes": 12_345_678,
                    "host": {"pid": 1234, "restarts": 0},
                }
            ],
            "latest": 3,
        }
        for number in range(models)
    }
    releases = {name: {"version": 3, "release": 7, "manifest_sha256": "0" * 64, "not_served": ""} for name in told}
    group = f"line-{index % 20}"
    state = {
        "device_id": f"dev-{index:05}",
        "runtime_version": "0.1.0",
        "profile": PROFILES[index % 3],
        "groups": [group],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "interval_s": INTERVAL_S,
        "health": "ok",
        "reasons": [],
        "since": "2026-11-27T00:00:00+00:00",
        "cameras": {},
        "totals": {"models": models, "states": {"ready": models}, "rate_per_s": 62.5, "p95_ms": 20.0},
        "models": told,
        "update": {"state": "idle", "group": group, "checked": None, "models": releases, "refused": []},
        "temperature_celsius": 51.5,
        "memory_bytes": 123_456_789,
        "cpu_cores": 0.5,
        **fields,
    }
    return json.dumps(state, separators=(",", ":")).encode()


def rss_mib(pid: int, kind: str = "VmRSS") -> float:
    """Memory of a process: VmRSS now, or VmHWM at most."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    assert found is not None
    return round(int(found[1]) / 1024, 1)


def get(url: str) -> Any:
    """A JSON answer of the page."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


class Changes(threading.Thread):
    """Reads the stream, and notes when a device was told of."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._changed = threading.Condition()
        self._told: set[str] = set()

    def run(self) -> None:
        """Read until the end."""
        connection = HTTPConnection(urlsplit(self._url).netloc, timeout=600)
        with closing(connection):
            connection.request("GET", urlsplit(self._url).path)
            stream = connection.getresponse()
            while line := stream.readline():
                if line.startswith(b"data: {"):
                    with self._changed:
                        self._told |= set(json.loads(line[6:]).get("devices") or ())
                        self._changed.notify_all()

    def wait(self, device: str) -> None:
        """Until a device was told of."""
        with self._changed:
            assert self._changed.wait_for(lambda: device in self._told, 60), f"{device} was not told of"


def measure(devices: int, models: int, changes: int) -> dict[str, Any]:
    """Retain all states, start the fleet's process, and ask it."""
    chance = random.Random(1)
    found: dict[str, Any] = {"devices": devices, "models": models}
    with (
        tempfile.TemporaryDirectory() as folder,
        Broker(Path(folder) / "broker", config="max_queued_messages 1000") as broker,
        Peer(broker.url) as peer,
    ):
        states = [device_state(index, models, chance) for index in range(devices)]
        found["state_bytes"] = len(states[0])
        for index, state in enumerate(states):
            is_last = index % 50 == 49  # so that the broker keeps up
            peer.publish(f"edge/dev-{index:05}/status", "online", 0, retain=True)
            peer.publish(f"edge/dev-{index:05}/state", state, int(is_last), retain=True)
        began_s = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-m", "edge_runtime", "fleet", "--mqtt", broker.url, "--http", "127.0.0.1:0", "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            text = ""
            while not text.endswith("}\n"):
                text += child.stdout.readline()
            url = json.loads(text)["endpoints"][0]
            while not (overview := get(f"{url}/fleet/overview"))["is_loaded"] or overview["devices"] < devices:
                assert time.monotonic() - began_s < LOAD_LIMIT_S, overview
                time.sleep(0.05)
            found["loaded_s"] = round(time.monotonic() - began_s, 2)
            for name in ("devices", "releases", "slow", "overview", "devices?search=line-7+dev-099"):
                began_s = time.monotonic()
                get(f"{url}/fleet/{name}")
                key = "search_s" if "?" in name else f"{name}_s"
                found[key] = round(time.monotonic() - began_s, 3)
            stream = Changes(f"{url}/fleet/stream")
            stream.start()
            is_over, sent = threading.Event(), [0]

            def publish() -> None:
                """Publish states at the rate of the whole fleet."""
                pause_s = INTERVAL_S / devices
                next_s = time.monotonic()
                while not is_over.is_set():
                    index = sent[0] % devices
                    peer.publish(f"edge/dev-{index:05}/state", states[index], 0, retain=True)
                    sent[0] += 1
                    next_s += pause_s
                    is_over.wait(max(next_s - time.monotonic(), 0.0))

            publisher = threading.Thread(target=publish)
            publisher.start()
            cpu_began, time_began = _cpu_s(child.pid), time.monotonic()
            waits = []
            for number in range(changes):
                device = f"dev-{chance.randrange(devices):05}"
                state = device_state(int(device[4:]), models, chance, health="degraded", reasons=[f"trouble {number}"])
                began_s = time.monotonic()
                peer.publish(f"edge/{device}/state", state, 1, retain=True)
                stream.wait(device)
                waits.append(time.monotonic() - began_s)
                time.sleep(0.5)
            found["change_s"] = [round(each, 2) for each in sorted(waits)][-3:]
            elapsed_s = time.monotonic() - time_began
            found["states_per_s"] = round(sent[0] / elapsed_s)
            found["cores"] = round((_cpu_s(child.pid) - cpu_began) / elapsed_s, 3)
            if not missing():
                with browser() as chromium:
                    painted = [paint(chromium, f"{url}/#/", "tbody tr", min(devices, PAGE)) for _ in range(VISITS)]
                found["paint_s"] = [round(first_s, 3) for first_s, _ in painted]
                found["listed_s"] = [round(listed_s, 3) for _, listed_s in painted]
            is_over.set()
            publisher.join()
            found["memory_mib"], found["memory_most_mib"] = rss_mib(child.pid), rss_mib(child.pid, "VmHWM")
        finally:
            child.terminate()
            child.wait(30)
    return found


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=5)
    parser.add_argument("--changes", type=int, default=20)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.devices, arguments.models, arguments.changes)))


if __name__ == "__main__":
    main()
