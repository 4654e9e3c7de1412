"""Fifteen minutes of figures, a sample each five seconds: of every model, of all together, and of the machine.

Owns: the samples, in arrays of a fixed size, and the differences between two readings of the counters. A round is
spread over several beats, so that no beat takes long. Thread: `beat` is the I/O loop's; the others any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import numpy as np

from edge_runtime.clock import Clock
from edge_runtime.errors import ModelNotFound
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import LATENCY_BOUNDS_S, QUANTILES, Metrics, ModelMetrics
from edge_runtime.tensors import Array
from edge_runtime.wire.codec import short

PERIOD_S = 5.0
KEPT = 180
"""Samples: fifteen minutes."""

MOST_MODELS = 256
"""Models with samples, some 3 KB each. A further one takes the place of one that was not asked in all that is kept,
from its first request on; else it has none, and is missing in the sum. Prometheus has them all."""

MOST_REASONS = 128
"""Series of refusals, of a model and a code each, of 850 bytes; further ones count in the sum alone."""

SLICE = 32
"""Models of one beat: some 0.3 ms where all are busy."""

LATELY = 12
"""Samples of the last minute."""

WHOLE = 1e6
"""Numbers from here on are bytes."""

LONGEST_MS = 60_000.0
"""What a half float holds."""

MACHINE = ("cpu_share", "daemon_cores", "memory_available_bytes", "daemon_memory_bytes", "temperature_celsius")

_BUCKETS = len(LATENCY_BOUNDS_S) + 1

_SHARES = np.array([*QUANTILES.values()])
_LOWS = np.array([0.0, *LATENCY_BOUNDS_S])
_HIGHS = np.array([*LATENCY_BOUNDS_S, LATENCY_BOUNDS_S[-1]])
"""The bounds of each bucket in seconds; what lies in the open last one counts as its lower bound."""

_GROWTH = 16
"""Rows that are made at once."""


class _Columns:
    """The samples of all models together (row 0), and of each, by its row. A quantile is NaN for no answers."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.beyond: dict[str, int] = {}  # answers, at the last sample, of models without a row
        self.answered: Array = np.zeros((1, KEPT), np.uint32)
        self.quantiles: Array = np.full((1, KEPT, len(QUANTILES)), np.nan, np.float16)
        self.counts: Any = np.zeros((1, _BUCKETS), np.int64)  # at the last sample, as the two below
        self.seen: list[int] = [0]
        self.seen_refusals: list[dict[str, int]] = [{}]
        self.refusals: list[dict[str, Array]] = [{}]
        self.reasons = 0

    def row(self, model: str) -> int | None:
        """Return the row of a model, a new one where there is room; else None."""
        row = self.rows.get(model)
        if row is None and len(self.rows) < MOST_MODELS:
            taken = set(self.rows.values())
            row = next((each for each in range(1, len(self.seen)) if each not in taken), len(self.seen))
            if row == len(self.seen):
                self._grow()
            self.rows[model] = row
        return row

    def row_of_idle(self, model: str, answered: int) -> int | None:
        """Return the row of a model beyond the bound, which is asked now, where another was not; else None.

        It has samples from the next one on: what it answered in this one is not known by itself.
        """
        before, self.beyond[model] = self.beyond.get(model, 0), answered
        if answered <= before:
            return None
        idle = (name for name, row in self.rows.items() if not self.answered[row].any() and not self.refusals[row])
        if (given_up := next(idle, None)) is None:
            return None
        self.beyond[given_up] = self.seen[self.rows[given_up]]
        self.drop(given_up)
        del self.beyond[model]
        return self.row(model)

    def drop(self, model: str) -> None:
        """Forget a model."""
        row = self.rows.pop(model)
        self.reasons -= len(self.refusals[row])
        self.answered[row], self.quantiles[row] = 0, np.nan
        self.refusals[row] = {}
        self.forget_counters(row)

    def forget_counters(self, row: int) -> None:
        """Count a model from zero on."""
        self.counts[row] = 0
        self.seen[row], self.seen_refusals[row] = 0, {}

    def clear(self, at: int) -> None:
        """Make room for a sample where the oldest was."""
        self.answered[:, at] = 0
        self.quantiles[:, at] = np.nan
        for series in self.refusals:
            for counts in series.values():
                counts[at] = 0

    def refuse(self, row: int, code: str, at: int, more: int) -> None:
        """Count refusals of a code, which a model has a series of from the first on while there is room."""
        series = self.refusals[row]
        if code not in series:
            if row and self.reasons >= MOST_REASONS:
                return
            self.reasons += row > 0
            series[code] = np.zeros(KEPT, np.uint32)
        series[code][at] += more

    def _grow(self) -> None:
        more = _GROWTH
        self.answered = np.concatenate((self.answered, np.zeros((more, KEPT), np.uint32)))
        empty = np.full((more, KEPT, len(QUANTILES)), np.nan, np.float16)
        self.quantiles = np.concatenate((self.quantiles, empty))
        self.counts = np.concatenate((self.counts, np.zeros((more, _BUCKETS), np.int64)))
        self.seen += [0] * more
        self.seen_refusals += [{} for _ in range(more)]
        self.refusals += [{} for _ in range(more)]


class History:
    """The samples of a daemon."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._monotonic_s = clock.monotonic_s
        self._host = HostProbe()
        self._lock = threading.Lock()
        self._samples = _Columns()
        self._times: Array = np.zeros(KEPT)
        self._lengths_s: Array = np.full(KEPT, PERIOD_S)
        self._machine: Array = np.full((KEPT, len(MACHINE)), np.nan)
        self._is_slowed: bool | None = None
        self._at = self._count = 0
        self._due_s = self._began_s = self._monotonic_s()
        self._left: list[tuple[str, ModelMetrics]] | None = None
        self._sum: Any = np.zeros(_BUCKETS, np.int64)

    @property
    def rounds(self) -> int:
        """Samples that were taken since the start."""
        return self._count

    def beat(self) -> None:
        """Take a part of a sample, where one is due."""
        now_s = self._monotonic_s()
        with self._lock:
            if self._left is None and now_s >= self._due_s:
                self._begin(now_s)
            elif self._left is not None:
                self._take(self._left[:SLICE])
                del self._left[:SLICE]
                if not self._left:
                    self._end(now_s)

    def report(self, model: str | None = None, *, is_known: bool = False) -> dict[str, Any]:
        """Return the samples, oldest first, of one model or of all, and a model's phases since the start.

        is_known: it has no samples where it was never asked. Raises ModelNotFound for any other without.
        """
        with self._lock:
            row = self._row(model)
            if row is None and not is_known:
                raise ModelNotFound(f"no samples of model {short(model)}: none of that name was loaded or asked here")
            samples, order = self._samples, self._order(KEPT if row is not None else 0)
            row = row or 0
            lengths_s, quantiles = self._lengths_s[order], samples.quantiles[row, order]
            refusals = {code: counts[order] for code, counts in samples.refusals[row].items()}
            refused = sum(refusals.values(), start=np.zeros(len(order)))
            told = {
                "period_s": PERIOD_S,
                "time": [round(each, 1) for each in self._times[order].tolist()],
                "model": model,
                "rate": _short(samples.answered[row, order] / lengths_s),
                "refused_rate": _short(refused / lengths_s),
                **{f"{name}_ms": _short(quantiles[:, index]) for index, name in enumerate(QUANTILES)},
                "refused": {code: counts.tolist() for code, counts in refusals.items() if counts.any()},
            }
            if model is not None:
                told["phases"] = self._phases(model)
            else:
                told["machine"] = {name: _short(self._machine[order, index]) for index, name in enumerate(MACHINE)}
            return told

    def now(self, model: str | None = None) -> dict[str, Any]:
        """Return the rates of the last sample, and the quantiles of the last minute's last one with an answer."""
        with self._lock:
            row, order, samples = self._row(model), self._order(LATELY), self._samples
            if row is None or not len(order):
                return {"rate": 0.0, "refused_rate": 0.0, **dict.fromkeys(f"{name}_ms" for name in QUANTILES)}
            last = order[-1]
            length_s = float(self._lengths_s[last])
            answered = order[samples.answered[row, order] > 0]
            found = samples.quantiles[row, answered[-1]] if len(answered) else np.full(len(QUANTILES), np.nan)
            refused = sum(int(counts[last]) for counts in samples.refusals[row].values())
            return {
                "rate": round(float(samples.answered[row, last]) / length_s, 3),
                "refused_rate": round(refused / length_s, 3),
                **dict(zip((f"{name}_ms" for name in QUANTILES), _short(found), strict=True)),
            }

    def refused_lately(self) -> dict[str, dict[str, int]]:
        """Return the refusals of the last minute by model and code, where there were any."""
        found: dict[str, dict[str, int]] = {}
        with self._lock:
            order, samples = self._order(LATELY), self._samples
            for name, row in samples.rows.items():
                for code, counts in samples.refusals[row].items():
                    if count := int(counts[order].sum()):
                        found.setdefault(name, {})[code] = count
        return found

    @property
    def is_slowed(self) -> bool | None:
        """Whether the kernel held the cores back to cool, at the last sample; None where it does not tell."""
        return self._is_slowed

    def machine(self) -> dict[str, float | None]:
        """Return the last sample of the machine."""
        with self._lock:
            order = self._order(1)
            values = self._machine[order[-1]] if len(order) else np.full(len(MACHINE), np.nan)
            return dict(zip(MACHINE, _short(values), strict=True))

    def _phases(self, model: str) -> dict[str, Any]:
        """The latencies of a model by phase since the start, as counts in buckets, the last one open."""
        found = self._metrics.models().get(model)
        phases = {} if found is None else {name: list(each.counts) for name, each in found.phases.items()}
        return {"bounds_ms": [round(each * 1e3, 4) for each in LATENCY_BOUNDS_S], **phases}

    # ---- under the lock ---------------------------------------------------------------------------------------------

    def _row(self, model: str | None) -> int | None:
        return 0 if model is None else self._samples.rows.get(model)

    def _order(self, most: int) -> Array:
        """The places of the last whole samples, oldest first."""
        count = min(self._count, most, KEPT - 1)  # the oldest place is being written anew
        return (self._at - count + np.arange(count)) % KEPT

    def _begin(self, now_s: float) -> None:
        self._due_s = max(self._due_s + PERIOD_S, now_s)
        models, samples = self._metrics.models(), self._samples
        for name in [each for each in samples.rows if each not in models]:
            samples.drop(name)
        samples.beyond = {name: count for name, count in samples.beyond.items() if name in models}
        samples.clear(self._at)
        self._sum[:] = 0
        self._left = list(models.items())
        counters = self._metrics.counters()
        self._refused(0, {name[8:]: count for name, count in counters.items() if name.startswith("refused_")})

    def _take(self, models: Sequence[tuple[str, ModelMetrics]]) -> None:
        samples, at = self._samples, self._at
        rows, read = [], []
        for name, metrics in models:
            answered = metrics.answered_requests
            row = samples.row(name)
            if row is None:
                row = samples.row_of_idle(name, answered)
                if row is not None:
                    samples.seen[row], samples.counts[row] = answered, metrics.total.counts[:]
                    samples.seen_refusals[row] = dict(metrics.refusals)
                continue
            if answered < samples.seen[row]:
                samples.forget_counters(row)  # the metrics are another's of its name
            if answered != samples.seen[row]:
                samples.seen[row] = answered
                rows.append(row)
                read.append(metrics.total.counts[:])
            if metrics.refusals:
                self._refused(row, dict(metrics.refusals))
        if rows:
            counts = np.array(read, np.int64)
            between: Any = np.maximum(counts - samples.counts[rows], 0)
            samples.counts[rows] = counts
            answered_now = between.sum(axis=1)
            samples.answered[rows, at] = answered_now
            samples.quantiles[rows, at] = _quantiles_ms(between)
            samples.answered[0, at] += answered_now.sum()
            self._sum += between.sum(axis=0)

    def _refused(self, row: int, now: Mapping[str, int]) -> None:
        """Write the differences of refusals by code, of a model also those of all."""
        seen = self._samples.seen_refusals[row]
        for code, count in now.items():
            more = count - seen.get(code, 0)
            seen[code] = count
            if more > 0:
                self._samples.refuse(row, code, self._at, more)
                if row:
                    self._samples.refuse(0, code, self._at, more)

    def _end(self, now_s: float) -> None:
        at = self._at
        self._samples.quantiles[0, at] = _quantiles_ms(self._sum[None])[0]
        self._times[at] = time.time()
        self._lengths_s[at] = max(now_s - self._began_s, 1e-3)
        self._machine[at] = self._read_machine()
        self._is_slowed = self._host.is_slowed()
        self._began_s = now_s
        self._left = None
        self._at = (at + 1) % KEPT
        self._count += 1

    def _read_machine(self) -> list[float]:
        host = self._host
        values = (
            host.machine_cpu_share(),
            host.cpu_cores(),
            host.memory_available_bytes(),
            host.rss_bytes(),
            max(host.temperatures().values(), default=None),
        )
        return [np.nan if value is None else float(value) for value in values]


def _quantiles_ms(counts: Array) -> Array:
    """The quantiles of latency histograms, interpolated within their buckets; NaN where nothing was counted.

    Shapes: [histograms, buckets] -> [histograms, quantiles].
    """
    running = counts.cumsum(axis=1)
    ranks = running[:, -1:] * _SHARES
    index = np.minimum((running[:, None, :] < ranks[:, :, None]).sum(axis=2), _BUCKETS - 1)
    at = np.arange(len(counts))[:, None]
    inside = counts[at, index]
    share = (ranks - (running[at, index] - inside)) / np.where(inside, inside, np.nan)
    found: Array = np.minimum((_LOWS[index] + (_HIGHS[index] - _LOWS[index]) * share) * 1e3, LONGEST_MS)
    return found


def _short(values: Array) -> list[float | None]:
    """Numbers of four digits, whole from a million on; None for NaN."""
    return [None if isnan(each) else float(f"{each:.4g}") if each < WHOLE else int(each) for each in values.tolist()]
