"""File permissions that hold even when the tests are run as root, whom they would not stop."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def ordinary_rights() -> Iterator[None]:
    """Run the block as a user whom permissions stop: root becomes nobody for its length, others stay who they are."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that every user may enter; pytest's own are for the one who runs it."""
    path = Path(tempfile.mkdtemp(prefix="edge-runtime-test-"))
    try:
        path.chmod(0o755)
        yield path
    finally:
        shutil.rmtree(path)
