"""The highest rate that keeps an objective, found by bracketing and halving. Pure: it is told what each rate gave."""

from __future__ import annotations

import math

UP, DOWN = 1.2, 0.75
"""Steps of the bracket: a quick look is right within a fifth more often than not. Each step makes the next
one the same way larger, since it was wrong then."""

PRECISION = 1.05
"""The search ends when the lowest rate that failed is so near the highest that did not: noise is about as large."""

MAX_PROBES = 12
"""Enough to come down from the first guess to a hundredth of it and to close in from there."""


class RateSearch:
    """Ask `next_rate` for a rate to offer, tell `record` whether the objective was kept; `best` is the highest kept.

    first: where to begin, above 0; usually a little below what was seen with many requests at a time.
    """

    def __init__(self, first: float) -> None:
        self.best = 0.0
        self._failed = math.inf
        self._first = first
        self._probes = 0
        self._failures = 0
        self._successes = 0

    def next_rate(self) -> float | None:
        """The rate to offer next; None when the search is over."""
        if self._probes >= MAX_PROBES:
            return None
        if self._probes == 0:
            return self._first
        if math.isinf(self._failed):
            return self.best * UP**self._successes
        if self.best == 0.0:
            return self._failed * DOWN**self._failures
        if self._failed / self.best <= PRECISION:
            return None
        return math.sqrt(self._failed * self.best)

    def record(self, rate: float, *, is_met: bool) -> None:
        """What a rate gave."""
        self._probes += 1
        if is_met:
            self._successes += 1
            self.best = max(self.best, rate)
        else:
            self._failures += 1
            self._failed = min(self._failed, rate)
