"""How far a build is, from the phases that TensorRT reports.

Owns: the tree of phases under way. Thread: any; TensorRT calls from several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildProgress:
    """Turns phases into a share from 0 to 1 that never falls. `tell` gets it with the phase, when it has grown."""

    def __init__(self, tell: Callable[[float, str], None]) -> None:
        self._tell = tell
        self._phases: dict[str, _Phase] = {}
        self._lock = threading.Lock()
        self._share = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase of so many steps begins inside another, or by itself."""
        with self._lock:
            self._phases[name] = _Phase(parent, max(steps, 1))

    def step(self, name: str, index: int) -> None:
        """A step of a phase is done; they count from 0."""
        with self._lock:
            phase = self._phases.get(name)
            if phase is None:
                return
            phase.done = min(max(phase.done, index + 1), phase.steps)
            share = self._share_from(name)
            has_grown = share > self._share
            self._share = max(self._share, share)
        if has_grown:
            self._tell(share, name)

    def finish(self, name: str) -> None:
        """A phase is over."""
        with self._lock:
            self._phases.pop(name, None)

    def _share_from(self, name: str) -> float:
        """The share of the whole, seen from one phase: each is one step of the phase it is in."""
        share, seen = 0.0, set[str]()
        current: str | None = name
        while current is not None and current not in seen:
            seen.add(current)
            phase = self._phases.get(current)
            if phase is None:
                break
            share = min((phase.done + share) / phase.steps, 1.0)
            current = phase.parent
        return share
