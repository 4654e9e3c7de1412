"""A model in a host that dies as its inputs say, without a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from edge_runtime.errors import HostEnded, LoadFailed, RunTooLong
from edge_runtime.tensors import Array

CRASH, ENDLESS, KILLED = -1.0, -2.0, -3.0
"""Values in an input: the run ends the host; it is over its limit; somebody kills the host meanwhile."""


class FakeHost:
    """Doubles its inputs, and keeps what was run: (first input's values, limit, alone)."""

    def __init__(self, kills: int = 1) -> None:
        """kills: runs with KILLED whose host is killed; then they end well."""
        self.runs: list[tuple[list[float], float, bool]] = []
        self.restores = 0
        self.is_beyond_repair = False
        self.was_alone = True
        self.may_restore = threading.Event()
        self.may_restore.set()
        self.meanwhile: Callable[[], None] = lambda: None
        self._kills = kills

    def run_parts(self, parts: Sequence[Sequence[Array]], limit_s: float, *, alone: bool) -> list[Array]:
        values = [float(value) for inputs in parts for value in inputs[0][:, 0]]
        self.runs.append((values, limit_s, alone))
        self.meanwhile()
        if CRASH in values:
            raise HostEnded("SIGSEGV ended its host", signal_name="SIGSEGV", was_alone=self.was_alone)
        if ENDLESS in values:
            raise RunTooLong("over its limit")
        if KILLED in values and self._kills:
            self._kills -= 1
            raise HostEnded("its host was killed", signal_name="SIGKILL", is_outside=True)
        return [np.concatenate([2 * inputs[0] for inputs in parts])]

    def restore(self) -> None:
        self.may_restore.wait(60.0)
        self.restores += 1
        if self.is_beyond_repair:
            raise LoadFailed("it died three times")
