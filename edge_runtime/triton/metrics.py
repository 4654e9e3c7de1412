"""Models' metrics under Triton's names, which lack the `_total` that a counter's name ends with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edge_runtime.telemetry.metrics import ModelMetrics

_ROWS: tuple[tuple[str, str, Callable[[ModelMetrics], float]], ...] = (
    ("request_success", "Requests answered with outputs", lambda metrics: metrics.answered_requests),
    ("count", "Rows run", lambda metrics: metrics.rows),
    ("exec_count", "Runs of the backend", lambda metrics: metrics.runs),
    ("request_duration_us", "Time of answered requests", lambda metrics: metrics.total.total * 1e6),
    ("queue_duration_us", "Time that answered requests waited", lambda metrics: metrics.queue.total * 1e6),
    ("compute_input_duration_us", "Always 0: part of the run", lambda _: 0.0),
    ("compute_infer_duration_us", "Run time of answered requests", lambda metrics: metrics.run_time.total * 1e6),
    ("compute_output_duration_us", "Always 0: part of the run", lambda _: 0.0),
    ("pending_request_count", "Rows that wait", lambda metrics: metrics.gauges.get("queue_rows", lambda: 0.0)()),
)
"""Triton's names after `nv_inference_`, without its label `version`: a model's versions count together."""

_REASONS = {
    "queue_full": "REJECTED",
    "deadline_unmeetable": "REJECTED",
    "deadline_exceeded": "REJECTED",
    "draining": "REJECTED",
    "cancelled": "CANCELED",
    "run_failed": "BACKEND",
}


def families(models: Mapping[str, ModelMetrics]) -> Iterator[Any]:
    """Yield the families of these models, for one scrape. Thread: any."""
    from prometheus_client.core import UntypedMetricFamily

    for name, text, read in _ROWS:
        family = UntypedMetricFamily(f"nv_inference_{name}", text, labels=["model"])
        for model, each in models.items():
            family.add_metric([model], read(each))
        yield family
    failures = UntypedMetricFamily(
        "nv_inference_request_failure", "Requests that ended in an error", labels=["model", "reason"]
    )
    for model, each in models.items():
        counts = dict.fromkeys(("REJECTED", "CANCELED", "BACKEND", "OTHER"), 0)
        for code, count in dict(each.refusals).items():
            counts[_REASONS.get(code, "OTHER")] += count
        for reason, count in counts.items():
            failures.add_metric([model, reason], count)
    yield failures
