"""Which models a scrape tells of in detail."""

from __future__ import annotations

from edge_runtime.telemetry.busiest import ASKED_S, HALF_LIFE_S, MOST_ASKED, BusiestModels
from edge_runtime.telemetry.metrics import ModelMetrics
from tests.fakes.clock import FakeClock


def models(**requests: int) -> dict[str, ModelMetrics]:
    found = {name: ModelMetrics() for name in requests}
    for name, count in requests.items():
        ask(found[name], count)
    return found


def ask(model: ModelMetrics, count: int) -> None:
    model.answered(0.001, 0.001, count)


def test_the_busiest_models_are_named_and_refusals_count_as_requests() -> None:
    found = models(idle=0, some=5, much=9, refused=0)
    found["refused"].refused("queue_full", 7)
    assert BusiestModels(2, FakeClock()).choose(found) == {"much", "refused"}


def test_all_models_are_named_where_they_are_few() -> None:
    assert BusiestModels(3, FakeClock()).choose(models(one=0, two=1, three=2)) == {"one", "two", "three"}


def test_no_model_is_named_by_a_limit_of_none_but_one_that_is_asked_for() -> None:
    busiest = BusiestModels(0, FakeClock())
    assert busiest.choose(models(one=1, two=2)) == set()
    busiest.ask(["two"])
    assert busiest.choose(models(one=1, two=2)) == {"two"}


def test_a_model_keeps_its_place_until_another_is_half_as_busy_again() -> None:
    busiest, found = BusiestModels(1, FakeClock()), models(first=100, second=0)
    assert busiest.choose(found) == {"first"}
    ask(found["second"], 140)
    assert busiest.choose(found) == {"first"}
    ask(found["second"], 20)
    assert busiest.choose(found) == {"second"}


def test_requests_of_long_ago_count_little() -> None:
    clock = FakeClock()
    busiest, found = BusiestModels(1, clock), models(before=1_000, now=0)
    assert busiest.choose(found) == {"before"}
    clock.advance(10 * HALF_LIFE_S)
    ask(found["now"], 5)
    assert busiest.choose(found) == {"now"}


def test_a_model_that_is_asked_for_stands_beside_the_busiest_for_an_hour() -> None:
    clock = FakeClock()
    busiest, found = BusiestModels(1, clock), models(busy=9, idle=0)
    busiest.ask(["idle"])
    assert busiest.choose(found) == {"busy", "idle"}
    clock.advance(ASKED_S - 1)
    assert busiest.choose(found) == {"busy", "idle"}
    clock.advance(2)
    assert busiest.choose(found) == {"busy"}


def test_the_last_models_that_were_asked_for_are_named_and_no_names_of_nothing() -> None:
    busiest, found = BusiestModels(0, FakeClock()), models(**{f"model-{index}": 0 for index in range(MOST_ASKED + 5)})
    busiest.ask(found)
    busiest.ask(f"nothing-{index}" for index in range(1_000))
    assert busiest.choose(found) == {f"model-{index}" for index in range(5, MOST_ASKED + 5)}
    busiest.ask(["model-0"])
    assert busiest.choose(found) == {"model-0", *(f"model-{index}" for index in range(6, MOST_ASKED + 5))}


def test_a_model_that_is_gone_and_comes_back_counts_anew() -> None:
    busiest = BusiestModels(1, FakeClock())
    assert busiest.choose(models(one=50, two=10)) == {"one"}
    assert busiest.choose(models(two=10)) == {"two"}
    assert busiest.choose(models(one=3, two=40)) == {"two"}
