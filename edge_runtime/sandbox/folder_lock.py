"""A lock on a folder of temporary files, which tells a folder in use from one that a killed process left behind.

Owns: the lock on the folder itself, which the kernel drops when its process ends, and the removal of what was left
behind. Thread: any.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from edge_runtime.sandbox.folder_tree import REMOVAL_S, remove_tree

MIN_AGE_S = 60.0
"""A folder younger than this may not be locked yet by who makes it."""


def lock_folder(folder: Path) -> int:
    """Lock a folder for as long as the returned descriptor is open. Raises OSError.

    A disk without locks (some network file systems) leaves it unlocked.
    """
    descriptor = _opened(folder)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_unless_locked(folder: Path) -> None:
    """Remove a folder and its content, unless a process has it locked; a file that cannot be removed stays."""
    with suppress(OSError):
        descriptor = _opened(folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(folder, REMOVAL_S)
        finally:
            os.close(descriptor)


def remove_left_behind(parent: Path, prefix: str, min_age_s: float = MIN_AGE_S) -> None:
    """Remove this user's folders with a prefix that no living process has locked.

    min_age_s: 0 where each is locked before it gets its name.
    """
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime >= min_age_s:
                remove_unless_locked(folder)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
