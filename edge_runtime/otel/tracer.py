"""Which requests are traced, and what is kept of one at its end, until it is made into spans.

Owns: the choice (a caller's context, else the rate), the ids, and the facts of an ended request: numbers and texts
alone, so that nothing of a request or a model is held. spans.py makes spans of them, on the exporter's thread. A traced
request costs its thread about 5 us. Thread: any; nothing here takes a lock, waits or raises.
"""

from __future__ import annotations

import logging
import math
import random
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.request.request import Request
from edge_runtime.telemetry.tracing import RequestTrace, TraceParent, written_traceparent

log = logging.getLogger(__name__)

TRACE_BITS, SPAN_BITS = 128, 64

MAX_ID_CHARS, MAX_NAME_CHARS = 64, 256
"""Of a caller's own name for its request, and of the model that it asks for: longer ones are cut."""


class VersionFacts(NamedTuple):
    """A version and its backend."""

    model: str
    version: int | None = None
    backend: str = ""
    device: str = ""
    precision: str = ""
    mode: str = ""
    asks: bool = False
    """Whether other models answer for it, as a pipeline's steps do: it has no run of its own."""
    is_known: bool = True
    """Whether a model of this name is there. Else it is what a caller wrote."""


class ErrorFacts(NamedTuple):
    """The part of an error that is kept: its traceback would hold its request's memory."""

    code: str
    message: str
    retry_after_ms: float | None = None


class EndedRequest(NamedTuple):
    """A traced request that has ended. Instants are monotonic seconds.

    trace_id: 0 for a new one. parent_id: 0 for none. traces: how many requests it stands for, each with a trace of its
    own where there are several. step: its name within a pipeline's request, "" for a door's. batch_requests: that ran
    together, 0 where only the batch's other spans tell. queue_s, run_s: None where it did not run.
    """

    trace_id: int
    span_id: int
    parent_id: int
    traces: int
    door: str
    step: str
    facts: VersionFacts
    arrived_s: float
    ended_s: float
    queue_s: float | None
    run_s: float | None
    batch_rows: int
    batch_requests: int
    rows: int
    nbytes: int
    priority: int
    timeout_s: float
    forecast_s: float
    user_id: str
    error: ErrorFacts | None


class Sink(Protocol):
    """Takes ended requests as long as it has room. Thread: any; never waits."""

    def has_room(self, traces: int) -> bool:
        """Whether it takes this number of traces: asked before anything is made of them."""
        ...

    def add(self, ended: EndedRequest) -> None:
        """Take one."""
        ...

    def drop(self, traces: int) -> None:
        """Count those that found no room."""
        ...


class Untraced:
    """The trace of requests that are not traced, nor their steps."""

    traceparent = ""
    log_fields: Mapping[str, str] = {}
    forecast_s = math.nan

    def end(self, request: Request, error: EdgeRuntimeError | None) -> None:
        """Nothing."""

    def begin_step(self, request: Request, name: str) -> None:  # noqa: ARG002 (as of Trace)
        """Have the step not traced either."""
        request.trace = self


UNTRACED = Untraced()


class Trace:
    """The trace of one request, or of `count` of those that a burst stands for."""

    __slots__ = ("_count", "_door", "_parent_id", "_step", "_tracer", "forecast_s", "span_id", "trace_id")

    def __init__(  # noqa: PLR0917 (on the data path, where keywords cost)
        self, tracer: RequestTracer, trace_id: int, parent_id: int, door: str, step: str, count: int
    ) -> None:
        self._tracer = tracer
        self._parent_id = parent_id
        self._door = door
        self._step = step
        self._count = count
        self.trace_id = trace_id
        self.span_id = tracer.new_id(SPAN_BITS)
        self.forecast_s = math.nan

    @property
    def traceparent(self) -> str:
        """Its own span, as callers are told."""
        return written_traceparent(TraceParent(self.trace_id, self.span_id))

    @property
    def log_fields(self) -> Mapping[str, str]:
        """The ids for log lines about it; none of a burst, whose requests have traces of their own."""
        if self._count > 1:
            return {}
        return {"trace_id": f"{self.trace_id:032x}", "span_id": f"{self.span_id:016x}"}

    def begin_step(self, request: Request, name: str) -> None:
        """Have a request belong to this one."""
        request.trace = Trace(self._tracer, self.trace_id, self.span_id, self._door, name, 1)

    def end(self, request: Request, error: EdgeRuntimeError | None) -> None:
        """Keep its facts."""
        sink = self._tracer.sink
        try:
            if sink.has_room(self._count):
                sink.add(self._ended(request, error))
            else:
                sink.drop(self._count)
        except Exception:  # the request is answered, whatever becomes of its trace
            log.exception("the trace of a request was lost")

    def _ended(self, request: Request, error: EdgeRuntimeError | None) -> EndedRequest:
        plan, tracer = request.plan, self._tracer
        has_run = error is None
        # A step's reply goes on with the next steps before it returns.
        is_over = bool(self._step) and has_run
        return EndedRequest(
            self.trace_id,
            self.span_id,
            self._parent_id,
            self._count,
            self._door,
            self._step,
            tracer.facts_of_asked(request.header.model, request.header.version)
            if plan is None
            else tracer.facts_of(plan.servable),
            request.arrived_s,
            request.arrived_s + request.queue_s + request.run_s if is_over else tracer.now_s(),
            request.queue_s if has_run else None,
            request.run_s if has_run else None,
            request.batch_rows if has_run else 0,
            0,
            request.rows // request.count if plan is not None else 0,
            request.nbytes // request.count,
            request.priority if plan is not None else 0,
            request.timeout_s if plan is not None else math.inf,
            self.forecast_s,
            request.reply.user_id[:MAX_ID_CHARS],
            _kept(error),
        )


class RequestTracer:
    """Decides which requests are traced. sink: takes those that have ended."""

    def __init__(
        self,
        rate: float,
        sink: Sink,
        now_s: Callable[[], float],
        is_model: Callable[[str], bool] = lambda _name: True,
    ) -> None:
        """rate: the share of requests without a context that are traced. now_s: the clock of requests.

        is_model: whether a model of a name is there.
        """
        self.sink = sink
        self.now_s = now_s
        chance = random.Random()  # noqa: S311 (ids are to differ, and not secret)
        self.new_id = chance.getrandbits
        self._random = chance.random
        self._rate = rate
        self._is_model = is_model
        self._facts: weakref.WeakKeyDictionary[Any, VersionFacts] = weakref.WeakKeyDictionary()

    def begin(self, request: Request, came: TraceParent | None = None, door: str = "") -> None:
        """Set a request's trace."""
        if came is not None:
            request.trace = Trace(self, came.trace_id, came.span_id, door, "", 1)
            return
        count = 0 if request.origin.is_check else self._chosen(request.count)
        trace: RequestTrace = UNTRACED
        if count:
            trace = Trace(self, self.new_id(TRACE_BITS), 0, door, "", count)
        request.trace = trace

    def ran_inline(self, door: str, runs: Sequence[tuple[Any, int, int, float, float, float]]) -> None:
        """Keep the facts of chosen requests of bursts that ran inline."""
        sink, dropped = self.sink, 0
        for servable, rows, requests, queue_s, run_s, finished_s in runs:
            count = self._chosen(requests)
            if not count:
                continue
            if not sink.has_room(count):
                dropped += count
                continue
            facts, arrived_s = self.facts_of(servable), finished_s - run_s - queue_s
            ended = _ended_of(facts, door, arrived_s, finished_s, traces=count)
            ran = {"queue_s": queue_s, "run_s": run_s, "batch_rows": rows, "batch_requests": requests}
            sink.add(ended._replace(**ran, rows=rows // requests))  # type: ignore[arg-type]
        if dropped:
            sink.drop(dropped)

    def refused(
        self,
        door: str,
        error: EdgeRuntimeError,
        came: Iterable[TraceParent | None],
        *,
        model: str = "",
        plan: Any = None,
    ) -> None:
        """Keep the facts of those that their callers trace, and of chosen ones. They ended as they came."""
        now_s, chosen, sink = self.now_s(), 0, self.sink
        facts = self.facts_of_asked(model) if plan is None else self.facts_of(plan.servable)
        ended = _ended_of(facts, door, now_s, now_s, error=error)
        if plan is not None:
            ended = ended._replace(rows=plan.rows, nbytes=plan.nbytes, priority=plan.priority, timeout_s=plan.timeout_s)
        for parent in came:
            if parent is not None and sink.has_room(1):
                span_id = self.new_id(SPAN_BITS)
                sink.add(ended._replace(trace_id=parent.trace_id, span_id=span_id, parent_id=parent.span_id))
            elif parent is not None:
                sink.drop(1)
            else:
                chosen += self._chosen(1)
        if chosen and sink.has_room(chosen):
            sink.add(ended._replace(traces=chosen))
        elif chosen:
            sink.drop(chosen)

    def facts_of(self, servable: Any) -> VersionFacts:
        """Return the facts of a version, read once."""
        found = self._facts.get(servable)
        if found is None:
            narrow = servable.layouts.narrow
            asks = servable.chain is not None and bool(servable.chain.asks)
            found = self._facts[servable] = VersionFacts(
                servable.model, servable.number, narrow.backend, narrow.device, narrow.precision, servable.mode, asks
            )
        return found

    def facts_of_asked(self, model: str, version: int | None = None) -> VersionFacts:
        """Return what is known of a version before it is found, from what a caller wrote."""
        return VersionFacts(model[:MAX_NAME_CHARS], version, is_known=self._is_model(model))

    def _chosen(self, count: int) -> int:
        """Return how many of these requests are traced: the rate's share of them in the long run."""
        return int(count * self._rate + self._random())


def _ended_of(
    facts: VersionFacts,
    door: str,
    arrived_s: float,
    ended_s: float,
    *,
    traces: int = 1,
    error: EdgeRuntimeError | None = None,
) -> EndedRequest:
    """Return a request that was no `Request`, of which no more is known than this."""
    return EndedRequest(
        0, 0, 0, traces, door, "", facts, arrived_s, ended_s, None, None, 0, 0, 0, 0, 0, math.inf, math.nan, "",
        _kept(error),
    )  # fmt: skip


def _kept(error: EdgeRuntimeError | None) -> ErrorFacts | None:
    return None if error is None else ErrorFacts(error.code, error.message, error.retry_after_ms)
