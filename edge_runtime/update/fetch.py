"""Bytes from an untrusted place, within bounds: of length, of time in all, and of slowness.

Owns: what a place is asked for (`Fetcher`), how long it may take (`Limits`, `Pace`), and files small enough for memory
(`fetch_bytes`). Never decides whether bytes are to be believed, and never writes them. Called by the client and the
downloader; `http_fetch` and `folder_fetch` are the places.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import DownloadError

PIECE_BYTES = 1 << 16
"""Read at once: large enough that the loop costs nothing beside the hash, small enough to hold a cap and a deadline."""

CAP_STEPS_PER_S = 8
"""With a cap, pieces are small enough that this many fit in a second, so that the cap holds over short times too."""


class Body(Protocol):
    """The bytes of one file, as they arrive."""

    @property
    def start_bytes(self) -> int:
        """Where in the file these bytes begin: where was asked for, or 0 when the place cannot begin there."""
        ...

    def read(self, limit: int) -> bytes:
        """The next bytes, 1 to `limit`; none: the file is over.

        Raises DownloadError: the deadline passed, nothing came for too long, or the connection broke.
        """
        ...


class Fetcher(Protocol):
    """A place that files come from: a server, a folder. Nothing it gives is trusted. Thread: one at a time."""

    def open(self, path: str, *, start_bytes: int, deadline_s: float) -> AbstractContextManager[Body]:
        """Begin to fetch a file; leaving the context ends it.

        path: below the place's base, parts divided by "/". start_bytes: how much of the file is here already.
        deadline_s: the instant on the clock's scale by which everything must be over, connecting included.
        Raises NotPublished (no such file) and DownloadError, here and in `read`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How long one piece of work may take in all, how slow it may be, and how fast.

    Slow: fewer than `min_bytes_per_s` over any `window_s`, which a server that gives a byte each 29 s falls under
    although it never stalls. Fast: at most `cap_bytes_per_s` (None: no cap); the slowest allowed is never above half of
    the cap.
    """

    total_s: float
    min_bytes_per_s: float = 1024.0
    window_s: float = 30.0
    cap_bytes_per_s: float | None = None


class Pace:
    """Counts what has come against `Limits`, from its making on. Thread: one owner."""

    def __init__(
        self, limits: Limits, clock: Clock | None = None, pause: Callable[[float], object] = time.sleep
    ) -> None:
        """`pause` waits so many seconds to hold the cap; an Event's `wait` lets a stopping daemon cut it short."""
        self._limits = limits
        self._clock = clock or SystemClock()
        self._pause = pause
        self._began_s = self._window_began_s = self._clock.monotonic_s()
        self._all_bytes = self._window_bytes = 0

    @property
    def deadline_s(self) -> float:
        """The instant at which everything must be over."""
        return self._began_s + self._limits.total_s

    @property
    def piece_bytes(self) -> int:
        """How much to read at once."""
        cap = self._limits.cap_bytes_per_s
        return PIECE_BYTES if cap is None else max(1, min(PIECE_BYTES, int(cap / CAP_STEPS_PER_S)))

    def count(self, length: int) -> None:
        """So many bytes came. Waits where the cap asks for it.

        Raises DownloadError: the deadline passed, or the last window was too slow.
        """
        self._all_bytes += length
        self._window_bytes += length
        now_s = self._clock.monotonic_s()
        if now_s >= self.deadline_s:
            raise DownloadError(
                f"{self._all_bytes} bytes came in {self._limits.total_s:g} s, which is all the time there was; "
                "look at the link, or allow more time"
            )
        self._check_window(now_s)
        self._hold_cap(now_s)

    def _check_window(self, now_s: float) -> None:
        lasted_s = now_s - self._window_began_s
        if lasted_s < self._limits.window_s:
            return
        slowest = self._limits.min_bytes_per_s
        if self._limits.cap_bytes_per_s is not None:
            slowest = min(slowest, self._limits.cap_bytes_per_s / 2)
        if self._window_bytes < slowest * lasted_s:
            raise DownloadError(
                f"{self._window_bytes} bytes came in {lasted_s:.0f} s, wanted {slowest:g} a second; look at the link"
            )
        self._window_began_s, self._window_bytes = now_s, 0

    def _hold_cap(self, now_s: float) -> None:
        cap = self._limits.cap_bytes_per_s
        if cap is None:
            return
        ahead_s = self._all_bytes / cap - (now_s - self._began_s)
        if ahead_s > 0:
            self._pause(min(ahead_s, self.deadline_s - now_s))


def fetch_bytes(fetcher: Fetcher, path: str, *, max_bytes: int, pace: Pace) -> bytes:
    """A whole file of at most `max_bytes`, in memory.

    Raises NotPublished, and DownloadError also when the file is longer (no more than one byte over is read).
    """
    got = bytearray()
    with fetcher.open(path, start_bytes=0, deadline_s=pace.deadline_s) as body:
        while piece := body.read(min(pace.piece_bytes, max_bytes + 1 - len(got))):
            got += piece
            if len(got) > max_bytes:
                raise DownloadError(f"{path}: more than the {max_bytes} bytes that it may have; it was not read on")
            pace.count(len(piece))
    return bytes(got)
