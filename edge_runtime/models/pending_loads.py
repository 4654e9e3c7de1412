"""Requests that wait for the load of a model on demand, within their deadlines.

Owns: which callback waits for which load. A pending load is a scheduled model that never runs, so bounds, priorities
and expiry by the timer are the dispatcher's own. Thread: any.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from functools import partial

from msgspec import Struct

from edge_runtime.config.settings import DEFAULT_PRIORITY
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.messages import RequestHeader
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.request import CallbackReply, Request
from edge_runtime.request.scheduled_model import Layout, ScheduledModel
from edge_runtime.telemetry.metrics import ModelMetrics

MAX_WAITING = 1024
MAX_WAITING_BYTES = 64 << 20
"""Bounds of one pending load: a load takes under a second for most, and memory is short while it lasts."""

OnEnd = Callable[[EdgeRuntimeError | None], object]
"""Called once, with None when the load has ended well, else with the reason why that is not waited for any more.

Thread: the one that loads, the timer's, or that of the door whose connection has gone. It must not raise.
"""


class PendingLoads:
    """One queue for each model that is being loaded on demand."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._loads: dict[str, ScheduledModel] = {}
        self._lock = threading.Lock()

    def wait(
        self,
        header: RequestHeader,
        on_end: OnEnd,
        sender: Hashable,
        *,
        nbytes: int = 0,
        arrived_s: float = 0.0,
        longest_s: float = math.inf,
    ) -> None:
        """Call `on_end` once the load of a header's model has ended. Raises QueueFull, DeadlineUnmeetable.

        nbytes: that are held meanwhile. longest_s: a bound on the wait from `arrived_s`, beside the header's timeouts.
        """
        timeouts_ms = [each for each in (header.timeout_ms, header.queue_timeout_ms) if each is not None]
        timeout_s = min(min(timeouts_ms, default=math.inf) / 1e3, longest_s)
        terms = WaitTerms(header.priority or DEFAULT_PRIORITY, timeout_s, ModelMetrics())
        waiting = Request(
            header, (), nbytes, CallbackReply(partial(_report_end, on_end)), sender, arrived_s, terms.metrics
        )
        waiting.take(terms, ())
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
            self._dispatcher.admit(load, waiting)

    def end(self, model: str, error: EdgeRuntimeError | None) -> None:
        """Tell the requests that wait for a model that its load has ended: well, or with an error."""
        with self._lock:
            load = self._loads.pop(model, None)
            waiting = self._dispatcher.take_all(load) if load is not None else []
        for each in waiting:
            if error is None:
                each.reply.answer(each)
            else:
                each.refuse(error)


def _report_end(on_end: OnEnd, ended: Request | EdgeRuntimeError) -> None:
    """Tell a request that waited how its load has ended: its entry in the queue never runs, and is answered by that."""
    on_end(ended if isinstance(ended, EdgeRuntimeError) else None)


class WaitTerms(Struct):
    """The terms of a request that waits in a queue and never runs; it counts as one row."""

    priority: int
    timeout_s: float
    metrics: ModelMetrics
    rows: int = 1
    shape: object = None
    level: int = 0
    queue_timeout_s: float = math.inf
    copies_shared: bool = False
