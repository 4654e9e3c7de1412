"""The time that this device judges expiry by, kept through restarts and wrong clocks.

Owns: the floor in the journal; the rule is `clock_rule`'s. Thread: one owner moves it; `now_utc` and `told` any.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from tuf.api.metadata import Root, Timestamp

from edge_runtime.errors import EdgeRuntimeError, MetadataExpired
from edge_runtime.repository.release_paths import ISSUED_FIELD
from edge_runtime.update.clock_rule import BUILT_UTC, floor_after, is_clock_synchronised, parse_utc, utc_text
from edge_runtime.update.journal import Journal
from edge_runtime.update.marks import signer_of

FLOOR_FACT = "clock_floor_utc"

FLOOR_STEP_S = 3600.0
"""The floor is written down when it moved by this: a device that looks each minute spares its flash."""


def _system_utc() -> datetime:
    return datetime.now(timezone.utc)


class DeviceTime:
    """max(system clock, floor). utc_clock: the system's; is_synchronised: whether somebody sets it."""

    def __init__(
        self,
        journal: Journal,
        utc_clock: Callable[[], datetime] | None = None,
        is_synchronised: Callable[[], bool] = is_clock_synchronised,
    ) -> None:
        self._journal = journal
        self._utc_clock = utc_clock or _system_utc
        self._is_synchronised = is_synchronised
        self._floor_utc = BUILT_UTC
        self._signer = ""

    def recall(self) -> None:
        """Read the floor that was written down. Once the journal is open. Raises StorageFailed."""
        text, _, self._signer = (self._journal.fact(FLOOR_FACT) or "").partition(" ")
        self._floor_utc = max(parse_utc(text) or BUILT_UTC, BUILT_UTC)

    def below(self, root: Root) -> datetime:
        """What time it is for metadata below a root.

        The floor counts where root gives the timestamp the keys that it was learned from: a thief of other ones may
        have said that it is the year 3000, for which everything has expired.
        """
        return max(self._utc_clock(), self._floor_below(signer_of(root, Timestamp.type)))

    def now_utc(self) -> datetime:
        """The clock, or what has surely passed, where the clock is behind it."""
        return max(self._utc_clock(), self._floor_utc)

    def now_text(self) -> str:
        """The same as text."""
        return utc_text(self.now_utc())

    def learn(self, root: Root, accepted: Timestamp) -> None:
        """Metadata was accepted just now: what it says of time is known from here on. Raises StorageFailed."""
        signer = signer_of(root, Timestamp.type)
        floor_utc = self._floor_below(signer)
        moved_utc = floor_after(
            floor_utc,
            clock_utc=self._utc_clock(),
            is_synchronised=self._is_synchronised(),
            issued_utc=parse_utc(accepted.unrecognized_fields.get(ISSUED_FIELD)),
            expires_utc=accepted.expires,
        )
        if signer != self._signer or (moved_utc - floor_utc).total_seconds() >= FLOOR_STEP_S:
            self._journal.note_fact(FLOOR_FACT, f"{utc_text(moved_utc)} {signer}")
            self._floor_utc, self._signer = moved_utc, signer

    def explained(self, error: EdgeRuntimeError) -> str:
        """An error's message, with what the clock may have to do with it."""
        if isinstance(error, MetadataExpired) and not self._is_synchronised():
            return f"{error.message}; nobody sets this device's clock (clock_unknown), so it may be what is wrong"
        return error.message

    def told(self) -> dict[str, Any]:
        """For `update status`."""
        clock_utc, floor_utc = self._utc_clock(), self._floor_utc
        return {
            "now_utc": utc_text(clock_utc),
            "floor_utc": utc_text(floor_utc),
            "is_behind": clock_utc < floor_utc,
            "is_synchronised": self._is_synchronised(),
        }

    def _floor_below(self, signer: str) -> datetime:
        return self._floor_utc if signer == self._signer else BUILT_UTC
