"""The daemon's metrics as OTLP has them in JSON. Pure but for reading them.

Owns: their names, which a collector that speaks to Prometheus makes into those of `/metrics`, so dashboards fit both.
Sums and histograms count from the daemon's start. A model that was never asked has only its gauges.
Thread: the exporter's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from edge_runtime.otel.otlp import attributes, packed
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import Histogram, Metrics, ModelMetrics
from edge_runtime.telemetry.prometheus import SHOWN_ROWS, SHOWN_TIMES

PREFIX = "edge_runtime."

REFUSED = "refused_"
"""Prefix of the counters of requests refused without a model; the code follows."""

CUMULATIVE = 2

Labels = Mapping[str, Any]


def metric_pieces(metrics: Metrics, host: HostProbe, start_ns: int, now_ns: int) -> Iterator[bytes]:
    """Write all metrics, those of one model at a time. start_ns, now_ns: Unix time."""
    period = _Period(str(start_ns), str(now_ns))
    for name, each in metrics.models().items():
        if entries := list(_of_model(name, each, period)):
            yield packed(entries)
    yield packed(list(_of_daemon(metrics, host, period)))


class _Period(NamedTuple):
    """Writes points of one reading."""

    start: str
    now: str

    def sum(self, name: str, value: float, labels: Labels, unit: str = "") -> dict[str, Any]:
        told = {"aggregationTemporality": CUMULATIVE, "isMonotonic": True}
        return {**_named(name, unit), "sum": {**told, "dataPoints": [{**self._since(labels), **_number(value)}]}}

    def gauge(self, name: str, value: float, labels: Labels, unit: str = "") -> dict[str, Any]:
        point = {"attributes": attributes(labels), "timeUnixNano": self.now, **_number(value)}
        return {**_named(name, unit), "gauge": {"dataPoints": [point]}}

    def histogram(self, name: str, histogram: Histogram, labels: Labels, unit: str = "") -> dict[str, Any]:
        """Buckets hold their own values alone here, where Prometheus' hold those of all below, too."""
        below = histogram.cumulative(SHOWN_TIMES if unit else SHOWN_ROWS)
        counts = [now - before for (_, now), (_, before) in zip(below, [(0.0, 0), *below], strict=False)]
        most = max(histogram.count, below[-1][1])  # a value may have come between the two readings
        point = {
            **self._since(labels),
            "count": str(most),
            "sum": histogram.total,
            "explicitBounds": [bound for bound, _ in below],
            "bucketCounts": [str(count) for count in (*counts, most - below[-1][1])],
        }
        return {**_named(name, unit), "histogram": {"aggregationTemporality": CUMULATIVE, "dataPoints": [point]}}

    def _since(self, labels: Labels) -> dict[str, Any]:
        return {"attributes": attributes(labels), "startTimeUnixNano": self.start, "timeUnixNano": self.now}


def _of_model(model: str, metrics: ModelMetrics, period: _Period) -> Iterator[dict[str, Any]]:
    own = {"model": model}
    if metrics.requests:
        yield period.sum("requests", metrics.requests, own)
        yield period.sum("answers", metrics.answered_requests, own)
        yield period.sum("runs", metrics.runs, own)
        yield period.sum("rows", metrics.rows, own)
        yield period.sum("run", metrics.run_s, own, "s")
        for phase, histogram in metrics.phases.items():
            if histogram.count:
                yield period.histogram("request_duration", histogram, {**own, "phase": phase}, "s")
        if metrics.batch_rows.count:
            yield period.histogram("batch_rows", metrics.batch_rows, own)
    for code, count in dict(metrics.refusals).items():
        yield period.sum("refusals", count, {**own, "code": code})
    for name, step in list(metrics.steps.items()):
        yield period.sum("step_requests", step.requests, {**own, "step": name})
        for phase, spent_s in (("queue", step.queue_s), ("run", step.run_s)):
            yield period.sum("step", spent_s, {**own, "step": name, "phase": phase}, "s")
    for name, read in list(metrics.gauges.items()):
        yield period.gauge(name, read(), own)
    for name, read_reason in list(metrics.reasons.items()):
        if reason := read_reason():
            yield period.gauge(name, 1, {**own, "reason": reason})


def _of_daemon(metrics: Metrics, host: HostProbe, period: _Period) -> Iterator[dict[str, Any]]:
    for name, count in sorted(metrics.counters().items()):
        if name.startswith(REFUSED):
            yield period.sum("refusals", count, {"code": name.removeprefix(REFUSED)})
        else:
            yield period.sum(name, count, {})
    for name, value in sorted(metrics.gauges().items()):
        yield period.gauge(name, value, {})
    for name, (label, values) in sorted(metrics.labelled_gauges().items()):
        for each, value in values.items():
            yield period.gauge(name, value, {label: each})
    if (resident_bytes := host.rss_bytes()) is not None:
        yield period.gauge("process_resident_memory", resident_bytes, {}, "By")
    yield period.sum("process_cpu", host.cpu_seconds(), {}, "s")
    for sensor, celsius in host.temperatures().items():
        yield period.gauge("temperature", celsius, {"sensor": sensor}, "Cel")


def _number(value: float) -> dict[str, Any]:
    return {"asInt": str(value)} if isinstance(value, int) else {"asDouble": float(value)}


def _named(name: str, unit: str) -> dict[str, Any]:
    return {"name": PREFIX + name, **({"unit": unit} if unit else {})}
