"""Spans of ended requests, as OTLP has them in JSON. Pure.

Owns: which spans a request has, their names and attributes. A request is a span at its door, with `queue` (until its
run began), `batch` (from then on, with links to the other traced requests that ran with it) and in that `run`. Steps of
pipelines are such spans, below that of the pipeline. Thread: the exporter's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from edge_runtime.otel.otlp import attributes, packed, text_of, unix_ns
from edge_runtime.otel.tracer import SPAN_BITS, TRACE_BITS, EndedRequest

PIECE = 16
"""Requests that are written at once. Writing holds the interpreter, some 0.1 ms for these: no request waits longer."""

MOST_LINKS = 8
"""Of one batch: a page that shows a trace shows no more, and each of n requests would have n - 1."""

MOST_NAME = 256
"""Characters of a span's name: those of models have 64 at most."""

INTERNAL, SERVER = 1, 2
FAILED = 2
"""Of `SpanKind` and `StatusCode`."""

PREFIX = "edge_runtime."


def span_pieces(ended: Sequence[EndedRequest], offset_ns: int, new_id: Callable[[int], int]) -> Iterator[bytes]:
    """Write the spans of requests, a few requests at a time: objects with commas between.

    offset_ns: from monotonic instants to Unix time. new_id: makes a number of random bits, by their count.
    """
    each = [one for request in ended for one in _single(request, new_id)]
    batches: dict[tuple[object, ...], list[EndedRequest]] = {}
    for request in each:
        if request.run_s is not None:
            batches.setdefault(_batch_of(request), []).append(request)
    for start in range(0, len(each), PIECE):
        spans: list[dict[str, Any]] = []
        for request in each[start : start + PIECE]:
            mates = batches[_batch_of(request)] if request.run_s is not None else ()
            spans += _spans(request, mates, offset_ns, new_id)
        yield packed(spans)


def _single(ended: EndedRequest, new_id: Callable[[int], int]) -> Iterator[EndedRequest]:
    """The requests that one stands for, each with ids of its own."""
    if ended.trace_id and ended.traces == 1:
        yield ended
        return
    for _ in range(ended.traces):
        yield ended._replace(trace_id=new_id(TRACE_BITS), span_id=new_id(SPAN_BITS), traces=1)


def _batch_of(ended: EndedRequest) -> tuple[object, ...]:
    """Equal for requests that ran together: these have one run time, to the last bit, of a run that began then.

    Its beginning is known as two sums of floats, so it counts to the millisecond.
    """
    began_s = ended.arrived_s + (ended.queue_s or 0.0)
    return ended.facts, ended.run_s, ended.batch_rows, round(began_s, 3)


def _spans(
    ended: EndedRequest, mates: Iterable[EndedRequest], offset_ns: int, new_id: Callable[[int], int]
) -> Iterator[dict[str, Any]]:
    trace = f"{ended.trace_id:032x}"

    def span(name: str, own: int, parent: int, begin_s: float, end_s: float, **more: Any) -> dict[str, Any]:
        return {
            "traceId": trace,
            "spanId": f"{own:016x}",
            **({"parentSpanId": f"{parent:016x}"} if parent else {}),
            "name": name,
            "kind": INTERNAL,
            "startTimeUnixNano": unix_ns(begin_s, offset_ns),
            "endTimeUnixNano": unix_ns(max(end_s, begin_s), offset_ns),
            **more,
        }

    facts, error = ended.facts, ended.error
    about = {"model": facts.model, "version": facts.version, "backend": facts.backend, "device": facts.device}
    more: dict[str, Any] = {"attributes": attributes(_root_attributes(ended), PREFIX)}
    if error is not None:
        more["attributes"] += attributes({"error.type": error.code})
        more["status"] = {"code": FAILED, "message": text_of(error.message)}
    if not ended.step:
        more["kind"] = SERVER
    # A collector makes metrics of spans by their names: no caller adds to these by models that are not there.
    model = facts.model if facts.is_known else ""
    step = ended.step if facts.is_known else ended.step.partition(" ")[0]
    name = text_of(f"step {step}" if step else f"infer {model}".rstrip(), MOST_NAME)
    own = ended.span_id
    yield span(name, own, ended.parent_id, ended.arrived_s, ended.ended_s, **more)
    if ended.run_s is None or ended.queue_s is None or (facts.asks and not ended.batch_requests):
        return
    began_s = ended.arrived_s + ended.queue_s
    yield span("queue", new_id(SPAN_BITS), own, ended.arrived_s, began_s)
    batch, others = new_id(SPAN_BITS), islice((each for each in mates if each.span_id != own), MOST_LINKS)
    links = [{"traceId": f"{each.trace_id:032x}", "spanId": f"{each.span_id:016x}"} for each in others]
    told = {"batch_rows": ended.batch_rows, "batch_requests": ended.batch_requests or None, "mode": facts.mode}
    kept = {"attributes": attributes(told, PREFIX), **({"links": links} if links else {})}
    yield span("batch", batch, own, began_s, ended.ended_s, **kept)
    ran = attributes({**about, "precision": facts.precision, "batch_rows": ended.batch_rows}, PREFIX)
    yield span("run", new_id(SPAN_BITS), batch, began_s, began_s + ended.run_s, attributes=ran)


def _root_attributes(ended: EndedRequest) -> dict[str, Any]:
    """Describe a request; None: not known."""
    facts, error = ended.facts, ended.error
    return {
        "model": facts.model,
        "version": facts.version,
        "backend": facts.backend,
        "device": facts.device,
        "door": ended.door,
        "rows": ended.rows or None,
        "bytes": ended.nbytes or None,
        "priority": ended.priority or None,
        "deadline_ms": ended.timeout_s * 1e3 if ended.timeout_s != math.inf else None,
        "forecast_ms": None if math.isnan(ended.forecast_s) else ended.forecast_s * 1e3,
        "request_id": ended.user_id,
        "retry_after_ms": error.retry_after_ms if error is not None else None,
    }
