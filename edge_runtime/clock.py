"""The clock of deadlines, in monotonic seconds, and the calendar that judges expiry. The two never meet."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Protocol


class Clock(Protocol):
    """The source of `now`; tests inject one that stands still."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; the origin has no meaning."""
        ...


class SystemClock:
    """The host's monotonic clock."""

    monotonic_s = staticmethod(time.monotonic)


class Calendar(Protocol):
    """The source of dates; tests inject one that shows the instant they set."""

    def now_utc(self) -> datetime:
        """Return the instant that the host's clock shows; it may be wrong."""
        ...

    def is_synchronised(self) -> bool:
        """Return whether a time service keeps the host's clock right."""
        ...
