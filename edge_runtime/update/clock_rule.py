"""What time it is for expiry, on devices whose clock may be wrong (DESIGN 8).

Owns: the rule of the floor. `now = max(system clock, floor)`: the floor is an instant that has surely passed, kept in
the journal, so that a clock which fell back to 1970 does not make everything fresh again. Only what was verified moves
it: the issue time that a repository signs into its timestamp, and this clock while the system says that it is
synchronised, but never beyond the expiry of metadata that was accepted at that time. A clock that is ahead thus heals
when it is right again. Nothing here stops serving.
"""

from __future__ import annotations

import ctypes
from datetime import datetime, timedelta, timezone
from pathlib import Path

BUILT_UTC = datetime(2026, 11, 1, tzinfo=timezone.utc)
"""This code is not older: the floor of a device that knows nothing else."""

LONGEST_STEP = timedelta(days=366)
"""The floor moves by no more at once: a time server that says the year 9999 must not end updates for ever."""

_SYNCHRONISED = Path("/run/systemd/timesync/synchronized")
_TIME_ERROR = 5
_TIMEX_BYTES = 256


def floor_after(
    floor_utc: datetime,
    *,
    clock_utc: datetime,
    is_synchronised: bool,
    issued_utc: datetime | None,
    expires_utc: datetime,
) -> datetime:
    """The floor after metadata was accepted that expires at `expires_utc` and says that it was issued at `issued_utc`.

    Never lower than before, at most LONGEST_STEP higher, never above the expiry. Pure.
    """
    seen = [floor_utc]
    if issued_utc is not None:
        seen.append(issued_utc)
    if is_synchronised:
        seen.append(clock_utc)
    return max(floor_utc, min(max(seen), expires_utc, floor_utc + LONGEST_STEP))


def parse_utc(text: object) -> datetime | None:
    """An instant as signed metadata writes it, `2026-11-21T12:00:00Z`; None: that is none."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return None


def utc_text(instant: datetime) -> str:
    """The same as text, to the second."""
    return instant.strftime("%Y-%m-%dT%H:%M:%SZ")


def is_clock_synchronised() -> bool:
    """Whether somebody sets this host's clock: systemd-timesyncd's flag, else what the kernel says (adjtimex)."""
    if _SYNCHRONISED.exists():
        return True
    try:
        # struct timex is 208 bytes on 64-bit Linux; zeroed, `modes` is 0: only read.
        state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return False
    return 0 <= state < _TIME_ERROR
