"""Files from a folder: a USB stick, a mirror on a disk. Nothing outside the folder is ever opened.

Owns: the walk into a folder with a stranger's content: links, devices and pipes in it are not followed or opened, names
are looked up, never listed. Never verifies bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import DownloadError, NotPublished
from edge_runtime.update.fetch import FetchedBody

# O_NONBLOCK: opening a pipe must not wait for its writer.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)


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
