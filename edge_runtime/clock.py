"""The clock of deadlines, in monotonic seconds. Calendar time judges expiry, elsewhere, and the two never meet."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The source of `now`; tests inject one that stands still."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; the origin has no meaning."""
        ...


class SystemClock:
    """The host's monotonic clock."""

    monotonic_s = staticmethod(time.monotonic)
