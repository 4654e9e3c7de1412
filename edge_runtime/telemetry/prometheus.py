"""The daemon's metrics for Prometheus, over HTTP when a port is given. The only user of prometheus-client.

Owns: metric names and units (seconds, bytes, celsius, `_total`; Prometheus' naming conventions) and the HTTP server's
life. Counts nothing itself: every scrape reads telemetry.metrics. Imported only when a port is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from edge_runtime import plugins
from edge_runtime.clock import SystemClock
from edge_runtime.errors import AddressTaken, ConfigError
from edge_runtime.extras import install_advice
from edge_runtime.telemetry.busiest import BusiestModels
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import LATENCY_BOUNDS_S, ROWS_BOUNDS, Histogram, Metrics, ModelMetrics

PREFIX = "edge_runtime"

REFUSED = "refused_"
"""Prefix of the counters of requests refused without a model; the code follows."""

OTHERS = "(others)"
"""The label `model` of all models together that have no series of their own; no model can have this name."""

PER_MODEL_LIMIT = 30
"""Models with series of their own: 30 have some 2 800 series, and few devices serve more at a time."""

ASKING = "model"
"""The parameter of a scrape that asks for a model's detail; it may stand there several times."""

MOST_PARAMETERS = 100

SHOWN_TIMES = (*range(LATENCY_BOUNDS_S.index(1e-5), LATENCY_BOUNDS_S.index(10.0) + 1, 4), len(LATENCY_BOUNDS_S) - 1)
"""Every fourth of twelve latency buckets a decade is exported (1, 2.2, 4.7), from 10 us to 10 s, and 100 s: 20 lines a
phase and model, and p99 within a factor of 1.5; `stats` reads the fine ones."""

SHOWN_ROWS = tuple(ROWS_BOUNDS.index(float(1 << power)) for power in range(13))
"""Powers of two, to 4 096."""


class MetricsServer:
    """An HTTP server that answers scrapes until it is closed. Thread: its own, and one for each scrape."""

    def __init__(self, server: Any, thread: Any) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The bound port, for when 0 was asked for."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop answering and free the port. Idempotent."""
        if self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._thread = None


def serve_metrics(
    metrics: Metrics,
    host_probe: HostProbe,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    also: Sequence[str] = (),
    busiest: BusiestModels | None = None,
) -> MetricsServer:
    """Serve `http://host:port/metrics`.

    also: names of declarations whose families stand beside ours. busiest: chooses the models that have series of their
    own; None: the `PER_MODEL_LIMIT` busiest, and those that a scrape asks for. Raises ConfigError: prometheus-client is
    not installed; AddressTaken: the address cannot be bound.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ConfigError(
            f"metrics.port: needs prometheus-client, which is not installed; {install_advice('prometheus')}"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    busiest = busiest or BusiestModels(PER_MODEL_LIMIT, SystemClock())
    registry.register(MetricsCollector(metrics, host_probe, also, busiest))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise AddressTaken(f"metrics: cannot serve on {host}:{port}: {error.strerror or error}") from None
    server.set_app(_asking(server.get_app(), busiest))
    return MetricsServer(server, thread)


class MetricsCollector:
    """Makes metric families of `Metrics` at each scrape. also: as of `serve_metrics`."""

    def __init__(self, metrics: Metrics, host_probe: HostProbe, also: Sequence[str], busiest: BusiestModels) -> None:
        self._metrics = metrics
        self._host = host_probe
        self._also = [plugins.named(plugins.declared("metrics", name).families) for name in also]
        self._busiest = busiest

    def collect(self) -> Iterator[Any]:
        """Every family: the models', the daemon's, the host's, and what capabilities make of the models'."""
        models, others = self._metrics.split(self._busiest.choose)
        if others is not None:
            models[OTHERS] = others
        yield from self._model_counters(models)
        yield from self._model_histograms(models)
        yield from self._model_gauges(models)
        yield from self._daemon()
        yield from self._facts()
        yield from self._process()
        for families in self._also:
            yield from families(models)

    def _model_counters(self, models: Mapping[str, ModelMetrics]) -> Iterator[Any]:
        for name, text, read in _MODEL_COUNTERS:
            family = _counter(name, text, ["model"])
            for model, metrics in models.items():
                family.add_metric([model], read(metrics))
            yield family
        yield self._refusals(models)
        yield from self._steps(models)

    def _steps(self, models: Mapping[str, ModelMetrics]) -> Iterator[Any]:
        """A pipeline's share of each of its steps."""
        requests = _counter("step_requests", "Answered requests of a pipeline to its steps", ["model", "step"])
        seconds = _counter("step_seconds", "Time of a pipeline's requests to its steps", ["model", "step", "phase"])
        for model, metrics in models.items():
            for name, step in list(metrics.steps.items()):
                requests.add_metric([model, name], step.requests)
                seconds.add_metric([model, name, "queue"], step.queue_s)
                seconds.add_metric([model, name, "run"], step.run_s)
        if requests.samples:
            yield from (requests, seconds)

    def _refusals(self, models: Mapping[str, ModelMetrics]) -> Any:
        """Refusals by model and code; requests refused before their model was known have none."""
        family = _counter("refusals", "Requests that ended in an error, by its code on the wire", ["model", "code"])
        for model, metrics in models.items():
            for code, count in dict(metrics.refusals).items():
                family.add_metric([model, code], count)
        for name, count in self._metrics.counters().items():
            if name.startswith(REFUSED):
                family.add_metric(["", name.removeprefix(REFUSED)], count)
        return family

    def _model_histograms(self, models: Mapping[str, ModelMetrics]) -> Iterator[Any]:
        phases = _histogram("request_duration_seconds", "Time of answered requests, by phase", ["model", "phase"])
        rows = _histogram("batch_rows", "Rows run together", ["model"])
        for model, metrics in models.items():
            for phase, histogram in metrics.phases.items():
                phases.add_metric([model, phase], *_buckets(histogram, SHOWN_TIMES))
            rows.add_metric([model], *_buckets(metrics.batch_rows, SHOWN_ROWS))
        yield phases
        yield rows

    def _model_gauges(self, models: Mapping[str, ModelMetrics]) -> Iterator[Any]:
        families: dict[str, Any] = {}
        for model, metrics in models.items():
            for name, read in list(metrics.gauges.items()):
                family = families.get(name)
                if family is None:
                    family = families[name] = _gauge(name, f"{_words(name)} now", ["model"])
                family.add_metric([model], read())
            for name, read_reason in list(metrics.reasons.items()):
                if reason := read_reason():
                    family = families.setdefault(name, _gauge(name, f"1 for the {_words(name)}", ["model", "reason"]))
                    family.add_metric([model, reason], 1)
        yield from families.values()

    def _daemon(self) -> Iterator[Any]:
        for name, count in sorted(self._metrics.counters().items()):
            if name.startswith(REFUSED):
                continue
            family = _counter(name, _words(name), [])
            family.add_metric([], count)
            yield family
        for name, value in sorted(self._metrics.gauges().items()):
            family = _gauge(name, f"{_words(name)} now", [])
            family.add_metric([], value)
            yield family
        for name, (label, values) in sorted(self._metrics.labelled_gauges().items()):
            family = _gauge(name, f"{_words(name)} now", [label])
            for each, value in values.items():
                family.add_metric([each], value)
            yield family

    def _facts(self) -> Iterator[Any]:
        for name, (labels, rows) in sorted(self._metrics.facts().items()):
            family = _gauge(name, f"{_words(name)}: always 1", list(labels))
            for values in rows:
                family.add_metric(values, 1)
            yield family

    def _process(self) -> Iterator[Any]:
        for name, text, value in (
            ("process_resident_memory_bytes", "Resident memory, shared pages in full", self._host.rss_bytes()),
            ("process_proportional_memory_bytes", "Resident memory, shared pages divided", self._host.pss_bytes()),
        ):
            if value is not None:
                family = _gauge(name, text, [])
                family.add_metric([], value)
                yield family
        cpu = _counter("process_cpu_seconds", "CPU time of all threads, user and system", [])
        cpu.add_metric([], self._host.cpu_seconds())
        yield cpu
        if (started_s := self._host.started_s()) is not None:
            yield _started(started_s)
        temperature = _gauge("temperature_celsius", "Temperature of the host, by sensor", ["sensor"])
        for sensor, celsius in self._host.temperatures().items():
            temperature.add_metric([sensor], celsius)
        yield temperature


# ---- private --------------------------------------------------------------------------------------------------------

_MODEL_COUNTERS: tuple[tuple[str, str, Callable[[ModelMetrics], float]], ...] = (
    ("requests", "Requests with a reply, answers and errors", lambda metrics: metrics.requests),
    ("answers", "Requests answered with outputs", lambda metrics: metrics.answered_requests),
    ("runs", "Runs of the backend", lambda metrics: metrics.runs),
    ("rows", "Rows run", lambda metrics: metrics.rows),
    ("run_seconds", "Time that the backend ran", lambda metrics: metrics.run_s),
)


def _asking(app: Any, busiest: BusiestModels) -> Any:
    """An application of WSGI that hears which models a scrape asks for."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        try:
            asked = parse_qs(environ.get("QUERY_STRING", ""), max_num_fields=MOST_PARAMETERS).get(ASKING, ())
        except ValueError:
            asked = ()
        busiest.ask(asked)
        found: Iterable[bytes] = app(environ, start_response)
        return found

    return answer


def _words(name: str) -> str:
    return name.replace("_", " ")


def _counter(name: str, text: str, labels: list[str]) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def _gauge(name: str, text: str, labels: list[str]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def _started(started_s: float) -> Any:
    """Under the name that Prometheus' own libraries give it, which its functions and dashboards look for."""
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily("process_start_time_seconds", "When the process began, in Unix seconds", started_s)


def _histogram(name: str, text: str, labels: list[str]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    return HistogramMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def _buckets(histogram: Histogram, places: Sequence[int]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets with the open one last, and the sum of values, as prometheus-client takes them."""
    count = histogram.count
    bounded = [(repr(bound), float(below)) for bound, below in histogram.cumulative(places)]
    # One of the two readings may miss a value recorded between them: the open bucket holds at least the last.
    most = max(count, int(bounded[-1][1]) if bounded else 0)
    return [*bounded, ("+Inf", float(most))], histogram.total
