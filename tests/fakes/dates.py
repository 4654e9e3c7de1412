"""A calendar that shows the instant that a test has set."""

from __future__ import annotations

from datetime import datetime

from edge_runtime.updates.device_time import SystemCalendar


class FakeCalendar(SystemCalendar):
    """Shows `instant_utc`. synchronised: None: as the host's clock is."""

    def __init__(self, instant_utc: datetime, *, synchronised: bool | None = None) -> None:
        self.instant_utc = instant_utc
        self._synchronised = synchronised

    def now_utc(self) -> datetime:
        """The instant that the test has set."""
        return self.instant_utc

    def is_synchronised(self) -> bool:
        """As the test has set it."""
        return super().is_synchronised() if self._synchronised is None else self._synchronised
