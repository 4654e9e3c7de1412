"""Samples of fifteen minutes: what they say, and what they cost."""

from __future__ import annotations

import tracemalloc

import pytest

from edge_runtime.errors import ModelNotFound
from edge_runtime.pages.history import KEPT, MOST_MODELS, MOST_REASONS, PERIOD_S, History
from edge_runtime.telemetry.metrics import Metrics
from tests.fakes.clock import FakeClock


def _sampled(history: History, clock: FakeClock) -> None:
    """Let a period pass, and take its sample."""
    clock.advance(PERIOD_S)
    before = history.rounds
    while history.rounds == before:
        history.beat()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def history(metrics: Metrics, clock: FakeClock) -> History:
    return History(metrics, clock)


def test_a_sample_has_the_rate_and_the_quantiles_of_its_own_seconds(
    history: History, metrics: Metrics, clock: FakeClock
) -> None:
    mlp, net = metrics.model("mlp"), metrics.model("net")
    mlp.answered(0.0, 0.010, 100)
    _sampled(history, clock)
    mlp.answered(0.0, 0.020, 50)
    net.answered(0.0, 0.001, 150)
    _sampled(history, clock)
    _sampled(history, clock)
    told = history.report("mlp")
    assert told["rate"] == [20.0, 10.0, 0.0]
    assert told["p50_ms"] == [pytest.approx(10, rel=0.2), pytest.approx(20, rel=0.2), None]
    everything = history.report()
    assert everything["rate"] == [20.0, 40.0, 0.0]
    assert everything["p50_ms"][1] == pytest.approx(1, rel=0.2)
    assert everything["p95_ms"][1] == pytest.approx(20, rel=0.2)
    assert len(everything["time"]) == len(everything["machine"]["cpu_share"]) == 3


def test_the_refusals_are_told_by_their_reasons(history: History, metrics: Metrics, clock: FakeClock) -> None:
    mlp = metrics.model("mlp")
    mlp.refused("queue_full", 3)
    metrics.refused("decode_failed", 2)
    _sampled(history, clock)
    mlp.refused("draining")
    _sampled(history, clock)
    assert history.report("mlp")["refused"] == {"queue_full": [3, 0], "draining": [0, 1]}
    assert history.report()["refused"] == {"decode_failed": [2, 0], "queue_full": [3, 0], "draining": [0, 1]}
    assert history.report("mlp")["refused_rate"] == [0.6, 0.2]
    assert history.refused_lately() == {"mlp": {"queue_full": 3, "draining": 1}}


def test_now_is_the_last_sample_and_the_last_answer_of_a_minute(
    history: History, metrics: Metrics, clock: FakeClock
) -> None:
    assert history.now("mlp") == {"rate": 0.0, "refused_rate": 0.0, "p50_ms": None, "p95_ms": None, "p99_ms": None}
    metrics.model("mlp").answered(0.0, 0.010, 5)
    _sampled(history, clock)
    assert history.now("mlp")["rate"] == 1.0
    _sampled(history, clock)
    assert history.now("mlp")["rate"] == 0.0
    assert history.now("mlp")["p50_ms"] == pytest.approx(10, rel=0.2)
    for _ in range(12):
        _sampled(history, clock)
    assert history.now("mlp")["p50_ms"] is None


def test_the_oldest_samples_make_room(history: History, metrics: Metrics, clock: FakeClock) -> None:
    mlp = metrics.model("mlp")
    for count in range(KEPT + 20):
        mlp.answered(0.0, 0.010, count)
        mlp.refused("queue_full")
        _sampled(history, clock)
    told = history.report("mlp")
    assert len(told["time"]) == KEPT - 1
    assert told["rate"][-1] == pytest.approx((KEPT + 19) / PERIOD_S, rel=1e-3)
    assert set(told["refused"]["queue_full"]) == {1}


def test_a_model_that_is_forgotten_leaves_and_another_of_its_name_begins_anew(
    history: History, metrics: Metrics, clock: FakeClock
) -> None:
    metrics.model("mlp").answered(0.0, 0.010, 100)
    _sampled(history, clock)
    metrics.forget("mlp")
    metrics.model("mlp").answered(0.0, 0.010, 10)
    _sampled(history, clock)
    assert history.report("mlp")["rate"] == [20.0, 2.0]
    metrics.forget("mlp")
    _sampled(history, clock)
    with pytest.raises(ModelNotFound, match="mlp"):
        history.report("mlp")


def test_a_quarter_of_an_hour_of_250_models_has_less_than_a_mebibyte(metrics: Metrics, clock: FakeClock) -> None:
    for number in range(250):
        model = metrics.model(f"m{number}")
        model.answered(0.0, 0.010, 100)
        model.refused("queue_full")
        model.refused("deadline_unmeetable")
    first = History(metrics, clock)
    _sampled(first, clock)  # what is imported at the first reading is not its own
    tracemalloc.start()
    try:
        history = History(metrics, clock)
        for _ in range(3):
            _sampled(history, clock)
        current, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert current < 1 << 20


def test_models_beyond_the_bound_have_no_samples_and_reasons_beyond_theirs_count_in_all(
    metrics: Metrics, clock: FakeClock
) -> None:
    history = History(metrics, clock)
    for number in range(MOST_MODELS + 5):
        metrics.model(f"m{number}").refused("queue_full")
    _sampled(history, clock)
    named = [each for each in range(MOST_MODELS + 5) if _is_known(history, f"m{each}")]
    assert len(named) == MOST_MODELS
    assert sum("queue_full" in history.report(f"m{each}")["refused"] for each in named) == MOST_REASONS
    assert history.report()["refused"]["queue_full"] == [MOST_MODELS]


def test_a_model_beyond_the_bound_has_samples_from_its_first_request_on_in_place_of_one_without_any(
    metrics: Metrics, clock: FakeClock
) -> None:
    history = History(metrics, clock)
    for number in range(MOST_MODELS):
        metrics.model(f"m{number}")
    late = metrics.model("late")
    _sampled(history, clock)
    assert not _is_known(history, "late")
    late.answered(0.0, 0.010, 100)
    _sampled(history, clock)
    late.answered(0.0, 0.010, 50)
    _sampled(history, clock)
    assert history.report("late")["rate"][-1] == 10.0
    assert sum(_is_known(history, f"m{number}") for number in range(MOST_MODELS)) == MOST_MODELS - 1


def test_a_model_beyond_the_bound_takes_no_place_of_one_that_is_asked(metrics: Metrics, clock: FakeClock) -> None:
    history = History(metrics, clock)
    for number in range(MOST_MODELS + 1):
        metrics.model(f"m{number}").answered(0.0, 0.010, 1)
    for _ in range(2):
        _sampled(history, clock)
    assert sum(_is_known(history, f"m{number}") for number in range(MOST_MODELS + 1)) == MOST_MODELS


def _is_known(history: History, model: str) -> bool:
    try:
        history.report(model)
    except ModelNotFound:
        return False
    return True
