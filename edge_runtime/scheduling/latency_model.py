"""Predicts how long a run takes by its rows, as a high quantile, learning from every run.

Owns: the estimates of one layout of one version. Seeded by warm-up and calibration, then fed by every run. Thread:
reads and writes happen under the dispatcher's lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

SMOOTHING = 0.1
"""Weight of a new run in the moving mean and deviation: about the last twenty runs count."""

DEVIATIONS = 2.0
"""Mean + 2 mean absolute deviations lies near the 95th percentile for the skewed run times measured on CPUs."""

OUTLIER = 8.0
"""A run over this many times the estimate is clipped to it: one page fault storm is not a trend."""


class LatencyModel:
    """Run time in seconds by batch rows; linear between and beyond the row counts that were seen."""

    def __init__(self, seed: Mapping[int, float] | None = None) -> None:
        self._mean: dict[int, float] = {}
        self._deviation: dict[int, float] = {}
        self._least: dict[int, float] = {}
        self._rows: list[int] = []
        for rows, run_s in (seed or {}).items():
            self.observe(rows, run_s)

    def observe(self, rows: int, run_s: float) -> None:
        """Learn from one measured run. rows >= 1."""
        mean = self._mean.get(rows)
        if mean is None:
            self._rows.insert(bisect_left(self._rows, rows), rows)
            self._mean[rows] = run_s
            self._deviation[rows] = run_s * 0.1
            self._least[rows] = run_s
            return
        self._least[rows] = min(self._least[rows], run_s)
        run_s = min(run_s, mean * OUTLIER)
        off = run_s - mean
        self._mean[rows] = mean + SMOOTHING * off
        self._deviation[rows] += SMOOTHING * (abs(off) - self._deviation[rows])

    def relax(self) -> None:
        """Lower every estimate by a tenth of its distance from the best run seen.

        Called when a forecast refuses work while nothing runs: no run would ever correct it, so a few slow runs would
        refuse a tight deadline for ever.
        """
        for rows, mean in self._mean.items():
            self._mean[rows] = mean - SMOOTHING * (mean - self._least[rows])
            self._deviation[rows] *= 1 - SMOOTHING

    def mean_s(self, rows: int) -> float:
        """Expected run time; 0.0 while nothing is known."""
        mean = self._mean.get(rows)
        return self._at(rows, self._mean) if mean is None else mean

    def predict_s(self, rows: int) -> float:
        """Run time that most runs of this many rows stay under; 0.0 while nothing is known."""
        mean = self._mean.get(rows)
        if mean is not None:
            return mean + DEVIATIONS * self._deviation[rows]
        return self._at(rows, self._mean) + DEVIATIONS * self._at(rows, self._deviation)

    def known(self) -> dict[int, float]:
        """The mean run time by rows, for the calibration cache and `stats`."""
        return {rows: self._mean[rows] for rows in self._rows}

    def _at(self, rows: int, values: Mapping[int, float]) -> float:
        """The value of rows that were never run."""
        known = self._rows
        if not known:
            return 0.0
        above = bisect_left(known, rows)
        if above == 0:
            # Fewer rows than ever seen: no more than the smallest seen.
            return values[known[0]]
        if above == len(known):
            # More than ever seen: by rows in proportion, which is never too little for a machine that batches at all.
            return values[known[-1]] * rows / known[-1]
        low, high = known[above - 1], known[above]
        share = (rows - low) / (high - low)
        return values[low] + share * (values[high] - values[low])
