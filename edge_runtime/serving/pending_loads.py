"""Requests for a model that is loaded on demand wait here until it is there, within their deadlines.

Owns: which request waits for which load. A pending load is a scheduled model that never runs, so bounds, priorities and
expiry by the timer are the dispatcher's own. Thread: any.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from edge_runtime.config.settings import DEFAULT_PRIORITY
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.scheduling.dispatcher import Dispatcher
from edge_runtime.scheduling.request import Request
from edge_runtime.scheduling.scheduled_model import Layout, ScheduledModel

MAX_WAITING = 1024
MAX_WAITING_BYTES = 64 << 20
"""Bounds of one pending load: a load takes under a second for most, and memory is short while it lasts."""


class PendingLoads:
    """One queue for each model that is being loaded on demand."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._loads: dict[str, ScheduledModel] = {}
        self._lock = threading.Lock()

    def wait(self, request: Request, resume: Callable[[Request], object]) -> None:
        """Let a request wait for its model. Raises QueueFull, DeadlineUnmeetable.

        resume: called with the request when the load has ended well, on the thread that loads; it must not raise.
        """
        header = request.header
        timeouts_ms = [each for each in (header.timeout_ms, header.queue_timeout_ms) if each is not None]
        request.wait_for_load(
            header.priority or DEFAULT_PRIORITY,
            min(timeouts_ms, default=math.inf) / 1e3,
            resume,
        )
        with self._lock:
            load = self._loads.get(header.model)
            if load is None:
                load = self._loads[header.model] = ScheduledModel(
                    header.model,
                    Layout(None, concurrency=0),
                    max_queue_rows=MAX_WAITING,
                    max_queue_bytes=MAX_WAITING_BYTES,
                )
            # Under this lock, so that `end` cannot pass between finding the load and waiting for it.
            self._dispatcher.admit(load, request)

    def end(self, model: str, error: EdgeRuntimeError | None) -> None:
        """The model's load ended: each request is submitted again, or refused with the error."""
        with self._lock:
            load = self._loads.pop(model, None)
            waiting = self._dispatcher.take_all(load) if load is not None else []
        for request in waiting:
            if error is None:
                request.resume(request)
            else:
                request.refuse(error)
