"""Scrapes over real HTTP on loopback, read by prometheus-client's own parser."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge_runtime.errors import ConfigError
from edge_runtime.extras import install_advice
from edge_runtime.telemetry.busiest import BusiestModels
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.telemetry.prometheus import OTHERS, MetricsServer, serve_metrics
from tests.fakes.clock import FakeClock


@pytest.fixture
def metrics() -> Metrics:
    found = Metrics()
    model = found.model("digits")
    model.answered_batch(rows=6, requests=3, queue_s=0.001, run_s=0.003)
    model.refused("queue_full", 2)
    model.watch("queue_rows", lambda: 9)
    model.watch_reason("host_last_end", lambda: "its process was ended by SIGSEGV")
    model.watch_reason("nothing_yet", lambda: "")
    found.count("replies_dropped", 4)
    found.count("refused_decode_failed", 5)
    found.watch("connections", lambda: 2)
    return found


@pytest.fixture
def server(metrics: Metrics) -> Iterator[MetricsServer]:
    served = serve_metrics(metrics, HostProbe())
    yield served
    served.close()


Sample = tuple[str, tuple[tuple[str, str], ...]]


def scrape(server: MetricsServer, query: str = "") -> dict[Sample, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics{query}", timeout=60) as reply:
        text = reply.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_has_every_number_under_its_conventional_name(server: MetricsServer) -> None:
    found = scrape(server)
    digits = (("model", "digits"),)
    assert found["edge_runtime_requests_total", digits] == 5
    assert found["edge_runtime_answers_total", digits] == 3
    assert found["edge_runtime_rows_total", digits] == 6
    assert found["edge_runtime_run_seconds_total", digits] == pytest.approx(0.003)
    assert found["edge_runtime_refusals_total", (("code", "queue_full"), ("model", "digits"))] == 2
    assert found["edge_runtime_refusals_total", (("code", "decode_failed"), ("model", ""))] == 5
    assert found["edge_runtime_queue_rows", digits] == 9
    ended = [labels for name, labels in found if name == "edge_runtime_host_last_end"]
    assert ended == [(("model", "digits"), ("reason", "its process was ended by SIGSEGV"))]
    assert not any(name == "edge_runtime_nothing_yet" for name, _ in found)
    assert found["edge_runtime_replies_dropped_total", ()] == 4
    assert found["edge_runtime_connections", ()] == 2
    assert found["edge_runtime_process_resident_memory_bytes", ()] > 0
    assert found["edge_runtime_process_cpu_seconds_total", ()] > 0


def test_latency_is_a_histogram_by_phase_in_seconds(server: MetricsServer) -> None:
    found = scrape(server)
    labels = {"model": "digits", "phase": "total"}
    name = "edge_runtime_request_duration_seconds"
    assert found[f"{name}_count", tuple(sorted(labels.items()))] == 3
    assert found[f"{name}_sum", tuple(sorted(labels.items()))] == pytest.approx(0.012)
    assert found[f"{name}_bucket", tuple(sorted({**labels, "le": "0.0022"}.items()))] == 0
    assert found[f"{name}_bucket", tuple(sorted({**labels, "le": "0.0047"}.items()))] == 3
    assert found[f"{name}_bucket", tuple(sorted({**labels, "le": "+Inf"}.items()))] == 3


def test_buckets_never_fall(server: MetricsServer) -> None:
    buckets = sorted(
        (float(dict(labels)["le"]), value)
        for (name, labels), value in scrape(server).items()
        if name == "edge_runtime_batch_rows_bucket"
    )
    assert [value for _, value in buckets] == sorted(value for _, value in buckets)
    assert buckets[-1][1] == 1


def test_every_name_has_the_prefix_but_the_one_that_all_processes_have(server: MetricsServer) -> None:
    others = {name for name, _ in scrape(server) if not name.startswith("edge_runtime_")}
    assert others == {"process_start_time_seconds"}


def test_the_start_of_the_process_is_told_as_unix_seconds(server: MetricsServer) -> None:
    started_s = scrape(server)["process_start_time_seconds", ()]
    assert started_s == pytest.approx(psutil.Process().create_time())


def test_facts_are_series_of_one(server: MetricsServer, metrics: Metrics) -> None:
    metrics.watch_facts("model_info", ("model", "version"), lambda: [("digits", "3"), ("faces", "1")])
    found = [(labels, value) for (name, labels), value in scrape(server).items() if name == "edge_runtime_model_info"]
    assert found == [((("model", "digits"), ("version", "3")), 1.0), ((("model", "faces"), ("version", "1")), 1.0)]


# ---- a device with many models --------------------------------------------------------------------------------------

LIMIT = 30


@pytest.fixture
def crowded() -> Iterator[tuple[MetricsServer, Metrics]]:
    """A thousand models, each asked and refused for four reasons, the first ones the most."""
    metrics = Metrics()
    for index in range(1_000):
        model = metrics.model(f"model-{index:03}")
        model.answered_batch(rows=2, requests=2_000 - index, queue_s=0.001, run_s=0.003)
        for code in ("queue_full", "deadline_unmeetable", "deadline_exceeded", "run_failed"):
            model.refused(code)
        for gauge in ("queue_rows", "queue_bytes", "host_restarts", "host_memory_bytes"):
            model.watch(gauge, lambda: 1)
    rows = [(f"model-{index:03}", "1", "7", "onnxruntime", "fp32") for index in range(1_000)]
    metrics.watch_facts("model_info", ("model", "version", "release", "backend", "precision"), lambda: rows)
    server = serve_metrics(metrics, HostProbe(), busiest=BusiestModels(LIMIT, FakeClock()))
    yield server, metrics
    server.close()


def models_of(found: dict[Sample, float], metric: str) -> set[str]:
    return {dict(labels)["model"] for name, labels in found if name == metric}


def test_a_thousand_models_have_at_most_6000_series_however_many_are_asked_for(crowded) -> None:
    server, _ = crowded
    asked = "&".join(f"model=model-{index:03}" for index in range(900, 960))
    found = scrape(server, f"?{asked}")
    assert len(found) <= 6_000
    assert len(models_of(found, "edge_runtime_request_duration_seconds_count")) == LIMIT + 10 + 1
    assert len(models_of(found, "edge_runtime_model_info")) == 1_000


def test_the_busiest_models_and_one_that_is_asked_for_are_told_of_and_the_others_as_one(crowded) -> None:
    server, metrics = crowded
    busiest = {f"model-{index:03}" for index in range(LIMIT)}
    assert models_of(scrape(server), "edge_runtime_answers_total") == {*busiest, OTHERS}
    found = scrape(server, "?model=model-777&model=nobody")
    for metric in ("edge_runtime_answers_total", "edge_runtime_batch_rows_count", "edge_runtime_refusals_total"):
        assert models_of(found, metric) == {*busiest, "model-777", OTHERS}
    assert models_of(found, "edge_runtime_host_memory_bytes") == {*busiest, "model-777"}
    answers = {
        dict(labels)["model"]: value for (name, labels), value in found.items() if name.endswith("answers_total")
    }
    assert answers["model-777"] == 1_223
    before = answers[OTHERS]
    metrics.model("model-999").answered(0.001, 0.003, 5)
    after = scrape(server)["edge_runtime_answers_total", (("model", OTHERS),)]
    assert after == before + 5


def test_a_query_that_cannot_be_read_is_a_plain_scrape(crowded) -> None:
    server, _ = crowded
    found = scrape(server, "?" + "&".join(f"model={index}" for index in range(1_000)))
    assert len(models_of(found, "edge_runtime_answers_total")) == LIMIT + 1


def test_a_later_scrape_sees_later_numbers(server: MetricsServer, metrics: Metrics) -> None:
    metrics.model("digits").refused("queue_full")
    assert scrape(server)["edge_runtime_refusals_total", (("code", "queue_full"), ("model", "digits"))] == 3


def test_after_close_the_port_is_free(metrics: Metrics) -> None:
    server = serve_metrics(metrics, HostProbe())
    port = server.port
    server.close()
    server.close()
    serve_metrics(metrics, HostProbe(), port=port).close()


def test_a_port_in_use_is_a_configuration_error_naming_it(metrics: Metrics) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            serve_metrics(metrics, HostProbe(), port=port)


def test_without_the_library_the_error_names_the_extra() -> None:
    program = """
import sys
sys.modules["prometheus_client"] = None
from edge_runtime.errors import ConfigError
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.telemetry.prometheus import serve_metrics
try:
    serve_metrics(Metrics(), HostProbe())
except ConfigError as error:
    print(error.message)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert install_advice("prometheus") in done.stdout


def test_the_light_modules_import_nothing_heavy() -> None:
    program = """
import json, sys
import edge_runtime.config.loading, edge_runtime.profiles.detect, edge_runtime.profiles.match
import edge_runtime.telemetry.metrics, edge_runtime.telemetry.host, edge_runtime.telemetry.logs
import edge_runtime.telemetry.notify
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"numpy", "psutil", "prometheus_client", "tomllib", "tomli", "openvino", "onnxruntime", "zmq"}
    assert heavy.isdisjoint(json.loads(done.stdout))
