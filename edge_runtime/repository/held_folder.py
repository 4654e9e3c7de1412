"""Folders that are somebody's for a while, told from those that were left by whoever was killed.

Owns: the lock on the folder itself, which ends with the process that has it. Thread: any.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path


def hold(folder: Path) -> int:
    """Mark a folder as in use for as long as the descriptor that this returns is open. Raises OSError.

    Where the disk has no locks (some networks' have none) it is not marked.
    """
    descriptor = _opened(folder)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_unless_held(folder: Path) -> None:
    """Remove a folder and all in it, unless somebody holds it; what cannot be removed stays."""
    with suppress(OSError):
        descriptor = _opened(folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
