"""Counting: buckets, quantiles, one model's numbers, the registry's snapshot."""

from __future__ import annotations

import json
import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.telemetry.metrics import LATENCY_BOUNDS_S, ROWS_BOUNDS, Histogram, Metrics, ModelMetrics

LATENCIES_S = st.floats(min_value=1e-6, max_value=100.0, allow_nan=False)


@pytest.mark.parametrize("bounds", [LATENCY_BOUNDS_S, ROWS_BOUNDS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


@given(st.lists(LATENCIES_S, min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_within_one_bucket_of_the_exact_one(values: list[float], q: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    exact = sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]
    found = histogram.quantile(q)
    assert found is not None
    step = 1.25  # the widest step of E12 is 1.0 to 1.2 and 1.2 to 1.5
    assert exact / step - 1e-6 <= found <= exact * step + 1e-6


@given(st.lists(st.tuples(LATENCIES_S, st.integers(1, 50)), max_size=30))
def test_recording_a_count_equals_recording_one_by_one(pairs: list[tuple[float, int]]) -> None:
    at_once, singly = Histogram(), Histogram()
    for value, count in pairs:
        at_once.record(value, count)
        for _ in range(count):
            singly.record(value)
    assert at_once.counts == singly.counts
    assert at_once.total == pytest.approx(singly.total)


def test_an_empty_histogram_has_no_quantile_and_no_mean() -> None:
    assert Histogram().quantile(0.5) is None
    assert Histogram().mean is None


def test_a_value_on_a_bound_counts_as_at_or_below_it() -> None:
    histogram = Histogram([1.0, 2.0])
    histogram.record(1.0)
    assert histogram.cumulative() == [(1.0, 1), (2.0, 1)]


def test_a_value_above_every_bound_is_counted_and_said_to_be_the_last() -> None:
    histogram = Histogram([1.0, 2.0])
    histogram.record(1e9)
    assert (histogram.count, histogram.quantile(0.5)) == (1, 2.0)


def test_rows_up_to_four_have_a_bucket_each() -> None:
    histogram = Histogram(ROWS_BOUNDS)
    for rows in (1, 2, 3, 4):
        histogram.record(rows)
    assert [count for _, count in histogram.cumulative()[:4]] == [1, 2, 3, 4]


def test_a_batch_counts_every_request_and_one_run() -> None:
    metrics = ModelMetrics()
    metrics.answered_batch(rows=12, requests=4, queue_s=0.001, run_s=0.002)
    snapshot = metrics.snapshot()
    assert (snapshot["requests"], snapshot["answered"], snapshot["runs"], snapshot["rows"]) == (4, 4, 1, 12)
    assert metrics.total.count == 4
    assert snapshot["total_ms"]["mean"] == pytest.approx(3.0)
    assert snapshot["run_s"] == pytest.approx(0.002)


def test_runs_of_workers_and_their_answers_are_counted_apart() -> None:
    metrics = ModelMetrics()
    metrics.run(8, 0.01)
    assert (metrics.requests, metrics.runs, metrics.rows) == (0, 1, 8)
    metrics.answered(0.001, 0.01)
    assert (metrics.requests, metrics.runs) == (1, 1)


def test_refusals_are_counted_by_code_and_are_requests_too() -> None:
    metrics = ModelMetrics()
    metrics.refused("queue_full")
    metrics.refused("queue_full", 2)
    metrics.refused("deadline_exceeded")
    assert metrics.refusals == {"queue_full": 3, "deadline_exceeded": 1}
    assert metrics.requests == 4


def test_a_models_numbers_outlive_a_reload() -> None:
    metrics = Metrics()
    metrics.model("digits").answered(0.001, 0.001)
    assert metrics.model("digits").requests == 1


def test_a_snapshot_is_json_and_reads_gauges_now() -> None:
    metrics = Metrics()
    waiting = [3]
    metrics.model("digits").watch("queue_rows", lambda: waiting[0])
    metrics.watch("connections", lambda: 2)
    metrics.count("replies_dropped", 5)
    waiting[0] = 7
    snapshot = json.loads(json.dumps(metrics.snapshot(), allow_nan=False))
    assert snapshot["models"]["digits"]["queue_rows"] == 7
    assert snapshot["models"]["digits"]["queue_ms"] == {"p50": None, "p95": None, "p99": None, "mean": None}
    assert (snapshot["gauges"], snapshot["counters"]) == ({"connections": 2}, {"replies_dropped": 5})


def test_counts_from_many_threads_all_arrive() -> None:
    metrics = Metrics()
    model = metrics.model("digits")

    def work() -> None:
        for _ in range(2_000):
            metrics.count("messages")
            metrics.model("digits").answered(0.001, 0.001)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.counters() == {"messages": 8_000}
    assert model is metrics.model("digits")
    assert model.total.count == 8_000


class Writer:
    """Somebody who counts, as long as it is there."""


def test_requests_that_a_version_counts_apart_are_reported_as_its_models_from_first_to_last():
    metrics = Metrics()
    metrics.model("digits").answered(0.001, 0.001)
    part, writer = metrics.apart("digits"), Writer()
    part.answered(0.002, 0.004)
    part.refused("queue_full", 2)
    assert (metrics.model("digits").requests, part.requests) == (1, 3)
    assert metrics.models()["digits"].requests == 4
    metrics.retire("digits", part, writer)
    part.answered(0.002, 0.004)
    assert metrics.models()["digits"].answered_requests == 3, "a late count is told too"
    del writer
    told = metrics.models()["digits"]
    assert told is metrics.model("digits"), "nobody can write to the part any more"
    assert (told.answered_requests, told.refusals, told.run_time.count) == (3, {"queue_full": 2}, 3)


def test_gauges_of_versions_counted_apart_are_added_until_they_retire():
    metrics = Metrics()
    metrics.model("digits").watch("queue_rows", lambda: 2)
    part = metrics.apart("digits")
    part.watch("queue_rows", lambda: 3)
    assert metrics.snapshot()["models"]["digits"]["queue_rows"] == 5
    metrics.retire("digits", part)
    assert metrics.snapshot()["models"]["digits"]["queue_rows"] == 2


def test_a_models_own_numbers_do_not_retire():
    metrics = Metrics()
    own = metrics.model("digits")
    own.watch("queue_rows", lambda: 2)
    metrics.retire("digits", own)
    assert metrics.snapshot()["models"]["digits"]["queue_rows"] == 2


def test_histograms_of_other_bounds_are_not_added():
    with pytest.raises(ValueError, match="bounds"):
        Histogram(LATENCY_BOUNDS_S).add(Histogram(ROWS_BOUNDS))


# ---- models that are told of for themselves, and the others --------------------------------------------------------


def answered(metrics: Metrics, name: str, count: int) -> None:
    metrics.model(name).answered_batch(rows=count, requests=count, queue_s=0.001, run_s=0.003)


def test_others_are_all_that_a_split_does_not_name():
    metrics = Metrics()
    for name in ("one", "two", "three"):
        answered(metrics, name, 2)
        metrics.model(name).refused("queue_full")
        metrics.model(name).watch("queue_rows", lambda: 4)
        metrics.model(name).watch("host_memory_bytes", lambda: 5)
    named, others = metrics.split(lambda models: {"one"})
    assert set(named) == {"one"}
    assert named["one"].requests == 3
    assert (others.answered_requests, others.rows, others.runs, others.refusals) == (4, 4, 2, {"queue_full": 2})
    assert (others.total.count, others.batch_rows.count) == (4, 2)
    assert {name: read() for name, read in others.gauges.items()} == {"queue_rows": 8}
    assert metrics.model("two").requests == 3


def test_a_daemon_whose_models_are_all_named_has_no_others():
    metrics = Metrics()
    answered(metrics, "one", 2)
    assert metrics.split(lambda models: models)[1] is None


def test_others_stay_when_the_last_of_them_is_gone():
    metrics = Metrics()
    answered(metrics, "one", 2)
    metrics.split(lambda models: ())
    metrics.forget("one")
    answered(metrics, "one", 5)
    named, others = metrics.split(lambda models: models)
    assert (named["one"].requests, others.requests) == (5, 2)


STEPS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from("abcd"), st.integers(1, 5)),
    st.tuples(st.just("forget"), st.sampled_from("abcd"), st.none()),
    st.tuples(st.just("split"), st.frozensets(st.sampled_from("abcd")), st.none()),
)


@given(st.lists(STEPS, max_size=40))
@settings(max_examples=100)
def test_others_never_fall_and_each_request_is_new_once_whatever_changes_sides(steps) -> None:
    """Held against increases as Prometheus sees them: between two scrapes, of a series that is in both."""
    metrics, asked, lost = Metrics(), 0, 0
    since: dict[str, int] = {}  # requests of a model since the last split
    before: dict[str, int] = {}
    seen, least = 0, [0] * (len(LATENCY_BOUNDS_S) + 1)
    had_others, known = 0, set()
    for what, value, count in [*steps, ("split", frozenset(), None)]:
        if what == "ask":
            answered(metrics, value, count)
            asked += count
            since[value] = since.get(value, 0) + count
        elif what == "forget":
            if value not in known or value in before:
                lost += since.pop(value, 0)  # of a model that was never scraped, or was told of for itself
            since.pop(value, None)
            before.pop(value, None)
            known.discard(value)
            metrics.forget(value)
        else:
            named, others = metrics.split(lambda models, value=value: value)
            now = {name: each.requests for name, each in named.items()}
            for name, requests in now.items():
                seen += requests - before[name] if name in before else requests if name not in known else 0
            if others is not None:
                assert all(count >= low for count, low in zip(others.total.counts, least, strict=True))
                assert others.requests >= had_others
                seen += others.requests - had_others
                had_others, least = others.requests, list(others.total.counts)
            before, since = now, {}
            known = set(metrics.models())
            assert seen == asked - lost


def test_facts_are_read_when_they_are_asked_for():
    metrics = Metrics()
    rows = [("digits", "1")]
    metrics.watch_facts("model_info", ("model", "version"), lambda: rows)
    rows.append(("faces", "2"))
    assert metrics.facts() == {"model_info": (("model", "version"), [("digits", "1"), ("faces", "2")])}
