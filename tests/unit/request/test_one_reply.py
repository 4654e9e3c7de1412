"""Exactly one reply for each request, whatever happens between its admission and the end of its run."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.clock import SystemClock
from edge_runtime.errors import DeadlineExceeded, Draining, EdgeRuntimeError, Refused, RunFailed
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.policy import BatchLimits
from edge_runtime.request.request import Request
from edge_runtime.request.scheduled_model import LatencyModel, Layout, ScheduledModel
from edge_runtime.request.worker import WorkerPool, refuse_expired, run_job
from tests.fakes.clock import FakeClock
from tests.fakes.requests import request_of
from tests.fakes.runs import FunctionRunner


class AllEnds:
    """A reply that keeps each end: `complete` and `refuse` swallow what a reply raises."""

    user_id = ""
    writes_text = False

    def __init__(self, ends, told):
        self.ends = ends
        self._told = told

    def answer(self, request):
        self.ends.append(request)
        self._told()

    def refuse(self, error):
        self.ends.append(error)
        self._told()


class Unforeseeing(LatencyModel):
    """Learns nothing, so each request is admitted and run."""

    def observe(self, rows, run_s):
        pass


class Kit:
    """A dispatcher with one model of 10 ms a run, and how each request ended, by tag."""

    def __init__(self, function=list, *, cores=1, max_rows=1, clock=None):
        self.clock = clock or FakeClock()
        self.dispatcher = Dispatcher(self.clock, cores)
        layout = Layout(FunctionRunner(function), 1, cores, LatencyModel({1: 0.010, 8: 0.020}))
        self.model = ScheduledModel("m", layout, BatchLimits(max_rows=max_rows))
        self.ends: dict[object, list[Request | EdgeRuntimeError]] = {}
        self.told = lambda: None

    def admit(self, tag, *, timeout_s=math.inf, value=1.0):
        inputs = [np.full((1, 1), value, np.float32)]
        reply = AllEnds([], self.told)
        request = request_of(inputs, reply, arrived_s=self.clock.monotonic_s(), timeout_s=timeout_s)
        self.dispatcher.admit(self.model, request)
        self.ends[tag] = reply.ends

    def start(self):
        job, expired = self.dispatcher.next_job()
        refuse_expired(expired, self.clock)
        return job

    def run(self, job):
        run_job(job, self.dispatcher, self.clock)

    def expire(self):
        expired, wake_at_s = self.dispatcher.expire()
        refuse_expired(expired, self.clock)
        return wake_at_s


def test_a_request_is_answered_at_its_deadline_while_its_run_goes_on():
    kit = Kit()
    kit.admit("slow", timeout_s=0.100)
    job = kit.start()

    assert kit.expire() == kit.clock.monotonic_s() + 0.100
    kit.clock.advance(0.100)
    assert kit.expire() == math.inf

    assert [type(end) for end in kit.ends["slow"]] == [DeadlineExceeded]
    assert not kit.dispatcher.is_idle()
    kit.run(job)
    assert len(kit.ends["slow"]) == 1
    assert kit.dispatcher.is_idle()


def test_requests_of_a_running_batch_expire_each_at_its_own_deadline():
    kit = Kit(max_rows=4)
    for tag, timeout_s in (("soon", 0.100), ("later", 0.200), ("never", math.inf)):
        kit.admit(tag, timeout_s=timeout_s)
    job = kit.start()

    kit.clock.advance(0.100)
    assert kit.expire() == pytest.approx(kit.clock.monotonic_s() + 0.100)
    assert [len(ends) for ends in kit.ends.values()] == [1, 0, 0]
    kit.run(job)

    assert [type(kit.ends[tag][0]) for tag in ("soon", "later", "never")] == [DeadlineExceeded, Request, Request]


def test_a_request_that_expired_in_a_failing_batch_is_not_run_again():
    seen = []

    def fail(arrays):
        seen.append(arrays[0][:, 0].tolist())
        if len(arrays[0]) > 1:
            kit.clock.advance(0.150)
            kit.expire()
            raise ValueError("no")
        return list(arrays)

    kit = Kit(fail, max_rows=4)
    kit.admit("late", timeout_s=0.100, value=1.0)
    kit.admit("patient", value=2.0)
    kit.run(kit.start())

    assert seen == [[1.0, 2.0], [2.0]]
    assert isinstance(kit.ends["late"][0], DeadlineExceeded)
    assert isinstance(kit.ends["patient"][0], Request)
    assert [len(ends) for ends in kit.ends.values()] == [1, 1]


def test_closing_a_model_refuses_what_an_endless_run_holds():
    kit = Kit()
    kit.admit("held")
    job = kit.start()

    assert kit.dispatcher.close_model(kit.model, timeout_s=0.0) is False
    assert not kit.dispatcher.wait_for_runs(kit.model, timeout_s=0.0)

    assert [type(end) for end in kit.ends["held"]] == [Draining]
    kit.run(job)
    assert len(kit.ends["held"]) == 1
    assert kit.dispatcher.wait_for_runs(kit.model, timeout_s=0.0)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.sampled_from([0.020, 0.050, math.inf]), st.sampled_from([1.0, -1.0])),
        st.tuples(st.just("start")),
        st.tuples(st.just("finish"), st.integers(0, 2)),
        st.tuples(st.just("advance"), st.sampled_from([0.001, 0.015, 0.040])),
        st.tuples(st.just("expire")),
        st.tuples(st.just("close")),
    ),
    max_size=40,
)


@given(ACTIONS, st.integers(1, 4))
def test_each_request_ends_once_in_any_order_of_events(actions, max_rows):
    """A negative value fails its run, alone or with its neighbours; `close` is what SIGTERM does."""

    def run(arrays):
        if (arrays[0] < 0).any():
            raise RunFailed("negative")
        return list(arrays)

    kit = Kit(run, cores=2, max_rows=max_rows)
    jobs, admitted = [], 0
    for name, *values in actions:
        if name == "admit":
            try:
                kit.admit(admitted, timeout_s=values[0], value=values[1])
                admitted += 1
            except Refused:
                continue
        elif name == "start" and (job := kit.start()) is not None:
            jobs.append(job)
        elif name == "finish" and jobs:
            kit.run(jobs.pop(values[0] % len(jobs)))
        elif name == "advance":
            kit.clock.advance(values[0])
        elif name == "expire":
            kit.expire()
        elif name == "close":
            kit.dispatcher.close_model(kit.model, timeout_s=0.0)
    for job in jobs:
        kit.run(job)
    while (job := kit.start()) is not None:
        kit.run(job)
    kit.expire()

    assert {tag: len(ends) for tag, ends in kit.ends.items()} == dict.fromkeys(range(admitted), 1)
    assert kit.dispatcher.is_idle()


def test_no_race_of_timer_and_workers_answers_twice_or_never():
    """Real threads; runs end about when their requests' deadlines pass, before and after."""
    lengths_s = iter([0.0005 + 0.0001 * (index * 7 % 30) for index in range(10_000)])
    lock = threading.Lock()

    def run(arrays):
        with lock:
            until_s = time.monotonic() + next(lengths_s)
        while time.monotonic() < until_s:
            time.sleep(0)  # gives the interpreter to the timer, as a library's run does
        return list(arrays)

    kit = Kit(run, cores=2, max_rows=4, clock=SystemClock())
    kit.model.layout.run_times = Unforeseeing()
    in_flight = threading.BoundedSemaphore(16)
    kit.told = in_flight.release
    pool = WorkerPool(kit.dispatcher, kit.clock)
    pool.start()
    admitted = 0
    until_s = time.monotonic() + 1.5
    while time.monotonic() < until_s:
        assert in_flight.acquire(timeout=60), "a reply is missing"
        kit.admit(admitted, timeout_s=0.003 if admitted % 4 else math.inf)
        admitted += 1
    kit.dispatcher.close_model(kit.model, timeout_s=10.0)
    assert pool.close()

    assert {tag: len(ends) for tag, ends in kit.ends.items()} == dict.fromkeys(range(admitted), 1)
    assert {type(ends[0]) for ends in kit.ends.values()} == {Request, DeadlineExceeded}
