"""Which refusals are held, for how long, and that each is told once."""

from __future__ import annotations

import math

import pytest

from edge_runtime.errors import Cancelled, DeadlineUnmeetable, QueueFull
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.policy import (
    LEAST_REFUSAL_S,
    MOST_REFUSAL_S,
    REFUSAL_BURST_S,
    REFUSAL_SHARE,
    REFUSALS_SHARE,
    hold_refusal_until_s,
    learnt_refusal_s,
    refusal_cost_s,
)
from edge_runtime.request.senders import MOST_ACCOUNTS, MOST_HELD_OF_SENDER, Refusals
from edge_runtime.request.worker import WorkerPool
from tests.fakes.clock import FakeClock
from tests.fakes.requests import KeptReply, request_of

IMAGE_BYTES = 600_000
COST_S = refusal_cost_s(LEAST_REFUSAL_S, IMAGE_BYTES)
FREE = int(REFUSAL_BURST_S * REFUSAL_SHARE / COST_S)
"""Refusals of one image each that are told at once."""


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def dispatcher(clock):
    return Dispatcher(clock, cores=1)


def refuse(dispatcher, clock, *, sender="greedy", retry_after_ms=50.0, timeout_s=1.0, nbytes=IMAGE_BYTES):
    reply = KeptReply()
    request = request_of(
        [b"tensor"], reply, sender=sender, nbytes=nbytes, arrived_s=clock.monotonic_s(), timeout_s=timeout_s
    )
    dispatcher.refuse(request, DeadlineUnmeetable("too late", retry_after_ms=retry_after_ms))
    return request


def told(requests):
    return [request for request in requests if request.reply.end is not None]


@pytest.mark.parametrize(
    ("what", "paid_until_s", "retry_s", "deadline_s", "until_s"),
    [
        ("within its share it is told at once", 100.0 + REFUSAL_BURST_S, 0.5, 101.0, 100.0),
        ("over it, when the time that it tells is over", 100.1 + REFUSAL_BURST_S, 0.5, 101.0, 100.5),
        ("and the sender is within its share again", 100.7 + REFUSAL_BURST_S, 0.5, 101.0, 100.7),
        ("but not after the deadline", 105.0 + REFUSAL_BURST_S, 0.5, 101.0, 101.0),
        ("at the end of the step in which it is over", 100.1 + REFUSAL_BURST_S, 0.503, 101.0, 100.51),
        ("of a step that ends after the deadline, at its begin", 105.0 + REFUSAL_BURST_S, 0.5, 100.995, 100.99),
        ("and now where that has begun", 105.0 + REFUSAL_BURST_S, 0.5, 100.005, 100.0),
    ],
)
def test_how_long_a_refusal_is_held(what, paid_until_s, retry_s, deadline_s, until_s):
    assert hold_refusal_until_s(paid_until_s, retry_s, deadline_s, 100.0) == pytest.approx(until_s), what


def test_refusals_are_sent_at_once_until_they_cost_too_much(dispatcher, clock):
    requests = [refuse(dispatcher, clock) for _ in range(FREE + 10)]

    assert told(requests) == requests[:FREE]
    assert [len(request.tensors) + len(request.inputs) for request in requests[FREE:]] == [0] * 10
    assert dispatcher.due_refusals()[0] == []


def test_a_held_refusal_is_sent_when_its_time_is_over_and_asks_for_no_more_patience(dispatcher, clock):
    requests = [refuse(dispatcher, clock) for _ in range(FREE + 1)]
    due, again_at_s = dispatcher.due_refusals()
    assert (due, again_at_s) == ([], pytest.approx(clock.monotonic_s() + 0.050))

    clock.advance(0.051)
    (due,), again_at_s = dispatcher.due_refusals()
    due.complete()

    assert due is requests[-1]
    assert isinstance(due.reply.end, DeadlineUnmeetable)
    assert due.reply.end.retry_after_ms == 0.0
    assert again_at_s == math.inf


def test_a_sender_that_asks_again_at_once_is_refused_at_the_rate_that_its_share_pays(dispatcher, clock):
    """64 in flight, each sent again the moment it is refused, for 20 s."""
    refusals, in_flight = 0, [refuse(dispatcher, clock, retry_after_ms=1.0) for _ in range(64)]
    for _ in range(20_000):
        clock.advance(0.001)
        for request in dispatcher.due_refusals()[0]:
            request.complete()
        ended = told(in_flight)
        refusals += len(ended)
        in_flight = [request for request in in_flight if request.reply.end is None]
        in_flight += [refuse(dispatcher, clock, retry_after_ms=1.0) for _ in ended]

    assert refusals * COST_S <= (20 + 2 * REFUSAL_BURST_S) * REFUSAL_SHARE
    assert refusals >= 20 * 0.8 * REFUSAL_SHARE / COST_S


@pytest.mark.parametrize(
    ("what", "known_s", "cpu_s", "count", "least_s", "most_s"),
    [
        ("one moves the mean a little", 100e-6, 200e-6, 1, 104e-6, 106e-6),
        ("a burst counts as often as it has refusals", 100e-6, 40 * 200e-6, 40, 180e-6, 190e-6),
        ("work beside is not a cost of refusing", 100e-6, 1.0, 1, 100e-6, 116e-6),
        ("nothing costs less than the least", LEAST_REFUSAL_S, 1e-9, 32, LEAST_REFUSAL_S, LEAST_REFUSAL_S),
        ("nothing costs more than the most", MOST_REFUSAL_S, 1.0, 32, MOST_REFUSAL_S, MOST_REFUSAL_S),
    ],
)
def test_the_cost_of_a_refusal_is_learnt(what, known_s, cpu_s, count, least_s, most_s):
    assert least_s <= learnt_refusal_s(known_s, cpu_s, count) <= most_s, what


def test_the_bytes_of_large_refused_requests_are_counted_once(dispatcher, clock):
    for _ in range(500):
        dispatcher.observe_refusals(COST_S, 1, IMAGE_BYTES)

    assert len(told([refuse(dispatcher, clock) for _ in range(FREE + 10)])) == FREE


@pytest.mark.parametrize("each_s", [50e-6, 200e-6, 1e-3])
def test_holding_starts_at_the_share_of_what_refusals_were_measured_to_cost(dispatcher, clock, each_s):
    for _ in range(500):
        dispatcher.observe_refusals(8 * each_s, 8)

    requests = [refuse(dispatcher, clock, nbytes=0) for _ in range(int(2 * REFUSAL_SHARE / each_s))]

    assert len(told(requests)) * each_s == pytest.approx(REFUSAL_BURST_S * REFUSAL_SHARE, rel=0.05)
    assert requests[: len(told(requests))] == told(requests)


def test_the_time_that_telling_held_refusals_takes_is_paid_for_too(dispatcher, clock):
    """The dearer the telling, the fewer are told in two seconds."""
    told_in_all = []
    for late_s in (LEAST_REFUSAL_S, 200e-6):
        dispatcher = Dispatcher(clock, cores=1)
        for _ in range(100):
            dispatcher.observe_late_refusals(8 * late_s, 8)
        requests = [refuse(dispatcher, clock, retry_after_ms=1.0, timeout_s=60.0) for _ in range(FREE + 2000)]
        clock.advance(2.0)
        told_in_all.append(len(told(requests)) + len(dispatcher.due_refusals()[0]))

    cheap, dear = told_in_all
    assert cheap < FREE + 2000
    assert (dear - FREE) * (COST_S + 200e-6) == pytest.approx((cheap - FREE) * (COST_S + LEAST_REFUSAL_S), rel=0.1)


@pytest.mark.parametrize("count", [1, 7, 64])
def test_refusals_counted_in_bursts_are_reported_as_many_as_one_by_one(clock, count):
    one_by_one, in_bursts = (Dispatcher(clock, cores=1) for _ in range(2))
    singly = sum(len(told([refuse(one_by_one, clock)])) for _ in range(20 * count))
    model, told_now = request_of([]).header.model, 0
    for _ in range(20):
        found = in_bursts.told_now("greedy", model, IMAGE_BYTES, count)
        told_now += found
        left = [refuse(in_bursts, clock) for _ in range(count - found)]
        assert told(left) == [], "what is not told now is held"

    assert told_now == singly == min(FREE, 20 * count)
    assert in_bursts.told_now("polite", model, IMAGE_BYTES, 1) == 1


def test_a_burst_is_refused_at_once_when_the_daemon_stops(dispatcher, clock):
    WorkerPool(dispatcher, clock).close()

    assert dispatcher.told_now("greedy", "m", IMAGE_BYTES, FREE + 10) == FREE + 10


def test_refusals_that_are_held_to_one_step_are_sent_together(dispatcher, clock):
    before = [refuse(dispatcher, clock) for _ in range(FREE + 2)]
    clock.advance(0.0021)
    requests = []
    for _ in range(5):
        requests.append(refuse(dispatcher, clock, retry_after_ms=100.0))
        clock.advance(0.0011)
    clock.advance(0.1)
    assert dispatcher.due_refusals()[0] == before[FREE:], "the time of the first is over, and not yet its step"
    clock.advance(0.005)

    assert dispatcher.due_refusals()[0] == requests


def test_one_sender_has_no_other_refusal_held(dispatcher, clock):
    for _ in range(FREE + 10):
        refuse(dispatcher, clock)

    assert told([refuse(dispatcher, clock, sender="polite")])


def test_a_sender_that_was_quiet_is_refused_at_once_again(dispatcher, clock):
    for _ in range(FREE + 10):
        refuse(dispatcher, clock)
    clock.advance(2 * REFUSAL_BURST_S)

    assert told([refuse(dispatcher, clock)])


def test_held_refusals_are_sent_when_the_daemon_stops(dispatcher, clock):
    requests = [refuse(dispatcher, clock) for _ in range(FREE + 10)]

    WorkerPool(dispatcher, clock).close()

    assert told(requests) == requests
    assert told([refuse(dispatcher, clock)]), "and none is held any more"


def test_those_of_a_sender_that_is_gone_leave(dispatcher, clock):
    requests = [refuse(dispatcher, clock) for _ in range(FREE + 10)]

    assert dispatcher.drop("greedy") == 10
    assert told(requests) == requests
    assert all(isinstance(request.reply.end, Cancelled) for request in requests[FREE:])
    assert dispatcher.due_refusals() == ([], math.inf)


def test_held_refusals_are_bounded(clock):
    refusals = Refusals()
    for index in range(FREE + MOST_HELD_OF_SENDER + 10):
        request = request_of([], nbytes=IMAGE_BYTES, arrived_s=clock.monotonic_s(), sender="greedy")
        is_held = refusals.hold(request, QueueFull("full"), clock.monotonic_s())
        assert is_held == (FREE <= index < FREE + MOST_HELD_OF_SENDER), index
    for index in range(2 * MOST_ACCOUNTS):
        request = request_of([], arrived_s=clock.monotonic_s(), sender=index)
        assert not refusals.hold(request, QueueFull("full"), clock.monotonic_s())

    assert len(refusals) == MOST_HELD_OF_SENDER


def test_many_senders_that_ask_again_at_once_share_what_refusing_may_cost(dispatcher, clock):
    last = {f"client {number}": None for number in range(64)}
    sent = []
    for second in range(6):
        for _ in range(1000):
            clock.advance(0.001)
            for request in dispatcher.due_refusals()[0]:
                request.complete()
            for sender, before in last.items():
                if before is None or before.reply.end is not None:
                    last[sender] = refuse(dispatcher, clock, sender=sender, retry_after_ms=500.0)
                    sent += [sender] if second == 5 else []

    assert len(sent) * COST_S < 3 * REFUSALS_SHARE < len(last) * REFUSAL_SHARE / 10
    assert len(sent) >= len(last), "each is told within its deadline"


def test_one_sender_is_charged_no_more_for_what_it_was_told_alone(dispatcher, clock):
    for _ in range(10):
        requests = [refuse(dispatcher, clock) for _ in range(FREE)]
        clock.advance(REFUSAL_BURST_S + COST_S)

    assert told(requests) == requests


def test_polite_sender_is_told_at_once_beside_a_crowd(dispatcher, clock):
    for _ in range(50):
        for number in range(64):
            refuse(dispatcher, clock, sender=number)
        clock.advance(0.01)

    assert told([polite := refuse(dispatcher, clock, sender="polite")]) == [polite]
