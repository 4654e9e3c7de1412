"""The folder that one tune works in: in the state folder, one tune at a time, gone afterwards."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_runtime.errors import ConfigError
from edge_runtime.tuning.temporary_folder import temporary_folder


@contextmanager
def session_folder(state: Path | None) -> Iterator[Path]:
    """An empty folder, below `state` where there is one. Raises ConfigError: another tune holds it."""
    if state is None:
        with temporary_folder() as folder:
            yield folder
        return
    root = state / "tuning" / "now"
    root.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(root.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{root.parent}: another tune runs here, and would disturb this one; wait for it"
            ) from None
        _remove(root)  # of one that was killed
        try:
            root.mkdir()
        except OSError as error:
            raise ConfigError(f"{root}: cannot be made: {error.strerror}; remove what is there") from None
        try:
            yield root
        finally:
            shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(lock)


def _remove(root: Path) -> None:
    """Whatever is there; a link goes, and what it leads to stays."""
    if root.is_symlink() or root.is_file():
        root.unlink(missing_ok=True)
    shutil.rmtree(root, ignore_errors=True)
