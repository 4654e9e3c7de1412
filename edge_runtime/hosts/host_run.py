"""One run in a host that was begun, and that no thread waits for: its reports are read as they come.

Owns: that the run ends once, whether its host reports, dies, or is given up for the run's limit. Thread: any.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from edge_runtime.backends.base import OnEnd, RunOwner
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.hosts.messages import BrokenMessage, ChannelEnded
from edge_runtime.hosts.runner import RunnerSide
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from edge_runtime.hosts.host_life import HostLife
    from edge_runtime.hosts.instance import HostInstance

log = logging.getLogger(__name__)


class HostRun:
    """A run that was begun: its reports are read as they come. See base.HostedRun. Thread: any."""

    __slots__ = ("_instance", "_life", "_limit_s", "_lock", "_on_end", "_owner", "_runner", "is_over")

    def __init__(  # noqa: PLR0917 (on the data path, where keywords cost)
        self,
        instance: HostInstance,
        life: HostLife,
        runner: RunnerSide,
        limit_s: float,
        owner: RunOwner,
        on_end: OnEnd,
    ) -> None:
        self._instance = instance
        self._life = life
        self._runner = runner
        self._limit_s = limit_s
        self._owner = owner
        self._on_end = on_end
        self._lock = threading.Lock()
        self.is_over = False

    def left_s(self) -> float:
        """How long it may go on."""
        return self._runner.left_s(self._limit_s)

    def await_report(self) -> None:
        """Have the loop call `hear` once the host reports, but for a run that its host's end has ended already."""
        with self._lock:  # the end of a host closes the descriptor, whose number may be another's then
            if not self.is_over:
                assert self._life.events is not None
                self._life.events.arm(self._runner.fd)

    def hear(self) -> None:
        """Read the host's report. Thread: the loop's, which must not wait."""
        result: list[Array] | EdgeRuntimeError | None = None
        with self._lock:  # against `give_up`, which reads the same channel
            if self.is_over:
                return
            owner = self._owner  # `lose` may end the run, and let go of it, before this returns
            owner.thread = threading.get_ident()
            try:
                result = self._runner.receive()
            except BlockingIOError:
                pass
            except ChannelEnded as error:
                self.lose(error)
                return
            except EdgeRuntimeError as error:
                result = error
            except Exception as error:  # a bug: its host ends, and nothing of the loop
                log.exception("a report of a host could not be read")
                self.lose(BrokenMessage(f"its report could not be read: {type(error).__name__}: {error}"))
                return
            finally:
                owner.thread = 0
            if result is None:
                assert self._life.events is not None
                self._life.events.arm(self._runner.fd)
                return
            self.is_over = True
        self.leave_runner()
        self._tell(result)

    def lose(self, error: ChannelEnded) -> None:
        """End a run whose host has ended, or must: on a thread, which waits for that."""
        self.is_over = True
        ends = partial(self._instance.lost_run, self._life, error)
        threading.Thread(target=self._end, args=(ends,), name="edge-lost-run", daemon=True).start()

    def give_up(self) -> None:
        """End a run that is over its limit, and wait for that."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
        self._end(partial(self._instance.end_run, self._life, self._runner, self._limit_s))

    def _end(self, ends: Callable[[], EdgeRuntimeError]) -> None:
        try:
            error = ends()
        finally:
            self.leave_runner()
        self._tell(error)

    def _tell(self, result: list[Array] | EdgeRuntimeError) -> None:
        on_end = self._on_end
        del self._on_end, self._owner  # the owner has this run: a circle would hold the requests' memory
        on_end(result)

    def leave_runner(self) -> None:
        """Let the runner take another run."""
        self._life.runs.pop(self._runner.fd, None)  # it holds the requests' memory
        self._runner.end()
        if self._life.is_shared:
            self._instance.count_run(self._runner.took_s())
        self._instance.give_back(self._life, self._runner)
