"""The forecast of language models: properties of its arithmetic, and admissions by it in an engine that is known."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.language.admission import BYTES_A_TOKEN, StepRates, WaitingWork, Work

STEP_S, STREAM_S, PREFILL_S = 0.005, 0.001, 0.0005

tokens = st.floats(min_value=0.0, max_value=4000.0)
works = st.builds(Work, tokens, tokens, st.floats(min_value=0.0, max_value=10.0))


def known_rates(slots: int = 4, prefill_tokens: int = 128) -> StepRates:
    """StepRates of an engine whose steps take STEP_S, STREAM_S a stream and PREFILL_S a token of a prompt."""
    rates = StepRates(slots, prefill_tokens)
    for _ in range(40):
        rates.observe_step(PREFILL_S * prefill_tokens, 0, prefill_tokens)
        for streams in range(1, slots + 1):
            rates.observe_step(STEP_S + STREAM_S * streams, streams, 0)
    return rates


def waiting(count: int, each: Work) -> WaitingWork:
    return WaitingWork(count, Work(each.prompt * count, each.tokens * count, each.looking_s * count))


def test_nothing_known_forecasts_nothing() -> None:
    forecast = StepRates(4, 128).forecast([Work(500.0, 500.0)] * 4, waiting(9, Work(100.0, 100.0)), Work(900.0, 900.0))

    assert forecast == (0.0, 0.0)


def test_first_token_of_a_lone_prompt_takes_its_reading_and_a_step() -> None:
    forecast = known_rates().forecast([], WaitingWork(), Work(1024.0, 11.0))

    assert 1024 * PREFILL_S <= forecast.first_token_s <= 1024 * PREFILL_S * 1.3
    assert forecast.whole_s - forecast.first_token_s >= 10 * (STEP_S + STREAM_S)


def test_a_full_engine_keeps_a_new_request_until_its_shortest_answer_ends() -> None:
    rates = known_rates(slots=2)

    forecast = rates.forecast([Work(0.0, 100.0), Work(0.0, 900.0)], WaitingWork(), Work(10.0, 1.0))

    assert 100 * (STEP_S + 2 * STREAM_S) <= forecast.first_token_s < 300 * (STEP_S + 2 * STREAM_S)


def test_steps_of_a_slowed_device_count_for_forecasts_until_it_is_cool_and_not_beyond() -> None:
    rates, new = known_rates(), Work(128.0, 11.0)
    before = rates.forecast([], WaitingWork(), new)
    rates.heed_heat(is_slowed=True)
    assert rates.forecast([], WaitingWork(), new) == before
    for _ in range(100):
        rates.observe_step(PREFILL_S * 128 * 5, 0, 128)
        rates.observe_step((STEP_S + STREAM_S) * 5, 1, 0)
        rates.heed_heat(is_slowed=True)
    slowed = rates.forecast([], WaitingWork(), new)
    assert slowed.first_token_s > 3 * before.first_token_s
    assert slowed.whole_s > 3 * before.whole_s
    rates.relax()
    rates.heed_heat(is_slowed=False)
    assert rates.forecast([], WaitingWork(), new) == before


@given(st.lists(works, max_size=8), st.integers(0, 40), works, works)
def test_more_before_a_request_never_lets_it_begin_sooner(live: list[Work], count: int, each: Work, new: Work) -> None:
    rates = known_rates(slots=8)

    before = rates.forecast(live, waiting(count, each), new)
    after = rates.forecast(live, waiting(count + 1, each), new)

    assert after.first_token_s >= before.first_token_s - 1e-9
    assert after.whole_s >= before.whole_s - 1e-9


@given(st.lists(works, max_size=8), st.integers(0, 40), works, works, st.floats(0.0, 500.0))
def test_a_longer_prompt_or_answer_is_never_forecast_to_end_sooner(
    live: list[Work], count: int, each: Work, new: Work, more: float
) -> None:
    rates = known_rates(slots=8)
    given_ = rates.forecast(live, waiting(count, each), new)

    prompt = rates.forecast(live, waiting(count, each), Work(new.prompt + more, new.tokens, new.looking_s))
    answer = rates.forecast(live, waiting(count, each), Work(new.prompt, new.tokens + more, new.looking_s))

    assert prompt.first_token_s >= given_.first_token_s - 1e-9
    assert answer.first_token_s == given_.first_token_s
    assert answer.whole_s >= given_.whole_s - 1e-9


@given(st.lists(st.tuples(st.floats(1e-4, 10.0), st.integers(0, 8), st.integers(0, 256)), max_size=60))
def test_forecasts_are_numbers_by_any_steps(steps: list[tuple[float, int, int]]) -> None:
    rates = StepRates(8, 128)
    for took_s, streams, prefill in steps:
        rates.observe_step(took_s, streams, prefill)
        rates.relax()

    forecast = rates.forecast([Work(10.0, 10.0)], WaitingWork(), Work(100.0, 100.0))

    assert 0.0 <= forecast.first_token_s <= forecast.whole_s < float("inf")


def test_bytes_of_prompts_become_tokens_by_what_was_counted() -> None:
    rates = StepRates(4, 128)
    assert rates.prompt_tokens("text", 300) == 300 / BYTES_A_TOKEN

    for _ in range(80):
        rates.observe_prompt("text", 400, 100, 0)

    assert rates.prompt_tokens("text", 300) == pytest.approx(75)
    assert rates.prompt_tokens("chat", 300) == 300 / BYTES_A_TOKEN


def test_a_prompt_that_comes_again_is_not_read_again() -> None:
    rates = StepRates(4, 128)
    for _ in range(80):
        rates.observe_prompt("chat", 4000, 1000, 960)

    assert rates.to_read("chat", 4000) == pytest.approx(40, rel=0.2)
    assert rates.prompt_tokens("chat", 4000) == pytest.approx(1000)


def test_length_of_an_answer_is_that_of_most_before_within_its_bound() -> None:
    rates = StepRates(4, 128)
    assert rates.length(64) == 64
    assert rates.length(None) == 1

    for _ in range(80):
        rates.observe_length(40)

    assert rates.length(None) == pytest.approx(40, rel=0.1)
    assert rates.length(1000) == pytest.approx(40, rel=0.1)
    assert rates.length(8) == 8


def test_an_answer_longer_than_most_is_not_thought_to_end_at_once() -> None:
    rates = StepRates(4, 128)
    for _ in range(80):
        rates.observe_length(40)

    assert rates.left(None, 10) == pytest.approx(30, rel=0.1)
    assert rates.left(None, 1000) == 500
    assert rates.left(1100, 1000) == 100
    assert rates.left(1000, 1000) == 1


# ---- an engine that is known -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Answer:
    """A request in the engine below."""

    prompt: int
    tokens: int
    arrived_s: float
    first_timeout_s: float
    timeout_s: float
    left: int = 0
    made: int = 0
    first_s: float = 0.0
    ended_s: float = 0.0


class Engine:
    """Continuous batching in simulated time, and admission by forecast before it."""

    def __init__(self, slots: int, prefill_tokens: int) -> None:
        self.rates = StepRates(slots, prefill_tokens)
        self.now_s = 0.0
        self.live: list[Answer] = []
        self.queue: list[Answer] = []
        self.refused = 0

    def offer(self, answer: Answer) -> None:
        rates = self.rates
        live = [Work(each.left, rates.left(each.tokens, each.made)) for each in self.live]
        read = sum(each.prompt for each in self.queue)
        before = WaitingWork(len(self.queue), Work(read, len(self.queue) * rates.length(None)))
        forecast = rates.forecast(live, before, Work(answer.prompt, rates.length(answer.tokens)))
        if forecast.first_token_s > answer.first_timeout_s * 0.85 or forecast.whole_s > answer.timeout_s * 0.85:
            self.refused += 1
            return
        answer.left = answer.prompt
        self.queue.append(answer)

    def step(self) -> list[Answer]:
        """Run one step; return the answers that it ended."""
        rates = self.rates
        while self.queue and len(self.live) < rates.slots:
            self.live.append(self.queue.pop(0))
        budget, prefill, writing = rates.prefill_tokens, 0, []
        for each in self.live:
            if each.left:
                share = min(each.left, budget - prefill)
                each.left -= share
                prefill += share
                if each.left:
                    continue
            writing.append(each)
        took_s = STEP_S + STREAM_S * len(writing) + PREFILL_S * prefill
        self.now_s += took_s
        rates.observe_step(took_s, len(writing), prefill)
        for each in writing:
            each.made += 1
            each.first_s = each.first_s or self.now_s
            if each.made >= each.tokens:
                each.ended_s = self.now_s
                rates.observe_length(each.made)
        ended = [each for each in self.live if each.ended_s]
        self.live = [each for each in self.live if not each.ended_s]
        return ended


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from((2, 4, 8)), st.floats(0.5, 4.0))
def test_admitted_requests_keep_their_deadlines_at_any_load(seed: int, slots: int, load: float) -> None:
    """load: what is offered, in parts of what the engine can do. 3 of 100 may be late: what comes later slows them.

    The first 50 teach what answers are like.
    """
    chance = random.Random(seed)
    engine = Engine(slots, 128)
    each_s = 100 * PREFILL_S + 50 * (STEP_S + STREAM_S * slots) / slots
    ended: list[Answer] = []
    next_s = 0.0
    while len(ended) < 200:
        while next_s <= engine.now_s:
            prompt, tokens_ = chance.randint(10, 200), chance.randint(5, 100)
            engine.offer(Answer(prompt, tokens_, next_s, 0.5, 3.0))
            next_s += chance.expovariate(load / each_s)
        if engine.live or engine.queue:
            ended += engine.step()
        else:
            engine.now_s = next_s
    late = [each for each in ended[50:] if each.first_s - each.arrived_s > 0.5 or each.ended_s - each.arrived_s > 3.0]

    assert len(late) <= 0.03 * 150


def test_pictures_count_as_tokens_to_read_and_as_the_time_of_looking() -> None:
    rates = known_rates()
    rates.observe_picture(640, 0.5)
    plain = rates.forecast([], WaitingWork(), rates.work("chat", 30, 0, 8.0))
    seeing = rates.forecast([], WaitingWork(), rates.work("chat", 30, 2, 8.0))
    assert seeing.first_token_s - plain.first_token_s == pytest.approx(2 * (0.5 + 640 * PREFILL_S), rel=0.2)


def test_costs_of_a_picture_that_a_host_tells_are_bounded() -> None:
    rates = known_rates()
    for tokens, seconds in ((-5, -1.0), (1 << 60, math.inf), (3, math.nan)):
        rates.observe_picture(tokens, seconds)
        forecast = rates.forecast([], WaitingWork(), rates.work("chat", 30, 8, 8.0))
        assert 0.0 <= forecast.first_token_s < 1000.0


def test_requests_that_wait_count_with_as_much_text_and_as_many_pictures_as_those_of_late() -> None:
    rates = known_rates()
    rates.observe_picture(640, 0.5)
    for _ in range(40):
        rates.observe_request(100_000, 300, 1)
    waiting = rates.waiting_work(3, "chat", 300_000, 30.0)
    assert waiting.work.prompt == pytest.approx(3 * (300 / BYTES_A_TOKEN + 640))
    assert waiting.work.looking_s == pytest.approx(1.5)
    assert rates.likely_tokens("chat", 100_000) == pytest.approx(300 / BYTES_A_TOKEN + 640)
