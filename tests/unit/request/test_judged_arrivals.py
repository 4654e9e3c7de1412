"""What is refused before a request is made of it: the same as `admit` would have refused, in each case."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.config.settings import QueuePolicies, QueuePolicy
from edge_runtime.errors import DeadlineUnmeetable, EdgeRuntimeError, QueueFull
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.level_queue import LevelQueue
from edge_runtime.request.policy import BatchLimits
from edge_runtime.request.queue import RequestQueue
from edge_runtime.request.request import Arrival
from edge_runtime.request.scheduled_model import LatencyModel, Layout, ScheduledModel
from edge_runtime.request.worker import refuse_expired
from tests.fakes.clock import FakeClock
from tests.fakes.requests import KeptReply, request_of
from tests.fakes.runs import FunctionRunner

SENDERS = ("a", "b", "c")
RULES = QueuePolicies(levels=2, default_level=2, default=QueuePolicy(max_requests=3))


class World:
    """Two models behind a dispatcher of one core. ends: how each request ended, by its number, and what it said."""

    def __init__(self, *, is_judged_first: bool) -> None:
        self.is_judged_first = is_judged_first
        self.clock = FakeClock()
        self.dispatcher = Dispatcher(self.clock, cores=1)
        self.models = [self._model("plain", RequestQueue()), self._model("levels", LevelQueue(RULES, 5))]
        self.jobs = []
        self.ends = {}

    def _model(self, name, queue):
        times = LatencyModel({1: 0.010, 4: 0.030})
        layout = Layout(FunctionRunner(lambda arrays: arrays), 1, 1, times)
        return ScheduledModel(name, layout, BatchLimits(max_rows=4), max_queue_rows=8, max_queue_bytes=100, queue=queue)

    def burst(self, at, senders, **fields):
        """Requests of one header that came together; as the frontend does, alike ones are judged once."""
        model, alike = self.models[at], {}
        for sender in senders:
            number = len(self.ends)
            self.ends[number] = "waits"
            request = request_of(
                [np.zeros((fields["rows"], 1), np.float32)], KeptReply(number, self._end),
                sender=sender, arrived_s=self.clock.monotonic_s(), **fields,
            )  # fmt: skip
            if self.is_judged_first:
                error, is_for_more = alike.get(sender) or self.dispatcher.judge(
                    model, Arrival(request.plan, request.nbytes, sender, request.arrived_s)
                )
                if error is not None:
                    if is_for_more:
                        alike[sender] = error, True
                    self._end(number, error)
                    continue
                alike.clear()
            try:
                self.dispatcher.admit(model, request)
            except EdgeRuntimeError as error:
                self._end(number, error)

    def _end(self, number, end):
        said = (type(end), end.message, end.retry_after_ms) if isinstance(end, EdgeRuntimeError) else "answered"
        self.ends[number] = said

    def begin(self):
        job, expired = self.dispatcher.next_job()
        refuse_expired(expired, self.clock)
        self.jobs += [job] if job is not None else []

    def finish(self):
        if self.jobs:
            job = self.jobs.pop()
            self.dispatcher.finish(job, 0.012 * job.rows)
            for request in job.unanswered():
                self._end(request.reply.tag, request)

    def blame(self, sender):
        """Have a sender's requests run alone from now on."""
        for model in self.models:
            model.culprits.add(sender, self.clock.monotonic_s())

    def queued(self):
        return [self.dispatcher.queued(model) for model in self.models]


BURSTS = st.tuples(
    st.just("burst"),
    st.integers(0, 1),
    st.lists(st.sampled_from(SENDERS), min_size=1, max_size=8),
    st.fixed_dictionaries(
        {
            "rows": st.integers(1, 4),
            "nbytes": st.sampled_from([4, 30]),
            "priority": st.integers(4, 6),
            "timeout_s": st.sampled_from([0.005, 0.030, 0.060, 0.2, math.inf]),
            "level": st.integers(1, 2),
        }
    ),
)
STEPS = st.lists(
    st.one_of(
        BURSTS,
        BURSTS,
        st.tuples(st.just("begin")),
        st.tuples(st.just("finish")),
        st.tuples(st.just("advance"), st.sampled_from([0.001, 0.015, 0.4])),
        st.tuples(st.just("blame"), st.sampled_from(SENDERS)),
    ),
    max_size=30,
)


@given(STEPS)
def test_judging_bursts_before_requests_are_made_changes_nothing_of_what_becomes_of_any(steps):
    worlds = [World(is_judged_first=is_first) for is_first in (False, True)]
    for name, *words in steps:
        for world in worlds:
            if name == "burst":
                at, senders, fields = words
                world.burst(at, senders, **fields)
            elif name == "advance":
                world.clock.advance(*words)
            else:
                getattr(world, name)(*words)
        admitted, judged = worlds
        assert judged.ends == admitted.ends
        assert judged.queued() == admitted.queued()


def filled(clock):
    """A dispatcher whose model has a run on and a full queue of one sender's requests without a deadline."""
    dispatcher = Dispatcher(clock, cores=1)
    layout = Layout(FunctionRunner(lambda arrays: arrays), 1, 1, LatencyModel({1: 0.010}))
    model = ScheduledModel("m", layout, max_queue_rows=4)
    for _ in range(5):
        dispatcher.admit(model, request_of([np.zeros((1, 1), np.float32)], sender="greedy"))
        if not model.running:
            dispatcher.next_job()
    return dispatcher, model


def arrival_of(clock, **fields):
    request = request_of([], arrived_s=clock.monotonic_s(), **fields)
    return Arrival(request.plan, request.nbytes, request.sender, request.arrived_s)


def test_a_refusal_for_a_deadline_holds_for_all_of_its_sender_and_takes_no_place():
    clock = FakeClock()
    dispatcher, model = filled(clock)
    error, is_for_more = dispatcher.judge(model, arrival_of(clock, sender="greedy", timeout_s=0.020))
    assert isinstance(error, DeadlineUnmeetable)
    assert is_for_more
    assert dispatcher.queued(model)[0] == 4


def test_a_full_queue_refuses_the_sender_that_fills_it_and_no_other():
    clock = FakeClock()
    dispatcher, model = filled(clock)
    error, _ = dispatcher.judge(model, arrival_of(clock, sender="greedy"))
    assert isinstance(error, QueueFull)
    assert dispatcher.judge(model, arrival_of(clock, sender="modest"))[0] is None, "one of the greedy gives way"


def test_an_idle_model_has_each_refusal_judged_by_itself_for_it_learns_from_each():
    clock = FakeClock()
    dispatcher = Dispatcher(clock, cores=1)
    times = LatencyModel({1: 0.005})
    for _ in range(3):
        times.observe(1, 0.040)
    model = ScheduledModel("m", Layout(FunctionRunner(lambda arrays: arrays), 1, 1, times))
    judged = []
    for _ in range(100):
        error, is_for_more = dispatcher.judge(model, arrival_of(clock, timeout_s=0.010))
        if error is None:
            break
        assert not is_for_more
        judged.append(error)
    assert 1 < len(judged) < 100


def test_of_a_closed_model_nothing_is_reported_for_another_version_may_take_it():
    clock = FakeClock()
    dispatcher, model = filled(clock)
    dispatcher.close_model(model, 0.0)
    assert dispatcher.judge(model, arrival_of(clock, sender="greedy", timeout_s=0.020)) == (None, False)
