"""A queue by Triton's rules: levels, how long and how many may wait, and answers in order. The clock stands still."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edge_runtime.config.settings import QueuePolicies, QueuePolicy
from edge_runtime.errors import DeadlineExceeded, QueueFull, QueueTimeExpired
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.level_queue import LevelQueue, ReplyLine
from edge_runtime.request.policy import BatchLimits
from edge_runtime.request.request import Request
from edge_runtime.request.scheduled_model import LatencyModel, Layout, ScheduledModel
from edge_runtime.request.worker import refuse_expired, run_job
from tests.fakes.clock import FakeClock
from tests.fakes.requests import KeptReply, request_of
from tests.fakes.runs import FunctionRunner


class Queue:
    """One model with `[queue]` behind a dispatcher; `ends` has how requests ended, in order."""

    def __init__(self, rules: QueuePolicies, *, concurrency: int = 1, max_rows: int = 1) -> None:
        self.clock = FakeClock()
        self.dispatcher = Dispatcher(self.clock, cores=concurrency)
        layout = Layout(FunctionRunner(lambda arrays: arrays), 1, concurrency, LatencyModel({1: 0.010}))
        limits = BatchLimits(max_rows=max_rows, in_order=True)
        self.model = ScheduledModel("m", layout, limits, queue=LevelQueue(rules, 5))
        self.ends: dict[str, Any] = {}

    def admit(self, tag, *, level=0, queue_timeout_s=math.inf, timeout_s=math.inf, sender="one"):
        request = request_of(
            [np.zeros((1, 1), np.float32)], KeptReply(tag, self.ends.__setitem__), level=level,
            queue_timeout_s=queue_timeout_s, arrived_s=self.clock.monotonic_s(), timeout_s=timeout_s, sender=sender,
        )  # fmt: skip
        self.dispatcher.admit(self.model, request)
        return request

    def start(self):
        """Begin the next run; requests found expired are refused."""
        job, expired = self.dispatcher.next_job()
        refuse_expired(expired, self.clock)
        return job

    def run_next(self):
        job = self.start()
        assert job is not None
        run_job(job, self.dispatcher, self.clock)

    def run_all(self):
        while not self.dispatcher.is_idle():
            self.run_next()

    def order(self):
        return [tag for tag, end in self.ends.items() if isinstance(end, Request)]

    def expire(self):
        expired, wake_at_s = self.dispatcher.expire()
        refuse_expired(expired, self.clock)
        return wake_at_s


def test_requests_run_as_they_came_whoever_sent_them_and_whatever_their_deadlines():
    queue = Queue(QueuePolicies())
    queue.admit("a", sender="busy")
    queue.admit("b", sender="busy", timeout_s=9.0)
    queue.admit("c", sender="other", timeout_s=1.0)

    queue.run_all()

    assert queue.order() == ["a", "b", "c"]


def test_a_level_runs_before_the_next_however_long_that_has_waited():
    queue = Queue(QueuePolicies(levels=2, default_level=2))
    queue.admit("low", level=2)
    queue.clock.advance(60.0)
    queue.admit("high", level=1)
    queue.admit("high too", level=1)

    queue.run_all()

    assert queue.order() == ["high", "high too", "low"]


def test_a_request_that_waited_too_long_is_rejected_when_its_time_is_over_though_nothing_is_free():
    queue = Queue(QueuePolicies(default=QueuePolicy(timeout_ms=100.0)))
    queue.admit("runs", queue_timeout_s=0.1)
    job = queue.start()
    queue.admit("waits", queue_timeout_s=0.1)
    queue.clock.advance(0.099)

    assert queue.expire() == pytest.approx(queue.clock.monotonic_s() + 0.001)
    assert queue.ends == {}
    queue.clock.advance(0.001)
    queue.expire()

    error = queue.ends["waits"]
    assert isinstance(error, QueueTimeExpired)
    assert error.code == "deadline_exceeded"
    assert error.message.startswith("Request timeout expired")
    assert queue.dispatcher.queued(queue.model) == (0, 0)
    queue.clock.advance(1.0)
    run_job(job, queue.dispatcher, queue.clock)
    assert queue.order() == ["runs"], "a run is not a wait: it has no end by the queue's timeout"


def test_a_request_that_waited_too_long_is_rejected_before_a_run_is_formed_of_it():
    queue = Queue(QueuePolicies(default=QueuePolicy(timeout_ms=100.0)), max_rows=8)
    queue.admit("late", queue_timeout_s=0.1)
    queue.clock.advance(0.060)
    queue.admit("fine", queue_timeout_s=0.1)
    queue.clock.advance(0.050)

    queue.run_next()

    assert isinstance(queue.ends["late"], QueueTimeExpired)
    assert queue.order() == ["fine"]


def test_a_delayed_request_runs_after_those_on_time_of_its_level_and_before_lower_levels():
    rules = QueuePolicies(levels=2, default_level=1, default=QueuePolicy(timeout_ms=100.0, on_timeout="delay"))
    queue = Queue(rules)
    queue.admit("delayed", level=1, queue_timeout_s=0.1)
    queue.admit("low", level=2)
    queue.clock.advance(0.2)
    queue.expire()
    queue.admit("on time", level=1, queue_timeout_s=0.1)

    queue.run_all()

    assert queue.order() == ["on time", "delayed", "low"]


def test_a_levels_bound_refuses_the_newest_and_counts_requests_that_are_delayed():
    rules = QueuePolicies(
        levels=2, default_level=2,
        level={"1": QueuePolicy(max_requests=2, timeout_ms=100.0, on_timeout="delay")},
    )  # fmt: skip
    queue = Queue(rules)
    queue.admit("a", level=1, queue_timeout_s=0.1)
    queue.admit("b", level=1, queue_timeout_s=0.1)
    queue.clock.advance(0.2)
    queue.expire()

    with pytest.raises(QueueFull, match="Exceeds maximum queue size"):
        queue.admit("c", level=1)
    queue.admit("d", level=2)

    queue.run_all()
    assert queue.order() == ["a", "b", "d"]


def test_a_deadline_counts_beside_the_queues_timeout():
    queue = Queue(QueuePolicies(default=QueuePolicy(timeout_ms=500.0)))
    queue.admit("runs")
    queue.start()
    queue.admit("waits", queue_timeout_s=0.5, timeout_s=0.1)
    queue.clock.advance(0.095)

    queue.expire()

    assert type(queue.ends["waits"]) is DeadlineExceeded


def test_answers_go_out_in_the_order_of_their_requests_where_two_runs_are_on():
    queue = Queue(QueuePolicies(keep_order=True), concurrency=2)
    queue.admit("first")
    queue.admit("second")
    queue.admit("third")
    first, second = queue.start(), queue.start()

    run_job(second, queue.dispatcher, queue.clock)
    assert queue.ends == {}
    run_job(first, queue.dispatcher, queue.clock)
    assert queue.order() == ["first", "second"]
    queue.run_all()

    assert queue.order() == ["first", "second", "third"]


def test_a_refused_request_holds_up_no_answer_behind_it():
    queue = Queue(QueuePolicies(keep_order=True), concurrency=2)
    cancelled = queue.admit("cancelled")
    queue.admit("second")

    assert queue.dispatcher.cancel(queue.model, cancelled)
    queue.run_all()

    assert queue.order() == ["second"]


def test_a_sender_that_is_gone_takes_its_requests_along():
    queue = Queue(QueuePolicies(levels=2, default_level=1))
    queue.admit("a", level=1, sender="gone", queue_timeout_s=1.0, timeout_s=2.0)
    queue.admit("b", level=2, sender="stays")

    assert queue.dispatcher.drop("gone") == 1
    queue.run_all()

    assert queue.order() == ["b"]


def test_a_request_that_waits_for_its_turn_keeps_its_callers_name_for_it() -> None:
    reply = KeptReply()
    reply.user_id = "a name"
    request = request_of([], reply)
    ReplyLine().join(request)
    assert request.reply.user_id == "a name"
