"""One host that an instance has, from its load to its end: its free runners, and the runs that were begun.

Knows nothing of the host after it. Guarded by the instance's lock.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from edge_runtime.backends.base import RunEvents
from edge_runtime.hosts.process import HostProcess
from edge_runtime.hosts.runner import RunnerSide
from edge_runtime.hosts.shared_hosts import HostPlace

if TYPE_CHECKING:
    from edge_runtime.hosts.host_run import HostRun


class HostLife:
    """One host that an instance has, its free runners, and runs that were begun. Guarded by the instance's lock.

    runs: of each runner the last, by its descriptor.
    """

    def __init__(self, process: HostProcess | HostPlace, events: RunEvents | None) -> None:
        self.process = process
        self.is_shared = isinstance(process, HostPlace)
        self.is_left = False
        self.events = events
        self.free: list[RunnerSide] = []
        self.runs: dict[int, HostRun] = {}
        self._watched: list[int] = []
        self.running = 0
        self.running_at_end = 0
        self.can_interrupt = False
        self.is_dead = False
        self.was_killed_for_limit = False
        self._memory_bytes = 0
        self._measured_s = -math.inf

    def watch(self) -> None:
        """Have the loop hear of runs that are begun."""
        if self.events is not None:
            self._watched = [runner.fd for runner in self.free]
            for fd in self._watched:
                self.events.watch_once(fd, partial(self._hear, fd))

    def close(self) -> None:
        """Close the sockets, once the process has ended and no run uses them. Idempotent."""
        watched, self._watched = self._watched, []
        for fd in watched:
            assert self.events is not None
            self.events.unwatch(fd)
        self.process.close()

    def _hear(self, fd: int) -> None:
        run = self.runs.get(fd)
        if run is not None:
            run.hear()

    def memory_bytes(self, now_s: float) -> int:
        """Memory of the process, measured at most once a second: a status must cost its reader's thread nothing."""
        if now_s - self._measured_s >= 1.0:
            self._measured_s = now_s
            self._memory_bytes = self.process.memory_bytes()
        return self._memory_bytes
