"""Instants for deadlines. Monotonic seconds only; calendar time lives where expiry is judged and never meets this."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where scheduling takes its `now` from; tests inject one that stands still."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; the origin has no meaning."""
        ...


class SystemClock:
    """The host's monotonic clock."""

    monotonic_s = staticmethod(time.monotonic)
