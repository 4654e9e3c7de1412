"""The daemon's metrics as OTLP has them in JSON. Pure but for reading them.

Owns: their names, which a collector that speaks to Prometheus makes into those of `/metrics`, so dashboards fit both.
Sums and histograms count from the process' start. Models are bounded as in a scrape. One that was never asked has only
its gauges.
Thread: the exporter's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from edge_runtime.otel.otlp import attributes, packed
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import Histogram, Metrics, ModelMetrics
from edge_runtime.telemetry.prometheus import OTHERS, SHOWN_ROWS, SHOWN_TIMES

PREFIX = "edge_runtime."

REFUSED = "refused_"
"""Prefix of the counters of requests refused without a model; the code follows."""

STARTED = "process_start_time"
"""Under the name that Prometheus' own libraries give it."""

CUMULATIVE = 2

Labels = Mapping[str, Any]


Choose = Callable[[Mapping[str, ModelMetrics]], Collection[str]]
"""Which models have points of their own."""


class Period(NamedTuple):
    """From the process' start to now, in Unix nanoseconds; writes the points of one reading."""

    start_ns: int
    now_ns: int

    def sum(self, name: str, value: float, labels: Labels, unit: str = "") -> dict[str, Any]:
        """Write a counter."""
        told = {"aggregationTemporality": CUMULATIVE, "isMonotonic": True}
        return {**_named(name, unit), "sum": {**told, "dataPoints": [{**self._since(labels), **_number(value)}]}}

    def gauge(self, name: str, value: float, labels: Labels, unit: str = "") -> dict[str, Any]:
        """Write a value that may fall."""
        point = {"attributes": attributes(labels), "timeUnixNano": str(self.now_ns), **_number(value)}
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
        times = {"startTimeUnixNano": str(self.start_ns), "timeUnixNano": str(self.now_ns)}
        return {"attributes": attributes(labels), **times}


def metric_pieces(metrics: Metrics, choose: Choose, host: HostProbe, period: Period) -> Iterator[bytes]:
    """Write all metrics, those of one model at a time. choose: as of `Metrics.split`; others are one together."""
    models, others = metrics.split(choose)
    if others is not None:
        models[OTHERS] = others
    for name, each in models.items():
        if entries := list(_of_model(name, each, period)):
            yield packed(entries)
    yield packed(list(_of_daemon(metrics, host, period)))


def _of_model(model: str, metrics: ModelMetrics, period: Period) -> Iterator[dict[str, Any]]:
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


def _of_daemon(metrics: Metrics, host: HostProbe, period: Period) -> Iterator[dict[str, Any]]:
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
    for name, (labels, rows) in sorted(metrics.facts().items()):
        for row in rows:
            yield period.gauge(name, 1, dict(zip(labels, row, strict=True)))
    for name, nbytes in (
        ("process_resident_memory", host.rss_bytes()),
        ("process_proportional_memory", host.pss_bytes()),
    ):
        if nbytes is not None:
            yield period.gauge(name, nbytes, {}, "By")
    yield {**period.gauge("", period.start_ns / 1e9, {}, "s"), "name": STARTED}
    yield period.sum("process_cpu", host.cpu_seconds(), {}, "s")
    for sensor, celsius in host.temperatures().items():
        yield period.gauge("temperature", celsius, {"sensor": sensor}, "Cel")


def _number(value: float) -> dict[str, Any]:
    return {"asInt": str(value)} if isinstance(value, int) else {"asDouble": float(value)}


def _named(name: str, unit: str) -> dict[str, Any]:
    return {"name": PREFIX + name, **({"unit": unit} if unit else {})}
