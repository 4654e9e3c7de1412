"""Files that survive a power cut: whole and new, or whole and old, never half and never empty.

Owns: the order write -> fsync -> rename -> fsync(folder), which ext4 needs: after a cut without the first fsync a file
is 0 bytes, without the second a new one is absent. Every file that the daemon must find again is written through here.
Never decides what is written.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from edge_runtime.errors import StorageFailed

if TYPE_CHECKING:
    import sqlite3  # only users of a database pay for it

PART_SUFFIX = ".part"

_FILE_MODE = 0o644
_PART_MODE = 0o600
_NUMBERS = itertools.count(1)


class Disk(Protocol):
    """The system calls used here; tests inject a disk that fails at a chosen call. Each raises OSError."""

    def open(self, path: Path, flags: int, mode: int) -> int:
        """Open a file or a folder, or make a file; returns its descriptor."""
        ...

    def write(self, fd: int, data: memoryview) -> int:
        """Write to a file; returns how many bytes were taken, which may be fewer than given."""
        ...

    def chmod(self, fd: int, mode: int) -> None:
        """Set the permissions of an open file."""
        ...

    def fsync(self, fd: int) -> None:
        """Wait until a file, or the names in a folder, survive a power cut."""
        ...

    def close(self, fd: int) -> None:
        """Close a file or a folder."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in the place of the file that has it."""
        ...

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name. Raises FileExistsError: another file has it."""
        ...

    def mkdir(self, path: Path) -> None:
        """Make a folder. Raises FileExistsError."""
        ...

    def free_bytes(self, folder: Path) -> int:
        """Return how many more bytes the disk of a folder takes."""
        ...

    def commit(self, database: sqlite3.Connection) -> None:
        """Commit the transaction of a database whose `synchronous` is FULL. Raises sqlite3.Error too."""
        ...


class SystemDisk:
    """The operating system's own calls."""

    open = staticmethod(os.open)
    write = staticmethod(os.write)
    chmod = staticmethod(os.fchmod)
    fsync = staticmethod(os.fsync)
    close = staticmethod(os.close)
    rename = staticmethod(os.replace)
    link = staticmethod(os.link)
    mkdir = staticmethod(os.mkdir)

    @staticmethod
    def free_bytes(folder: Path) -> int:
        """Return how many more bytes the disk of a folder takes."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    @staticmethod
    def commit(database: sqlite3.Connection) -> None:
        """Commit the transaction of a database. Raises sqlite3.Error."""
        database.commit()


SYSTEM_DISK = SystemDisk()


def write_atomically(path: Path, data: bytes, *, mode: int = _FILE_MODE, disk: Disk = SYSTEM_DISK) -> None:
    """Make `path` hold `data`, durably, creating its folder where needed.

    When it returns, a power cut cannot undo it. Readers see the old content or the new, never a part. Any number of
    writers: the last rename wins. Raises StorageFailed when the disk is full, failing or not writable; the old content
    is untouched then, except where the message says that only the permanence of the new one is unsure.
    """
    make_folder(path.parent, disk=disk)
    part = path.with_name(f"{path.name}.{os.getpid()}-{next(_NUMBERS)}{PART_SUFFIX}")
    try:
        _write_whole(part, data, mode, disk)
        disk.rename(part, path)
    except OSError as error:
        # A full disk should not stay full of halves.
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise _storage_failed(path, f"writing {len(data)} bytes", error, "its old content is untouched") from error
    try:
        sync_folder(path.parent, disk=disk)
    except OSError as error:
        kept = "the new content is there, but a power cut may bring the old one back"
        raise _storage_failed(path, "syncing its folder", error, kept) from error


class PartFile:
    """A file that grows in pieces under a name of its own, and gets its real name only when it is whole.

    Made by `growing`. The part stays when the process ends or the power fails, as far as the disk kept it, so that a
    download resumes where it stopped; the code that resumes it checks the whole file. Thread: one owner.
    """

    def __init__(self, part: Path, fd: int, disk: Disk) -> None:
        self._part = part
        self._fd: int | None = fd
        self._disk = disk

    def write(self, data: bytes) -> None:
        """Add bytes at the end. Raises StorageFailed; the bytes before them stay."""
        assert self._fd is not None
        try:
            _write_all(self._fd, data, self._disk)
        except OSError as error:
            raise _storage_failed(self._part, f"adding {len(data)} bytes", error, "what came before is kept") from error

    def commit(self, path: Path, *, mode: int = _FILE_MODE) -> None:
        """Make the part durable and rename it to `path`, on the same disk. Nothing can be added after that.

        When it returns, a power cut cannot undo it. Raises StorageFailed: `path` is as it was, except where the message
        says that only its permanence is unsure.
        """
        assert self._fd is not None
        try:
            self._disk.chmod(self._fd, mode)
            self._disk.fsync(self._fd)
            self.close()
            self._disk.rename(self._part, path)
        except OSError as error:
            raise _storage_failed(path, "making it durable", error, "nothing of that name was changed") from error
        try:
            sync_folder(path.parent, disk=self._disk)
        except OSError as error:
            raise _storage_failed(
                path, "syncing its folder", error, "it is there, until a power cut at worst"
            ) from error

    def close(self) -> None:
        """Close the part, which stays. Idempotent.

        Ignores an error: a commit has synced by now, and uncommitted bytes are unsure anyway.
        """
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self._disk.close(fd)


@contextlib.contextmanager
def growing(part: Path, *, keep: bool, disk: Disk = SYSTEM_DISK) -> Iterator[PartFile]:
    """Open the part of a file, to append to its bytes (`keep`) or emptied, creating its folder where needed.

    Leaving closes it; an uncommitted part stays. Raises StorageFailed.
    """
    make_folder(part.parent, disk=disk)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    flags = flags if keep else flags | os.O_TRUNC
    try:
        try:
            fd = disk.open(part, flags, _PART_MODE)
        except PermissionError:
            _allow_writing(part, disk)
            fd = disk.open(part, flags, _PART_MODE)
    except OSError as error:
        raise _storage_failed(part, "opening it", error, "nothing was written") from error
    file = PartFile(part, fd, disk)
    try:
        yield file
    finally:
        file.close()


def _allow_writing(part: Path, disk: Disk) -> None:
    """Give a part the mode of one again: a commit that a power cut ended before its rename gave it that of the file."""
    fd = disk.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0)
    try:
        disk.chmod(fd, _PART_MODE)
    finally:
        disk.close(fd)


def make_folder(path: Path, *, disk: Disk = SYSTEM_DISK) -> None:
    """Create a folder and its missing parents, each durable before the next. Raises StorageFailed."""
    missing: list[Path] = []
    folder = path.absolute()
    try:
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                disk.mkdir(folder)
            sync_folder(folder.parent, disk=disk)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise _storage_failed(path, "creating the folder", error, "nothing was written") from error


def read_kept(path: Path, max_bytes: int) -> bytes:
    """Read a file, at most one byte more than it may have. Raises OSError.

    Follows no link and waits for no pipe that stands in its place.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        return file.read(max_bytes + 1)


def open_within(path: Path, within: Sequence[str]) -> BinaryIO:
    """Open a plain file that lies in one of some real folders, wherever links lead. Raises OSError.

    within: () for anywhere. Judged by what was opened: a link that is changed meanwhile leads nowhere else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a plain file", str(path))
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        if within and not any(place.is_relative_to(each) for each in within):
            reason = f"is a symbolic link that leads outside the models folder, to {place}; copy the file instead"
            raise OSError(errno.EACCES, reason, str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def remove_parts(folder: Path) -> None:
    """Remove the parts of interrupted writers in a folder. For the folder's only user, before it writes."""
    with contextlib.suppress(OSError):
        for part in folder.glob(f"*{PART_SUFFIX}"):
            part.unlink(missing_ok=True)


def sync_folder(path: Path, *, disk: Disk = SYSTEM_DISK) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = disk.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0)
    try:
        disk.fsync(fd)
    finally:
        disk.close(fd)


# ---- private --------------------------------------------------------------------------------------------------------


def _write_whole(path: Path, data: bytes, mode: int, disk: Disk) -> None:
    fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        _write_all(fd, data, disk)
        disk.fsync(fd)
    finally:
        disk.close(fd)


def _write_all(fd: int, data: bytes, disk: Disk) -> None:
    rest = memoryview(data)
    while rest:
        written = disk.write(fd, rest)
        if written == 0:
            raise OSError(errno.EIO, "the disk takes no more bytes and gives no reason")
        rest = rest[written:]


def _storage_failed(path: Path, doing: str, error: OSError, kept: str) -> StorageFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free some space on it, or name another folder with --state"
    elif error.errno == errno.EIO:
        advice = "the disk reports a hardware error; look at dmesg and replace it"
    else:
        advice = "give the daemon a folder that it may write to (--state)"
    reason = error.strerror or str(error)
    return StorageFailed(f"{path}: {doing} failed: {reason}; {kept}; {advice}")
