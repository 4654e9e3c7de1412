"""Senders whose request ended their model's host: whose requests run alone, and from when on.

Owns: that memory of one model, bounded. Deaths during runs cost the culprit alone: its requests share no batch for a
while, and wait longer after each death, while others' run as before. Thread: under the dispatcher's lock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

ALONE_S = 60.0
"""How long a culprit's requests run alone after its last death (issue 12: a minute)."""

FIRST_WAIT_S = 0.1
"""A culprit waits this long after its first death, which is about what the next host takes to load a small model."""

LONGEST_WAIT_S = 8.0
"""The wait doubles with each death, up to this: then the other senders lose some 2 % of their time to its deaths."""

MOST_CULPRITS = 1024
"""Beyond this the oldest is forgotten: a client may come back under as many names as it likes."""


@dataclass(slots=True)
class Culprit:
    """One sender. until_s: it is forgotten then. not_before_s: its next request runs then; wait_s: that long a wait."""

    until_s: float
    not_before_s: float
    wait_s: float


class Culprits:
    """The culprits of one model."""

    def __init__(self) -> None:
        self._by_sender: dict[Hashable, Culprit] = {}

    def __bool__(self) -> bool:
        return bool(self._by_sender)

    def add(self, sender: Hashable, now_s: float) -> None:
        """A sender's request, alone in its host, has ended it."""
        known = self._by_sender.pop(sender, None)
        is_again = known is not None and now_s < known.until_s
        wait_s = min(known.wait_s * 2, LONGEST_WAIT_S) if known is not None and is_again else FIRST_WAIT_S
        if len(self._by_sender) >= MOST_CULPRITS:
            del self._by_sender[next(iter(self._by_sender))]
        self._by_sender[sender] = Culprit(now_s + ALONE_S, now_s + wait_s, wait_s)

    def has(self, sender: Hashable, now_s: float) -> bool:
        """Whether a sender's requests run alone now."""
        known = self._by_sender.get(sender)
        if known is None:
            return False
        if now_s >= known.until_s:
            del self._by_sender[sender]
            return False
        return True

    def not_before_s(self, sender: Hashable) -> float:
        """The instant from which a sender's next request may run."""
        known = self._by_sender.get(sender)
        return known.not_before_s if known is not None else 0.0
