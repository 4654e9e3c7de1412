"""What an allowance takes from runs: the share of low work, cores of all but urgent work, low priorities at last."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.config.settings import FIRST_PRIORITY, QueuePolicies
from edge_runtime.errors import DeadlineUnmeetable
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.level_queue import LevelQueue
from edge_runtime.request.policy import LONGEST_PAUSE_S, LOW_SAVED_S, Allowance, low_credit_s
from edge_runtime.request.request import CHECK
from edge_runtime.request.scheduled_model import LatencyModel, Layout, ScheduledModel
from tests.fakes.clock import FakeClock
from tests.fakes.requests import KeptReply, request_of

RUN_S = 0.1
LOW, NORMAL, URGENT = 8, 5, 1


class Site:
    """A dispatcher whose runs take their time by the clock."""

    def __init__(self, cores=2):
        self.clock = FakeClock()
        self.dispatcher = Dispatcher(self.clock, cores)
        self.dispatcher.count_work(6)
        self.running = []

    def model(self, name="m", *, places=2, threads=1, **options):
        return ScheduledModel(name, Layout(None, threads, places, LatencyModel({1: RUN_S})), **options)

    def ask(self, model, priority=LOW, timeout_s=math.inf):
        request = request_of(
            [], KeptReply(priority), priority=priority, arrived_s=self.clock.monotonic_s(), timeout_s=timeout_s
        )
        self.dispatcher.admit(model, request)

    def begin(self):
        """Begin all that may begin now; return their priorities."""
        begun = []
        while (job := self.dispatcher.next_job()[0]) is not None:
            self.running.append((self.clock.monotonic_s() + RUN_S, job))
            begun.append(job.batch[0].priority)
        return begun

    def run(self, seconds, step_s=0.01):
        """Let time pass; return how many began of each priority."""
        begun = self.begin()
        for _ in range(round(seconds / step_s)):
            self.clock.advance(step_s)
            for end in [each for each in self.running if each[0] <= self.clock.monotonic_s() + 1e-9]:
                self.running.remove(end)
                self.dispatcher.finish(end[1], RUN_S)
            self.dispatcher.expire()
            begun += self.begin()
        return {priority: begun.count(priority) for priority in set(begun)}


@settings(max_examples=100, deadline=None)
@given(credit_s=st.floats(-1e6, 10), elapsed_s=st.floats(0, 1e6), rate=st.floats(1e-3, 64))
def test_low_credit_is_bounded_both_ways(credit_s, elapsed_s, rate):
    after = low_credit_s(credit_s, elapsed_s, rate)
    assert -LONGEST_PAUSE_S * rate <= after <= LOW_SAVED_S * rate


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_low_work_has_its_share_of_the_time(share):
    site = Site()
    model = site.model()
    for _ in range(600):
        site.ask(model)
    site.dispatcher.allow(Allowance(2, 6, share))
    assert site.run(20.0)[LOW] == pytest.approx(20.0 / RUN_S * 2 * share, rel=0.08)


def test_work_that_is_not_low_runs_past_low_work_that_is_held_back():
    site = Site()
    model = site.model()
    site.dispatcher.allow(Allowance(2, 6, 0.01))
    for _ in range(20):
        site.ask(model)
    assert site.run(1.0).get(LOW, 0) <= 2
    site.ask(model, NORMAL)
    assert site.begin() == [NORMAL]


def test_a_model_that_may_slow_is_low_work_at_any_priority():
    site = Site()
    slow, other = site.model("slow", may_slow=True), site.model("other")
    site.dispatcher.allow(Allowance(2, 6, 0.01))
    for _ in range(20):
        site.ask(slow, URGENT)
    assert site.run(1.0)[URGENT] <= 2
    site.ask(other, NORMAL)
    assert site.begin() == [NORMAL]


def test_models_have_their_shares_by_themselves_so_that_a_gpu_of_two_places_is_slowed_too():
    site = Site(cores=12)
    model = site.model(places=2)
    for _ in range(200):
        site.ask(model)
    site.dispatcher.allow(Allowance(12, 6, 0.5))
    assert site.run(5.0)[LOW] == pytest.approx(50, rel=0.1)


def test_low_work_is_never_held_back_for_longer_than_a_pause():
    site = Site()
    model = site.model()
    site.dispatcher.allow(Allowance(2, 6, 1e-6))
    for _ in range(4):
        site.ask(model)
    assert site.run(2 * LONGEST_PAUSE_S + 1.0, step_s=0.1)[LOW] >= 2


def test_cores_bound_all_work_but_urgent():
    site = Site(cores=4)
    model = site.model(places=4)
    site.dispatcher.allow(Allowance(1, 6))
    for _ in range(4):
        site.ask(model, NORMAL)
    assert site.begin() == [NORMAL]
    site.ask(model, URGENT)
    assert site.begin() == [URGENT]
    site.dispatcher.allow(None)
    assert site.begin() == [NORMAL, NORMAL]


def test_no_core_for_a_moment_lets_urgent_work_alone_begin():
    site = Site()
    model = site.model()
    site.dispatcher.allow(Allowance(0, 6))
    site.ask(model, NORMAL)
    assert site.begin() == []
    site.ask(model, URGENT)
    assert site.begin() == [URGENT]
    site.dispatcher.allow(Allowance(2, 6))
    assert site.begin() == [NORMAL]


def test_a_run_on_more_cores_than_are_allowed_begins_when_all_are_free():
    site = Site(cores=4)
    model = site.model(threads=4, places=1)
    site.dispatcher.allow(Allowance(1, 6))
    site.ask(model, NORMAL)
    assert site.begin() == [NORMAL]


def test_forecast_of_low_work_knows_its_share():
    site = Site()
    model = site.model()
    for _ in range(10):
        site.ask(model, timeout_s=4.0)
    site.begin()
    site.ask(model, timeout_s=5.0)
    site.dispatcher.allow(Allowance(2, 6, 0.05))
    with pytest.raises(DeadlineUnmeetable):
        site.ask(model, timeout_s=5.0)
    site.ask(model, URGENT, timeout_s=0.5)


def test_the_daemon_s_own_question_is_not_held_back_with_low_work():
    site = Site()
    model = site.model()
    site.dispatcher.allow(Allowance(0, 6, 0.01))
    request = request_of([], KeptReply(), priority=9, arrived_s=site.clock.monotonic_s())
    request.origin = CHECK
    site.dispatcher.admit(model, request)
    assert site.begin() == [FIRST_PRIORITY]


def test_low_priorities_are_refused_with_the_time_to_ask_again():
    site = Site()
    site.dispatcher.allow(Allowance(2, 6, 0.1, refuses_low=True, retry_s=10.0))
    refusal = site.dispatcher.refusal_of_low(6)
    assert (refusal.code, refusal.retry_after_ms) == ("queue_full", 10_000.0)
    assert site.dispatcher.refusal_of_low(5) is None
    site.dispatcher.allow(None)
    assert site.dispatcher.refusal_of_low(9) is None


def test_a_queue_by_triton_s_rules_is_held_back_as_a_whole():
    site = Site()
    queue = LevelQueue(QueuePolicies(), LOW)
    model = site.model(queue=queue)
    site.dispatcher.allow(Allowance(2, 6, 0.01))
    for _ in range(10):
        request = request_of([], KeptReply(), priority=LOW, arrived_s=site.clock.monotonic_s())
        site.dispatcher.admit(model, request)
    assert site.run(1.0).get(LOW, 0) <= 2


def test_work_is_counted_by_its_kind():
    site = Site()
    low, normal = site.model("low"), site.model("normal")
    site.ask(low)
    site.ask(normal, NORMAL)
    site.run(0.2)
    assert site.dispatcher.taken_s == pytest.approx(2 * RUN_S)
    assert site.dispatcher.low_s == pytest.approx(RUN_S)


def test_a_refusal_that_slowing_alone_causes_leaves_the_forecast_of_runs_as_it_is():
    site = Site()
    times = LatencyModel({1: RUN_S / 10})
    for _ in range(50):
        times.observe(1, RUN_S)
    model = ScheduledModel("m", Layout(None, 1, 2, times))
    site.dispatcher.allow(Allowance(2, 6, 0.01))
    site.ask(model)
    site.run(2 * RUN_S)  # its share is used up, and nothing runs
    before_s = model.layout.run_times.predict_s(1)
    for _ in range(5):
        with pytest.raises(DeadlineUnmeetable):
            site.ask(model, timeout_s=5 * RUN_S)
    assert model.layout.run_times.predict_s(1) == before_s
    with pytest.raises(DeadlineUnmeetable):
        site.ask(model, timeout_s=RUN_S)  # late by its run alone
    assert model.layout.run_times.predict_s(1) < before_s


def test_runs_of_a_slowed_device_teach_forecasts_only_until_it_is_cool():
    site = Site()
    model = site.model()
    own_s = model.layout.run_times.predict_s(1)

    def run_once():
        site.ask(model, URGENT)
        job, _ = site.dispatcher.next_job()
        site.dispatcher.finish(job, 2 * RUN_S)

    for _ in range(2):  # twice hot
        site.dispatcher.allow(Allowance(2, 6, 0.5))
        for _ in range(10):
            run_once()
        slowed_s = model.layout.run_times.predict_s(1)
        assert slowed_s > 1.5 * own_s
        site.dispatcher.allow(Allowance(1, 6, 0.5))
        assert model.layout.run_times.predict_s(1) == slowed_s
        site.dispatcher.allow(None)
        assert model.layout.run_times.predict_s(1) == own_s
    run_once()
    assert model.layout.run_times.predict_s(1) > own_s


def test_a_curve_that_is_measured_anew_stays_when_the_device_has_cooled():
    site = Site()
    model = site.model()
    site.dispatcher.allow(Allowance(2, 6, 0.5))
    site.dispatcher.teach_apart(model)
    model.layout.measured({1: 3 * RUN_S})
    site.dispatcher.allow(None)
    assert model.layout.run_times.mean_s(1) == 3 * RUN_S


def test_a_model_that_is_closed_answers_its_low_work_without_being_held_back():
    site = Site()
    model = site.model()
    site.dispatcher.allow(Allowance(2, 6, 0.01))
    for _ in range(20):
        site.ask(model)
    assert site.run(1.0).get(LOW, 0) <= 2
    model.is_open = False
    assert site.run(2.0)[LOW] >= 18


def test_pipelines_know_how_long_low_work_of_their_steps_is_held_back():
    site = Site()
    model, chain = site.model(), site.model("chain", places=0)
    request = request_of([], KeptReply(), priority=LOW)
    site.dispatcher.allow(Allowance(2, 6, 0.01))
    site.ask(model)
    site.run(2 * RUN_S)
    _, _, (waits_s,) = site.dispatcher.chain_load(chain, [model], request)
    assert waits_s > 10 * RUN_S
    site.dispatcher.allow(None)
    assert site.dispatcher.chain_load(chain, [model], request)[2] == [0.0]


def test_work_that_nothing_slows_calls_nothing_for_it():
    site = Site()
    site.dispatcher = Dispatcher(site.clock, 2)
    model, called = site.model(), set()

    def note(frame, event, _):
        if event == "call":
            called.add(frame.f_code.co_name)

    def follow():
        called.clear()
        sys.setprofile(note)
        site.ask(model, URGENT, timeout_s=60.0)
        site.run(RUN_S)
        sys.setprofile(None)
        return called & {
            "_held_from",
            "_runs_below",
            "_held_s",
            "_slowed_s",
            "_count_work",
            "_take_low",
            "_teach_apart",
        }

    assert not follow()
    assert "next_job" in called
    site.dispatcher.allow(Allowance(2, 6, 0.5))
    assert "_held_from" in follow()
