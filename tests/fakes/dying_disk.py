"""A disk that ends its process, or fails, at a chosen durable call: the one way that tests make storage go wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_runtime.durable import SYSTEM_DISK, SystemDisk

Fault = Callable[[], None]
"""What happens instead of a call, or after it; it usually does not return."""

CALLS = ("open", "create", "write", "chmod", "fsync", "rename", "link", "mkdir", "commit")
"""open: a folder, or a file that is there; create: a file that may be new."""

WRITES = tuple(call for call in CALLS if call != "open")


class Killed(BaseException):
    """The process ends here, as far as the test goes."""


def die() -> None:
    """End what runs, as a kill would, within this process."""
    raise Killed


def kill_process() -> None:
    """End this very process, at once: nothing is flushed, nothing is closed."""
    os.kill(os.getpid(), signal.SIGKILL)


def failing(error: int | Exception) -> Fault:
    """Fail as a full (ENOSPC) or broken (EIO) disk does, or with an exception of one's own."""

    def fail() -> None:
        raise OSError(error, os.strerror(error)) if isinstance(error, int) else error

    return fail


class DyingDisk(SystemDisk):
    """The real disk until call number `at` (from 1; 0: never), where `fault` happens. Closing is not such a call.

    after: the call is made and then the fault happens. lasts: so it is with every call that follows. syncs: really
    sync; the death of a process loses nothing that was written, so only what cuts the power needs it. counts: which
    calls are counted. piece_bytes: how much one write takes at most. watched: a folder that is looked at before each
    counted call.
    """

    def __init__(
        self,
        at: int = 0,
        fault: Fault = die,
        *,
        after: bool = False,
        lasts: bool = True,
        syncs: bool = False,
        counts: tuple[str, ...] = CALLS,
        piece_bytes: int = 1 << 30,
        watched: Path | None = None,
    ) -> None:
        self.calls: list[str] = []
        self.changes: list[int] = []
        """The numbers of the calls that found the watched folder changed: a process that dies at another of them leaves
        the same bytes as at the one before."""
        self._at = at
        self._fault = fault
        self._after = after
        self._lasts = lasts
        self._syncs = syncs
        self._counts = counts
        self._piece_bytes = piece_bytes
        self._watched = watched
        self._seen: set[tuple[str, int, int, bytes]] | None = None

    @property
    def is_dead(self) -> bool:
        """Whether the call with the fault was reached."""
        return 0 < self._at <= len(self.calls)

    def open(self, path: Path, flags: int, mode: int) -> int:  # type: ignore[override]
        """As Disk."""
        name = "create" if flags & os.O_CREAT else "open"
        return int(self._call(name, lambda: SYSTEM_DISK.open(path, flags, mode)))

    def write(self, fd: int, data: memoryview) -> int:  # type: ignore[override]
        """As Disk."""
        return int(self._call("write", lambda: SYSTEM_DISK.write(fd, data[: self._piece_bytes])))

    def chmod(self, fd: int, mode: int) -> None:  # type: ignore[override]
        """As Disk."""
        self._call("chmod", lambda: SYSTEM_DISK.chmod(fd, mode))

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        """As Disk."""
        self._call("fsync", lambda: SYSTEM_DISK.fsync(fd) if self._syncs else None)

    def rename(self, old: Path, new: Path) -> None:  # type: ignore[override]
        """As Disk."""
        self._call("rename", lambda: SYSTEM_DISK.rename(old, new))

    def link(self, old: Path, new: Path) -> None:  # type: ignore[override]
        """As Disk."""
        self._call("link", lambda: SYSTEM_DISK.link(old, new))

    def mkdir(self, path: Path) -> None:  # type: ignore[override]
        """As Disk."""
        self._call("mkdir", lambda: SYSTEM_DISK.mkdir(path))

    def commit(self, database: sqlite3.Connection) -> None:  # type: ignore[override]
        """As Disk; a failure is one of SQLite's own."""
        try:
            self._call("commit", lambda: SYSTEM_DISK.commit(database))
        except OSError as error:
            raise sqlite3.OperationalError(f"disk I/O error: {error.strerror}") from error

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        if name not in self._counts:
            return call()
        self.calls.append(name)
        number = len(self.calls)
        if self._watched is not None:
            seen, self._seen = self._seen, _contents(self._watched)
            if seen != self._seen:
                self.changes.append(number)
        is_struck = number == self._at or (self._lasts and 0 < self._at < number)
        if not is_struck:
            return call()
        if self._after and number == self._at:
            result = call()
            if name in ("open", "create"):
                os.close(result)  # nobody learns of it
        return self._fault()


def _contents(folder: Path) -> set[tuple[str, int, int, bytes]]:
    """Everything in a folder: its path, mode, number of links and bytes."""
    found = set()
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another thread's
            seen = path.lstat()
            found.add((str(path), seen.st_mode, seen.st_nlink, path.read_bytes() if path.is_file() else b""))
    return found


class SmallDisk(SystemDisk):
    """The real disk, with little room: `free` bytes."""

    def __init__(self, free: int) -> None:
        self._free = free

    def free_bytes(self, folder: Path) -> int:  # type: ignore[override]
        """What the test has set."""
        del folder
        return self._free
