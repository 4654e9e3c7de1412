"""The choice of models that have series of their own in a scrape: the busiest of late, and those that a scrape wants.

Owns: how busy each model was, and who asked. Pure but for its lock: Prometheus' collector gives models and names.
Thread: any.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from edge_runtime.clock import Clock
from edge_runtime.telemetry.metrics import ModelMetrics

HALF_LIFE_S = 600.0
"""A request counts half as much after ten minutes: two of the windows that alerts look at."""

STAYS = 1.5
"""A model gives its place to one that is half as busy again: series that come and go are worse than a few idle ones."""

ASKED_S = 3600.0
"""A model that a scrape wants stays named this long: an outage of the scraper makes no gap."""

MOST_ASKED = 10
"""The last ones: each peer that reaches the port may ask."""


class BusiestModels:
    """Chooses models. limit: the most of the busiest; those asked for stand beside them."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = limit
        self._monotonic_s = clock.monotonic_s
        self._lock = threading.Lock()
        self._at_s = self._monotonic_s()
        self._requests: dict[str, int] = {}
        self._scores: dict[str, float] = {}
        self._busiest: frozenset[str] = frozenset()
        self._asked: dict[str, float] = {}

    def ask(self, names: Iterable[str]) -> None:
        """Want detail of these; a name that is not a model's has no effect."""
        now_s = self._monotonic_s()
        with self._lock:
            for name in names:
                self._asked.pop(name, None)
                self._asked[name] = now_s

    def choose(self, models: Mapping[str, ModelMetrics]) -> frozenset[str]:
        """Return the names of the models to name, by their requests since the last call and before."""
        now_s = self._monotonic_s()
        with self._lock:
            self._count(models, 0.5 ** ((now_s - self._at_s) / HALF_LIFE_S))
            self._at_s = now_s
            self._busiest = frozenset(sorted(models, key=self._rank)[: self._limit])
            wanted = [(name, at_s) for name, at_s in self._asked.items() if name in models and now_s - at_s < ASKED_S]
            self._asked = dict(wanted[-MOST_ASKED:])
            return self._busiest | self._asked.keys()

    def _count(self, models: Mapping[str, ModelMetrics], fading: float) -> None:
        before, scores = self._requests, self._scores
        self._requests = {name: metrics.requests for name, metrics in models.items()}
        self._scores = {
            name: scores.get(name, 0.0) * fading + max(requests - before.get(name, 0), 0)
            for name, requests in self._requests.items()
        }

    def _rank(self, name: str) -> tuple[float, bool, str]:
        """The key of an order from busy to idle."""
        is_there = name in self._busiest
        return -self._scores[name] * (STAYS if is_there else 1.0), not is_there, name
