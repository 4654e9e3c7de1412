"""What is measured through a broker: a real mosquitto on this machine, as in the tests.

As in scenarios.py, rounds are interleaved, and daemon and yardstick go through the same broker. Without mosquitto the
scenarios say so and are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paho.mqtt.client import Client, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion

from bench import makers
from bench.load import mqtt_payload
from bench.makers import BenchModel
from bench.mqtt_devices import Fleet, FleetCount, allow_connections
from bench.mqtt_load import ALLOWANCE_MS, GIVEN_UP_AFTER_S, MqttLoad, MqttRun
from bench.scenarios import SLICES, Bench, say
from bench.servers import REPOSITORY, BenchError, Daemon
from bench.wake_scenario import mqtt_wake
from tests.fakes.broker import MOSQUITTO, Broker

DEVICE = "bench"
DAEMON_TOPICS, ECHO_TOPICS = f"edge/{DEVICE}", "edge/echo0"
"""Of equal length, so that both carry the same bytes."""

ANSWER_LIMIT_S = 30.0
PROCESS_LIMIT_S = 60.0
DROPPED, UPTIME, VERSION = "$SYS/broker/publish/messages/dropped", "$SYS/broker/uptime", "$SYS/broker/version"
BROKER_CONFIG = "sys_interval 1"
OVERLOAD_TIMEOUTS_MS = {"small5ms": 75.0, "mlp": 500.0}
"""Some fifteen runs of small5ms; and for a model that costs nothing, what a person would wait for."""


RATE_KINDS: Mapping[str, Mapping[str, Any]] = {
    "1": {"in_flight": 1},
    "64": {"in_flight": 64, "client": "paho"},
    "64.lean": {"in_flight": 64, "client": "lean"},
    "64.qos1": {"in_flight": 64, "qos": 1},
}


@dataclass(slots=True)
class Site:
    """A broker, with a daemon and the echo listening to it."""

    bench: Bench
    broker: Broker
    daemon: Daemon

    def ask(self, topics: str, model: BenchModel, *, timeout_ms: float | None = None, **words: Any) -> MqttLoad:
        """One run of the generator. topics: none, and it asks itself. words: MqttRun's.

        Raises BenchError when nothing was answered in a closed loop.
        """
        run = MqttRun(
            port=self.broker.port,
            topic=topics and f"{topics}/infer/{model.name}",
            payload=str(_payload_file(self.bench, model, timeout_ms)),
            **({} if timeout_ms is None else {"timeout_ms": timeout_ms}),
            **words,
        )
        limit_s = run.warm_s + run.seconds + run.timeout_ms / 1e3 + GIVEN_UP_AFTER_S + PROCESS_LIMIT_S
        load = MqttLoad(**_json_of("bench.mqtt_load", asdict(run), limit_s))
        if not load.answered and not run.rate:
            raise BenchError(
                f"{run.topic}: nothing answered of {load.sent}: refused {load.refused}, {load.never} never"
            )
        return load


class Listener:
    """Hears retained words of a broker: who is online, and what the broker counts. Thread: main; paho has its own."""

    def __init__(self, port: int) -> None:
        self._heard: dict[str, tuple[int, str]] = {}
        self._changed = threading.Condition()
        self._client = Client(CallbackAPIVersion.VERSION2, protocol=MQTTv5)
        self._client.on_connect = lambda *_: self._client.subscribe(
            [(topic, 0) for topic in (DROPPED, UPTIME, VERSION, "edge/+/status")]
        )
        self._client.on_message = self._on_message
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()

    def close(self) -> None:
        """End it."""
        self._client.disconnect()
        self._client.loop_stop()

    def wait_online(self, topics: str) -> None:
        """Wait until `<topics>/status` says so. Raises BenchError."""
        self._wait(lambda: self._said(f"{topics}/status") == "online", f"{topics} is not online")

    def dropped(self) -> int:
        """Messages that the broker dropped since it began, counted no earlier than this call."""
        ticks = self._count(UPTIME)
        # What is told at one tick comes before the next; the first may have begun before this call.
        self._wait(lambda: self._count(UPTIME) >= ticks + 2, "the broker says nothing of itself")
        return int(self._said(DROPPED) or 0)

    def version(self) -> str:
        """The broker's name and version."""
        self._wait(lambda: bool(self._said(VERSION)), "the broker says nothing of itself")
        return self._said(VERSION)

    def _said(self, topic: str) -> str:
        return self._heard.get(topic, (0, ""))[1]

    def _count(self, topic: str) -> int:
        return self._heard.get(topic, (0, ""))[0]

    def _wait(self, is_so: Callable[[], bool], problem: str) -> None:
        with self._changed:
            if not self._changed.wait_for(is_so, ANSWER_LIMIT_S):
                raise BenchError(f"{problem} after {ANSWER_LIMIT_S:.0f} s")

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        with self._changed:
            self._heard[message.topic] = (self._count(message.topic) + 1, message.payload.decode())
            self._changed.notify_all()


def mqtt_rate(bench: Bench) -> None:
    """A model that costs nothing: the daemon beside a bare paho echo behind the same broker."""
    model, figures = makers.mlp(), bench.figures
    kinds = {name: RATE_KINDS[name] for name in ("1", "64", "64.qos1")} if bench.is_quick else RATE_KINDS
    targets = [("ours", DAEMON_TOPICS), ("echo", ECHO_TOPICS)]
    with _site(bench, "mqtt_rate", model) as (site, _):
        slices = 1 if bench.is_quick else SLICES
        for number in bench.rounds("mqtt_rate", slices):
            for kind, words in kinds.items():
                seconds = max(0.5, bench.seconds / slices)
                order = targets[::-1] if number % 2 else targets
                loads = {name: site.ask(topics, model, seconds=seconds, **words) for name, topics in order}
                if not all(each.rate for each in loads.values()):  # a busy machine kept one off its cores meanwhile
                    loads = {name: site.ask(topics, model, seconds=4 * seconds, **words) for name, topics in order}
                ours, echo = loads["ours"], loads["echo"]
                if not echo.rate:
                    raise BenchError(f"mqtt_rate: the echo answered nothing in {4 * seconds:g} s, {kind} in flight")
                figures.add(f"mqtt.{kind}.rate", ours.rate)
                figures.add(f"mqtt.{kind}.echo_rate", echo.rate)
                figures.add(f"mqtt.{kind}.rate_ratio", ours.rate / echo.rate)
                figures.add(f"mqtt.{kind}.p50_ms", ours.p50_ms)
                figures.add(f"mqtt.{kind}.p99_ms", ours.p99_ms)
                figures.add(f"mqtt.{kind}.echo_p50_ms", echo.p50_ms)
                figures.add(f"mqtt.{kind}.added_p50_ms", ours.p50_ms - echo.p50_ms)
                figures.add("mqtt.rate.failed", sum(ours.refused.values()) + ours.never + ours.duplicated + ours.stray)
                if kind in ("64", "64.lean") and not bench.is_quick:
                    figures.add(f"mqtt.{kind}.client_rate", site.ask("", model, seconds=seconds, **words).rate)
    for kind in ("64", "64.lean"):
        if f"mqtt.{kind}.client_rate" in figures.values:
            rate = figures.median(f"mqtt.{kind}.client_rate")
            figures.note(
                "mqtt_rate", f"the {RATE_KINDS[kind]['client']} client asking itself, 64 in flight: {rate:,.0f}/s"
            )


def mqtt_overload(bench: Bench) -> None:
    """Twice what it can serve, as Poisson arrivals with a timeout: nothing may be answered late, or not at all."""
    models, figures = (makers.mlp(), makers.small5ms()), bench.figures
    with _site(bench, "mqtt_overload", *models) as (site, listener):
        for number in bench.rounds("mqtt_overload"):
            for model in models:
                key, timeout_ms = f"mqtt.overload.{model.name}", OVERLOAD_TIMEOUTS_MS[model.name]
                capacity = _capacity(site, model)
                before = listener.dropped()
                load = site.ask(
                    DAEMON_TOPICS,
                    model,
                    timeout_ms=timeout_ms,
                    client="lean",
                    rate=2 * capacity,
                    seconds=bench.overload_seconds,
                    warm_s=0.0,
                    seed=number,
                )
                dropped = listener.dropped() - before
                in_all = 2 * capacity * bench.overload_seconds
                figures.add(f"{key}.capacity", capacity)
                figures.add(f"{key}.offered_ratio", load.sent / in_all)
                figures.add(f"{key}.goodput_ratio", load.rate / capacity)
                figures.add(f"{key}.p50_ms", load.p50_ms)
                figures.add(f"{key}.p99_ms", load.p99_ms)
                figures.add(f"{key}.past_timeout", load.past_timeout)
                figures.add(f"{key}.late", load.late)
                figures.add(f"{key}.latest_ms", load.latest_ms)
                figures.add(f"{key}.never", load.never)
                figures.add(f"{key}.dropped", dropped)
                figures.add(f"{key}.lost", max(0, load.never - dropped))
                figures.add(f"{key}.duplicated", load.duplicated + load.stray)
                figures.add(f"{key}.lag_ms", load.lag_ms)
                figures.add(f"{key}.unsent_p99_ms", load.unsent_p99_ms)
                figures.add(f"{key}.answered", load.answered)
                for code, count in load.refused.items():
                    figures.add(f"{key}.refused.{code}", count)
    for model in models:
        _note_overload(bench, model)


def mqtt_devices(bench: Bench) -> None:
    """1 000 client devices, each on a connection of its own, asking one gateway once a second for a minute."""
    model, figures = makers.mlp(), bench.figures
    wanted, seconds = (100, 5.0) if bench.is_quick else (1000, 60.0)
    devices = allow_connections(wanted)  # before the broker starts, which needs as many and gets this process's limit
    with _site(bench, "mqtt_devices", model) as (site, _):
        say(f"mqtt_devices: {devices} of them for {seconds:.0f} s")
        fleet = Fleet(
            port=site.broker.port,
            topic=f"{DAEMON_TOPICS}/infer/{model.name}",
            payload=str(_payload_file(bench, model, None)),
            devices=devices,
            seconds=seconds,
        )
        count = FleetCount(**_json_of("bench.mqtt_devices", asdict(fleet), seconds + 2 * PROCESS_LIMIT_S))
    for name in ("devices", "asked", "answered", "lost", "duplicated", "disconnected", "p50_ms", "p99_ms"):
        figures.add(f"mqtt.devices.{name}", getattr(count, name))
    figures.add("mqtt.devices.refused", sum(count.refused.values()))
    figures.note(
        "mqtt_devices",
        f"{count.devices} devices asked {count.asked:,} times, every other one with QoS 1; {count.disconnected} "
        f"disconnected, refused: {count.refused or 'none'}; 99% were sent within {count.lag_p99_ms:.1f} ms of when due",
    )


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "mqtt_rate": mqtt_rate,
    "mqtt_overload": mqtt_overload,
    "mqtt_devices": mqtt_devices,
    "mqtt_wake": mqtt_wake,
}


def missing() -> str:
    """What keeps these scenarios from being measured here; nothing when they can be."""
    return "" if MOSQUITTO else "left out: mosquitto is not installed. Do: sudo apt-get install mosquitto"


# ---- private --------------------------------------------------------------------------------------------------------


@contextmanager
def _site(bench: Bench, scenario: str, *models: BenchModel) -> Iterator[tuple[Site, Listener]]:
    """Broker, daemon and echo, all online, and the daemon calibrated."""
    with Broker(bench.children.folder / bench.children.new_name("broker"), config=BROKER_CONFIG) as broker:
        listener = Listener(broker.port)
        daemon = bench.daemon(*models, mqtt=f"{broker.url}/{DEVICE}")
        echo = bench.children.start(
            [sys.executable, "-m", "bench.mqtt_echo", str(broker.port), ECHO_TOPICS],
            bench.children.new_name("echo"),
        )
        try:
            daemon.start()
            daemon.wait_for_answer(bench.request(models[0]))
            daemon.settle(quiet_s=1.0 if bench.is_quick else 2.0)
            listener.wait_online(DAEMON_TOPICS)
            listener.wait_online(ECHO_TOPICS)
            bench.figures.note(scenario, listener.version())
            yield Site(bench, broker, daemon), listener
        finally:
            listener.close()
            bench.children.stop(echo)
            daemon.stop()


def _payload_file(bench: Bench, model: BenchModel, timeout_ms: float | None) -> Path:
    path = bench.children.folder / f"{model.name}-{timeout_ms or 0:g}.mqtt"
    if not path.exists():
        path.write_bytes(mqtt_payload(model, timeout_ms=timeout_ms))
    return path


def _capacity(site: Site, model: BenchModel) -> float:
    """The best closed-loop rate."""
    depths = (64,) if site.bench.is_quick else (64, 256)
    runs = [site.ask(DAEMON_TOPICS, model, client="lean", in_flight=n, seconds=site.bench.seconds) for n in depths]
    return max(run.rate for run in runs)


def _note_overload(bench: Bench, model: BenchModel) -> None:
    """What became of the requests, in one sentence."""
    figures, key = bench.figures, f"mqtt.overload.{model.name}"
    prefix = f"{key}.refused."

    def median(name: str) -> str:
        return f"{figures.median(f'{key}.{name}'):,.0f}"

    codes = [name.removeprefix(prefix) for name in figures.values if name.startswith(prefix)]
    refused = ", ".join(f"{code} {median(f'refused.{code}')}" for code in codes) or "none"
    latest_ms = max(figures.values[f"{key}.latest_ms"])
    figures.note(
        "mqtt_overload",
        f"{model.name}, timeout {OVERLOAD_TIMEOUTS_MS[model.name]:g} ms, capacity {median('capacity')}/s; a round: "
        f"answered {median('answered')}, refused {refused}, never {median('never')}, dropped by the broker "
        f"{median('dropped')}; past the timeout {median('past_timeout')}, by {latest_ms:,.1f} ms at most, and late are "
        f"those over by more than {ALLOWANCE_MS:g} ms and the generator's longest pause, {median('lag_ms')} ms; 99% of "
        f"arrivals were sent within {median('unsent_p99_ms')} ms: the broker pushes back when the cores are busy",
    )


def _json_of(module: str, words: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """What a generator prints, run in a process of its own."""
    command = [sys.executable, "-m", module, json.dumps(words)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, cwd=REPOSITORY)
    if found.returncode:
        raise BenchError(f"{module} failed ({found.returncode}): {found.stderr.strip()[-500:]}")
    return dict(json.loads(found.stdout))
