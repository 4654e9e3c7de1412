"""A process that may open no further file, for as long as a block lasts."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOM = 16
"""Numbers above the highest open one that the limit leaves, so that closing a few is enough to open as many."""


@contextmanager
def no_descriptor_left(spare: int = 0) -> Iterator[None]:
    """Let this process open `spare` more files, and no other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(int(each.name) for each in Path("/proc/self/fd").iterdir()) + ROOM
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        try:
            while len(taken) < limit:
                taken.append(os.dup(taken[0] if taken else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)))
        except OSError:
            for _ in range(spare):
                os.close(taken.pop())
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
