"""Where parts count what happens to them, without knowing who keeps the figures."""

from __future__ import annotations

from typing import Protocol


class Counters(Protocol):
    """What is counted, by name; `Metrics` is one."""

    def count(self, name: str, count: int = 1) -> None:
        """Add to a counter."""
        ...
