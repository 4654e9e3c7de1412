"""A lock on a folder of temporary files, which tells a folder in use from one that a killed process left behind.

Owns: the lock on the folder itself; the kernel drops it when its process ends. Thread: any.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path


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
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
