"""How much memory a load added, as far as the host tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from resource import getpagesize


def resident_bytes(pid: int | None = None) -> int:
    """Resident memory of this process, or of `pid`; 0 where /proc does not tell."""
    try:
        pages = Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * getpagesize()


def watch_growth(at_least: int) -> Callable[[], int]:
    """Begin to measure; the function returned says how many bytes were added since, and never under `at_least`.

    A load may reuse memory that an earlier one gave back, and loads may overlap: hence the floor, the artifact's size.
    """
    before = resident_bytes()
    return lambda: max(resident_bytes() - before, at_least)
