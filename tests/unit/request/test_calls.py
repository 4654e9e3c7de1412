"""Runs that wait for another model: cores, forecasts, deadlines and circles, with a clock that stands still."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import CalledTooSoon, DeadlineExceeded, DeadlineUnmeetable, Unsupported
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.request import Request
from edge_runtime.request.scheduled_model import Job, LatencyModel, Layout, ScheduledModel
from tests.fakes.clock import FakeClock
from tests.fakes.requests import request_of
from tests.fakes.runs import FunctionRunner


def model(name: str, *, run_s: float = 0.010, threads: int = 1, concurrency: int = 4) -> ScheduledModel:
    run = FunctionRunner(lambda arrays: arrays)
    return ScheduledModel(name, Layout(run, threads, concurrency, LatencyModel({1: run_s})))


def request(clock: FakeClock, timeout_s: float = math.inf, priority: int = 5) -> Request:
    inputs = [np.zeros((1, 1), np.float32)]
    return request_of(inputs, arrived_s=clock.monotonic_s(), timeout_s=timeout_s, priority=priority)


def started(dispatcher: Dispatcher, of: ScheduledModel, clock: FakeClock) -> Job:
    """Admit a request to a model and start its run on this thread."""
    dispatcher.admit(of, request(clock))
    job, _ = dispatcher.next_job()
    assert job is not None
    assert job.model is of
    return job


def test_a_run_that_waits_gives_its_cores_back_and_takes_them_at_once_when_it_goes_on() -> None:
    clock = FakeClock()
    dispatcher = Dispatcher(clock, 1)
    front = started(dispatcher, model("front"), clock)
    assert not dispatcher.has_spare_core()
    assert dispatcher.begin_call("inner")[0] is front
    assert dispatcher.has_spare_core()
    assert dispatcher.workers_wanted == 3
    inner, other = model("inner"), model("other")
    job = started(dispatcher, inner, clock)
    dispatcher.end_call(front)  # two runs on one core, until one ends
    assert dispatcher.workers_wanted == 2
    dispatcher.admit(other, request(clock))
    assert dispatcher.next_job() == (None, [])
    dispatcher.finish(job, 0.010)
    assert dispatcher.next_job() == (None, [])
    dispatcher.finish(front, 0.020)
    assert dispatcher.next_job()[0] is not None


def test_a_call_that_ends_after_its_run_changes_nothing() -> None:
    clock = FakeClock()
    dispatcher = Dispatcher(clock, 2)
    front = started(dispatcher, model("front", threads=2), clock)
    dispatcher.begin_call("inner")
    dispatcher.run_again(front, [], None)  # its host died
    dispatcher.end_call(front)
    assert dispatcher.workers_wanted == 4
    assert started(dispatcher, model("wide", threads=2), clock).layout.threads == 2
    assert not dispatcher.has_spare_core()


def test_the_forecast_of_the_called_model_does_not_count_the_run_that_waits_for_it() -> None:
    clock = FakeClock()
    dispatcher = Dispatcher(clock, 1)
    inner = model("inner", run_s=0.010)
    started(dispatcher, model("front", run_s=0.100), clock)
    with pytest.raises(DeadlineUnmeetable):
        dispatcher.admit(inner, request(clock, timeout_s=0.020))
    dispatcher.begin_call("inner")
    dispatcher.admit(inner, request(clock, timeout_s=0.020))
    assert dispatcher.queued(inner)[0] == 1


def test_a_forecast_that_refuses_all_calls_relaxes_although_the_caller_is_on() -> None:
    clock = FakeClock()
    dispatcher = Dispatcher(clock, 2)
    inner = model("inner", run_s=0.010)
    for _ in range(20):
        inner.layout.run_times.observe(1, 1.0)  # slow for a while, long ago
    started(dispatcher, model("front"), clock)
    dispatcher.begin_call("inner")
    for _ in range(1000):
        try:
            dispatcher.admit(inner, request(clock, timeout_s=0.100))
        except DeadlineUnmeetable:
            continue
        return
    pytest.fail("every call was refused for ever")


def test_waiting_is_not_use_of_cores_in_the_fair_share() -> None:
    clock = FakeClock()
    dispatcher = Dispatcher(clock, 1)
    front = model("front")
    job = started(dispatcher, front, clock)
    dispatcher.begin_call("inner")
    clock.advance(0.5)
    dispatcher.end_call(job)
    clock.advance(0.25)
    dispatcher.finish(job, 0.75)
    assert front.served_s == pytest.approx(0.25)


def test_a_call_gets_the_requests_that_still_wait_for_their_answers() -> None:
    clock = FakeClock()
    dispatcher = Dispatcher(clock, 1)
    front = model("front")
    front.limits = front.limits.__class__(max_rows=2)
    soon, later = request(clock, timeout_s=1.0), request(clock, timeout_s=5.0)
    dispatcher.admit(front, soon)
    dispatcher.admit(front, later)
    job, _ = dispatcher.next_job()
    assert job is not None
    assert dispatcher.begin_call("inner")[1] == [soon, later]
    dispatcher.end_call(job)
    clock.advance(2.0)
    assert dispatcher.expire()[0] == [soon]
    assert dispatcher.begin_call("inner")[1] == [later]
    dispatcher.end_call(job)
    clock.advance(5.0)
    dispatcher.expire()
    with pytest.raises(DeadlineExceeded, match="have been answered"):
        dispatcher.begin_call("inner")
    assert not dispatcher.has_spare_core()


def test_a_thread_without_a_job_cannot_call() -> None:
    clock = FakeClock()
    dispatcher = Dispatcher(clock, 1)
    started(dispatcher, model("front"), clock)
    errors: list[Exception] = []

    def call() -> None:
        try:
            dispatcher.begin_call("inner")
        except CalledTooSoon as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(errors) == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40))
def test_exactly_the_calls_that_close_a_circle_are_refused(calls: list[tuple[int, int]]) -> None:
    clock = FakeClock()
    dispatcher = Dispatcher(clock, 1)
    models = [model(f"m{number}") for number in range(6)]
    reached = {number: {number} for number in range(6)}  # what each may wait for, itself among them
    for caller, called in calls:
        job = started(dispatcher, models[caller], clock)
        if caller in reached[called]:
            with pytest.raises(Unsupported) as refused:
                dispatcher.begin_call(f"m{called}")
            way = refused.value.message.rpartition(": ")[2].split(" -> ")
            assert (way[0], way[1], way[-1]) == (f"m{caller}", f"m{called}", f"m{caller}")
        else:
            dispatcher.begin_call(f"m{called}")
            dispatcher.end_call(job)
            for number in [number for number in reached if caller in reached[number]]:
                reached[number] |= reached[called]
        dispatcher.finish(job, 0.01)
        assert dispatcher.is_idle()


def test_calls_of_a_closed_version_are_forgotten_once_its_runs_have_ended() -> None:
    clock = FakeClock()
    dispatcher = Dispatcher(clock, 2)
    a, b = model("a"), model("b")
    job = started(dispatcher, a, clock)
    dispatcher.begin_call("b")
    closing = threading.Thread(target=dispatcher.close_model, args=(a, 20.0))
    closing.start()
    other = threading.Thread(target=dispatcher.finish, args=(started(dispatcher, b, clock), 0.01))
    with pytest.raises(Unsupported):  # the old version of a still waits for b
        _begin_of(dispatcher, b, "a", clock)
    other.start()
    other.join()
    dispatcher.end_call(job)
    dispatcher.finish(job, 0.01)
    closing.join(60)
    assert _begin_of(dispatcher, b, "a", clock)


def _begin_of(dispatcher: Dispatcher, of: ScheduledModel, called: str, clock: FakeClock) -> bool:
    """Start a run on a thread of its own, and call from there."""
    ended: list[BaseException | None] = []

    def call() -> None:
        job = started(dispatcher, of, clock)
        try:
            dispatcher.begin_call(called)
        except Unsupported as error:
            ended.append(error)
        else:
            dispatcher.end_call(job)
            ended.append(None)
        dispatcher.finish(job, 0.01)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if ended[0] is not None:
        raise ended[0]
    return True
