"""What the daemon counts: latency by phase, batch rows, refusals, transport events. Cheap enough for every request.

Owns: histograms, one model's numbers, the registry that `stats` and Prometheus read. Never formats for Prometheus,
never touches a socket. Imports nothing heavy.

Threads: writers take no lock. In CPython the `+=` on a list element or slot below holds the GIL from read to write (no
call lies between), so counts are exact there; elsewhere one may be lost, which a statistic bears. Readers see each
number whole but several numbers at slightly different moments.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

E12 = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 3.9, 4.7, 5.6, 6.8, 8.2)
"""Twelve steps a decade (IEC 60063's E12 values): a quantile is off by at most a tenth, and bounds stay readable."""

LATENCY_BOUNDS_S = (*(float(f"{step}e{decade}") for decade in range(-6, 2) for step in E12), 100.0)
"""Upper bounds of latency buckets in seconds: 1 us, less than any request takes, to 100 s, longer than any timeout."""

ROWS_BOUNDS = (1.0, *(float(rows) for power in range(1, 13) for rows in (1 << power, 3 << power >> 1)))
"""Upper bounds of batch rows: exact up to 4, then two steps an octave, to 6 144."""

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

PHASES = ("queue", "run", "total")
"""Of one request: from its header's arrival to the start of its run, the run, and both."""


class Histogram:
    """Counts of values in buckets of fixed upper bounds, the last one open. One `record` takes about 0.15 us."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def record(self, value: float, count: int = 1) -> None:
        """Add a value `count` times. A value on a bound belongs to the bucket below it, as in Prometheus."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def since(self, counts: Sequence[int]) -> Histogram:
        """What was recorded after `counts` were these. For counts and quantiles; its `total`, and so its mean, is 0."""
        between = Histogram(self.bounds)
        between.counts = [now - then for now, then in zip(list(self.counts), counts, strict=True)]
        return between

    def add(self, other: Histogram) -> None:
        """Count another's values too. Raises ValueError: its bounds are others."""
        if other.bounds != self.bounds:
            raise ValueError("histograms of different bounds cannot be added")
        for index, count in enumerate(other.counts):
            self.counts[index] += count
        self.total += other.total

    @property
    def count(self) -> int:
        """How many values were recorded."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Mean of all values, exact; None when there is none."""
        count = self.count
        return self.total / count if count else None

    def quantile(self, q: float) -> float | None:
        """The value that a share `q` of all lie at or below, within its bucket by straight line; None when empty.

        Values above the last bound are said to be the last bound.
        """
        counts = list(self.counts)
        count = sum(counts)
        if not count:
            return None
        rank = q * count
        below = 0
        for index, inside in enumerate(counts):
            if inside and below + inside >= rank:
                return self._inside(index, max(rank - below, 0.0) / inside)
            below += inside
        return self.bounds[-1]

    def cumulative(self, every: int = 1) -> list[tuple[float, int]]:
        """(upper bound, values at or below it) for each `every`-th bound, without the open last bucket."""
        running = list(accumulate(self.counts))
        return [(self.bounds[index], running[index]) for index in range(0, len(self.bounds), every)]

    def _inside(self, index: int, share: float) -> float:
        if index == len(self.bounds):
            return self.bounds[-1]
        low = self.bounds[index - 1] if index else 0.0
        return low + (self.bounds[index] - low) * share


class ModelMetrics:
    """The numbers of one model, over all its versions since the daemon started.

    answered: requests. rows and runs: what the backend ran, successful runs only. run_s: run time in all.
    """

    __slots__ = (
        "answered_requests", "batch_rows", "gauges", "phases", "queue", "refusals", "rows", "run_s", "run_time", "runs",
        "total",
    )  # fmt: skip

    def __init__(self) -> None:
        self.queue = Histogram()
        self.run_time = Histogram()
        self.total = Histogram()
        self.phases: Mapping[str, Histogram] = dict(zip(PHASES, (self.queue, self.run_time, self.total), strict=True))
        self.batch_rows = Histogram(ROWS_BOUNDS)
        self.answered_requests = 0
        self.rows = 0
        self.runs = 0
        self.run_s = 0.0
        self.refusals: dict[str, int] = {}
        self.gauges: dict[str, Callable[[], float]] = {}

    def answered(self, queue_s: float, run_s: float) -> None:
        """One request was answered after waiting and running so long. Its run is counted by `run`."""
        self.queue.record(queue_s)
        self.run_time.record(run_s)
        self.total.record(queue_s + run_s)
        self.answered_requests += 1

    def answered_batch(self, rows: int, requests: int, queue_s: float, run_s: float) -> None:
        """One run answered this many requests, which waited equally long: `run` and `answered` for all at once."""
        self.queue.record(queue_s, requests)
        self.run_time.record(run_s, requests)
        self.total.record(queue_s + run_s, requests)
        self.answered_requests += requests
        self.run(rows, run_s)

    def run(self, rows: int, run_s: float) -> None:
        """One run of so many rows took so long."""
        self.batch_rows.record(rows)
        self.rows += rows
        self.runs += 1
        self.run_s += run_s

    def run_of_batch(self, rows: int, requests: int, run_s: float) -> None:  # noqa: ARG002 (the dispatcher's signature)
        """The same, as the dispatcher tells it; its requests are counted as they are answered."""
        self.run(rows, run_s)

    def refused(self, code: str, count: int = 1) -> None:
        """Requests ended with this wire code instead of an answer: refused, expired, failed or cancelled."""
        refusals = self.refusals
        if code in refusals:
            refusals[code] += count
        else:
            refusals[code] = count

    def watch(self, gauge: str, read: Callable[[], float]) -> None:
        """Have a number read when somebody looks, for example `queue_rows`; a later one replaces it."""
        self.gauges[gauge] = read

    def unwatch(self) -> None:
        """Read no gauge any more: what they told of is closed."""
        self.gauges.clear()

    def add(self, other: ModelMetrics) -> None:
        """Count what another counted too; its gauges stay its own."""
        for phase, histogram in self.phases.items():
            histogram.add(other.phases[phase])
        self.batch_rows.add(other.batch_rows)
        self.answered_requests += other.answered_requests
        self.rows += other.rows
        self.runs += other.runs
        self.run_s += other.run_s
        for code, count in dict(other.refusals).items():
            self.refused(code, count)

    @property
    def requests(self) -> int:
        """Requests that have had their reply."""
        return self.answered_requests + sum(dict(self.refusals).values())

    def snapshot(self) -> dict[str, Any]:
        """All of it as JSON can hold it. Phases in milliseconds, as on the wire; None where nothing was recorded."""
        return {
            "requests": self.requests,
            "answered": self.answered_requests,
            "refused": dict(self.refusals),
            "runs": self.runs,
            "rows": self.rows,
            "run_s": round(self.run_s, 6),
            "batch_rows": _quantiles(self.batch_rows, 1.0),
            **{f"{phase}_ms": _quantiles(histogram, 1e3) for phase, histogram in self.phases.items()},
            **{name: read() for name, read in list(self.gauges.items())},
        }


@dataclass(slots=True)
class _Part:
    """Numbers that are counted apart and told as part of their model's. writer: who may still write, if anybody."""

    metrics: ModelMetrics
    is_retired: bool = False
    writer: Callable[[], object | None] = lambda: None


class Metrics:
    """Every model's numbers, and the daemon's own counters and gauges by name. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, ModelMetrics] = {}
        self._parts: dict[str, list[_Part]] = {}
        self._counters: dict[str, int] = {}
        self._gauges: dict[str, Callable[[], float]] = {}

    def model(self, name: str) -> ModelMetrics:
        """One model's numbers, made when first asked for and kept over reloads."""
        found = self._models.get(name)
        if found is None:
            with self._lock:
                found = self._models.setdefault(name, ModelMetrics())
        return found

    def apart(self, name: str) -> ModelMetrics:
        """New numbers for one version, to be judged on their own; what is told of the model has them too."""
        self.model(name)
        part = _Part(ModelMetrics())
        with self._lock:
            self._parts.setdefault(name, []).append(part)
        return part.metrics

    def retire(self, name: str, metrics: ModelMetrics, writer: object | None = None) -> None:
        """A version is closed: its gauges end, its counts stay the model's. Does nothing for the model's own numbers.

        Answers are counted after they are sent, so the closed version may still write: its numbers are kept as they
        are until `writer` is gone, so that no late count is lost.
        """
        with self._lock:
            for part in self._parts.get(name, ()):
                if part.metrics is metrics:
                    metrics.unwatch()
                    part.is_retired = True
                    if writer is not None:
                        part.writer = weakref.ref(writer)
            self._fold(name)

    def count(self, name: str, count: int = 1) -> None:
        """Add to a counter, for example `replies_dropped`, `messages_malformed`, `connections_accepted`.

        Takes a lock: for what happens seldom, or once a batch.
        """
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + count

    def watch(self, gauge: str, read: Callable[[], float]) -> None:
        """Have a number read when somebody looks, for example `connections`."""
        self._gauges[gauge] = read

    def models(self) -> dict[str, ModelMetrics]:
        """The models known now, by name. Numbers of versions counted apart are added up, so write to none of these."""
        with self._lock:
            for name in list(self._parts):
                self._fold(name)
            return {name: self._whole(name) for name in self._models}

    def counters(self) -> dict[str, int]:
        """The counters as they are now."""
        with self._lock:
            return dict(self._counters)

    def gauges(self) -> dict[str, float]:
        """Every registered number, read now."""
        return {name: read() for name, read in list(self._gauges.items())}

    def snapshot(self) -> dict[str, Any]:
        """What the `stats` op answers: `models` by name, `counters`, `gauges`. JSON can hold it."""
        return {
            "models": {name: metrics.snapshot() for name, metrics in sorted(self.models().items())},
            "counters": self.counters(),
            "gauges": self.gauges(),
        }

    # ---- under the lock ---------------------------------------------------------------------------------------------

    def _fold(self, name: str) -> None:
        """Parts that nobody can write to any more become the model's own numbers."""
        left: list[_Part] = []
        for part in self._parts.get(name, ()):
            if part.is_retired and part.writer() is None:
                self._models[name].add(part.metrics)
            else:
                left.append(part)
        if left:
            self._parts[name] = left
        else:
            self._parts.pop(name, None)

    def _whole(self, name: str) -> ModelMetrics:
        own, parts = self._models[name], self._parts.get(name)
        if not parts:
            return own
        whole = ModelMetrics()
        readers: dict[str, list[Callable[[], float]]] = {}
        for metrics in (own, *(part.metrics for part in parts)):
            whole.add(metrics)
            for gauge, read in list(metrics.gauges.items()):
                readers.setdefault(gauge, []).append(read)
        for gauge, reads in readers.items():
            whole.watch(gauge, lambda reads=reads: sum(read() for read in reads))  # type: ignore[misc]
        return whole


def _quantiles(histogram: Histogram, scale: float) -> dict[str, float | None]:
    found = {name: histogram.quantile(q) for name, q in QUANTILES.items()} | {"mean": histogram.mean}
    return {name: None if value is None else round(value * scale, 6) for name, value in found.items()}
