"""The seam between requests and what traces them: the context that a caller sends, and whom a request's end is told.

Owns: the form of `traceparent` (W3C Trace Context). The ring `otel` has tracers, spans and how they are sent; without
`[tracing]` there is no tracer, and no request has a trace. Pure; no threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

TRACEPARENT = "traceparent"
"""The name of the header, metadata or property that carries a caller's context; the key in ZeroMQ's frame of extras."""

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[^,]*)?")
_SAMPLED = 1


class TraceParent(NamedTuple):
    """A span of a caller that a request belongs to, and the trace of both."""

    trace_id: int
    span_id: int


class RequestTrace(Protocol):
    """The trace of one request; of one that is not traced, an object whose methods do nothing. Thread: any.

    forecast_s: until its answer, as it was admitted; NaN where none was made.
    """

    forecast_s: float

    @property
    def traceparent(self) -> str:
        """Its own span."""
        ...

    @property
    def log_fields(self) -> Mapping[str, str]:
        """The trace's and the span's ids, by the names of fields."""
        ...

    def end(self, request: Any, error: Any) -> None:
        """Note the end of the request, or of all that it stands for. error: None: answered. Never raises."""
        ...

    def begin_step(self, request: Any, name: str) -> None:
        """Have a request that this one asks for belong to it: a step of a pipeline, or a call by a model."""
        ...


class Tracer(Protocol):
    """Decides which requests are traced. Thread: any; no method waits or raises."""

    def begin(self, request: Any, came: TraceParent | None = None, door: str = "") -> None:
        """Set a request's trace. came: the span of its caller, which has it traced whatever the rate."""
        ...

    def ran_inline(self, door: str, runs: Sequence[tuple[Any, int, int, float, float, float]]) -> None:
        """Note runs of requests that were no `Request`: servable, rows, requests, wait, run, monotonic end."""
        ...

    def refused(
        self, door: str, error: Any, came: Iterable[TraceParent | None], *, model: str = "", plan: Any = None
    ) -> None:
        """Note requests that were refused before one was made. came: of each. plan: where their header is known."""
        ...


def joined_traceparents(texts: Iterable[str]) -> str | None:
    """Put all contexts of one request together, as HTTP does; None: it has none."""
    return ", ".join(texts) or None


def read_traceparent(text: str | None) -> TraceParent | None:
    """Read a caller's context. None: there is none, it is malformed, or it says that the caller does not trace.

    Several together are malformed (W3C Trace Context, 3.2.2.5: the trace begins anew).
    """
    if text is None:
        return None
    found = _FORM.fullmatch(text.strip())
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return None
    parent = TraceParent(int(trace, 16), int(span, 16))
    return parent if all(parent) and int(flags, 16) & _SAMPLED else None


def written_traceparent(parent: TraceParent) -> str:
    """Write a context of a span that is traced."""
    return f"00-{parent.trace_id:032x}-{parent.span_id:016x}-{_SAMPLED:02x}"


def log_fields_of(requests: Iterable[Any]) -> Mapping[str, str]:
    """Return the fields by which a log line names the trace of its first request that has one; {} without any."""
    for request in requests:
        if request.trace is not None and (fields := request.trace.log_fields):
            return fields  # type: ignore[no-any-return]
    return {}
