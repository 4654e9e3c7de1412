"""Each rule of scheduling is a row here, on the pure rules; then properties that hold for any queue."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.config.settings import QueuePolicies, QueuePolicy
from edge_runtime.request.policy import (
    AGEING_S,
    MOST_PASSED,
    PATIENCE_S,
    BatchLimits,
    ChainFlow,
    ChainLoad,
    Claim,
    Load,
    aged_priority,
    choose_model,
    due_s,
    forecast_chain_s,
    forecast_wait_s,
    is_meetable,
    level_of,
    may_begin_chain,
    plan_batch,
    plan_expiry,
    queue_timeout_s,
    shared_rows,
)


@dataclass(eq=False)
class Request:
    """A waiting request, with the name a failing row is read by."""

    name: str
    rows: int = 1
    arrived_s: float = 0.0
    deadline_s: float = math.inf
    shape: object = ()


class RunTimes:
    """`base_s` and `row_s` seconds a row."""

    def __init__(self, base_s=0.010, row_s=0.0):
        self.base_s, self.row_s = base_s, row_s

    def predict_s(self, rows):
        return self.base_s + self.row_s * rows


def names(requests):
    return [request.name for request in requests]


FULL = BatchLimits(max_rows=8)

ROWS = [
    # what, waiting in order, limits, take, expired
    ("nothing waits", [], FULL, [], []),
    ("an idle instance runs what is there", [Request("a")], FULL, ["a"], []),
    ("requests join up to the row limit", [Request(str(i), rows=3) for i in range(4)], FULL, ["0", "1"], []),
    ("a request is never split, even above the limit", [Request("big", rows=20)], FULL, ["big"], []),
    ("a model that does not batch runs one", [Request("a"), Request("b")], BatchLimits(max_rows=1), ["a"], []),
    ("only equal inner shapes share a batch", [Request("a", shape=(3,)), Request("b", shape=(4,))], FULL, ["a"], []),
    (
        "a request of another shape lets those behind it join",
        [Request("a", shape=(3,)), Request("b", shape=(4,)), Request("c", shape=(3,))], FULL, ["a", "c"], [],
    ),
    (
        "the search for a batch passes so many of another shape",
        [Request("a", shape=(3,)), *(Request("b", shape=(4,)) for _ in range(MOST_PASSED)), Request("c", shape=(3,))],
        FULL, ["a"], [],
    ),
    (
        "what can no longer make it expires at once, wherever it waits",
        [Request("lost", deadline_s=0.005), Request("fine", deadline_s=1.0), Request("too", deadline_s=0.006)],
        FULL, ["fine"], ["lost", "too"],
    ),
    ("a finish exactly at the deadline is in time", [Request("just", deadline_s=0.010)], FULL, ["just"], []),
]  # fmt: skip


@pytest.mark.parametrize(("what", "waiting", "limits", "take", "expired"), ROWS, ids=[row[0] for row in ROWS])
def test_the_next_batch_follows_the_rules(what, waiting, limits, take, expired):
    plan = plan_batch(waiting, 0.0, limits, RunTimes())

    assert names(plan.take) == take, what
    assert names(plan.expired) == expired, what


def test_a_batch_stops_before_its_run_breaks_a_deadline_already_taken():
    waiting = [*(Request(str(i), deadline_s=0.030 + i) for i in range(8))]

    plan = plan_batch(waiting, 0.0, FULL, RunTimes(base_s=0.010, row_s=0.005))

    assert names(plan.take) == ["0", "1", "2", "3"]


def test_a_batch_is_cut_to_the_longest_run_allowed_while_another_model_waits():
    waiting = [*(Request(str(i)) for i in range(8))]
    limits = BatchLimits(max_rows=8, max_run_s=0.050)

    plan = plan_batch(waiting, 0.0, limits, RunTimes(base_s=0.0, row_s=0.020))

    assert names(plan.take) == ["0", "1"]


@pytest.mark.parametrize(
    ("what", "rows", "slots", "times", "most"),
    [
        ("rows that cost a run each are shared out", 16, 2, RunTimes(0.0, 0.002), 8),
        ("an odd one goes with the first", 5, 2, RunTimes(0.0, 0.002), 3),
        ("more than two places", 16, 4, RunTimes(0.0, 0.002), 4),
        ("two full batches wait", 64, 2, RunTimes(0.0, 0.002), 32),
        ("a full batch leaves the rest to the other place", 40, 2, RunTimes(0.0, 0.002), 32),
        ("one row cannot be shared", 1, 2, RunTimes(0.0, 0.002), 32),
        ("a run that hardly grows with its rows is as quick alone", 16, 2, RunTimes(0.010, 0.0005), 32),
        ("a run that is over soon is not worth another", 16, 2, RunTimes(0.0, 0.00005), 32),
    ],
)
def test_waiting_rows_are_shared_out_among_free_cores_where_they_end_sooner_so(what, rows, slots, times, most):
    assert shared_rows(rows, BatchLimits(max_rows=32), slots, times) == most, what


def test_an_idle_instance_waits_for_a_fuller_batch_where_its_settings_say():
    limits = BatchLimits(max_rows=4, max_delay_s=0.100)
    waiting = [Request("a", arrived_s=1.0)]

    plan = plan_batch(waiting, 1.02, limits, RunTimes())

    assert plan.take == []
    assert plan.wake_at_s == pytest.approx(1.1)


def test_waiting_for_a_fuller_batch_ends_with_the_delay():
    limits = BatchLimits(max_rows=4, max_delay_s=0.100)

    plan = plan_batch([Request("a", arrived_s=1.0)], 1.101, limits, RunTimes())

    assert names(plan.take) == ["a"]


def test_waiting_for_a_fuller_batch_ends_where_the_earliest_deadline_needs_it():
    limits = BatchLimits(max_rows=4, max_delay_s=0.100)
    waiting = [Request("a", arrived_s=1.0, deadline_s=1.050)]

    plan = plan_batch(waiting, 1.0, limits, RunTimes(base_s=0.010))

    assert plan.take == []
    assert plan.wake_at_s == pytest.approx(1.040)


def test_a_full_batch_does_not_wait():
    limits = BatchLimits(max_rows=2, max_delay_s=0.100)

    plan = plan_batch([Request("a"), Request("b")], 0.0, limits, RunTimes())

    assert names(plan.take) == ["a", "b"]


@pytest.mark.parametrize(("waiting", "taken"), [(3, 2), (4, 4), (7, 4), (1, 1)])
def test_a_batch_is_cut_at_the_largest_preferred_size(waiting, taken):
    limits = BatchLimits(max_rows=8, preferred_rows=(2, 4))

    plan = plan_batch([*(Request(str(i)) for i in range(waiting))], 0.0, limits, RunTimes())

    assert len(plan.take) == taken


def test_expiry_needs_no_free_instance_and_says_when_to_look_again():
    waiting = [Request("lost", deadline_s=0.005), Request("next", deadline_s=0.500)]

    plan = plan_expiry(waiting, 0.0, RunTimes(base_s=0.010))

    assert names(plan.expired) == ["lost"]
    assert plan.take == []
    assert plan.wake_at_s == pytest.approx(0.490)


def test_a_priority_rises_one_level_for_each_second_in_which_none_of_it_runs():
    assert [aged_priority(5, 1.0, 1.0 + age * AGEING_S) for age in (-1, 0, 1, 3, 6)] == [5, 5, 4, 2, -1]


def test_a_request_without_a_deadline_is_due_in_a_while():
    assert due_s(3.0, 5.0) == 5.0
    assert due_s(3.0, math.inf) == 3.0 + PATIENCE_S


def test_models_are_served_by_priority_then_by_least_run_time():
    claims = [Claim(5, 1.0), Claim(5, 0.5), Claim(1, 9.0)]

    assert choose_model(claims) == [2, 1, 0]


def test_another_models_backlog_delays_by_no_more_than_its_fair_share():
    flooded = Load(running_s=0.0, own_queued_s=0.010, all_queued_s=5.0, models=2)

    assert forecast_wait_s(flooded, slots=2) == pytest.approx(0.010)


def test_the_whole_backlog_counts_where_it_is_ones_own():
    assert forecast_wait_s(Load(0.020, 0.080, 0.080, 1), slots=2) == pytest.approx(0.050)


@pytest.mark.parametrize(
    ("wait_s", "nbytes", "meetable"),
    [(0.0, 64, True), (0.075, 64, True), (0.076, 64, False), (0.070, 600_000, True), (0.071, 600_000, False)],
)
def test_a_forecast_must_leave_a_margin_of_the_timeout(wait_s, nbytes, meetable):
    assert is_meetable(wait_s, 0.010, 0.100, nbytes) is meetable


requests = st.builds(
    Request,
    name=st.just("r"),
    rows=st.integers(1, 12),
    arrived_s=st.floats(0, 5),
    deadline_s=st.one_of(st.just(math.inf), st.floats(0, 10)),
    shape=st.sampled_from([(3,), (4,)]),
)


queues = st.lists(requests, max_size=20)

limits_of_any_kind = st.builds(
    BatchLimits,
    max_rows=st.integers(1, 16),
    max_delay_s=st.sampled_from([0.0, 0.05]),
    preferred_rows=st.sampled_from([(), (2,), (2, 4)]),
    max_run_s=st.sampled_from([math.inf, 0.05]),
)
run_times = st.builds(RunTimes, base_s=st.floats(0, 0.1), row_s=st.floats(0, 0.02))


@given(queues, st.floats(0, 10), limits_of_any_kind, run_times)
def test_any_plan_keeps_its_promises(waiting, now, limits, times):
    plan = plan_batch(waiting, now, limits, times)

    taken, expired = {id(r) for r in plan.take}, {id(r) for r in plan.expired}
    assert not taken & expired, "a request is taken or expired, never both"
    assert len(taken) == len(plan.take), "a request is taken once"
    assert taken | expired <= {id(r) for r in waiting}, "nothing is made up"
    rows = sum(r.rows for r in plan.take)
    assert len(plan.take) <= 1 or rows <= limits.max_rows, "never more rows than allowed"
    for request in plan.take:
        assert now + times.predict_s(request.rows) <= request.deadline_s, "never an expired row taken"
    for request in plan.expired:
        assert now + times.predict_s(request.rows) > request.deadline_s, "only what is too late expires"
    if len(plan.take) > 1:
        assert now + times.predict_s(rows) <= min(r.deadline_s for r in plan.take), "a batch breaks no deadline"
    assert len({r.shape for r in plan.take}) <= 1, "one inner shape a batch"
    live = [r for r in waiting if id(r) not in expired]
    if plan.take:
        mates = [id(r) for r in live if r.shape == plan.take[0].shape]
        assert plan.take[0] is live[0], "the first leads"
        assert mates[: len(plan.take)] == [id(r) for r in plan.take], "no mate is passed"
    elif live:
        assert plan.wake_at_s is not None, "what waits is looked at again"


def singles(count, *, arrived_s=0.0):
    return [Request(str(index), arrived_s=arrived_s) for index in range(count)]


PREFERRED = BatchLimits(max_rows=8, preferred_rows=(2, 4), max_delay_s=0.100, in_order=True)
AT_ONCE = BatchLimits(max_rows=8, preferred_rows=(4,), in_order=True)

TRITON_ROWS = [
    # what, waiting since 1.0 s in order, limits, now, rows taken (0: it waits), looked at again at
    ("fewer than the least preferred size wait for the delay", singles(1, arrived_s=1.0), PREFERRED, 1.02, 1.1, []),
    ("a preferred size goes at once", singles(2, arrived_s=1.0), PREFERRED, 1.02, None, ["0", "1"]),
    ("of two preferred sizes the larger goes", singles(5, arrived_s=1.0), PREFERRED, 1.02, None, ["0", "1", "2", "3"]),
    ("after the delay everything goes", singles(3, arrived_s=1.0), PREFERRED, 1.1, None, ["0", "1", "2"]),
    ("without a delay a preferred size is cut off", singles(5), AT_ONCE, 0.0, None, ["0", "1", "2", "3"]),
    ("without a delay what is not a preferred size goes too", singles(3), AT_ONCE, 0.0, None, ["0", "1", "2"]),
    (
        "one that cannot join sends what is before it, and lets none pass",
        [Request("a", shape=(3,)), Request("b", shape=(4,)), Request("c", shape=(3,))], PREFERRED, 0.0, None, ["a"],
    ),
    (
        "a full batch goes at once",
        [Request("a", rows=5), Request("b", rows=3)], BatchLimits(max_rows=8, max_delay_s=0.1, in_order=True), 0.0,
        None, ["a", "b"],
    ),
    (
        "a wait for more ends where a deadline needs it",
        [Request("a", deadline_s=0.050)], PREFERRED, 0.0, 0.040, [],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "waiting", "limits", "now_s", "wake_at_s", "take"), TRITON_ROWS, ids=[row[0] for row in TRITON_ROWS]
)
def test_batches_in_order_are_released_as_by_triton(what, waiting, limits, now_s, wake_at_s, take):
    plan = plan_batch(waiting, now_s, limits, RunTimes())

    assert names(plan.take) == take, what
    assert plan.wake_at_s == (pytest.approx(wake_at_s) if wake_at_s is not None else None), what


THREE = QueuePolicies(levels=3, default_level=2)


@pytest.mark.parametrize(
    ("priority", "queue", "level"),
    [(1, THREE, 1), (3, THREE, 3), (0, THREE, 2), (4, THREE, 2), (1, QueuePolicies(), 0), (0, QueuePolicies(), 0)],
)
def test_a_requests_priority_is_its_level_and_0_or_one_above_them_the_default(priority, queue, level):
    assert level_of(priority, queue) == level


@pytest.mark.parametrize(
    ("allowed_ms", "may_override", "asked_ms", "timeout_s"),
    [
        (0.0, True, 5.0, math.inf),  # a default of none: what the request asks for is ignored
        (100.0, False, 5.0, 0.1),
        (100.0, True, 5.0, 0.005),
        (100.0, True, 0.0, 0.1),
        (100.0, True, 200.0, 0.1),  # only a shorter one counts
    ],
)
def test_a_queues_timeout_is_the_policys_or_a_shorter_one_where_that_is_allowed(
    allowed_ms, may_override, asked_ms, timeout_s
):
    assert queue_timeout_s(QueuePolicy(timeout_ms=allowed_ms, allow_override=may_override), asked_ms) == timeout_s


@pytest.mark.parametrize(
    ("promised_s", "waiting_s", "path_s", "cores", "forecast_s"),
    [
        (0.0, 0.0, 0.030, 2, 0.030),  # nothing else is there: the critical path
        (0.2, 0.0, 0.030, 2, 0.130),  # what chains under way will ask for comes first
        (0.0, 0.4, 0.030, 2, 0.230),  # and what waits before it
        (0.2, 0.4, 0.030, 1, 0.630),  # on one core all of it is waited for
    ],
)
def test_a_chain_is_forecast_by_all_that_comes_before_its_first_step(promised_s, waiting_s, path_s, cores, forecast_s):
    load = ChainLoad(promised_s, waiting_s)
    assert forecast_chain_s(load, path_s, cores) == pytest.approx(forecast_s)


@pytest.mark.parametrize(
    ("rows", "work_s", "nbytes", "timeout_s", "begins"),
    [
        (0, 0.0, 0, 0.5, True),
        (1, 9.0, 99, 0.001, True),  # as many as cores always are under way, or nothing would go on
        (2, 0.1, 0, 0.5, True),  # a tenth of a second on two cores is a tenth of the timeout
        (2, 0.3, 0, 0.5, False),  # work under way takes more than its share of the timeout
        (2, 0.3, 0, math.inf, True),  # without a deadline only full batches count
        (12, 0.1, 0, math.inf, False),  # every step has what it can run together, and the next
        (2, 0.1, 10, 0.5, False),  # tensors under way fill their bound
    ],
)
def test_a_chain_begins_while_few_enough_are_under_way(rows, work_s, nbytes, timeout_s, begins):
    flow = ChainFlow(rows, 12, work_s, nbytes, 10)
    assert may_begin_chain(flow, timeout_s, 2) is begins


def test_a_step_of_an_admitted_chain_may_use_all_of_its_time():
    assert is_meetable(0.4, 0.1, 0.5, 1 << 20, is_step=True)
    assert not is_meetable(0.4, 0.1, 0.5, 4)
