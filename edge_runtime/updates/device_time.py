"""The time by which this device judges expiry, kept through restarts and wrong clocks.

Owns: the rule of the floor, and the floor in the journal. `now = max(system clock, floor)`: the floor is an instant
that has surely passed, so that nothing becomes fresh again for a clock that fell back to 1970. Verified facts alone
move it: the issue time that a repository signs into its timestamp, and this clock while the system says that it is
synchronised, but never beyond the expiry of metadata accepted at that time. A clock that is ahead thus heals when it is
right again. Nothing here stops serving. Thread: one owner moves the floor; `now_utc` and `as_json` any.
"""

from __future__ import annotations

import ctypes
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from tuf.api.metadata import Root, Timestamp

from edge_runtime.clock import Calendar
from edge_runtime.errors import EdgeRuntimeError, MetadataExpired
from edge_runtime.updates.journal import Journal
from edge_runtime.updates.release_paths import ISSUED_FIELD
from edge_runtime.updates.trust import signer_of

BUILT_UTC = datetime(2026, 11, 1, tzinfo=timezone.utc)
"""This code is not older: the floor of a device without another."""

LONGEST_STEP = timedelta(days=366)
"""The floor moves by no more at once: a time server that says the year 9999 must not end updates for ever."""

_SYNCHRONISED = Path("/run/systemd/timesync/synchronized")
_TIME_ERROR = 5
_TIMEX_BYTES = 256

FLOOR_FACT = "clock_floor_utc"

FLOOR_STEP_S = 3600.0
"""The floor is written down when it moved by this: a device that checks each minute spares its flash."""


def floor_after(
    floor_utc: datetime,
    *,
    clock_utc: datetime,
    is_synchronised: bool,
    issued_utc: datetime | None,
    expires_utc: datetime,
) -> datetime:
    """Return the floor after a check accepted metadata with this expiry and this signed time of issue.

    Never lower than before, at most LONGEST_STEP higher, never above the expiry. Pure.
    """
    seen = [floor_utc]
    if issued_utc is not None:
        seen.append(issued_utc)
    if is_synchronised:
        seen.append(clock_utc)
    return max(floor_utc, min(max(seen), expires_utc, floor_utc + LONGEST_STEP))


def parse_utc(text: object) -> datetime | None:
    """Parse an instant of signed metadata, `2026-11-21T12:00:00Z`; None: it is none."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return None


def utc_text(instant: datetime) -> str:
    """Return an instant as text, to the second."""
    return instant.strftime("%Y-%m-%dT%H:%M:%SZ")


class SystemCalendar:
    """The host's own calendar clock."""

    def now_utc(self) -> datetime:
        """Return the instant that the host's clock shows."""
        return datetime.now(timezone.utc)

    def is_synchronised(self) -> bool:
        """Return whether the host's clock is synchronised: systemd-timesyncd's flag, else the kernel's (adjtimex)."""
        if _SYNCHRONISED.exists():
            return True
        try:
            # struct timex is 208 bytes on 64-bit Linux; zeroed, `modes` is 0: only read.
            state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
        except (OSError, AttributeError):
            return False
        return 0 <= state < _TIME_ERROR


class DeviceTime:
    """The host's calendar clock, or the floor where the clock is behind it."""

    def __init__(self, journal: Journal, calendar: Calendar | None = None) -> None:
        """calendar: None takes the host's."""
        self._journal = journal
        self._calendar = calendar or SystemCalendar()
        self._floor_utc = BUILT_UTC
        self._signer = ""

    def recall(self) -> None:
        """Read the floor from the open journal. Raises StorageFailed."""
        text, _, self._signer = (self._journal.fact(FLOOR_FACT) or "").partition(" ")
        self._floor_utc = max(parse_utc(text) or BUILT_UTC, BUILT_UTC)

    def below(self, root: Root) -> datetime:
        """Return the time for metadata below a root.

        The floor counts only while root gives the timestamp the keys by which it was learned: a thief of other keys may
        have signed the year 3000, in which all metadata has expired.
        """
        return max(self._calendar.now_utc(), self._floor_below(signer_of(root, Timestamp.type)))

    def now_utc(self) -> datetime:
        """Return the clock, or the floor where the clock is behind it."""
        return max(self._calendar.now_utc(), self._floor_utc)

    def now_text(self) -> str:
        """Return `now_utc` as text."""
        return utc_text(self.now_utc())

    def learn(self, root: Root, accepted: Timestamp) -> None:
        """Move the floor by metadata that was accepted just now. Raises StorageFailed."""
        signer = signer_of(root, Timestamp.type)
        floor_utc = self._floor_below(signer)
        moved_utc = floor_after(
            floor_utc,
            clock_utc=self._calendar.now_utc(),
            is_synchronised=self._calendar.is_synchronised(),
            issued_utc=parse_utc(accepted.unrecognized_fields.get(ISSUED_FIELD)),
            expires_utc=accepted.expires,
        )
        if signer != self._signer or (moved_utc - floor_utc).total_seconds() >= FLOOR_STEP_S:
            self._journal.note_fact(FLOOR_FACT, f"{utc_text(moved_utc)} {signer}")
            self._floor_utc, self._signer = moved_utc, signer

    def explained(self, error: EdgeRuntimeError) -> str:
        """Return an error's message, with a hint where an unsynchronised clock may be its cause."""
        if isinstance(error, MetadataExpired) and not self._calendar.is_synchronised():
            return f"{error.message}; nobody sets this device's clock (clock_unknown), so it may be what is wrong"
        return error.message

    def as_json(self) -> dict[str, Any]:
        """For `update status`."""
        clock_utc, floor_utc = self._calendar.now_utc(), self._floor_utc
        return {
            "now_utc": utc_text(clock_utc),
            "floor_utc": utc_text(floor_utc),
            "is_behind": clock_utc < floor_utc,
            "is_synchronised": self._calendar.is_synchronised(),
        }

    def _floor_below(self, signer: str) -> datetime:
        return self._floor_utc if signer == self._signer else BUILT_UTC
