"""How long to wait before the next try to reach what was lost. Pure but for the random source it is given.

"Equal jitter": half of the wait is fixed, half is random, so that a fleet that lost its broker in one instant does not
come back in one, and yet nobody hammers (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
"""

from __future__ import annotations

from collections.abc import Callable

STEADY_S = 10.0
"""A connection that lasted this long was a good one: the next loss begins with the shortest wait again. One that is
thrown out at once (two clients of one id, a broker that is full) goes on doubling."""

MAX_DOUBLINGS = 32


class Backoff:
    """Waits that double from `min_s` to `max_s` with each failure in a row."""

    def __init__(self, min_s: float, max_s: float, random: Callable[[], float]) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._random = random
        self._failures = 0

    def next_s(self) -> float:
        """The wait before the next try, in seconds; each call is one more failure."""
        whole_s = min(self._min_s * (1 << min(self._failures, MAX_DOUBLINGS)), self._max_s)
        self._failures += 1
        return whole_s * (0.5 + 0.5 * self._random())

    def lasted(self, connected_s: float) -> None:
        """A connection ended after so many seconds."""
        if connected_s >= STEADY_S:
            self._failures = 0
