"""Processes of this machine that carry a mark among their arguments, as /proc tells them."""

from __future__ import annotations

import time
from pathlib import Path

GONE_S = 60.0


def marked(mark: str) -> list[int]:
    """Return those that live; zombies have no arguments any more."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def wait_for_marked(mark: str, count: int) -> list[int]:
    """Wait until exactly so many live; returns them, or what there is when the time is over."""
    end_s = time.monotonic() + GONE_S
    while len(found := marked(mark)) != count and time.monotonic() < end_s:
        time.sleep(0.01)
    return found
