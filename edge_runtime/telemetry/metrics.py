"""The daemon's metrics: latency by phase, batch rows, refusals, transport events. Cheap enough for every request.

Owns: histograms, each model's metrics, the registry that `stats` and Prometheus read. Never formats for Prometheus,
never touches a socket. Imports nothing heavy.

Threads: writers take no lock. In CPython the `+=` on a list element or slot below holds the GIL from read to write (no
call lies between), so counts are exact there; elsewhere one may be lost, which a statistic bears. Readers see each
number whole but several numbers at slightly different moments.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import asdict

E12 = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 3.9, 4.7, 5.6, 6.8, 8.2)
"""Twelve steps a decade (IEC 60063's E12 values): a quantile is off by at most a tenth, and bounds stay readable."""

LATENCY_BOUNDS_S = (*(float(f"{step}e{decade}") for decade in range(-6, 2) for step in E12), 100.0)
"""Upper bounds of latency buckets in seconds: 1 us, less than any request takes, to 100 s, longer than any timeout."""

ROWS_BOUNDS = (1.0, *(float(rows) for power in range(1, 13) for rows in (1 << power, 3 << power >> 1)))
"""Upper bounds of batch rows: exact up to 4, then two steps an octave, to 6 144."""

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

PHASES = ("queue", "run", "total")
"""Phases of a request: from its header's arrival to the start of its run, the run, and both."""

SUMMED = ("queue_rows", "queue_bytes", "interface_changed")
"""Gauges of models that mean something as a sum, and take no time to read of a thousand models."""


class MetricsDeclaration(Struct, frozen=True):
    """Metrics under names that a capability knows. name: of the setting in `[metrics]` that switches them on.

    families: "module:function", (metrics of models by name) -> families of prometheus-client, made at each scrape.
    """

    name: str
    families: str


class Counters(Protocol):
    """The counters of a part that needs nothing else of `Metrics`."""

    def count(self, name: str, count: int = 1) -> None:
        """Add to a counter."""
        ...


class Histogram:
    """Counts of values in buckets of fixed upper bounds, the last one open. One `record` takes about 0.15 us."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def record(self, value: float, count: int = 1) -> None:
        """Add a value `count` times. A value on a bound belongs to the bucket below, as in Prometheus."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def since(self, counts: Sequence[int]) -> Histogram:
        """The values recorded since the counts were `counts`: counts and quantiles only; `total` and mean are 0."""
        between = Histogram(self.bounds)
        between.counts = [now - then for now, then in zip(list(self.counts), counts, strict=True)]
        return between

    def add(self, other: Histogram, times: int = 1) -> None:
        """Add another's values, or with -1 take them away. Raises ValueError for different bounds."""
        if other.bounds != self.bounds:
            raise ValueError("histograms of different bounds cannot be added")
        for index, count in enumerate(other.counts):
            if count:
                self.counts[index] += count * times
        self.total += other.total * times

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Exact mean of all values; None without any."""
        count = self.count
        return self.total / count if count else None

    def quantile(self, q: float) -> float | None:
        """The value that a share `q` of all lie at or below, interpolated within its bucket; None when empty.

        A value above the last bound is reported as the last bound.
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

    def cumulative(self, places: Iterable[int] | None = None) -> list[tuple[float, int]]:
        """(upper bound, values at or below it) for the bounds at these places, or for all; without the open bucket."""
        running = list(accumulate(self.counts))
        return [(self.bounds[at], running[at]) for at in (range(len(self.bounds)) if places is None else places)]

    def _inside(self, index: int, share: float) -> float:
        if index == len(self.bounds):
            return self.bounds[-1]
        low = self.bounds[index - 1] if index else 0.0
        return low + (self.bounds[index] - low) * share


class StepMetrics(Struct):
    """A pipeline's share of one of its steps: requests to its model that were answered, their wait and their runs."""

    requests: int = 0
    queue_s: float = 0.0
    run_s: float = 0.0

    def answered(self, queue_s: float, run_s: float, count: int = 1) -> None:
        """Count answered requests, which waited and ran this long in all."""
        self.requests += count
        self.queue_s += queue_s
        self.run_s += run_s


MOST_ROW_COUNTS = 256
"""Exact numbers of rows of which a model's runs are counted; an answer of statistics with all of them has 60 KB."""


class ModelMetrics:
    """The metrics of one model, over all its versions since the daemon started.

    rows, runs: successful runs of the backend. run_s: their total time. by_rows: runs and their total time by their
    exact rows, for the first `MOST_ROW_COUNTS` of those. steps: of a pipeline, by name. source: what
    gauges and reasons are read of, and keep in memory until `unwatch`. Run times of a device that is slowed are counted
    like others, and apart (`slowed_counts`), at no cost to a request.
    """

    __slots__ = (
        "answered_requests", "batch_rows", "by_rows", "gauges", "phases", "queue", "reasons", "refusals", "rows",
        "run_s", "run_time", "runs", "slowed_before", "slowed_from", "source", "steps", "total",
    )  # fmt: skip

    def __init__(self) -> None:
        self.queue = Histogram()
        self.run_time = Histogram()
        self.total = Histogram()
        self.phases: Mapping[str, Histogram] = dict(zip(PHASES, (self.queue, self.run_time, self.total), strict=True))
        self.batch_rows = Histogram(ROWS_BOUNDS)
        self.by_rows: dict[int, tuple[int, float]] = {}
        self.answered_requests = 0
        self.rows = 0
        self.runs = 0
        self.run_s = 0.0
        self.refusals: dict[str, int] = {}
        self.gauges: dict[str, Callable[[], float]] = {}
        self.reasons: dict[str, Callable[[], str]] = {}
        self.steps: dict[str, StepMetrics] = {}
        self.source: object | None = None
        self.slowed_from: list[int] | None = None
        self.slowed_before: list[int] | None = None

    def begin_slowed(self) -> None:
        """Count run times apart from now on. Idempotent."""
        if self.slowed_from is None:
            self.slowed_from = list(self.run_time.counts)

    def end_slowed(self) -> None:
        """Count run times apart no more. Idempotent."""
        self.slowed_before, self.slowed_from = self.slowed_counts(), None

    def slowed_counts(self) -> list[int]:
        """Return how many of the counts of `run_time` are of times in which the device was slowed."""
        before, then = self.slowed_before or [0] * len(self.run_time.counts), self.slowed_from
        if then is None:
            return list(before)
        return [sum(each) - start for *each, start in zip(before, self.run_time.counts, then, strict=True)]

    def step(self, name: str) -> StepMetrics:
        """One step's share, created at the first call and kept over reloads."""
        return self.steps.setdefault(name, StepMetrics())

    def answered(self, queue_s: float, run_s: float, count: int = 1) -> None:
        """Count answered requests with their waiting and run time. `run` counts their run."""
        self.queue.record(queue_s, count)
        self.run_time.record(run_s, count)
        self.total.record(queue_s + run_s, count)
        self.answered_requests += count

    def answered_batch(self, rows: int, requests: int, queue_s: float, run_s: float) -> None:
        """Count one run and its answered requests, which all waited `queue_s`: `run` and `answered` at once."""
        self.answered(queue_s, run_s, requests)
        self.run(rows, run_s)

    def run(self, rows: int, run_s: float) -> None:
        """Count one run."""
        self.batch_rows.record(rows)
        self.rows += rows
        self.runs += 1
        self.run_s += run_s
        self._count_rows(rows, 1, run_s)

    def refused(self, code: str, count: int = 1) -> None:
        """Count requests that ended with this wire code: refused, expired, failed or cancelled."""
        refusals = self.refusals
        if code in refusals:
            refusals[code] += count
        else:
            refusals[code] = count

    def watch(self, gauge: str, read: Callable[[], float]) -> None:
        """Set how a gauge such as `queue_rows` is read; a later call replaces it."""
        self.gauges[gauge] = read

    def watch_reason(self, name: str, read: Callable[[], str]) -> None:
        """Set how a reason such as `host_last_end` is read, "" while there is none; a later call replaces it."""
        self.reasons[name] = read

    def unwatch(self) -> None:
        """Drop all gauges and reasons: their source is closed."""
        self.source = None
        self.gauges.clear()
        self.reasons.clear()

    def add(self, other: ModelMetrics) -> None:
        """Add another's counts, without its gauges."""
        self.add_totals(other)
        for rows, (runs, run_s) in dict(other.by_rows).items():
            self._count_rows(rows, runs, run_s)
        for name, step in dict(other.steps).items():
            self.step(name).answered(step.queue_s, step.run_s, step.requests)

    def add_totals(self, other: ModelMetrics, times: int = 1) -> None:
        """Add another's counts, or with -1 take them away, without gauges, exact numbers of rows and steps."""
        for phase, histogram in self.phases.items():
            histogram.add(other.phases[phase], times)
        self.batch_rows.add(other.batch_rows, times)
        self.answered_requests += other.answered_requests * times
        self.rows += other.rows * times
        self.runs += other.runs * times
        self.run_s += other.run_s * times
        for code, count in dict(other.refusals).items():
            self.refused(code, count * times)

    def _count_rows(self, rows: int, runs: int, run_s: float) -> None:
        counted = self.by_rows.get(rows)
        if counted is not None:
            self.by_rows[rows] = counted[0] + runs, counted[1] + run_s
        elif len(self.by_rows) < MOST_ROW_COUNTS:
            self.by_rows[rows] = runs, run_s

    @property
    def requests(self) -> int:
        """Requests with a reply."""
        return self.answered_requests + sum(dict(self.refusals).values())

    def snapshot(self) -> dict[str, Any]:
        """Everything as JSON values. Phases in milliseconds, as on the wire; None where nothing was recorded."""
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
            **({"steps": {name: asdict(step) for name, step in list(self.steps.items())}} if self.steps else {}),
        }


class _Part(Struct):
    """Metrics of one version, reported as part of its model's. writer: the object that may still write, if any."""

    metrics: ModelMetrics
    is_retired: bool = False
    writer: weakref.ref[object] | None = None

    @property
    def may_change(self) -> bool:
        """Whether the version still serves, or its writer lives."""
        return not self.is_retired or (self.writer is not None and self.writer() is not None)


class LabelFacts(Struct):
    """Facts that stand in labels. read: the values of the labels, a row for each of several things."""

    labels: tuple[str, ...]
    read: Callable[[], Iterable[Sequence[str]]]


class _Others(Struct):
    """The last `split`. named: the models that it named, as counted then; added: the names of all others.

    beyond: counts of others that are gone or were named since, less those of models that were named before: with it the
    sum of all others never falls, and rises by what is new.
    """

    named: dict[str, ModelMetrics] = field(default_factory=dict)
    added: frozenset[str] = frozenset()
    beyond: ModelMetrics = field(default_factory=ModelMetrics)
    have_begun: bool = False


class Metrics:
    """Every model's metrics, and the daemon's own counters and gauges by name. Thread: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._splitting = threading.Lock()
        self._models: dict[str, ModelMetrics] = {}
        self._parts: dict[str, list[_Part]] = {}
        self._counters: dict[str, int] = {}
        self._gauges: dict[str, Callable[[], float]] = {}
        self._labelled: dict[str, tuple[str, Callable[[], Mapping[str, float]]]] = {}
        self._facts: dict[str, LabelFacts] = {}
        self._others = _Others()

    def model(self, name: str) -> ModelMetrics:
        """One model's metrics, created at the first call and kept over reloads."""
        found = self._models.get(name)
        if found is None:
            with self._lock:
                found = self._models.setdefault(name, ModelMetrics())
        return found

    def apart(self, name: str) -> ModelMetrics:
        """Metrics of one version, to be judged on their own; the model's reports include them."""
        self.model(name)
        part = _Part(ModelMetrics())
        with self._lock:
            self._parts.setdefault(name, []).append(part)
        return part.metrics

    def retire(self, name: str, metrics: ModelMetrics, writer: object | None = None) -> None:
        """End a closed version's metrics: drop its gauges, keep its counts as the model's.

        Answers are counted after they are sent, so a closed version may still write: its metrics stay until `writer`
        is collected, so that no late count is lost. Of the model's own metrics only gauges go, unless another version
        is their source by now.
        """
        if writer is not None and metrics.source is writer:
            metrics.unwatch()
        with self._lock:
            for part in self._parts.get(name, ()):
                if part.metrics is metrics:
                    metrics.unwatch()
                    part.is_retired = True
                    if writer is not None:
                        part.writer = weakref.ref(writer)
            self._fold(name)

    def forget(self, name: str) -> None:
        """Drop a model's metrics; what is still written to them is lost."""
        with self._lock:
            others = self._others
            if name in self._models and name in others.added:
                others.beyond.add_totals(self._whole(name))
            others.named.pop(name, None)
            others.added -= {name}
            self._models.pop(name, None)
            self._parts.pop(name, None)

    def count(self, name: str, count: int = 1) -> None:
        """Add to a counter, for example `replies_dropped`, `messages_malformed`, `connections_accepted`.

        Takes a lock: for rare events, or once a batch.
        """
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + count

    def refused(self, code: str, count: int = 1) -> None:
        """Count requests that ended with this wire code and reached no model."""
        self.count(f"refused_{code}", count)

    def watch(self, gauge: str, read: Callable[[], float]) -> None:
        """Set how a gauge such as `connections` is read."""
        self._gauges[gauge] = read

    def watch_each(self, gauge: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Set how a gauge is read that has a value for each of several things, by its label's value."""
        self._labelled[gauge] = (label, read)

    def watch_facts(self, name: str, labels: Sequence[str], read: Callable[[], Iterable[Sequence[str]]]) -> None:
        """Set how facts are read that stand in labels, such as the version of each model."""
        self._facts[name] = LabelFacts(tuple(labels), read)

    def models(self) -> dict[str, ModelMetrics]:
        """All models' metrics by name. Metrics of versions are added up, so write to none of these."""
        with self._lock:
            return self._wholes()

    def split(
        self, choose: Callable[[Mapping[str, ModelMetrics]], Collection[str]]
    ) -> tuple[dict[str, ModelMetrics], ModelMetrics | None]:
        """The metrics of the models that `choose` returns, and of all others together; None: there were never others.

        The others' counts never fall, as a counter must not, while models change sides, come and go: a model that
        becomes one of them adds what is new since the last split. Of gauges they have the sums of `SUMMED`. Metrics of
        versions are added up, so write to none of these. One split at a time; no writer of counts waits for its sums.
        """
        with self._splitting:
            with self._lock:
                models, own, before = self._wholes(), dict(self._models), self._others
                was_named, were_added = dict(before.named), before.added
                others = ModelMetrics()
                others.add_totals(before.beyond)
            chosen = choose(models)
            named: dict[str, ModelMetrics] = {}
            moved: list[tuple[str, ModelMetrics, int]] = []
            for name, metrics in models.items():
                if name in chosen:
                    named[name] = counted = ModelMetrics()
                    counted.add_totals(metrics)
                    if name in were_added:
                        moved.append((name, counted, 1))
                elif metrics.requests or metrics.runs:
                    others.add_totals(metrics)
                    if name in was_named:
                        moved.append((name, was_named[name], -1))
            for _, counted, times in moved:
                others.add_totals(counted, times)
            added = models.keys() - named.keys()
            with self._lock:
                beyond = self._others.beyond  # with those that were forgotten meanwhile
                gone = {name for name in models if self._models.get(name) is not own[name]}
                for name, counted, times in moved:
                    if name not in gone or times < 0:
                        beyond.add_totals(counted, times)
                for name in gone:
                    if named.pop(name, None) is None and name not in were_added:  # else `forget` has seen to it
                        beyond.add_totals(models[name])
                self._others = _Others(named, frozenset(added - gone), beyond, before.have_begun or bool(added))
            for gauge in SUMMED:
                if reads := [models[name].gauges[gauge] for name in added if gauge in models[name].gauges]:
                    others.watch(gauge, lambda reads=reads: sum(read() for read in reads))  # type: ignore[misc]
            told = {name: metrics for name, metrics in models.items() if name in chosen}
            return told, others if self._others.have_begun else None

    def counters(self) -> dict[str, int]:
        """A copy of the counters."""
        with self._lock:
            return dict(self._counters)

    def gauges(self) -> dict[str, float]:
        """Every gauge, read now."""
        return {name: read() for name, read in list(self._gauges.items())}

    def labelled_gauges(self) -> dict[str, tuple[str, Mapping[str, float]]]:
        """Every gauge that has several values, read now: its label, and the values by that."""
        return {name: (label, read()) for name, (label, read) in list(self._labelled.items())}

    def facts(self) -> dict[str, tuple[tuple[str, ...], list[Sequence[str]]]]:
        """Every fact, read now: the labels, and their values."""
        return {name: (each.labels, list(each.read())) for name, each in list(self._facts.items())}

    def snapshot(self) -> dict[str, Any]:
        """The result of the `stats` op, as JSON values: `models` by name, `counters`, `gauges`."""
        return {
            "models": {name: metrics.snapshot() for name, metrics in sorted(self.models().items())},
            "counters": self.counters(),
            "gauges": self.gauges(),
        }

    # ---- under the lock ---------------------------------------------------------------------------------------------

    def _wholes(self) -> dict[str, ModelMetrics]:
        for name in list(self._parts):
            self._fold(name)
        return {name: self._whole(name) for name in self._models}

    def _fold(self, name: str) -> None:
        """Add the parts that can no longer be written to the model's own metrics."""
        left: list[_Part] = []
        for part in self._parts.get(name, ()):
            if part.may_change:
                left.append(part)
            else:
                self._models[name].add(part.metrics)
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
