"""Calls of served models by a running model: each becomes a request like any other, with the deadline of its caller's.

Owns: how a call becomes a request, and when the run that waits for it gives its cores back and takes them again. The
called model's queue, admission and deadlines are the ordinary ones. Nothing but `infer` can be called. Thread: a call
begins on the worker that waits for the run, and ends on any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from edge_runtime.backends.base import Called
from edge_runtime.clock import Clock
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError
from edge_runtime.messages import RequestHeader
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.infer import Infer
from edge_runtime.request.request import CallbackReply, Request
from edge_runtime.request.scheduled_model import Job
from edge_runtime.request.worker import WorkerPool
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.tensors import Array


class ModelCalls:
    """Submits the calls of running models."""

    def __init__(
        self, infer: Infer, dispatcher: Dispatcher, workers: WorkerPool, clock: Clock, metrics: Metrics
    ) -> None:
        self._infer = infer
        self._dispatcher = dispatcher
        self._workers = workers
        self._clock = clock
        self._metrics = metrics

    def begin(
        self, header: RequestHeader, arrays: Sequence[Array], on_end: Callable[[Called], None]
    ) -> Callable[[], None]:
        """Ask a model for the run of this thread. See base.BeginCall.

        The request's deadline is the earliest of the run's requests, its priority the most urgent of theirs, and its
        sender the calling model: a flood by one model delays its own callers first. Its level in a queue with `[queue]`
        is the default, as in Triton.
        """
        if header.timeout_ms is not None and not 0 <= header.timeout_ms < math.inf:
            raise DecodeFailed(f"timeout_ms: got {header.timeout_ms}, wanted milliseconds, 0 or more")
        job, waiting = self._dispatcher.begin_call(header.model)
        self._workers.stand_in()
        now_s = self._clock.monotonic_s()
        header = replace(header, priority=min(request.priority for request in waiting), level=0)
        nbytes = sum(array.nbytes for array in arrays)
        reply = CallbackReply(partial(self._end, job, on_end))
        request = Request(header, arrays, nbytes, reply, ("model", job.model.name), now_s, self._metrics)
        request.longest_s = min(request.deadline_s for request in waiting) - now_s
        if waiting[0].trace is not None:  # of a batch, the call is said to be its first request's
            waiting[0].trace.begin_step(request, f"call {header.model}")
        self._infer.submit(request)

        def cancel() -> None:
            if request.plan is not None:
                request.plan.servable.cancel(request)

        return cancel

    def _end(self, job: Job, on_end: Callable[[Called], None], ended: Request | EdgeRuntimeError) -> None:
        """Let the run go on that waits for a call."""
        called: Called
        if isinstance(ended, Request):
            plan = ended.plan
            arrays = plan.select(ended.outputs)
            called = plan.tensor_headers([array.shape for array in arrays]), arrays
        else:
            called = ended
        self._dispatcher.end_call(job)
        on_end(called)
