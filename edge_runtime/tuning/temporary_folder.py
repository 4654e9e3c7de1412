"""A temporary folder that is gone afterwards, or with the next one where whoever had it was killed.

Owns: the folders' name, and how old one is that may be taken away.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_runtime.repository.held_folder import hold, remove_unless_held

PREFIX = "edge-runtime-tune-"

MIN_AGE_S = 60.0
"""Of a folder that is taken away: a younger one may be between being made and being held."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """An empty folder where temporary files lie, its path short enough for a socket's. Raises OSError."""
    _reclaim(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        held = hold(folder)
        try:
            yield folder
        finally:
            os.close(held)


def _reclaim(parent: Path) -> None:
    """Remove what killed tunes of this user left."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime >= MIN_AGE_S:
                remove_unless_held(folder)
