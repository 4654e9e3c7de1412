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
from edge_runtime.telemetry.busiest import BusiestModels
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


class Host(HostProbe):
    """A device whose process began when a test says."""

    began_s = 1_700_000_000.0

    def started_s(self):
        return self.began_s


class Device:
    """An exporter whose turns a test calls."""

    def __init__(self, folder, *, most_bytes=1 << 20, logs=True):
        self.clock, self.metrics = FakeClock(), Metrics()
        self.collector = Collector(self.clock)
        self.host = Host(folder / "none")
        self.store = BodyStore(folder, most_bytes)
        self.store.open()
        self.logs = LogRecords(logging.WARNING, self.clock) if logs else None
        self.exporter = Exporter(
            self.collector,
            self.store,
            {"service.name": "edge-runtime"},
            metrics=self.metrics,
            busiest=BusiestModels(2, self.clock),
            host=self.host,
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


def test_records_that_wait_for_a_collector_are_a_file_each_few_seconds_and_not_each_turn(device):
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


def starts(device):
    """The start of each sum and histogram that was sent, and what the gauge of the start says, in seconds."""
    device.turn(METRICS_S)
    (body,) = device.collector.bodies
    metrics = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    points = [each[kind]["dataPoints"][0] for each in metrics for kind in ("sum", "histogram") if kind in each]
    (gauge,) = [each["gauge"] for each in metrics if each["name"] == "process_start_time"]
    begun = {int(each["startTimeUnixNano"]) / 1e9 for each in points}
    return begun | {gauge["dataPoints"][0]["asDouble"]}


def test_sums_count_from_the_process_start_which_moves_only_when_the_clock_was_set(device):
    device.metrics.model("m").answered_batch(rows=1, requests=1, queue_s=0.001, run_s=0.001)
    began_s = device.host.began_s
    assert starts(device) == {began_s}
    device.host.began_s += 1.0  # the kernel rounds
    assert starts(device) == {began_s}
    device.host.began_s += 1e6
    assert starts(device) == {device.host.began_s}


def test_metrics_of_models_beyond_the_busiest_are_sent_as_one(device):
    for number in range(1, 5):
        model = device.metrics.model(f"m{number}")
        model.answered_batch(rows=1, requests=number, queue_s=0.001, run_s=0.001)
        model.watch("queue_rows", lambda: 1.0)
    device.turn(METRICS_S)
    (body,) = device.collector.bodies
    metrics = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    requests = {
        each["sum"]["dataPoints"][0]["attributes"][0]["value"]["stringValue"]: each["sum"]["dataPoints"][0]["asInt"]
        for each in metrics
        if each["name"] == "edge_runtime.requests"
    }
    assert requests == {"m4": "4", "m3": "3", "(others)": "3"}
    assert sum(each["name"] == "edge_runtime.queue_rows" for each in metrics) == 3


def test_facts_of_the_device_and_its_models_are_sent_as_in_a_scrape(device):
    device.metrics.watch_facts("device_info", ("device", "group"), lambda: [("dev1", "north")])
    device.turn(METRICS_S)
    (body,) = device.collector.bodies
    metrics = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    (facts,) = [each["gauge"]["dataPoints"] for each in metrics if each["name"] == "edge_runtime.device_info"]
    (point,) = facts
    assert point["asInt"] == "1"
    assert [(each["key"], each["value"]["stringValue"]) for each in point["attributes"]] == [
        ("device", "dev1"),
        ("group", "north"),
    ]
