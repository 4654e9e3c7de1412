"""Admission, choice of jobs and the accounts of the cores, with a clock that stands still."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest

from edge_runtime.errors import Cancelled, DeadlineExceeded, DeadlineUnmeetable, Draining, QueueFull, RunFailed
from edge_runtime.request.dispatcher import UNDISTURBED_S, WIDE_AGAIN_RUNS, Dispatcher
from edge_runtime.request.plan import HeadPlan
from edge_runtime.request.policy import BatchLimits
from edge_runtime.request.request import Arrival, Request
from edge_runtime.request.scheduled_model import LatencyModel, Layout, ScheduledModel
from edge_runtime.request.worker import refuse_expired, run_job
from tests.fakes.clock import FakeClock
from tests.fakes.requests import KeptReply, request_of
from tests.fakes.runs import FunctionRunner


def double(arrays):
    return [array * 2 for array in arrays]


def scheduled(name="m", run=double, *, run_s=0.010, threads=1, concurrency=2, **options):
    layout = Layout(FunctionRunner(run), threads, concurrency, LatencyModel({1: run_s} if run_s else None))
    return ScheduledModel(name, layout, **options)


class Ends(dict):
    """Collects how requests ended, by tag: themselves, or an error; a second end fails."""

    def request(
        self, tag, clock, *, rows=1, timeout_s=math.inf, priority=5, shape=(), value=1.0, nbytes=4, sender="one"
    ):
        inputs = [np.full((rows, 1), value, np.float32)]
        return request_of(
            inputs, KeptReply(tag, self.__setitem__), rows=rows, nbytes=nbytes, shape=shape, priority=priority,
            arrived_s=clock.monotonic_s(), timeout_s=timeout_s, sender=sender,
        )  # fmt: skip


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def ends():
    return Ends()


def take(dispatcher):
    job, expired = dispatcher.next_job()
    return job, [request.reply.tag for request in expired]


def test_a_request_is_run_and_answered_with_its_own_rows(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(limits=BatchLimits(max_rows=8))
    dispatcher.admit(model, ends.request("a", clock, rows=2, value=1.0))
    dispatcher.admit(model, ends.request("b", clock, rows=3, value=5.0))

    job, _ = take(dispatcher)
    run_job(job, dispatcher, clock)

    assert [array.tolist() for array in ends["a"].outputs] == [[[2.0], [2.0]]]
    assert ends["b"].outputs[0].tolist() == [[10.0]] * 3
    assert ends["a"].batch_rows == 5
    assert dispatcher.is_idle()


def test_the_requests_of_a_burst_wake_a_worker_once_and_together(clock, ends, monkeypatch):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(limits=BatchLimits(max_rows=8))
    has_work, waits, taken = dispatcher.has_work, threading.Semaphore(0), []
    wait = has_work.wait

    def wait_seen():
        waits.release()  # under the lock, which `wait` gives up
        wait()

    monkeypatch.setattr(has_work, "wait", wait_seen)
    worker = threading.Thread(target=lambda: taken.append(dispatcher.next_job(waits=True)))
    worker.start()
    assert waits.acquire(timeout=60)

    dispatcher.begin_burst()
    dispatcher.admit(model, ends.request("a", clock))
    for _ in range(100):  # a worker that was woken takes its request in this time, unless the machine is very busy
        time.sleep(0)
    dispatcher.admit(model, ends.request("b", clock))
    dispatcher.end_burst()
    worker.join(60)

    ((job, _),) = taken
    assert [request.reply.tag for request in job.batch] == ["a", "b"]


@pytest.mark.parametrize(
    ("cores", "limits", "batches"),
    [
        (2, BatchLimits(max_rows=8), ["ab", "cd"]),
        (1, BatchLimits(max_rows=8), ["abcd"]),
        (2, BatchLimits(max_rows=8, preferred_rows=(4,)), ["abcd"]),
    ],
)
def test_requests_that_wait_run_side_by_side_where_cores_are_free(clock, ends, cores, limits, batches):
    dispatcher, model = Dispatcher(clock, cores=cores), scheduled(limits=limits)
    dispatcher.begin_burst()
    for tag in "abcd":
        dispatcher.admit(model, ends.request(tag, clock))
    dispatcher.end_burst()

    jobs = [take(dispatcher)[0] for _ in batches]

    assert ["".join(request.reply.tag for request in job.batch) for job in jobs] == batches


def test_full_queue_refuses_newest_request_and_keeps_the_others(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(max_queue_rows=2)
    dispatcher.admit(model, ends.request("a", clock, rows=2))

    with pytest.raises(QueueFull) as refused:
        dispatcher.admit(model, ends.request("b", clock))

    assert refused.value.retry_after_ms > 0
    assert dispatcher.queued(model) == (2, 4)


def test_queue_is_bounded_in_bytes_too(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(max_queue_bytes=10)
    dispatcher.admit(model, ends.request("a", clock, nbytes=8))

    with pytest.raises(QueueFull, match="8 bytes wait"):
        dispatcher.admit(model, ends.request("b", clock, nbytes=8))


def test_a_deadline_behind_too_long_a_queue_is_refused_at_once(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(run_s=0.010, concurrency=1)
    for tag in range(7):
        dispatcher.admit(model, ends.request(tag, clock, timeout_s=0.100))

    with pytest.raises(DeadlineUnmeetable) as refused:
        dispatcher.admit(model, ends.request("late", clock, timeout_s=0.100))
    dispatcher.admit(model, ends.request("patient", clock, timeout_s=0.200))

    assert refused.value.retry_after_ms > 0
    assert dispatcher.queued(model)[0] == 8


def test_requests_that_run_later_make_no_deadline_unmeetable(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(run_s=0.010, concurrency=1)
    for tag in range(100):
        dispatcher.admit(model, ends.request(tag, clock))

    dispatcher.admit(model, ends.request("urgent", clock, timeout_s=0.020))

    job, _ = take(dispatcher)
    assert [request.reply.tag for request in job.batch] == ["urgent"]


def test_a_burst_fills_the_queue_for_its_own_sender_only(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(max_queue_rows=4)
    for tag in range(4):
        dispatcher.admit(model, ends.request(tag, clock, sender="greedy"))

    dispatcher.admit(model, ends.request("polite", clock, sender="polite"))
    with pytest.raises(QueueFull):
        dispatcher.admit(model, ends.request("more", clock, sender="greedy"))

    assert isinstance(ends[3], QueueFull)
    assert dispatcher.queued(model)[0] == 4
    with pytest.raises(QueueFull):
        dispatcher.admit(model, ends.request("wide", clock, rows=2, sender="polite"))
    assert set(ends) == {3}, "those that gave way for nothing wait on"


def test_the_requests_of_a_sender_that_is_gone_are_cancelled_in_every_model(clock, ends):
    dispatcher, model, other = Dispatcher(clock, cores=1), scheduled(), scheduled("other")
    for each in (model, other):
        for priority in (1, 5):
            tag = (each.name, priority)
            dispatcher.admit(each, ends.request(tag, clock, sender="gone", priority=priority, timeout_s=1.0))
    dispatcher.admit(model, ends.request("stays", clock, sender="there"))

    assert dispatcher.drop("gone") == 4
    assert dispatcher.drop("gone") == 0

    assert len(ends) == 4
    assert all(isinstance(end, Cancelled) for end in ends.values())
    assert dispatcher.queued(model)[0] == 1
    job, _ = take(dispatcher)
    assert job.model is model
    dispatcher.finish(job, 0.010)
    assert dispatcher.is_idle()


def test_a_flooded_neighbour_does_not_make_a_short_queue_unmeetable(clock, ends):
    dispatcher = Dispatcher(clock, cores=1)
    flooded, quiet = scheduled("flooded", run_s=0.010), scheduled("quiet", run_s=0.005)
    for tag in range(50):
        dispatcher.admit(flooded, ends.request(tag, clock))

    dispatcher.admit(quiet, ends.request("quick", clock, timeout_s=0.050))

    assert dispatcher.queued(quiet)[0] == 1


def test_a_waiting_request_expires_while_every_core_is_busy(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(concurrency=1)
    dispatcher.admit(model, ends.request("running", clock))
    job, _ = take(dispatcher)
    dispatcher.admit(model, ends.request("waiting", clock, timeout_s=0.050))

    clock.advance(0.049)
    expired, wake_at_s = dispatcher.expire()
    refuse_expired(expired, clock)

    assert isinstance(ends["waiting"], DeadlineExceeded)
    assert wake_at_s == math.inf
    assert dispatcher.queued(model) == (0, 0)
    run_job(job, dispatcher, clock)
    assert isinstance(ends["running"], Request)


def test_a_run_that_ends_after_its_deadline_is_never_answered_with_late_tensors(clock, ends):
    def slow(arrays):
        clock.advance(1.0)
        return double(arrays)

    dispatcher, model = Dispatcher(clock, cores=1), scheduled(run=slow)
    dispatcher.admit(model, ends.request("late", clock, timeout_s=0.100))
    job, _ = take(dispatcher)
    run_job(job, dispatcher, clock)

    assert isinstance(ends["late"], DeadlineExceeded)


def test_one_bad_request_does_not_fail_its_neighbours(clock, ends):
    def run(arrays):
        if (arrays[0] < 0).any():
            raise ValueError("negative")
        return double(arrays)

    dispatcher, model = Dispatcher(clock, cores=1), scheduled(run=run, limits=BatchLimits(max_rows=8))
    for tag, value in (("good", 1.0), ("bad", -1.0), ("fine", 3.0)):
        dispatcher.admit(model, ends.request(tag, clock, value=value))
    job, _ = take(dispatcher)
    run_job(job, dispatcher, clock)

    assert isinstance(ends["bad"], RunFailed)
    assert ends["good"].outputs[0].tolist() == [[2.0]]
    assert ends["fine"].outputs[0].tolist() == [[6.0]]
    assert dispatcher.is_idle()


def test_runs_never_take_more_threads_than_there_are_cores(clock, ends):
    dispatcher = Dispatcher(clock, cores=2)
    wide, narrow = scheduled("wide", threads=2, concurrency=1), scheduled("narrow")
    dispatcher.admit(narrow, ends.request("n", clock))
    first, _ = take(dispatcher)
    dispatcher.admit(wide, ends.request("w", clock))

    assert first.model is narrow
    assert take(dispatcher) == (None, [])
    run_job(first, dispatcher, clock)
    assert take(dispatcher)[0].model is wide


def test_models_share_the_cores_by_run_time(clock, ends):
    dispatcher = Dispatcher(clock, cores=1)
    heavy, light = scheduled("heavy", run_s=0.030), scheduled("light", run_s=0.010)
    for tag in range(20):
        dispatcher.admit(heavy, ends.request(("h", tag), clock))
        dispatcher.admit(light, ends.request(("l", tag), clock))
    served = {"heavy": 0, "light": 0}
    for _ in range(20):
        job, _ = take(dispatcher)
        served[job.model.name] += 1
        dispatcher.finish(job, 0.030 if job.model is heavy else 0.010)

    assert served == {"heavy": 5, "light": 15}


def test_a_model_that_was_idle_gets_no_credit_for_it(clock, ends):
    dispatcher = Dispatcher(clock, cores=1)
    busy, idle = scheduled("busy"), scheduled("idle")
    dispatcher.admit(busy, ends.request("b0", clock))
    job, _ = take(dispatcher)
    dispatcher.finish(job, 100.0)
    for tag in range(4):
        dispatcher.admit(busy, ends.request(f"b{tag + 1}", clock))
    for tag in range(4):
        dispatcher.admit(idle, ends.request(f"i{tag}", clock))
    order = []
    for _ in range(6):
        job, _ = take(dispatcher)
        order.append(job.model.name)
        dispatcher.finish(job, 0.010)

    assert order.count("busy") >= 2


def test_a_lone_request_on_an_idle_machine_takes_the_wide_layout(clock, ends):
    wide = Layout(FunctionRunner(double), threads=2, concurrency=1)
    dispatcher, model = Dispatcher(clock, cores=2), scheduled(wide=wide)
    dispatcher.admit(model, ends.request("alone", clock))
    alone, _ = take(dispatcher)
    dispatcher.finish(alone, 0.001)
    for tag in range(2):
        dispatcher.admit(model, ends.request(tag, clock))
    first, _ = take(dispatcher)

    assert alone.layout is wide
    assert first.layout is model.layout


def test_the_wide_layout_is_left_while_it_is_slower_and_tried_again_now_and_then(clock, ends):
    wide = Layout(FunctionRunner(double), threads=2, concurrency=1, run_times=LatencyModel({1: 0.020}))
    dispatcher, model = Dispatcher(clock, cores=2), scheduled(wide=wide, run_s=0.010)
    tried = 0
    for tag in range(10 * WIDE_AGAIN_RUNS):
        dispatcher.admit(model, ends.request(tag, clock))
        job, _ = take(dispatcher)
        tried += job.layout is wide
        dispatcher.finish(job, 0.020 if job.layout is wide else 0.010)
    assert tried == 10

    wide.run_times = LatencyModel({1: 0.005})
    dispatcher.admit(model, ends.request("quiet again", clock))
    assert take(dispatcher)[0].layout is wide


@pytest.fixture
def alone(clock, ends):
    """A dispatcher of two cores, and a hosted model of full batches that has been the only one for a while."""
    dispatcher = Dispatcher(clock, 2)
    model = scheduled(limits=BatchLimits(max_rows=2))
    model.layout.ahead = 2
    dispatcher.admit(model, ends.request("before", clock))
    run_job(take(dispatcher)[0], dispatcher, clock)
    model.layout.run_times = LatencyModel({2: 0.010})
    clock.advance(UNDISTURBED_S)
    return dispatcher, model


def fill(alone, clock, ends, count, **options):
    for tag in range(count):
        alone[0].admit(alone[1], ends.request(tag, clock, **options))
    return [job for job, _ in (take(alone[0]) for _ in range(5)) if job is not None]


def test_full_batches_are_handed_to_a_host_while_every_core_is_taken_and_no_others(alone, clock, ends):
    jobs = fill(alone, clock, ends, 9)
    assert [job.is_ahead for job in jobs] == [False, False, True, True]
    run_job(jobs[0], alone[0], clock)
    assert take(alone[0])[0] is None, "one request is not a full batch"
    for job in jobs[1:]:
        run_job(job, alone[0], clock)
    run_job(take(alone[0])[0], alone[0], clock)
    assert alone[0].is_idle()
    assert set(ends) == {"before", *range(9)}


def test_a_run_that_waits_in_its_host_begins_when_another_ends_and_its_time_counts_from_there(alone, clock, ends):
    first, _, third, fourth = fill(alone, clock, ends, 8)
    clock.advance(0.010)
    run_job(first, alone[0], clock)
    assert (third.is_ahead, fourth.is_ahead) == (False, True)
    clock.advance(0.012)
    run_job(third, alone[0], clock)
    assert third.batch[0].run_s == pytest.approx(0.012)
    assert third.batch[0].queue_s == pytest.approx(0.010)


def test_short_runs_are_handed_over_though_they_are_not_full(alone, clock, ends):
    alone[1].layout.run_times = LatencyModel({1: 1e-4})
    alone[1].limits = BatchLimits(max_rows=64)
    jobs = []
    for _ in range(4):
        jobs += fill(alone, clock, ends, 1)
    assert [job.is_ahead for job in jobs] == [False, False, True, True]


def test_nothing_is_handed_over_beside_another_model_nor_soon_after(alone, clock, ends):
    other = scheduled("other")
    alone[0].admit(other, ends.request("other", clock))
    run_job(take(alone[0])[0], alone[0], clock)
    jobs = fill(alone, clock, ends, 8)
    assert [job.is_ahead for job in jobs] == [False, False]
    alone[0].admit(other, ends.request("waits", clock))
    clock.advance(UNDISTURBED_S)
    assert take(alone[0])[0] is None
    run_job(jobs[0], alone[0], clock)
    assert not take(alone[0])[0].is_ahead


def test_a_request_that_would_be_late_behind_the_runs_under_way_is_not_handed_over(alone, clock, ends):
    jobs = fill(alone, clock, ends, 4)
    assert [job.is_ahead for job in jobs] == [False, False]
    alone[0].admit(alone[1], ends.request("urgent", clock, timeout_s=0.030, rows=2))
    alone[1].layout.run_times.observe(2, 0.060)
    assert take(alone[0]) == (None, [])

    run_job(jobs[0], alone[0], clock)
    assert take(alone[0])[0].batch[0].reply.tag == "urgent", "a run ended sooner"


def test_work_that_waits_in_a_host_counts_once_in_a_forecast(alone, clock, ends):
    fill(alone, clock, ends, 8)
    alone[0].admit(alone[1], ends.request("next", clock, timeout_s=0.040))  # two runs of 10 ms, then its own
    with pytest.raises(DeadlineUnmeetable):
        alone[0].admit(alone[1], ends.request("late", clock, timeout_s=0.020))


def test_a_cancelled_request_is_refused_once_and_never_run(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled()
    request = ends.request("a", clock)
    dispatcher.admit(model, request)

    assert dispatcher.cancel(model, request) is True
    assert dispatcher.cancel(model, request) is False
    assert isinstance(ends["a"], Cancelled)
    assert take(dispatcher) == (None, [])


def test_a_running_request_cannot_be_cancelled(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled()
    request = ends.request("a", clock)
    dispatcher.admit(model, request)
    job, _ = take(dispatcher)

    assert dispatcher.cancel(model, request) is False
    run_job(job, dispatcher, clock)
    assert isinstance(ends["a"], Request)


def test_a_closed_model_admits_nothing_and_refuses_what_was_not_reached(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled()
    dispatcher.admit(model, ends.request("left", clock))

    assert dispatcher.close_model(model, timeout_s=0.0) is False

    assert isinstance(ends["left"], Draining)
    with pytest.raises(Draining):
        dispatcher.admit(model, ends.request("new", clock))


def arrival(clock, timeout_s):
    """A request of which only the head has come."""
    return Arrival(HeadPlan(timeout_s, priority=5, level=0), nbytes=4, sender="one", arrived_s=clock.monotonic_s())


def test_a_request_that_has_not_come_is_foreseen_as_it_would_be_refused_and_takes_no_place(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(run_s=0.010, concurrency=1)
    dispatcher.foresee(model, arrival(clock, timeout_s=0.100))
    for tag in range(7):
        dispatcher.admit(model, ends.request(tag, clock, timeout_s=0.100))

    with pytest.raises(DeadlineUnmeetable):
        dispatcher.foresee(model, arrival(clock, timeout_s=0.100))
    dispatcher.foresee(model, arrival(clock, timeout_s=math.inf))
    assert model.queue.rows == 7


def test_a_forecast_that_went_wrong_does_not_refuse_for_ever(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled(run_s=0.005)
    for _ in range(3):
        model.layout.run_times.observe(1, 0.040)
    refusals = 0
    for tag in range(200):
        try:
            dispatcher.admit(model, ends.request(tag, clock, timeout_s=0.010))
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


def test_a_model_whose_only_request_expires_as_its_turn_comes_leaves_the_table(clock, ends):
    dispatcher, model = Dispatcher(clock, cores=1), scheduled()
    dispatcher.admit(model, ends.request("late", clock, timeout_s=0.050))
    clock.advance(1.0)
    assert take(dispatcher) == (None, ["late"])
    assert dispatcher.is_idle()


def test_alarm_is_due_once_at_the_instant_that_was_set_last(clock):
    dispatcher, calls = Dispatcher(clock, cores=1), []

    def call():
        calls.append("now")

    dispatcher.set_alarm(call, clock.monotonic_s() + 1.0)
    dispatcher.set_alarm(call, clock.monotonic_s() + 2.0)
    assert dispatcher.due_alarms() == ([], clock.monotonic_s() + 2.0)
    clock.advance(2.0)

    assert dispatcher.due_alarms() == ([call], math.inf)
    assert dispatcher.due_alarms() == ([], math.inf)
