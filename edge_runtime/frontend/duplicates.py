"""Requests seen a short while ago, so that what a broker delivers twice is answered once.

Owns: the memory of them, bounded in time and number (DESIGN 5: 60 s). Thread: the transport's, except `forget`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

WINDOW_S = 60.0
"""A broker delivers again after a lost connection: within the session's expiry, 60 s by default."""

MAX_REMEMBERED = 32_768
"""About 10 MB; at 1 000 QoS 1 requests a second it holds 30 s."""


class Duplicates:
    """Keys with the time they were first seen, oldest first."""

    def __init__(self, window_s: float = WINDOW_S, max_remembered: int = MAX_REMEMBERED) -> None:
        self._window_s = window_s
        self._max_remembered = max_remembered
        self._seen: OrderedDict[Hashable, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def is_new(self, key: Hashable, now_s: float) -> bool:
        """Whether a key was not seen within the window; it is remembered from now on."""
        self._expire(now_s)
        if key in self._seen:
            return False
        self._seen[key] = now_s
        if len(self._seen) > self._max_remembered:
            self._seen.popitem(last=False)
        return True

    def forget(self, key: Hashable) -> None:
        """Let a key be new again: its request was refused, and may be sent once more. Thread: any."""
        self._seen.pop(key, None)

    def _expire(self, now_s: float) -> None:
        while self._seen:
            try:
                key, seen_s = next(iter(self._seen.items()))
            except (StopIteration, RuntimeError):
                return  # another thread forgot one at this very moment
            if now_s - seen_s < self._window_s:
                return
            self._seen.pop(key, None)
