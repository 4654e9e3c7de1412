"""Which requests are traced, and what is kept of them."""

from __future__ import annotations

import pytest

from edge_runtime.errors import QueueFull
from edge_runtime.messages import RequestHeader
from edge_runtime.otel.tracer import UNTRACED, EndedRequest, RequestTracer
from edge_runtime.request.request import CHECK, CallbackReply, Request
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.telemetry.tracing import TraceParent


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.ended: list[EndedRequest] = []
        self.most, self.dropped = 1_000_000, 0

    def has_room(self, traces: int) -> bool:
        return len(self.ended) + traces <= self.most

    def drop(self, traces: int) -> None:
        self.dropped += traces

    def add(self, ended: EndedRequest) -> None:
        self.ended.append(ended)


def new_request(origin=None, on_end=lambda _: None) -> Request:
    more = () if origin is None else (origin,)
    return Request(RequestHeader(model="m", version=4), (), 8, CallbackReply(on_end, "me"), "s", 1.0, Metrics(), *more)


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_request_with_a_context_is_traced_whatever_the_rate(kept):
    tracer, request = RequestTracer(0.0, kept, lambda: 3.0), new_request()
    tracer.begin(request, TraceParent(17, 5), "zmq")
    request.refuse(QueueFull("full", retry_after_ms=2.0))
    (ended,) = kept.ended
    assert (ended.trace_id, ended.parent_id, ended.door, ended.user_id) == (17, 5, "zmq", "me")
    assert (ended.facts.model, ended.facts.version) == ("m", 4)
    assert (ended.arrived_s, ended.ended_s, ended.run_s) == (1.0, 3.0, None)
    assert ended.error is not None
    assert ended.error.code == "queue_full"
    assert request.trace is not None
    assert request.trace.traceparent == f"00-{17:032x}-{ended.span_id:016x}-01"


def test_rate_of_one_traces_all_and_of_none_no_request(kept):
    for rate, count in ((1.0, 100), (0.0, 0)):
        kept.ended.clear()
        tracer = RequestTracer(rate, kept, lambda: 2.0)
        for _ in range(100):
            request = new_request()
            tracer.begin(request)
            request.refuse(QueueFull("full"))
        assert len(kept.ended) == count
        assert len({each.trace_id for each in kept.ended}) == count


def test_rate_between_traces_its_share_of_bursts_as_of_requests(kept):
    tracer = RequestTracer(0.01, kept, lambda: 2.0)
    tracer.refused("zmq", QueueFull("full"), [None] * 20_000, model="m")
    alone = sum(each.traces for each in kept.ended)
    assert 100 <= alone <= 300  # 200 +- 7 standard deviations


def test_the_daemons_own_check_and_steps_of_what_is_not_traced_are_not_traced(kept):
    tracer = RequestTracer(1.0, kept, lambda: 2.0)
    check = new_request(CHECK)
    tracer.begin(check)
    assert check.trace is UNTRACED
    step = new_request()
    UNTRACED.begin_step(step, "first")
    step.refuse(QueueFull("full"))
    assert step.trace is UNTRACED
    assert not kept.ended


def test_step_belongs_to_the_request_that_asks_for_it(kept):
    tracer, whole, step = RequestTracer(0.0, kept, lambda: 2.0), new_request(), new_request()
    tracer.begin(whole, TraceParent(1, 2), "http")
    assert whole.trace is not None
    whole.trace.begin_step(step, "first")
    step.refuse(QueueFull("full"))
    whole.refuse(QueueFull("full"))
    first, root = kept.ended
    assert (first.trace_id, first.step, first.parent_id) == (1, "first", root.span_id)
    assert root.parent_id == 2


def test_sink_that_fails_costs_no_request_its_answer(kept, caplog):
    answers: list[object] = []

    class Broken(Kept):
        def add(self, ended: EndedRequest) -> None:
            raise ValueError("full")

    tracer, request = RequestTracer(1.0, Broken(), lambda: 2.0), new_request(on_end=answers.append)
    tracer.begin(request)
    request.refuse(QueueFull("full"))
    assert len(answers) == 1
    assert "the trace of a request was lost" in caplog.text


def test_full_sink_drops_traces_and_counts_them(kept):
    tracer = RequestTracer(1.0, kept, lambda: 2.0)
    kept.most = 1
    for _ in range(3):
        request = new_request()
        tracer.begin(request)
        request.refuse(QueueFull("full"))
    tracer.refused("zmq", QueueFull("full"), [None, TraceParent(1, 2)])
    assert (len(kept.ended), kept.dropped) == (1, 4)
