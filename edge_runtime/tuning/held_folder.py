"""A temporary folder that is gone afterwards, or with the next one where whoever had it was killed.

Owns: the folders' name, and the lock by which one that is in use is known.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "edge-runtime-tune-"

MIN_AGE_S = 60.0
"""Of a folder that is taken away: a younger one may be between being made and being locked."""


@contextmanager
def held_folder() -> Iterator[Path]:
    """An empty folder where temporary files lie, its path short enough for a socket's. Raises OSError."""
    _reclaim(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(folder)
        finally:
            os.close(held)


def _reclaim(parent: Path) -> None:
    """Remove what killed tunes of this user left."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < MIN_AGE_S:
                continue
            found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(found)
