"""Sequences through the dispatcher and the states of a host, in one thread: each equals its own history, or is told."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import EdgeRuntimeError, HostEnded, QueueFull, RunFailed, SequenceLost
from edge_runtime.kept_state import SequenceOptions, SequenceSettings, StateTensor
from edge_runtime.messages import SequenceStep
from edge_runtime.model_spec import DYNAMIC, ROW_INPUT, KeptSequences, ModelSpec, TensorSpec
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.policy import BatchLimits
from edge_runtime.request.request import CHECK
from edge_runtime.request.scheduled_model import LatencyModel, Layout, ScheduledModel
from edge_runtime.request.worker import refuse_expired, run_job
from edge_runtime.sequences.live import LiveSequences
from edge_runtime.sequences.states import stateful
from tests.fakes.clock import FakeClock
from tests.fakes.requests import KeptReply, request_of
from tests.fakes.runs import FunctionRunner

BAD = 666.0
"""A value with which the model fails."""

IDLE_S = 10.0


class Sum:
    """x, s -> y, t: both s + x. Fails on BAD."""

    def __init__(self) -> None:
        column = ("FP32", (DYNAMIC, 1))
        self.spec = ModelSpec(
            (TensorSpec("x", *column), TensorSpec("s", *column)), (TensorSpec("y", *column), TensorSpec("t", *column))
        )
        self.backend, self.device, self.precision, self.concurrency, self.memory_bytes = "sum", "CPU", "f32", 2, 0

    def run(self, inputs, outputs=None):
        if (inputs["x"] == BAD).any():
            raise RunFailed("a bad value")
        total = inputs["s"] + inputs["x"]
        return [total, total]


def stateful_sum(slots=4):
    settings = SequenceSettings(state=(StateTensor("s", "t"),), max_sequences=slots)
    return stateful(Sum(), SequenceOptions(settings))


class Site:
    """A dispatcher with one model that keeps sums, whose host may end."""

    def __init__(self, slots=4, most=3, idle_s=IDLE_S):
        self.clock = FakeClock()
        self.host = SimpleNamespace(lives=0)
        self.dispatcher = Dispatcher(self.clock, cores=2)
        self.slots = slots
        self.instance = stateful_sum(slots)
        self.ends_host = False
        layout = Layout(FunctionRunner(self._run), 1, 2, LatencyModel({1: 0.01}))
        self.model = ScheduledModel("m", layout, BatchLimits(max_rows=most), has_lines=True)
        self.table = LiveSequences("m", KeptSequences(slots), idle_s, self.host, self.clock)
        self.jobs = []
        self.ends = {}
        self.requests = []

    def _run(self, arrays):
        if self.ends_host:
            self.ends_host = False
            self.instance = stateful_sum(self.slots)
            self.host.lives += 1
            raise HostEnded("it died", is_outside=True)
        return self.instance.run({"x": arrays[0], ROW_INPUT: arrays[1]})

    def ask(self, value, sequence=1, *, start=False, end=False, timeout_s=np.inf):
        tag = len(self.requests)
        inputs = [np.full((1, 1), value, np.float32)]
        reply = KeptReply(tag, self.ends.__setitem__)
        request = request_of(inputs, reply, arrived_s=self.clock.monotonic_s(), timeout_s=timeout_s, sender=tag % 3)
        request.sequence = SequenceStep(sequence, start, end)
        self.requests.append((request, value, request.sequence))
        try:
            self.table.enter(request)
            try:
                self.dispatcher.admit(self.model, request)
            except EdgeRuntimeError:
                self.table.leave(request)
                raise
        except EdgeRuntimeError as error:
            request.refuse(error)
        return tag

    def begin(self):
        job, expired = self.dispatcher.next_job()
        refuse_expired(expired, self.clock)
        if job is not None:
            running = [request for each in (*self.jobs, job) for request in each.batch]
            ids = [request.sequence.id for request in running if request.sequence is not None]
            assert len(ids) == len(set(ids)), "two runs of one sequence are on"
            self.jobs.append(job)
        return job is not None or bool(expired)

    def finish(self):
        if self.jobs:
            job = self.jobs.pop(0)
            if run_job(job, self.dispatcher, self.clock):
                self.dispatcher.mark_up(job.layout)

    def expire(self):
        expired, _ = self.dispatcher.expire()
        refuse_expired(expired, self.clock)

    def run_all(self):
        while self.begin() or self.jobs:
            while self.begin():
                pass
            self.finish()

    def value(self, tag):
        end = self.ends[tag]
        return end if isinstance(end, EdgeRuntimeError) else float(end.outputs[0][0, 0])


@pytest.fixture
def site():
    return Site()


def test_the_daemons_own_check_takes_no_room_and_runs_with_no_other(site):
    for sequence in range(4):
        site.ask(1, sequence + 1, start=True)
    site.run_all()
    check = request_of([np.full((1, 1), 5, np.float32)], KeptReply("check", site.ends.__setitem__))
    check.origin = CHECK
    site.table.enter(check)
    site.dispatcher.admit(site.model, check)
    tag = site.ask(2, 1)
    site.begin()
    assert len(site.jobs[0].batch) == 1
    site.run_all()
    assert (site.value("check"), site.value(tag)) == (5, 3)


def test_a_batch_has_one_request_of_each_sequence_in_order_of_arrival(site):
    tags = [site.ask(1, sequence, start=turn == 0) for turn in range(3) for sequence in (1, 2, 3)]
    site.begin()
    (job,) = site.jobs
    assert [request.sequence.id for request in job.batch] == [1, 2, 3]
    site.run_all()
    assert [site.value(tag) for tag in tags] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_request_with_an_earlier_deadline_does_not_pass_one_before_it(site):
    first = site.ask(1, start=True)
    second = site.ask(2, timeout_s=5.0)
    site.run_all()
    assert (site.value(first), site.value(second)) == (1, 3)


def test_an_answer_that_comes_too_late_counts_as_if_it_had_not_come(site):
    site.ask(1, start=True)
    site.run_all()
    late = site.ask(10, timeout_s=1.0)
    site.begin()
    site.clock.advance(2.0)
    site.expire()
    again = site.ask(10)
    site.run_all()
    assert site.value(late).code == "deadline_exceeded"
    assert site.value(again) == 11


def test_a_run_that_fails_leaves_the_states_of_all_its_rows(site):
    tags = [site.ask(sequence, sequence, start=True) for sequence in (1, 2, 3)]
    site.run_all()
    tags = [site.ask(10, 1), site.ask(BAD, 2), site.ask(10, 3)]
    site.run_all()
    assert site.value(tags[1]).code == "run_failed"
    assert [site.value(tags[0]), site.value(tags[2])] == [11, 13]
    assert site.value((site.ask(10, 2), site.run_all())[0]) == 12


def test_an_idle_sequence_is_lost_and_told(site):
    site.ask(1, start=True)
    site.run_all()
    site.clock.advance(IDLE_S + 1)
    assert site.value(site.ask(1)).code == "sequence_lost"


def test_idle_sequences_make_room_for_a_start(site):
    for sequence in range(4):
        site.ask(1, 10 + sequence, start=True)
        site.run_all()
        site.clock.advance(1)
    refused = site.value(site.ask(1, 99, start=True))
    assert isinstance(refused, QueueFull)
    assert refused.retry_after_ms == pytest.approx((IDLE_S - 4) * 1e3)
    site.clock.advance(IDLE_S - 3.5)
    tag = site.ask(1, 99, start=True)
    site.run_all()
    assert site.value(tag) == 1
    assert len(site.table) == 4


def test_a_request_that_follows_an_expired_start_is_told_that_its_sequence_is_lost(site):
    start = site.ask(1, start=True, timeout_s=1.0)
    middle = site.ask(2)
    site.clock.advance(2.0)
    site.expire()
    site.run_all()
    assert site.value(start).code == "deadline_exceeded"
    assert site.value(middle).code == "sequence_lost"


def test_a_refused_restart_leaves_the_sequence_that_it_would_have_replaced(site):
    site.ask(1, start=True)
    site.run_all()
    site.ask(5, start=True, timeout_s=1.0)
    site.clock.advance(2.0)
    site.expire()
    tag = site.ask(2)
    site.run_all()
    assert site.value(tag) == 3


def test_a_failed_start_has_begun_and_a_failed_end_has_ended(site):
    site.ask(BAD, start=True)
    site.run_all()
    tag = site.ask(2)
    site.run_all()
    assert site.value(tag) == 2
    site.ask(BAD, end=True)
    site.run_all()
    assert site.value(site.ask(3)).code == "sequence_lost"


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"), st.integers(1, 3), st.sampled_from(["start", "end", "both", "", "", ""]),
            st.sampled_from([1.0, 2.0, 4.0, BAD]), st.sampled_from([np.inf, np.inf, 1.0, 5.0]),
        ),
        st.sampled_from(["begin", "finish", "finish", "expire", "cancel", "die", "wait", "sleep"]),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(STEPS)
def test_each_sequence_equals_its_own_history_whatever_happens(steps):
    site = Site()
    for step in steps:
        if step == "begin":
            site.begin()
        elif step == "finish":
            site.finish()
        elif step == "expire":
            site.expire()
        elif step == "cancel":
            waiting = [request for request, *_ in site.requests if request.share is not None]
            if waiting:
                site.dispatcher.cancel(site.model, waiting[len(waiting) // 2])
        elif step == "die":
            site.ends_host = bool(site.jobs)
        elif step in ("wait", "sleep"):
            site.clock.advance(0.7 if step == "wait" else IDLE_S * 1.1)
        else:
            _, sequence, mark, value, timeout_s = step
            site.ask(value, sequence, start=mark in ("start", "both"), end=mark in ("end", "both"), timeout_s=timeout_s)
    site.run_all()
    assert site.dispatcher.is_idle()
    check_histories(site)


def test_ten_thousand_steps_of_fifty_sequences_with_idles_and_deaths_equal_their_histories():
    """Idles by an injected clock: some sequences pause for longer than they may, while others go on."""
    random_of = random.Random(26)
    site = Site(slots=40, most=8)
    live = set()
    codes = Counter()
    for _ in range(10_000):
        sequence = random_of.randint(1, 50)
        start = sequence not in live or random_of.random() < 0.01
        end = random_of.random() < 0.02
        value = BAD if random_of.random() < 0.01 else float(random_of.randrange(1, 9))
        tag = site.ask(value, sequence, start=start, end=end)
        if random_of.random() < 0.002:
            site.begin()
            site.ends_host = bool(site.jobs)
        if random_of.random() < 0.3 or tag % 64 == 0:
            site.run_all()
        site.clock.advance(random_of.choice((0.0, 0.01, 0.2)) if random_of.random() < 0.998 else IDLE_S * 1.2)
        error = site.ends.get(tag)
        if isinstance(error, EdgeRuntimeError):
            codes[error.code] += 1
            live.discard(sequence)
        else:
            (live.discard if end else live.add)(sequence)
    site.run_all()
    check_histories(site)
    codes.update(end.code for end in site.ends.values() if isinstance(end, EdgeRuntimeError))
    assert {"sequence_lost", "queue_full", "run_failed"} <= codes.keys()
    assert sum(not isinstance(end, EdgeRuntimeError) for end in site.ends.values()) > 5_000


def check_histories(site):
    """Hold every answer against the sum of those before it; what is no answer has to be an error that says why."""
    sums = {}
    for tag, (_, value, step) in enumerate(site.requests):
        end = site.value(tag)
        code = end.code if isinstance(end, EdgeRuntimeError) else ""
        if not code:
            before = 0.0 if step.start else sums[step.id]
            assert end == before + value
            sums[step.id] = end
        elif code == "run_failed" and step.start:
            sums[step.id] = 0.0
        elif code == "sequence_lost":
            assert not step.start
        if step.end and code in ("", "run_failed"):
            sums.pop(step.id, None)


def test_a_state_is_never_continued_by_a_stranger():
    kept = stateful_sum()
    row = LiveSequences("m", KeptSequences(4), IDLE_S, SimpleNamespace(lives=0), FakeClock())
    request = request_of([np.ones((1, 1), np.float32)])
    request.sequence = SequenceStep(7, start=True)
    row.enter(request)
    request.line.steps = 3
    request.line.begin(request)
    with pytest.raises(SequenceLost, match="sequence 7"):
        kept.run({"x": request.inputs[0], ROW_INPUT: request.inputs[1]})
