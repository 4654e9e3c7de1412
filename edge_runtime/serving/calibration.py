"""The curve of run time by rows: measured when the machine is idle, kept in the state folder, turned into limits.

Owns: the measurement within a budget and its cache file. Decides the batch limit from the curve (pure). Thread: the
loader's. Ready never waits for it (DESIGN 3).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.backends.base import Instance
from edge_runtime.errors import BackendError, StorageFailed
from edge_runtime.repository.durable import write_atomically
from edge_runtime.serving.warmup import make_inputs, time_run

log = logging.getLogger(__name__)

BUDGET_S = 1.0
"""Idle time that one version's curve may take (DESIGN 3)."""

GAIN = 1.1
"""A batch has to serve this much more rows a second to be worth the wait it adds for its first request; less is noise:
models that batching cannot help measured up to 1.07 on a busy machine."""

REPEATS = 5
"""Runs a point; the quickest counts, since noise only ever adds."""

SETTLING_RUNS = 2
"""Runs at a new number of rows before it is timed: the library plans and allocates in the first."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Run seconds by rows; wide_s: of one row on all cores, None where that is not worth a second copy."""

    times: Mapping[int, float]
    wide_s: float | None = None

    def best_rows(self) -> int:
        """The fewest rows that serve nearly the most rows a second; 1 when batching gains nothing."""
        best, best_rate = 1, 1 / self.times[1] if 1 in self.times else 0.0
        for rows in sorted(self.times):
            rate = rows / self.times[rows]
            if rate >= best_rate * GAIN:
                best, best_rate = rows, rate
        return best


def row_counts(max_rows: int) -> list[int]:
    """Powers of two up to `max_rows`."""
    counts = [1]
    while counts[-1] * 2 <= max_rows:
        counts.append(counts[-1] * 2)
    return counts


def measure(
    instance: Instance, max_rows: int, length: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Mapping[int, float]]:
    """Measure one number of rows a step, yielding the times so far, so that the caller can stop when work comes.

    Stops by itself when the budget is spent, when two doublings in a row gain nothing, or when a run fails.
    """
    times: dict[int, float] = {}
    spent_s, best_rate, idle_steps = 0.0, 0.0, 0
    for rows in row_counts(max_rows):
        expected_s = times[rows // 2] * 2 * (SETTLING_RUNS + REPEATS) if rows > 1 else 0.0
        if spent_s + expected_s > BUDGET_S or idle_steps == 2:
            return
        started_s = time.perf_counter()
        try:
            times[rows] = measure_rows(instance, rows, length, shapes)
        except BackendError as error:
            log.info("calibration stopped", extra={"rows": rows, "reason": error.message})
            return
        spent_s += time.perf_counter() - started_s
        rate = rows / times[rows]
        idle_steps = 0 if rate >= best_rate * GAIN else idle_steps + 1
        best_rate = max(best_rate, rate)
        yield dict(times)


def measure_rows(instance: Instance, rows: int, length: int, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Seconds of the quickest of a few settled runs of so many rows. Raises RunFailed."""
    inputs = make_inputs(instance.spec, rows, length, shapes)
    runs = [time_run(instance, inputs) for _ in range(SETTLING_RUNS + REPEATS)]
    return min(runs[SETTLING_RUNS:])


class CurveCache:
    """Curves on disk, one small JSON file each, named by a key of what the curve depends on."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, key: str) -> Curve | None:
        """A curve measured before under the same key; a damaged file counts as none."""
        if self._folder is None:
            return None
        try:
            fields = json.loads((self._folder / f"{key}.json").read_bytes())
            times = {int(rows): float(run_s) for rows, run_s in fields["times"].items()}
            wide_s = None if fields["wide_s"] is None else float(fields["wide_s"])
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None
        is_sane = times and all(rows > 0 and 0 < run_s < 3600 for rows, run_s in times.items())
        return Curve(times, wide_s) if is_sane else None

    def write(self, key: str, curve: Curve) -> None:
        """Keep a curve. A full or read-only disk is reported and costs nothing but the next measurement."""
        if self._folder is None:
            return
        fields = {"times": dict(curve.times), "wide_s": curve.wide_s}
        try:
            write_atomically(self._folder / f"{key}.json", json.dumps(fields).encode())
        except (OSError, StorageFailed) as error:
            log.warning("the calibration of %s is not kept: %s", key[:12], error)
