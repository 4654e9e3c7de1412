"""The daemons that a tune keeps running, one a candidate, so that candidates can be asked by turns.

Owns: how many run at once. What is not asked sleeps, and costs memory only; the one that was not asked for longest ends
where the next would take more than half of the memory that was free. Thread: one owner.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from edge_runtime.telemetry.host import HostProbe
from edge_runtime.tuning.candidates import Candidate
from edge_runtime.tuning.measurement import ServingFailed, TrialDaemon

MAX_RUNNING = 32
"""Each idle daemon takes up to half a percent of a core (bench, idle.cpu_percent)."""

MEMORY_SHARE = 0.5
"""Of the memory that was free at first: a run takes more than a loaded model has, and the rest is the owner's."""

Serve = Callable[[Candidate], AbstractContextManager[TrialDaemon]]


class DaemonPool:
    """Runs daemons; `close` ends all. serve: runs one candidate's, which is ready inside the block.

    budget_bytes: of all together; None for a share of the memory that is free now.
    """

    def __init__(self, serve: Serve, budget_bytes: int | None = None) -> None:
        self._serve = serve
        self._running: dict[Candidate, tuple[TrialDaemon, ExitStack]] = {}
        self._memory_bytes: dict[Candidate, int] = {}
        if budget_bytes is None:
            budget_bytes = int((HostProbe().memory_available_bytes() or 0) * MEMORY_SHARE)
        self._budget_bytes = budget_bytes

    def daemon(self, candidate: Candidate, *, alone: bool = False) -> TrialDaemon:
        """The candidate's daemon, started where it does not run. Raises ServingFailed, EdgeRuntimeError.

        alone: end all others, for a measurement that none may disturb.
        """
        found = self._running.pop(candidate, None)
        if alone:
            self.close()
        if found is None:
            found = self._started(candidate)
        self._running[candidate] = found  # the last one asked for
        return found[0]

    def stop(self, candidate: Candidate) -> None:
        """End a candidate's daemon, if it runs."""
        found = self._running.pop(candidate, None)
        if found is not None:
            found[1].close()

    def close(self) -> None:
        """End all daemons. Idempotent."""
        for candidate in list(self._running):
            self.stop(candidate)

    def _started(self, candidate: Candidate) -> tuple[TrialDaemon, ExitStack]:
        likely = self._memory_bytes.get(candidate, max(self._memory_bytes.values(), default=0))
        while self._running and (len(self._running) >= MAX_RUNNING or likely + self._used_bytes() > self._budget_bytes):
            self.stop(next(iter(self._running)))
        try:
            return self._start(candidate)
        except ServingFailed:
            if not self._running:
                raise
            # A device's memory may be full of the others, which the host's free memory does not tell.
            self.close()
            return self._start(candidate)

    def _start(self, candidate: Candidate) -> tuple[TrialDaemon, ExitStack]:
        with ExitStack() as stack:
            daemon = stack.enter_context(self._serve(candidate))
            self._memory_bytes[candidate] = daemon.memory_bytes()
            return daemon, stack.pop_all()

    def _used_bytes(self) -> int:
        return sum(self._memory_bytes[each] for each in self._running)
