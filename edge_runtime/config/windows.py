"""Windows of time, as `"mon-fri 01:00-05:00"`: when a device may do what would disturb its work.

Pure. Times are the device's local ones. A window that ends before it begins lasts over midnight, and belongs to the day
on which it begins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

DAY_MINUTES = 24 * 60

WINDOW_RULE = '"01:00-05:00", "sat,sun 00:00-24:00" or "mon-fri 22:00-05:00"'

_FORM = re.compile(
    r"(?:(?P<days>[a-z]{3}(?:[-,][a-z]{3})*) )?(?P<from>[0-2]\d:[0-5]\d)-(?P<to>[0-2]\d:[0-5]\d)", re.ASCII
)


class UpdateWindow(NamedTuple):
    """One window. days: on which it begins, 0 for Monday. start, minutes: its beginning in the day, and its length."""

    days: frozenset[int]
    start: int
    minutes: int


def parse_window(text: str) -> UpdateWindow:
    """Return a window. Raises ValueError, which says what is wanted."""
    match = _FORM.fullmatch(text.lower())
    if match is None:
        raise ValueError(f"got {text[:80]!r}; wanted {WINDOW_RULE}")
    start, end = _minute(match["from"], text), _minute(match["to"], text)
    if start in {end, DAY_MINUTES}:
        raise ValueError(f"got {text!r}, which lasts no time; wanted {WINDOW_RULE}")
    days = frozenset(range(7)) if match["days"] is None else _days(match["days"], text)
    return UpdateWindow(days, start, (end - start) % DAY_MINUTES or DAY_MINUTES)


def is_open(windows: Sequence[UpdateWindow], local: datetime) -> bool:
    """Return whether one of the windows is open; without any, always. local: the device's time."""
    return not windows or any(_is_open(window, local) for window in windows)


def opens_in_s(windows: Sequence[UpdateWindow], local: datetime, share: float = 0.0) -> float:
    """Return the seconds until the next window opens, 0 where one is open.

    share: this device's place, 0 to 1, in the first quarter of a window, at most 15 minutes, so that a fleet spreads.
    """
    if is_open(windows, local):
        return 0.0
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
    waits = []
    for window in windows:
        for day in range(8):
            begins = midnight + timedelta(days=day, minutes=window.start)
            if begins > local and begins.weekday() in window.days:
                waits.append((begins - local).total_seconds() + share * min(window.minutes * 15.0, 900.0))
                break
    return min(waits)


# ---- private --------------------------------------------------------------------------------------------------------


def _is_open(window: UpdateWindow, local: datetime) -> bool:
    minute = local.hour * 60 + local.minute
    today = window.start <= minute < window.start + window.minutes and local.weekday() in window.days
    overnight = minute < window.start + window.minutes - DAY_MINUTES and (local.weekday() - 1) % 7 in window.days
    return today or overnight


def _minute(text: str, whole: str) -> int:
    hours, minutes = map(int, text.split(":"))
    minute = hours * 60 + minutes
    if minute > DAY_MINUTES:
        raise ValueError(f"got {whole!r}; a day ends at 24:00; wanted {WINDOW_RULE}")
    return minute


def _days(text: str, whole: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        names = part.split("-")
        if len(names) > 2 or any(name not in DAYS for name in names):
            raise ValueError(f"got {whole!r}; a day is one of {', '.join(DAYS)}; wanted {WINDOW_RULE}")
        first, last = DAYS.index(names[0]), DAYS.index(names[-1])
        found.update((first + each) % 7 for each in range((last - first) % 7 + 1))
    return frozenset(found)
