"""A clock that moves only when a test moves it."""

from __future__ import annotations


class FakeClock:
    """Stands still at `start_s` until advanced; the same protocol as `edge_runtime.clock.Clock`."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def monotonic_s(self) -> float:
        """The instant that the test has set."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move on. Raises ValueError for a step back: a monotonic clock has none."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back by {-seconds} s")
        self._now_s += seconds
