"""The order in which requests run, who takes turns, and what admission is told of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.request.policy import AGEING_S, PATIENCE_S
from edge_runtime.request.queue import KEPT_TURNS, RequestQueue
from tests.fakes.requests import KeptReply, request_of


def request(tag, sender="one", *, rows=1, priority=5, arrived_s=0.0, timeout_s=math.inf, shape=()):
    return request_of(
        [], KeptReply(tag), rows=rows, priority=priority, arrived_s=arrived_s, timeout_s=timeout_s, sender=sender,
        shape=shape,
    )  # fmt: skip


def queue_of(*requests):
    queue = RequestQueue()
    for each in requests:
        queue.push(each)
    return queue


def order(queue, now_s=0.0):
    return [each.reply.tag for each in queue.in_order(now_s)]


def serve(queue, now_s=0.0):
    """Run the first request."""
    first = next(iter(queue.in_order(now_s)))
    queue.remove([first], runs_at_s=now_s)
    return first


ROWS = [
    # what, requests as they came, now, order
    ("priority goes first", [request("late"), request("first", priority=1)], 0.0, ["first", "late"]),
    (
        "inside a priority the earliest deadline goes first",
        [request("loose", timeout_s=9.0), request("tight", timeout_s=1.0), request("middle", timeout_s=5.0)],
        0.0, ["tight", "middle", "loose"],
    ),
    (
        "equal deadlines go by arrival",
        [request("first", arrived_s=0.1, timeout_s=0.9), request("second", arrived_s=0.2, timeout_s=0.8)],
        0.2, ["first", "second"],
    ),
    (
        "a request without a deadline goes before one that came much later",
        [request("old"), request("new", arrived_s=PATIENCE_S, timeout_s=1.0)], PATIENCE_S, ["old", "new"],
    ),
    (
        "a priority that did not run for a while goes over a higher one",
        [request("old", arrived_s=0.0, priority=5), request("new", arrived_s=4.5, priority=2)], 4.5, ["old", "new"],
    ),
    (
        "senders take turns",
        [request("a1", "a"), request("a2", "a"), request("a3", "a"), request("b1", "b"), request("b2", "b")],
        0.0, ["a1", "b1", "a2", "b2", "a3"],
    ),
    (
        "of two whose turn it is, the one that is due first goes first",
        [request("a1", "a", timeout_s=3), request("a2", "a", timeout_s=4), request("b1", "b", timeout_s=2)],
        0.0, ["b1", "a1", "a2"],
    ),
    (
        "a turn is as long as the rows that it took",
        [request("a1", "a", rows=2), request("a2", "a"), *(request(f"b{i}", "b") for i in range(3))],
        0.0, ["a1", "b0", "b1", "a2", "b2"],
    ),
    (
        "a deadline lets a sender pass itself, not others",
        [request("a1", "a"), request("b1", "b"), request("b2", "b", timeout_s=1)], 0.0, ["b2", "a1", "b1"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("what", "requests", "now_s", "wanted"), ROWS, ids=[row[0] for row in ROWS])
def test_requests_run_in_the_order_of_the_rules(what, requests, now_s, wanted):
    queue = queue_of(*requests)

    assert order(queue, now_s) == wanted, what
    assert [serve(queue, now_s).reply.tag for _ in wanted] == wanted, "and so they are served"
    assert (len(queue), queue.rows, queue.nbytes) == (0, 0, 0)


def test_a_sender_that_comes_later_has_its_turn_at_once_and_no_credit():
    queue = queue_of(*(request(f"a{i}", "a") for i in range(6)))
    for _ in range(3):
        serve(queue)
    for i in range(3):
        queue.push(request(f"b{i}", "b"))

    assert order(queue) == ["b0", "a3", "b1", "a4", "b2", "a5"]


def test_a_sender_that_sends_one_by_one_is_served_no_more_than_its_turns():
    queue = queue_of(*(request(f"a{i}", "a") for i in range(40)))
    queue.push(request("b", "b", rows=4))
    rows = {"a": 0, "b": 0}
    for _ in range(30):
        served = serve(queue)
        rows[served.sender] += served.rows
        if served.sender == "b":
            queue.push(request("b", "b", rows=4))

    assert abs(rows["a"] - rows["b"]) <= 4


def test_a_request_that_leaves_unserved_costs_its_sender_no_turn():
    gone = request("a1", "a")
    queue = queue_of(gone, request("a2", "a"), request("b1", "b"), request("b2", "b"))
    queue.remove([gone, gone])

    assert order(queue) == ["a2", "b1", "b2"]


def test_many_senders_leave_nothing_behind():
    queue = queue_of(request("first", "first"))
    for i in range(3 * KEPT_TURNS):
        queue.push(request(i, i, timeout_s=60.0))
        serve(queue)
    while queue.rows:
        serve(queue)

    assert list(queue.by_deadline()) == []
    assert order(queue_of()) == []


fresh = st.builds(
    request,
    tag=st.just("r"),
    rows=st.integers(1, 4),
    priority=st.integers(1, 9),
    arrived_s=st.floats(0, 0.5),
    timeout_s=st.one_of(st.just(math.inf), st.floats(0.1, 9)),
)


@given(st.lists(fresh, max_size=20), st.data())
def test_a_sender_alone_is_served_by_priority_then_deadline_then_arrival(requests, data):
    requests.sort(key=lambda each: each.arrived_s)
    queue = queue_of(*requests)
    leaving = data.draw(st.lists(st.sampled_from(requests), max_size=5)) if requests else []
    queue.remove(leaving)
    left = [each for each in requests if all(each is not other for other in leaving)]

    wanted = sorted(left, key=lambda each: (each.priority, each.due_s, each.number))
    assert [id(each) for each in queue.in_order(0.5)] == [id(each) for each in wanted]
    deadlines = sorted((each.deadline_s, each.number) for each in left if each.deadline_s != math.inf)
    assert [(each.deadline_s, each.number) for each in queue.by_deadline()] == deadlines


def any_of(rows):
    return st.builds(
        request,
        tag=st.just("r"),
        sender=st.sampled_from("abcde"),
        rows=rows,
        timeout_s=st.one_of(st.just(math.inf), st.floats(0.1, 20)),
    )


@given(
    st.lists(any_of(st.integers(1, 5)), max_size=30), st.lists(any_of(st.integers(1, 5)), max_size=30),
    st.integers(0, 30), any_of(st.integers(1, 5)),
)  # fmt: skip
def test_the_rows_before_a_request_are_never_forecast_too_few(early, later, served, new):
    """Whatever came, was served and came again: what is told at admission holds if nothing else comes."""
    queue = queue_of(*early)
    for _ in range(min(served, len(early))):
        serve(queue)
    for each in later:
        queue.push(each)
    forecast = queue.rows_before(new, 0.0, 1)
    queue.push(new)

    before = 0
    while (first := serve(queue)) is not new:
        before += first.rows
    assert before <= forecast


@given(st.lists(any_of(st.just(1)), max_size=30), any_of(st.just(1)))
def test_the_rows_before_a_request_are_forecast_exactly_but_for_one_turn(waiting, new):
    queue = queue_of(*waiting)
    senders = {each.sender for each in waiting} - {new.sender}
    forecast = queue.rows_before(new, 0.0, 1)
    queue.push(new)

    before = order_of(queue).index(new)
    is_first = all(each.sender != new.sender or each.due_s > new.due_s for each in waiting)
    if is_first:
        assert forecast == before, "a first request is forecast by its deadline"
    else:
        assert forecast <= 2 * before + len(senders)


def order_of(queue):
    return list(queue.in_order(0.0))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 30), st.integers(1, 3)), min_size=40, max_size=80))
def test_no_flood_of_deadlines_starves_a_request_without_one(flood):
    """Two requests come for each that is served, from senders old and new, each with a deadline before the last."""
    queue, victim = queue_of(request("victim", "victim")), None
    for step in range(2000):
        now_s = step * 0.1
        for i in range(2):
            sender, timeout_s, rows = flood[(2 * step + i) % len(flood)]
            name = sender if sender != "c" else (sender, step, i)
            queue.push(request("r", name, arrived_s=now_s, timeout_s=timeout_s, rows=rows))
        if serve(queue, now_s).reply.tag == "victim":
            victim = now_s
            break
    assert victim is not None
    assert victim <= 3 * PATIENCE_S


@pytest.mark.parametrize("timeout_s", [math.inf, 0.5])
def test_no_flood_of_a_higher_priority_starves_a_lower_one(timeout_s):
    queue = queue_of(request("victim", "victim", priority=9))
    for step in range(1000):
        now_s = step * 0.1
        for i in range(2):
            queue.push(request("r", i, priority=1, arrived_s=now_s, timeout_s=timeout_s))
        if serve(queue, now_s).reply.tag == "victim":
            break
    assert step * 0.1 <= 10 * AGEING_S
