"""Folders that a hostile process filled: what they hold, and their removal, however deep they are.

Owns: a walk that needs neither a path of any length, nor a descriptor a level, nor recursion: the standard library's
`rmtree` raises RecursionError 500 folders deep, and a path of more than 4096 bytes names nothing. Thread: any.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from collections.abc import Generator
from pathlib import Path

FILE_BYTES, SUBFOLDER_BYTES = 4096, 32 << 10
"""The least that a file and a folder count: an empty file takes a block of the disk's table too, and a folder costs ten
times as much to remove (0.4 ms on ext4)."""

REMOVAL_S = 5.0
"""The longest that a start or a stop spends on one tree: 12 000 folders on ext4. The next start goes on with it."""

_OPENED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def tree_bytes(folder: str, most: int, file_bytes: int = FILE_BYTES) -> int:
    """Return the bytes below a folder, or a number above `most`; what is removed meanwhile counts nothing.

    file_bytes: what a file counts at least.
    """
    total = 0
    with contextlib.suppress(OSError), contextlib.closing(_folders(folder)) as folders:
        for descriptor in folders:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        least = SUBFOLDER_BYTES if entry.is_dir(follow_symlinks=False) else file_bytes
                        total += max(entry.stat(follow_symlinks=False).st_blocks * 512, least)
                    if total > most:
                        return total
    return total


def remove_tree(folder: str | Path, limit_s: float = math.inf) -> None:
    """Remove a folder with all that is in it, unreadable folders too; what cannot be removed stays.

    limit_s: after which it stops with what is left. Nobody may change the folder meanwhile.
    """
    end_s = time.monotonic() + limit_s
    with contextlib.suppress(OSError), contextlib.closing(_folders(str(folder), opens_all=True)) as folders:
        for descriptor in folders:
            _empty(descriptor)
            if time.monotonic() >= end_s:
                return
    with contextlib.suppress(OSError):
        Path(folder).rmdir()


def _folders(folder: str, *, opens_all: bool = False) -> Generator[int, None, None]:
    """Yield a descriptor of each folder of a tree, each after those in it; it is closed when the next one is wanted.

    opens_all: make readable those that are not, else they are left out. Raises OSError: the first cannot be opened, or
    another process moved one.
    """
    here = _open(folder, None, opens_all=opens_all)
    try:
        left = [_subfolders(here)]
        places = [_place(here)]
        while True:
            if left[-1]:
                try:
                    below = _open(left[-1].pop(), here, opens_all=opens_all)
                except OSError:
                    continue
                os.close(here)
                here = below
                left.append(_subfolders(here))
                places.append(_place(here))
                continue
            yield here
            left.pop()
            places.pop()
            if not left:
                return
            above = os.open("..", _OPENED, dir_fd=here)
            os.close(here)
            here = above
            if _place(here) != places[-1]:
                raise FileNotFoundError(f"a folder below {folder} was moved")
    finally:
        os.close(here)


def _open(name: str, within: int | None, *, opens_all: bool) -> int:
    if opens_all:
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=within, follow_symlinks=False)  # a link's own mode would be its target's
            if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o700 != 0o700:
                os.chmod(name, 0o700, dir_fd=within)
    return os.open(name, _OPENED, dir_fd=within)


def _subfolders(descriptor: int) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(descriptor) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _place(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _empty(descriptor: int) -> None:
    """Remove all that is in a folder, whose own folders are empty by now."""
    for name in os.listdir(descriptor):
        try:
            os.unlink(name, dir_fd=descriptor)
        except OSError:  # EISDIR, or EPERM on some disks
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=descriptor)
