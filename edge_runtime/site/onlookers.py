"""The people who look at one rule: its last answer and its picture are kept for them, and only while they ask.

Owns: how long an ask counts, and how often a picture is drawn. An ask is told what the ask before had drawn. Thread:
any; answering threads put answers, doors ask, results.py's thread looks which asks are over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from edge_runtime.clock import Clock
from edge_runtime.site.publication import PendingResult, SentPicture

KEPT_S = 10.0
"""How long after the last ask answers are kept: a page asks each second, and a slow link takes some."""

DRAW_S = 0.25
"""Least time between two pictures of a rule: four a second are a film for a person."""

Draw = Callable[[PendingResult, SentPicture, Callable[[bytes], None]], None]
"""Has a picture drawn; the function gets it as JPEG, or b"" where it cannot be."""


class Onlookers:
    """The people who look at one rule. last: its newest answer, published or not. draw: for its pictures."""

    def __init__(self, clock: Clock, draw: Draw) -> None:
        self.last: PendingResult | None = None
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._asked_s = clock.monotonic_s()
        self._due_s = 0.0
        self._is_wanted = self._is_drawing = False
        self._jpeg: bytes | None = None

    def look(self) -> PendingResult | None:
        """Return the newest answer, and have the next ones kept. None: none came yet."""
        self._asked_s = self._clock.monotonic_s()
        return self.last

    def picture(self) -> bytes | None:
        """Return the newest picture that was drawn, and have the next answer's drawn. None: there is none yet."""
        self._asked_s, self._is_wanted = self._clock.monotonic_s(), True
        return self._jpeg

    @property
    def wants_picture(self) -> bool:
        """Whether the picture of the next answer is drawn."""
        return self._is_wanted and not self._is_drawing and self._clock.monotonic_s() >= self._due_s

    def put(self, result: PendingResult, picture: SentPicture | None) -> None:
        """Take the rule's next answer. picture: of it, where one is wanted and there is one."""
        self.last = result
        if picture is None:
            return
        with self._lock:
            if self._is_drawing:
                return
            self._is_drawing, self._is_wanted = True, False
            self._due_s = self._clock.monotonic_s() + DRAW_S
        self._draw(result, picture, self._take)

    def is_over(self, now_s: float) -> bool:
        """Return whether the last ask is too long ago to count."""
        return now_s - self._asked_s >= KEPT_S

    def _take(self, drawn: bytes) -> None:
        self._jpeg = drawn or self._jpeg
        self._is_drawing = False
