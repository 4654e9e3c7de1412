"""When a device looks for updates: at intervals, soon after it was woken, and never too often.

Owns: the two rules of time (DESIGN 8: at most one check each `min_check_s`; a fleet that was woken at once spreads).
Instants are the clock's seconds. No thread and no clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Schedule:
    """When the next look is due. Thread: one owner.

    A share is a number from 0 to 1 that says where in a jitter this device stands; whoever calls draws it.
    """

    poll_s: float
    poll_jitter: float
    wake_jitter_s: float
    min_check_s: float
    due_s: float
    looked_s: float | None = None

    def woken(self, now_s: float, share: float) -> None:
        """Somebody says that there may be something new: look soon, at a share (0 to 1) of the jitter."""
        earliest_s = now_s + share * self.wake_jitter_s
        if self.looked_s is not None:
            earliest_s = max(earliest_s, self.looked_s + self.min_check_s)
        self.due_s = min(self.due_s, earliest_s)

    def looked(self, now_s: float, share: float) -> None:
        """A look is over; the next is due after poll_s, more or less."""
        self.looked_s = now_s
        self.due_s = now_s + self.poll_s * (1 + (2 * share - 1) * self.poll_jitter)
