"""Admission, choice of jobs and the accounts of the cores, with a clock that stands still and no thread."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_runtime.errors import Cancelled, DeadlineExceeded, DeadlineUnmeetable, Draining, QueueFull, RunFailed
from edge_runtime.scheduling.dispatcher import Dispatcher, Layout, ScheduledModel
from edge_runtime.scheduling.latency_model import LatencyModel
from edge_runtime.scheduling.policy import BatchLimits
from edge_runtime.scheduling.queue import Answer, Pending
from edge_runtime.scheduling.worker import carry_out, settle_expired
from tests.fakes.clock import FakeClock


def double(arrays):
    return [array * 2 for array in arrays]


def scheduled(name="m", run=double, *, run_s=0.010, threads=1, concurrency=2, **options):
    layout = Layout(run, threads, concurrency, LatencyModel({1: run_s} if run_s else None))
    return ScheduledModel(name, layout, **options)


class Outcomes(dict):
    """Collects outcomes by tag and fails on a second one."""

    def request(self, tag, clock, *, rows=1, timeout_s=math.inf, priority=5, shape=(), value=1.0, nbytes=4):
        inputs = [np.full((rows, 1), value, np.float32)]
        return Pending(inputs, rows, nbytes, shape, priority, clock.monotonic_s(), timeout_s, self.settle, tag)

    def settle(self, request, outcome):
        assert request.tag not in self, "a second outcome"
        self[request.tag] = outcome


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def outcomes():
    return Outcomes()


def take(dispatcher):
    job, expired = dispatcher.next_job()
    return job, [request.tag for request in expired]


def test_a_request_is_run_and_answered_with_its_own_rows(clock, outcomes):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(limits=BatchLimits(max_rows=8))
    dispatcher.admit(model, outcomes.request("a", clock, rows=2, value=1.0))
    dispatcher.admit(model, outcomes.request("b", clock, rows=3, value=5.0))

    job, _ = take(dispatcher)
    carry_out(job, dispatcher, clock)

    assert [array.tolist() for array in outcomes["a"].outputs] == [[[2.0], [2.0]]]
    assert outcomes["b"].outputs[0].tolist() == [[10.0]] * 3
    assert outcomes["a"].batch_rows == 5
    assert dispatcher.is_idle()


def test_full_queue_refuses_newest_request_and_keeps_the_others(clock, outcomes):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(max_queue_rows=2)
    dispatcher.admit(model, outcomes.request("a", clock, rows=2))

    with pytest.raises(QueueFull) as refused:
        dispatcher.admit(model, outcomes.request("b", clock))

    assert refused.value.retry_after_ms > 0
    assert dispatcher.queued(model) == (2, 4)


def test_queue_is_bounded_in_bytes_too(clock, outcomes):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(max_queue_bytes=10)
    dispatcher.admit(model, outcomes.request("a", clock, nbytes=8))

    with pytest.raises(QueueFull, match="8 bytes wait"):
        dispatcher.admit(model, outcomes.request("b", clock, nbytes=8))


def test_a_deadline_behind_too_long_a_queue_is_refused_at_once(clock, outcomes):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(run_s=0.010, concurrency=1)
    for tag in range(5):
        dispatcher.admit(model, outcomes.request(tag, clock))

    with pytest.raises(DeadlineUnmeetable) as refused:
        dispatcher.admit(model, outcomes.request("late", clock, timeout_s=0.050))
    dispatcher.admit(model, outcomes.request("patient", clock, timeout_s=0.200))

    assert refused.value.retry_after_ms > 0
    assert dispatcher.queued(model)[0] == 6


def test_a_flooded_neighbour_does_not_make_a_short_queue_unmeetable(clock, outcomes):
    dispatcher = Dispatcher(clock, cores=1)
    flooded, quiet = scheduled("flooded", run_s=0.010), scheduled("quiet", run_s=0.005)
    for tag in range(50):
        dispatcher.admit(flooded, outcomes.request(tag, clock))

    dispatcher.admit(quiet, outcomes.request("quick", clock, timeout_s=0.050))

    assert dispatcher.queued(quiet)[0] == 1


def test_a_waiting_request_expires_while_every_core_is_busy(clock, outcomes):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(concurrency=1)
    dispatcher.admit(model, outcomes.request("running", clock))
    job, _ = take(dispatcher)
    dispatcher.admit(model, outcomes.request("waiting", clock, timeout_s=0.050))

    clock.advance(0.049)
    expired, wake_at_s = dispatcher.expire()
    settle_expired(expired, clock)

    assert isinstance(outcomes["waiting"], DeadlineExceeded)
    assert wake_at_s == math.inf
    assert dispatcher.queued(model) == (0, 0)
    carry_out(job, dispatcher, clock)
    assert isinstance(outcomes["running"], Answer)


def test_a_run_that_ends_after_its_deadline_is_never_answered_with_late_tensors(clock, outcomes):
    def slow(arrays):
        clock.advance(1.0)
        return double(arrays)

    dispatcher, model = Dispatcher(clock, cores=1), scheduled(run=slow)
    dispatcher.admit(model, outcomes.request("late", clock, timeout_s=0.100))
    job, _ = take(dispatcher)
    carry_out(job, dispatcher, clock)

    assert isinstance(outcomes["late"], DeadlineExceeded)


def test_one_bad_request_does_not_fail_its_neighbours(clock, outcomes):
    def run(arrays):
        if (arrays[0] < 0).any():
            raise ValueError("negative")
        return double(arrays)

    dispatcher, model = Dispatcher(clock, cores=1), scheduled(run=run, limits=BatchLimits(max_rows=8))
    for tag, value in (("good", 1.0), ("bad", -1.0), ("fine", 3.0)):
        dispatcher.admit(model, outcomes.request(tag, clock, value=value))
    job, _ = take(dispatcher)
    carry_out(job, dispatcher, clock)

    assert isinstance(outcomes["bad"], RunFailed)
    assert outcomes["good"].outputs[0].tolist() == [[2.0]]
    assert outcomes["fine"].outputs[0].tolist() == [[6.0]]
    assert dispatcher.is_idle()


def test_runs_never_take_more_threads_than_there_are_cores(clock, outcomes):
    dispatcher = Dispatcher(clock, cores=2)
    wide, narrow = scheduled("wide", threads=2, concurrency=1), scheduled("narrow")
    dispatcher.admit(narrow, outcomes.request("n", clock))
    first, _ = take(dispatcher)
    dispatcher.admit(wide, outcomes.request("w", clock))

    assert first.model is narrow
    assert take(dispatcher) == (None, [])
    carry_out(first, dispatcher, clock)
    assert take(dispatcher)[0].model is wide


def test_models_share_the_cores_by_run_time(clock, outcomes):
    dispatcher = Dispatcher(clock, cores=1)
    heavy, light = scheduled("heavy", run_s=0.030), scheduled("light", run_s=0.010)
    for tag in range(20):
        dispatcher.admit(heavy, outcomes.request(("h", tag), clock))
        dispatcher.admit(light, outcomes.request(("l", tag), clock))
    served = {"heavy": 0, "light": 0}
    for _ in range(20):
        job, _ = take(dispatcher)
        served[job.model.name] += 1
        dispatcher.finish(job, 0.030 if job.model is heavy else 0.010)
        for request in job.batch:
            outcomes.settle(request, None)

    assert served == {"heavy": 5, "light": 15}


def test_a_model_that_was_idle_gets_no_credit_for_it(clock, outcomes):
    dispatcher = Dispatcher(clock, cores=1)
    busy, idle = scheduled("busy"), scheduled("idle")
    dispatcher.admit(busy, outcomes.request("b0", clock))
    job, _ = take(dispatcher)
    dispatcher.finish(job, 100.0)
    for tag in range(4):
        dispatcher.admit(busy, outcomes.request(f"b{tag + 1}", clock))
    for tag in range(4):
        dispatcher.admit(idle, outcomes.request(f"i{tag}", clock))
    order = []
    for _ in range(6):
        job, _ = take(dispatcher)
        order.append(job.model.name)
        dispatcher.finish(job, 0.010)

    assert order.count("busy") >= 2


def test_a_lone_request_on_an_idle_machine_takes_the_wide_layout(clock, outcomes):
    wide = Layout(double, threads=2, concurrency=1)
    dispatcher, model = Dispatcher(clock, cores=2), scheduled(wide=wide)
    dispatcher.admit(model, outcomes.request("alone", clock))
    alone, _ = take(dispatcher)
    dispatcher.finish(alone, 0.001)
    for tag in range(2):
        dispatcher.admit(model, outcomes.request(tag, clock))
    first, _ = take(dispatcher)

    assert alone.layout is wide
    assert first.layout is model.layout


def test_a_cancelled_request_is_settled_once_and_never_run(clock, outcomes):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled()
    request = outcomes.request("a", clock)
    dispatcher.admit(model, request)

    assert dispatcher.cancel(model, request) is True
    assert dispatcher.cancel(model, request) is False
    assert isinstance(outcomes["a"], Cancelled)
    assert take(dispatcher) == (None, [])


def test_a_running_request_cannot_be_cancelled(clock, outcomes):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled()
    request = outcomes.request("a", clock)
    dispatcher.admit(model, request)
    job, _ = take(dispatcher)

    assert dispatcher.cancel(model, request) is False
    carry_out(job, dispatcher, clock)
    assert isinstance(outcomes["a"], Answer)


def test_a_closed_model_admits_nothing_and_refuses_what_was_not_reached(clock, outcomes):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled()
    dispatcher.admit(model, outcomes.request("left", clock))

    assert dispatcher.close_model(model, timeout_s=0.0) is False

    assert isinstance(outcomes["left"], Draining)
    with pytest.raises(Draining):
        dispatcher.admit(model, outcomes.request("new", clock))


def test_a_forecast_that_went_wrong_does_not_refuse_for_ever(clock, outcomes):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(run_s=0.005)
    for _ in range(3):
        model.layout.run_times.observe(1, 0.040)
    refusals = 0
    for tag in range(200):
        try:
            dispatcher.admit(model, outcomes.request(tag, clock, timeout_s=0.010))
            break
        except DeadlineUnmeetable:
            refusals += 1

    assert 0 < refusals < 100


def test_the_run_time_forecast_follows_a_machine_that_became_slower():
    times = LatencyModel({1: 0.010})
    for _ in range(60):
        times.observe(1, 0.020)

    assert times.mean_s(1) == pytest.approx(0.020, rel=0.05)
    assert times.predict_s(1) >= times.mean_s(1)


def test_unknown_row_counts_are_forecast_from_known_ones():
    times = LatencyModel({1: 0.010, 4: 0.016})

    assert times.mean_s(2) == pytest.approx(0.012)
    assert times.mean_s(8) == pytest.approx(0.032)
    assert LatencyModel().predict_s(3) == 0.0
