"""Requests whose host ended, or whose run was ended: who is blamed, who runs again, who waits."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.clock import SystemClock
from edge_runtime.errors import DeadlineExceeded, DeadlineUnmeetable, HostEnded, NotReady, Refused, RunTooLong
from edge_runtime.request.dispatcher import UNDISTURBED_S, Dispatcher
from edge_runtime.request.policy import ALONE, BatchLimits
from edge_runtime.request.request import Request
from edge_runtime.request.scheduled_model import (
    LEAST_LIMIT_S,
    LIMIT_RUNS,
    UNKNOWN_LIMIT_S,
    LatencyModel,
    Layout,
    ScheduledModel,
)
from edge_runtime.request.senders import ALONE_S, FIRST_WAIT_S, LONGEST_WAIT_S
from edge_runtime.request.worker import LOST_RUNS, WorkerPool, refuse_expired, run_job
from tests.fakes.clock import FakeClock
from tests.fakes.hosted import CRASH, ENDLESS, KILLED, FakeHost
from tests.fakes.requests import KeptReply, request_of


class Kit:
    """A dispatcher with models in fake hosts, 10 ms a run, and how each request ended, by tag."""

    def __init__(self, *, cores=2, max_rows=4, clock=None, host=None, **options):
        self.clock = clock or FakeClock()
        self.dispatcher = Dispatcher(self.clock, cores)
        self.host = host or FakeHost()
        self.model = self.model_in(self.host, "m", max_rows, **options)
        self.ends: dict[object, list[object]] = {}

    def model_in(self, host, name, max_rows=1, concurrency=2, ahead=0, **options):
        times = LatencyModel({1: 0.010, 4: 0.015})
        layout = Layout(host, 1, concurrency, times, run_limit_s=None, ahead=ahead)
        return ScheduledModel(name, layout, BatchLimits(max_rows=max_rows), **options)

    def admit(self, tag, value=1.0, *, model=None, sender="polite", timeout_s=math.inf, priority=5):
        request = request_of(
            [np.full((1, 1), value, np.float32)], KeptReply(tag, self._told), sender=sender, timeout_s=timeout_s,
            arrived_s=self.clock.monotonic_s(), priority=priority,
        )  # fmt: skip
        self.dispatcher.admit(model or self.model, request)
        self.ends[tag] = []

    def _told(self, tag, end):
        self.ends[tag].append(end)

    def start(self):
        job, expired = self.dispatcher.next_job()
        refuse_expired(expired, self.clock)
        return job

    def run(self, job):
        """Run a job; a host that ended is back at once."""
        if run_job(job, self.dispatcher, self.clock):
            job.layout.runner.restore()
            self.dispatcher.mark_up(job.layout)

    def run_all(self):
        while (job := self.start()) is not None:
            self.run(job)

    def kinds(self):
        assert all(len(ends) == 1 for ends in self.ends.values()), self.ends
        return {tag: type(ends[0]) for tag, ends in self.ends.items()}


class KeptRuns:
    """Keeps the jobs that are to be begun."""

    def __init__(self):
        self.jobs = []

    def begin(self, job):
        self.jobs.append(job)

    def drive(self):
        pass


class SlowRun:
    """A run that was begun and is over its limit."""

    def left_s(self):
        return 0.0

    def give_up(self):
        pass


def test_the_limit_of_a_run_is_looked_at_though_the_timer_looked_while_it_was_being_begun():
    kit = Kit()
    kit.dispatcher.runs = runs = KeptRuns()
    kit.model.layout.begins = True
    kit.admit("slow")
    (job,) = runs.jobs
    expired, wake_at_s = kit.dispatcher.expire()
    assert (expired, wake_at_s) == ([], kit.clock.monotonic_s() + job.limit_s)
    assert job.limit_s == LEAST_LIMIT_S
    job.run = run = SlowRun()
    assert kit.dispatcher.take_overdue() == [run]


def test_the_culprit_alone_fails_with_the_signals_name_and_its_batch_is_answered():
    kit = Kit()
    for tag, value in (("good", 1.0), ("bad", CRASH), ("fine", 3.0), ("also", 4.0), ("waits", 5.0)):
        kit.admit(tag, value, sender=tag)
    kit.run_all()

    assert kit.kinds() == {"good": Request, "bad": HostEnded, "fine": Request, "also": Request, "waits": Request}
    assert kit.ends["bad"][0].code == "run_failed"
    assert "SIGSEGV" in kit.ends["bad"][0].message
    assert kit.ends["fine"][0].outputs[0].tolist() == [[6.0]]
    assert kit.host.runs[0][0] == [1.0, CRASH, 3.0, 4.0]
    assert sorted((values, alone) for values, _, alone in kit.host.runs[1:]) == [
        ([CRASH], True), ([1.0], True), ([3.0], True), ([4.0], True), ([5.0], False),
    ]  # fmt: skip
    assert kit.dispatcher.is_idle()


def test_while_its_host_is_down_a_model_waits_and_the_others_have_the_cores():
    kit = Kit(cores=1)
    other = kit.model_in(FakeHost(), "other")
    kit.admit("bad", CRASH)
    assert run_job(kit.start(), kit.dispatcher, kit.clock) is True
    kit.admit("waits", sender="someone")
    kit.admit("elsewhere", model=other)

    job = kit.start()
    assert job.model is other
    kit.run(job)
    assert kit.start() is None
    kit.dispatcher.mark_up(kit.model.layout)
    kit.run_all()

    assert kit.kinds() == {"bad": HostEnded, "waits": Request, "elsewhere": Request}


def test_two_batches_in_one_host_that_dies_and_the_innocent_one_is_never_blamed():
    kit = Kit(max_rows=1)
    kit.host.was_alone = False
    kit.admit("bad", CRASH, sender="greedy")
    kit.admit("good", 1.0)
    first, second = kit.start(), kit.start()
    run_job(first, kit.dispatcher, kit.clock)
    kit.host.meanwhile = lambda: (_ for _ in ()).throw(HostEnded("too", signal_name="SIGSEGV", was_alone=False))
    run_job(second, kit.dispatcher, kit.clock)
    assert kit.ends == {"bad": [], "good": []}

    kit.host.meanwhile, kit.host.was_alone = (lambda: None), True
    kit.dispatcher.mark_up(kit.model.layout)
    kit.run_all()

    assert kit.kinds() == {"bad": HostEnded, "good": Request}


def test_a_run_that_waits_in_a_host_that_dies_is_run_again_and_never_blamed():
    kit = Kit(cores=1, max_rows=1, concurrency=1, ahead=1)
    kit.admit("before")
    kit.run_all()
    kit.clock.advance(UNDISTURBED_S)
    kit.host.was_alone = False
    kit.admit("bad", CRASH, sender="greedy")
    kit.admit("good", sender="polite")
    first, second = kit.start(), kit.start()
    assert (first.is_ahead, second.is_ahead) == (False, True)
    run_job(first, kit.dispatcher, kit.clock)
    kit.host.meanwhile = lambda: (_ for _ in ()).throw(HostEnded("too", signal_name="SIGSEGV", was_alone=False))
    run_job(second, kit.dispatcher, kit.clock)
    assert kit.ends["bad"] == kit.ends["good"] == []

    kit.host.meanwhile, kit.host.was_alone = (lambda: None), True
    kit.dispatcher.mark_up(kit.model.layout)
    assert kit.start().batch[0].shape is ALONE
    assert kit.start() is None


def test_the_limit_of_a_run_that_waits_in_its_host_counts_from_the_one_before():
    kit = Kit(cores=1, max_rows=1, concurrency=1, ahead=1)
    kit.admit("before")
    kit.run_all()
    kit.clock.advance(UNDISTURBED_S)
    for tag in ("first", "second"):
        kit.admit(tag)
    kit.start()
    assert kit.start().limit_s == 2 * LEAST_LIMIT_S


def test_a_request_on_trial_has_its_host_for_itself_and_other_models_run_beside_it():
    kit = Kit(cores=3, max_rows=1)
    other = kit.model_in(FakeHost(), "other")
    kit.admit("bad", CRASH)
    kit.run(kit.start())
    kit.admit("next", sender="someone")
    kit.admit("elsewhere", model=other)

    alone, beside = kit.start(), kit.start()
    assert (alone.batch[0].reply.tag, beside.model) == ("bad", other)
    assert kit.start() is None
    kit.run(alone)
    assert kit.start().batch[0].reply.tag == "next"


def test_a_request_on_trial_waits_for_the_models_other_runs():
    kit = Kit(cores=2, max_rows=1)
    kit.admit("bad", CRASH)
    kit.admit("long", sender="someone")
    first, long = kit.start(), kit.start()
    kit.run(first)
    kit.admit("later", sender="someone")

    assert kit.start() is None
    kit.run(long)
    assert kit.start().batch[0].reply.tag == "bad"


def test_a_culprits_requests_run_alone_for_a_minute_and_then_join_batches_again():
    kit = Kit()
    kit.admit("bad", CRASH, sender="greedy")
    kit.run_all()
    kit.clock.advance(FIRST_WAIT_S)
    for tag, sender in (("a", "greedy"), ("b", "polite"), ("c", "greedy"), ("d", "polite")):
        kit.admit(tag, sender=sender)
    del kit.host.runs[:]
    kit.run_all()
    assert sorted((len(values), alone) for values, _, alone in kit.host.runs) == [(1, True), (1, True), (2, False)]

    kit.clock.advance(ALONE_S)
    kit.admit("e", sender="greedy")
    kit.admit("f", sender="polite")
    del kit.host.runs[:]
    kit.run_all()
    assert [(len(values), alone) for values, _, alone in kit.host.runs] == [(2, False)]


def test_requests_that_a_culprit_has_in_the_queue_run_alone_too():
    kit = Kit(max_rows=1)
    kit.admit("bad", CRASH, sender="greedy")
    kit.run(kit.start())
    for tag in range(3):
        kit.admit(tag, sender="greedy")
    kit.run(kit.start())
    assert isinstance(kit.ends["bad"][0], HostEnded)

    assert kit.start() is None
    kit.clock.advance(FIRST_WAIT_S)
    assert kit.start() is not None
    assert kit.start() is None, "one at a time"


def test_only_the_culprit_waits_and_longer_after_each_death():
    kit = Kit()
    waits_s = []
    for attempt in range(10):
        kit.admit(attempt, CRASH, sender="greedy")
        kit.admit(("polite", attempt))
        kit.run_all()
        assert len(kit.ends["polite", attempt]) == 1
        began_s = kit.clock.monotonic_s()
        while not kit.ends[attempt]:
            _, wake_at_s = kit.dispatcher.expire()
            kit.clock.advance(max(wake_at_s - kit.clock.monotonic_s(), 0.0))
            kit.run_all()
        waits_s.append(kit.clock.monotonic_s() - began_s)

    assert waits_s == pytest.approx([0.0, *(min(FIRST_WAIT_S * 2**each, LONGEST_WAIT_S) for each in range(9))])


def test_a_culprit_that_must_wait_longer_than_its_deadline_is_refused_at_once():
    kit = Kit()
    kit.admit("bad", CRASH, sender="greedy")
    kit.run_all()

    with pytest.raises(DeadlineUnmeetable):
        kit.admit("hasty", sender="greedy", timeout_s=FIRST_WAIT_S / 2)
    kit.admit("polite", timeout_s=FIRST_WAIT_S / 2)


def test_a_signal_from_outside_counts_for_nothing():
    kit = Kit(host=FakeHost(kills=3))
    kit.admit("unlucky", KILLED)
    kit.admit("good", 1.0)
    kit.run_all()

    assert kit.kinds() == {"unlucky": Request, "good": Request}
    assert [alone for _, _, alone in kit.host.runs] == [False] * 4
    kit.admit("again", sender="polite")
    assert kit.start() is not None


def test_a_request_whose_host_is_always_killed_fails_in_the_end():
    kit = Kit(host=FakeHost(kills=1000))
    kit.admit("unlucky", KILLED)
    kit.run_all()

    assert kit.kinds() == {"unlucky": HostEnded}
    assert len(kit.host.runs) == LOST_RUNS + 1


def test_where_nothing_may_run_again_the_batch_fails():
    kit = Kit(may_rerun=False)
    for tag, value in (("good", 1.0), ("bad", CRASH)):
        kit.admit(tag, value)
    kit.admit("waits", sender="someone")
    job = kit.start()
    assert len(job.batch) == 3
    kit.admit("later", sender="someone")
    kit.run(job)
    kit.run_all()

    assert kit.kinds() == {"good": HostEnded, "bad": HostEnded, "waits": HostEnded, "later": Request}
    assert len(kit.host.runs) == 2


def test_a_request_keeps_its_deadline_and_is_answered_at_it_while_its_host_is_away():
    kit = Kit()
    kit.admit("bad", CRASH)
    kit.admit("good", timeout_s=0.200)
    run_job(kit.start(), kit.dispatcher, kit.clock)
    _, wake_at_s = kit.dispatcher.expire()

    kit.clock.advance(wake_at_s + 0.001 - kit.clock.monotonic_s())
    expired, _ = kit.dispatcher.expire()
    refuse_expired(expired, kit.clock)

    assert isinstance(kit.ends["good"][0], DeadlineExceeded)
    assert kit.ends["bad"] == []


def test_lost_requests_go_first_again_and_the_urgent_one_before_the_others():
    kit = Kit(cores=1, max_rows=4)
    kit.admit("first", CRASH, sender="a")
    kit.admit("second", sender="b")
    job = kit.start()
    kit.clock.advance(0.001)
    kit.admit("later", sender="a")
    kit.admit("urgent", sender="c", priority=1)
    kit.run(job)

    order = []
    while (job := kit.start()) is not None:
        order.append(job.batch[0].reply.tag)
        kit.run(job)
    assert order.index("urgent") == 0
    assert set(order[1:3]) == {"first", "second"}


def test_a_run_over_its_limit_is_the_culprits_who_is_not_run_again():
    kit = Kit(max_rows=1)
    kit.admit("endless", ENDLESS, sender="greedy")
    kit.admit("good")
    kit.run_all()

    assert kit.kinds() == {"endless": RunTooLong, "good": Request}
    assert len(kit.host.runs) == 2
    assert kit.host.restores == 0
    kit.admit("next", sender="greedy")
    assert kit.start() is None, "a culprit waits"


def test_a_batch_over_its_limit_runs_again_one_by_one():
    kit = Kit()
    for tag, value in (("good", 1.0), ("endless", ENDLESS), ("fine", 2.0)):
        kit.admit(tag, value, sender=tag)
    kit.run_all()

    assert kit.kinds() == {"good": Request, "endless": RunTooLong, "fine": Request}


@pytest.mark.parametrize(
    ("limit_s", "times", "warm_row_bytes", "rows", "nbytes", "wanted_s"),
    [
        (0.3, {1: 9.0}, 0, 1, 4, 0.3),
        (math.inf, {1: 9.0}, 0, 1, 4, math.inf),
        (None, {}, 0, 1, 4, UNKNOWN_LIMIT_S),
        (None, {1: 0.010}, 0, 1, 4, LEAST_LIMIT_S),
        (None, {1: 1.0}, 0, 1, 4, LIMIT_RUNS * LatencyModel({1: 1.0}).predict_s(1)),
        (None, {1: 1.0}, 8, 2, 16, LIMIT_RUNS * LatencyModel({1: 1.0}).predict_s(2)),
        (None, {1: 1.0}, 8, 2, 160, 10 * LIMIT_RUNS * LatencyModel({1: 1.0}).predict_s(2)),
    ],
)
def test_a_runs_limit_comes_from_the_curve_and_is_a_second_at_least(
    limit_s, times, warm_row_bytes, rows, nbytes, wanted_s
):
    layout = Layout(FakeHost(), run_times=LatencyModel(times), run_limit_s=limit_s, warm_row_bytes=warm_row_bytes)
    assert layout.limit_s(rows, nbytes) == pytest.approx(wanted_s)


def test_runs_with_pictures_have_a_longer_least_limit_since_pictures_differ_more_than_tensors():
    layout = Layout(FakeHost(), run_times=LatencyModel({1: 0.010}), run_limit_s=None, least_limit_s=15.0)
    assert layout.limit_s(1, 0) == 15.0
    layout.run_limit_s = 0.5
    assert layout.limit_s(1, 0) == 0.5


def test_each_run_gets_its_limit():
    kit = Kit()
    kit.admit("a")
    kit.run_all()

    assert kit.host.runs == [([1.0], LEAST_LIMIT_S, False)]


def test_workers_serve_other_models_while_a_host_is_restored_on_a_thread_of_its_own():
    kit = Kit(cores=1, clock=SystemClock())
    told = threading.Semaphore(0)
    kit._told = lambda tag, end: (kit.ends[tag].append(end), told.release())
    other = kit.model_in(FakeHost(), "other")
    kit.host.may_restore.clear()
    pool = WorkerPool(kit.dispatcher, kit.clock)
    kit.admit("bad", CRASH, sender="greedy")
    kit.admit("good")
    kit.admit("elsewhere", model=other)
    pool.start()
    try:
        assert told.acquire(timeout=60)
        assert [tag for tag, ends in kit.ends.items() if ends] == ["elsewhere"]
        kit.host.may_restore.set()
        assert told.acquire(timeout=60)
        assert told.acquire(timeout=60)
    finally:
        kit.host.may_restore.set()
        kit.dispatcher.close_model(kit.model, 0.0)
        assert pool.close()
    assert kit.kinds() == {"bad": HostEnded, "good": Request, "elsewhere": Request}


def test_a_model_whose_host_cannot_be_restored_refuses_what_waits():
    kit = Kit(cores=1, clock=SystemClock())
    told = threading.Event()
    kit._told = lambda tag, end: (kit.ends[tag].append(end), told.set())
    kit.host.is_beyond_repair = True
    pool = WorkerPool(kit.dispatcher, kit.clock)
    kit.admit("bad", CRASH)
    pool.start()
    try:
        assert told.wait(60)
    finally:
        assert pool.close()
    assert kit.kinds() == {"bad": NotReady}
    assert "died three times" in kit.ends["bad"][0].message


VALUES = st.sampled_from([1.0, 2.0, CRASH, ENDLESS, KILLED])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), VALUES, st.sampled_from("abc"), st.sampled_from([0.050, 1.0, math.inf])),
        st.tuples(st.just("start")),
        st.tuples(st.just("finish"), st.integers(0, 2)),
        st.tuples(st.just("restore")),
        st.tuples(st.just("advance"), st.sampled_from([0.001, 0.060, 0.500])),
        st.tuples(st.just("expire")),
    ),
    max_size=40,
)


@given(ACTIONS, st.sampled_from([0, 2]))
def test_each_request_ends_once_whatever_its_host_does_and_none_but_culprits_fail(actions, ahead):
    kit = Kit(host=FakeHost(kills=3), ahead=ahead)
    jobs, values = [], {}
    kit.admit("before")
    kit.run_all()
    del kit.ends["before"]
    kit.clock.advance(UNDISTURBED_S)
    for name, *what in actions:
        if name == "admit":
            tag = len(values)
            try:
                kit.admit(tag, what[0], sender=what[1], timeout_s=what[2])
                values[tag] = what[0]
            except Refused:
                continue
        elif name == "start" and (job := kit.start()) is not None:
            jobs.append(job)
        elif name == "finish" and jobs:
            run_job(jobs.pop(what[0] % len(jobs)), kit.dispatcher, kit.clock)
        elif name == "restore":
            kit.dispatcher.mark_up(kit.model.layout)
        elif name == "advance":
            kit.clock.advance(what[0])
        elif name == "expire":
            refuse_expired(kit.dispatcher.expire()[0], kit.clock)
    for job in jobs:
        run_job(job, kit.dispatcher, kit.clock)
    kit.dispatcher.mark_up(kit.model.layout)
    for _ in range(60):
        kit.run_all()
        kit.clock.advance(LONGEST_WAIT_S)
        refuse_expired(kit.dispatcher.expire()[0], kit.clock)

    kinds = kit.kinds()
    assert len(kinds) == len(values)
    for tag, kind in kinds.items():
        if kind in {HostEnded, RunTooLong}:
            assert values[tag] in {CRASH, ENDLESS}
    assert kit.dispatcher.is_idle()
