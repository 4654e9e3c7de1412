"""Models' metrics under Triton's names, scraped over real HTTP on loopback."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge_runtime.telemetry.busiest import BusiestModels
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.telemetry.prometheus import OTHERS, serve_metrics
from edge_runtime.triton import METRICS
from tests.fakes.clock import FakeClock


def scraped(metrics: Metrics, *also: str, **options: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    server = serve_metrics(metrics, HostProbe(), also=also, **options)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as reply:
            text = reply.read().decode()
    finally:
        server.close()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("also", [(), (METRICS.name,)])
def test_tritons_names_are_beside_ours_where_they_are_asked_for(also: tuple[str, ...]) -> None:
    metrics = Metrics()
    model = metrics.model("digits")
    model.answered_batch(rows=6, requests=3, queue_s=0.001, run_s=0.003)
    model.refused("queue_full", 2)
    model.watch("queue_rows", lambda: 9)
    found, digits = scraped(metrics, *also), ("model", "digits")
    wanted = {
        "nv_inference_request_success": 3,
        "nv_inference_count": 6,
        "nv_inference_exec_count": 1,
        "nv_inference_queue_duration_us": 3_000,
        "nv_inference_compute_infer_duration_us": 9_000,
        "nv_inference_pending_request_count": 9,
    }
    given = {name: round(value) for (name, labels), value in found.items() if name in wanted and labels == (digits,)}
    assert given == (wanted if also else {})
    rejected = found.get(("nv_inference_request_failure", (digits, ("reason", "REJECTED"))))
    assert rejected == (2 if also else None)
    assert found["edge_runtime_rows_total", (digits,)] == 6


def test_tritons_names_have_the_models_that_ours_have() -> None:
    metrics = Metrics()
    for name in ("one", "two", "three"):
        metrics.model(name).answered_batch(rows=2, requests=2, queue_s=0.001, run_s=0.003)
    found = scraped(metrics, METRICS.name, busiest=BusiestModels(1, FakeClock()))
    told = {labels: value for (name, labels), value in found.items() if name == "nv_inference_request_success"}
    assert told == {(("model", "one"),): 2, (("model", OTHERS),): 4}
