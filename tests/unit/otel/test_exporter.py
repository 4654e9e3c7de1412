"""The turns of the signals: none keeps another back, whatever comes of it and however the collector takes it."""

from __future__ import annotations

import gzip
import json
import logging
import math

import pytest

from edge_runtime.otel.collector import CollectorAnswer
from edge_runtime.otel.exporter import BODY_TRACES, MOST_TRACES, RESENT, Exporter
from edge_runtime.otel.log_records import LogRecords
from edge_runtime.otel.store import BodyStore
from edge_runtime.otel.tracer import EndedRequest, VersionFacts
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import Metrics
from tests.fakes.clock import FakeClock

TAKEN = CollectorAnswer(is_taken=True)
NOT_NOW = CollectorAnswer(is_taken=False, may_repeat=True, reason="it answered 503")
AWAY = CollectorAnswer(is_taken=False, may_repeat=True, is_away=True, reason="refused")

METRICS_S = 60.0


class Collector:
    """Takes what it is told to. sent: the signals of the bodies that it got, in order. took_s: what each takes."""

    endpoint = "http://127.0.0.1:4318"

    def __init__(self, clock):
        self.answers = {}
        self.sent, self.bodies = [], []
        self.took_s = dict[str, float]()
        self.on_send = lambda: None
        self._clock = clock

    def send(self, signal, body, wait_s):
        self.sent.append(signal)
        self.bodies.append(json.loads(gzip.decompress(body)))
        self._clock.advance(self.took_s.get(signal, 0.0))
        self.on_send()
        return self.answers.get(signal, TAKEN)

    def close(self):
        pass


class Device:
    """An exporter whose turns a test calls."""

    def __init__(self, folder, *, most_bytes=1 << 20, logs=True):
        self.clock, self.metrics = FakeClock(), Metrics()
        self.collector = Collector(self.clock)
        self.store = BodyStore(folder, most_bytes)
        self.store.open()
        self.logs = LogRecords(logging.WARNING, self.clock) if logs else None
        self.exporter = Exporter(
            self.collector,
            self.store,
            {"service.name": "edge-runtime"},
            metrics=self.metrics,
            host=HostProbe(folder / "none"),
            logs=self.logs,
            metrics_s=METRICS_S,
            clock=self.clock,
        )

    def trace(self, count=1):
        """Have requests be traced, as many as find room."""
        for _ in range(count):
            if self.exporter.has_room(1):
                self.exporter.add(ended())

    def log(self, text="something"):
        self.logs.handle(logging.makeLogRecord({"name": "edge_runtime.x", "levelno": 30, "msg": text, "args": ()}))

    def turn(self, seconds=1.0):
        """Let time pass; return the signals of what was sent then."""
        self.clock.advance(seconds)
        self.collector.sent.clear()
        self.collector.bodies.clear()
        self.exporter.look()
        return list(self.collector.sent)


def ended():
    facts = VersionFacts("m", 1)
    return EndedRequest(
        1, 2, 0, 1, "zmq", "", facts, 1.0, 2.0, None, None, 0, 0, 1, 4, 0, math.inf, math.nan, "", None
    )  # fmt: skip


@pytest.fixture
def device(tmp_path):
    return Device(tmp_path)


def test_metrics_come_before_the_traces_that_wait(device):
    device.trace(MOST_TRACES)
    device.log()
    assert device.turn(METRICS_S) == ["metrics", "logs", "traces", "traces"]


def test_traces_that_come_as_quickly_as_they_are_sent_end_a_turn(device):
    device.collector.on_send = lambda: device.trace(BODY_TRACES)
    device.trace(BODY_TRACES)
    assert device.turn() == ["traces", "traces"]


def test_a_collector_that_takes_no_traces_gets_metrics_and_logs(device):
    device.collector.answers["traces"] = NOT_NOW
    device.trace()
    device.turn()
    for _ in range(20):
        device.trace()
        device.log()
        sent = device.turn(METRICS_S)
        assert sent[:2] == ["metrics", "logs"]
    assert len(device.store) > 1
    device.collector.answers.clear()
    device.turn(METRICS_S)
    while "traces" in device.turn(METRICS_S):
        pass
    assert not len(device.store)


def test_a_collector_that_takes_long_for_traces_gets_metrics_in_between(device):
    device.collector.answers["traces"] = NOT_NOW
    for _ in range(5 * RESENT):
        device.trace()
        device.turn(METRICS_S)
    device.collector.answers.clear()
    device.collector.took_s["traces"] = 4.0
    sent = []
    while len(device.store):
        sent += device.turn(METRICS_S)
    turns = "".join(each[0] for each in sent).split("m")
    assert max(map(len, turns)) <= 2, "after a slow one of them it is the others' turn"


def test_nothing_is_asked_for_the_other_signals_while_the_collector_is_away(device):
    device.collector.answers = dict.fromkeys(("metrics", "logs", "traces"), AWAY)
    device.trace()
    device.log()
    assert device.turn(METRICS_S) == ["metrics"]
    assert len(device.store) == 3
    device.collector.answers.clear()
    assert sorted(set(device.turn(METRICS_S))) == ["logs", "metrics", "traces"]
    device.turn(METRICS_S)
    assert not len(device.store)


def test_what_waits_for_a_collector_is_a_file_each_few_seconds_and_not_each_turn(device):
    device.collector.answers["traces"] = NOT_NOW
    device.trace()
    device.turn()
    for _ in range(20):
        device.trace()
        device.turn()
    assert 4 <= len(device.store) <= 7


def test_a_daemon_that_stops_finds_out_once_that_nothing_is_taken(device):
    device.collector.answers = dict.fromkeys(("metrics", "logs", "traces"), NOT_NOW)
    device.trace()
    device.log()
    device.exporter.close()
    assert device.turn() == ["metrics"]
    assert len(device.store) == 3
