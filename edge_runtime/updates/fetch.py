"""Bytes from an untrusted place, within bounds of length, total time and slowness.

Owns: the interface of a place (`Fetcher`), how long it may take (`FetchLimits`, `Pace`), small files in memory
(`fetch_bytes`), and the place that is a folder: a USB stick, a mirror on a disk. Strangers may have filled it:
links, devices and pipes in it are not followed or opened, names are looked up, never listed, and nothing outside it is
opened. The place that is a server is in `http_fetch`. Never verifies bytes, and never writes them. Called by the client
and the downloader.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import DownloadError, NotPublished

PIECE_BYTES = 1 << 16
"""Read at once: large enough that the loop costs nothing beside the hash, small enough to hold a cap and a deadline."""

CAP_STEPS_PER_S = 8
"""With a cap, pieces are small enough that this many fit in a second, so that the cap holds over short times too."""


# O_NONBLOCK: opening a pipe must not wait for its writer.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)


class FetchedBody(Protocol):
    """The bytes of one file, as they arrive."""

    @property
    def start_bytes(self) -> int:
        """Return the offset of the first byte: the one asked for, or 0 when the place cannot begin there."""
        ...

    def read(self, limit: int) -> bytes:
        """Return the next bytes, 1 to `limit`; none at the end of the file.

        Raises DownloadError: the deadline passed, nothing came for too long, or the connection broke.
        """
        ...


class Fetcher(Protocol):
    """A place of files: a server, a folder. Its bytes are not trusted. Thread: one at a time."""

    def open(self, path: str, *, start_bytes: int, deadline_s: float) -> AbstractContextManager[FetchedBody]:
        """Start to fetch a file; leaving the context ends it.

        path: below the place's base, parts divided by "/". start_bytes: how much of the file is here already.
        deadline_s: the instant on the clock's scale by which it must end, connecting included. Raises NotPublished (no
        such file) and DownloadError, here and in `read`.
        """
        ...


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How long a download may take in total, how slow it may be, and how fast.

    Slow: fewer than `min_bytes_per_s` over any `window_s`; it ends a server that sends a byte each 29 s and so never
    stalls. Fast: at most `cap_bytes_per_s` (None: no cap); the slowest allowed rate is never above half of the cap.
    """

    total_s: float
    min_bytes_per_s: float = 1024.0
    window_s: float = 30.0
    cap_bytes_per_s: float | None = None


class Pace:
    """Counts received bytes against `FetchLimits`, from its construction on. Thread: one owner."""

    def __init__(self, limits: FetchLimits, clock: Clock | None = None, stop: threading.Event | None = None) -> None:
        """stop: set when the daemon stops, which ends a wait for the cap."""
        self._limits = limits
        self._clock = clock or SystemClock()
        self._stop = stop or threading.Event()
        self._began_s = self._window_began_s = self._clock.monotonic_s()
        self._all_bytes = self._window_bytes = 0

    @property
    def deadline_s(self) -> float:
        """Return the instant by which the download must end."""
        return self._began_s + self._limits.total_s

    @property
    def piece_bytes(self) -> int:
        """Return how much to read at once."""
        cap = self._limits.cap_bytes_per_s
        return PIECE_BYTES if cap is None else max(1, min(PIECE_BYTES, int(cap / CAP_STEPS_PER_S)))

    def count(self, length: int) -> None:
        """Count received bytes, and wait where the cap demands it.

        Raises DownloadError: the deadline passed, or the last window was too slow.
        """
        self._all_bytes += length
        self._window_bytes += length
        now_s = self._clock.monotonic_s()
        if now_s >= self.deadline_s:
            raise DownloadError(
                f"{self._all_bytes} bytes came in {self._limits.total_s:g} s, which is the time limit; "
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
            self._stop.wait(min(ahead_s, self.deadline_s - now_s))


@dataclass(frozen=True, slots=True)
class Pacer:
    """Starts a `Pace` for each download. stop: set when the daemon stops, which ends a wait for the cap."""

    limits: FetchLimits
    clock: Clock | None = None
    stop: threading.Event | None = None

    def start(self) -> Pace:
        """Start the time of one download."""
        return Pace(self.limits, self.clock, self.stop)


def fetch_bytes(fetcher: Fetcher, path: str, *, max_bytes: int, pace: Pace) -> bytes:
    """Fetch a whole file of at most `max_bytes` into memory.

    Raises NotPublished, and DownloadError also when the file is longer (at most one byte over is read).
    """
    got = bytearray()
    with fetcher.open(path, start_bytes=0, deadline_s=pace.deadline_s) as body:
        while piece := body.read(min(pace.piece_bytes, max_bytes + 1 - len(got))):
            got += piece
            if len(got) > max_bytes:
                raise DownloadError(f"{path}: more than the {max_bytes} bytes that it may have; the rest was not read")
            pace.count(len(piece))
    return bytes(got)


class FolderFetcher:
    """Files below one folder. `open` as the Fetcher protocol says."""

    def __init__(self, folder: Path, *, clock: Clock | None = None) -> None:
        self._folder = folder
        self._clock = clock or SystemClock()

    @contextmanager
    def open(self, path: str, *, start_bytes: int = 0, deadline_s: float) -> Iterator[FetchedBody]:
        """Start to read a file. The deadline is checked between reads: only the kernel can end a read that hangs.

        Raises NotPublished: there is no such regular file without links on the way. DownloadError: it cannot be read.
        """
        fd = self._descend(path)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NotPublished(f"{self._folder}: {path!r} is not a regular file")
            yield _FolderBody(path, fd, self._clock, deadline_s, os.lseek(fd, start_bytes, os.SEEK_SET))
        finally:
            os.close(fd)

    def _descend(self, path: str) -> int:
        """Open part by part, so that no link on the way is followed; close every folder opened on the way."""
        parts = path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise NotPublished(f"{self._folder}: {path!r} is not a path within a repository")
        try:
            at = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise DownloadError(f"{self._folder}: {error.strerror}; look whether the disk is plugged in") from error
        try:
            with contextlib.ExitStack() as opened:
                for part in parts:
                    opened.callback(os.close, at)
                    at = os.open(part, _FLAGS, dir_fd=at)
                return at
        except OSError as error:
            kind = NotPublished if error.errno in _MISSING else DownloadError
            raise kind(f"{self._folder}: {path!r}: {error.strerror}; look whether all was copied") from error


class _FolderBody:
    def __init__(self, path: str, fd: int, clock: Clock, deadline_s: float, start_bytes: int) -> None:
        self._path = path
        self._fd = fd
        self._clock = clock
        self._deadline_s = deadline_s
        self._start_bytes = start_bytes

    @property
    def start_bytes(self) -> int:
        return self._start_bytes

    def read(self, limit: int) -> bytes:
        if self._clock.monotonic_s() >= self._deadline_s:
            raise DownloadError(f"{self._path}: the deadline passed while it was read")
        try:
            return os.read(self._fd, limit)
        except OSError as error:
            raise DownloadError(f"{self._path}: {error.strerror}; the disk may be failing") from error
