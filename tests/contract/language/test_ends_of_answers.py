"""Answers that callers leave, that run out of time, or whose host dies: each has one end, and its slot is free."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from edge_runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    DeadlineUnmeetable,
    EdgeRuntimeError,
    QueueFull,
    RunFailed,
)
from edge_runtime.language import generation
from edge_runtime.language.messages import STEP_FORM, orders_of
from edge_runtime.request.policy import Allowance
from edge_runtime.request.request import CallbackReply, Request
from tests.contract.language.served_words import SLOTS, Parts, Whole, Words, until, words_served
from tests.contract.running_daemon import ANSWER_S

pytest.importorskip("openvino_genai", reason="the extra llm is not installed: pip install edge-runtime[llm]")

LONG = 3000
"""Tokens of an answer that is always under way when a test ends it."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Words]:
    with words_served(tmp_path_factory.mktemp("words")) as words:
        yield words


def at_part(number: int, act: object) -> Parts:
    """A reply that does something when a certain part has come."""
    return Parts(lambda reply: act(reply) if len(reply.parts) == number else None)


def test_cancelled_answer_frees_its_slot_within_two_steps(words: Words) -> None:
    steps_before = words.numbers["runs"]

    reply = words.ask(at_part(5, lambda reply: words.servable.cancel(reply.request)), max_tokens=LONG).wait()
    words.wait_until_idle()

    assert isinstance(reply.error, Cancelled)
    assert len(reply.parts) == 5
    # The one under way and the one behind it go on; the next frees the slot before it writes.
    assert words.numbers["runs"] - steps_before <= 5 + 2 + 1


class LateReply(CallbackReply):
    """Of two steps under way, tells the first one's end behind the second's."""

    under_way = 0
    swaps = 0
    held: tuple[LateReply, Request] | None = None

    def __init__(self, on_end: Callable[[Request | EdgeRuntimeError], object]) -> None:
        super().__init__(on_end)
        LateReply.under_way += 1

    def answer(self, request: Request) -> None:
        LateReply.under_way -= 1
        held, LateReply.held = LateReply.held, None
        if held is None and LateReply.under_way:
            LateReply.held = (self, request)
            return
        super().answer(request)
        if held is not None:
            LateReply.swaps += 1
            CallbackReply.answer(*held)


def test_events_of_a_step_that_are_here_before_those_of_the_one_before_are_told_behind_them(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = words.ask(max_tokens=LONG).wait().text
    monkeypatch.setattr(generation, "CallbackReply", LateReply)

    told = words.ask(max_tokens=LONG).wait()
    words.wait_until_idle()

    assert told.text == expected
    assert LateReply.swaps > 0


def test_answers_of_a_sender_that_is_gone_end_and_others_go_on(words: Words) -> None:
    other = words.ask(max_tokens=60)

    gone = words.ask(at_part(3, lambda reply: words.core.infer.drop(reply.sender)), max_tokens=LONG).wait()

    assert isinstance(gone.error, Cancelled)
    assert other.wait().parts[-1].finish_reason == "length"
    words.wait_until_idle()


def test_deadline_that_passes_in_mid_stream_is_an_error_behind_the_parts(words: Words) -> None:
    reply = words.ask(max_tokens=4000, timeout_ms=150.0).wait()

    assert isinstance(reply.error, DeadlineExceeded | DeadlineUnmeetable)
    assert reply.ends == 1
    words.wait_until_idle()


def test_answers_end_at_their_deadlines_while_a_step_hangs_and_others_go_on_after_it(words: Words) -> None:
    host, hangs = words.host, threading.Event()

    def hang(_: Parts) -> None:
        os.kill(host, signal.SIGSTOP)
        hangs.set()

    other = words.ask(at_part(2, hang), max_tokens=60)
    try:
        assert hangs.wait(ANSWER_S)
        late = words.ask(max_tokens=2, timeout_ms=2_000.0).wait()
        without_a_token = words.ask(max_tokens=2, first_token_ms=2_000.0).wait()
        assert not other.ends
    finally:
        os.kill(host, signal.SIGCONT)

    assert isinstance(late.error, DeadlineExceeded)
    assert isinstance(without_a_token.error, DeadlineExceeded)
    assert other.wait().parts[-1].finish_reason == "length"
    assert late.ends == without_a_token.ends == other.ends == 1
    words.wait_until_idle()


def slow_chat() -> dict:
    """A chat whose schema takes some seconds to prepare: each pattern has a thousand states."""
    patterns = {key: {"type": "string", "pattern": f"^[ab]*a[ab]{{10}}{key}$"} for key in "cdefghij"}
    schema = {"type": "object", "properties": patterns, "required": [*patterns]}
    return {
        "messages": [{"role": "user", "content": "Hello"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "slow", "schema": schema}},
    }


def test_answer_ends_at_its_deadline_while_its_schema_is_prepared_and_others_go_on(words: Words) -> None:
    other = words.ask(max_tokens=LONG)
    other.wait_for_part()

    late = words.ask(chat=slow_chat(), max_tokens=2, timeout_ms=1_000.0).wait()
    other.wait_for_part()
    words.servable.cancel(other.request)

    assert isinstance(late.error, DeadlineExceeded)
    assert late.ends == 1
    assert not late.parts
    assert words.ask(max_tokens=2).wait().parts[-1].finish_reason == "length"
    words.wait_until_idle()


def test_part_that_cannot_be_given_ends_its_answer_alone(words: Words) -> None:
    other = words.ask(max_tokens=60)

    def fail(_: Parts) -> None:
        raise OSError("the connection is gone")

    broken = words.ask(at_part(2, fail), max_tokens=LONG).wait()

    assert isinstance(broken.error, RunFailed)
    assert other.wait().error is None
    words.wait_until_idle()


def test_host_that_dies_ends_its_answers_with_an_error_and_the_next_is_answered(words: Words) -> None:
    replies = [words.ask(max_tokens=LONG) for _ in range(SLOTS)]
    until(lambda: all(reply.parts for reply in replies))

    os.kill(words.host, signal.SIGKILL)

    assert all(isinstance(reply.wait().error, RunFailed) and reply.ends == 1 for reply in replies)
    assert words.ask(max_tokens=8).wait().parts[-1].finish_reason == "length"
    words.wait_until_idle()


def test_requests_that_wait_when_a_host_dies_are_answered_by_the_next(words: Words) -> None:
    """No deadline ends them, and no limit of a step: the process's end does, which the kernel tells at once."""
    before = words.host
    lost = [words.ask(max_tokens=LONG) for _ in range(SLOTS)]
    until(lambda: all(reply.parts for reply in lost))
    waiting = [words.ask(max_tokens=4) for _ in range(SLOTS)]

    os.kill(before, signal.SIGKILL)

    assert [reply.wait().error.code for reply in lost] == [RunFailed.code] * SLOTS
    assert all("SIGKILL" in reply.error.message for reply in lost)
    assert [reply.wait().error for reply in waiting] == [None] * SLOTS
    assert words.host not in (0, before)
    words.wait_until_idle()


class Steps:
    """Hears of each step that is asked for: how many answers are in it, and its priority."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()

    def follow(self, request: Request) -> None:
        orders = orders_of(request.inputs[0][0])
        self.seen.add((len(orders.live) + len(orders.begins), request.priority))

    def close(self) -> None:
        pass


def test_step_has_the_priority_of_the_most_urgent_of_its_answers(words: Words) -> None:
    step = words.servable.forms[STEP_FORM]
    step.mirror = steps = Steps()
    try:
        patient = words.ask(max_tokens=LONG, priority=6)
        patient.wait_for_part()
        words.ask(max_tokens=20, priority=2).wait()
        patient.wait_for_part()
        words.servable.cancel(patient.request)
        words.wait_until_idle()
    finally:
        step.mirror = None

    assert {each for each in steps.seen if each[0]} == {(1, 6), (2, 2)}


def test_times_of_an_answer_part_at_its_first_token(words: Words) -> None:
    clock, host = words.core.clock, words.host
    os.kill(host, signal.SIGSTOP)
    try:
        reply = words.ask(Whole(), max_tokens=40)
    finally:
        goes_on_s = clock.monotonic_s()
        os.kill(host, signal.SIGCONT)
    reply.wait()

    request = reply.request
    assert goes_on_s < request.arrived_s + request.queue_s < request.arrived_s + request.queue_s + request.run_s
    words.wait_until_idle()


def test_full_queue_refuses_with_the_time_after_which_to_ask_again(words: Words) -> None:
    replies = [words.ask(max_tokens=300) for _ in range(SLOTS * 6)]

    refused = [reply for reply in replies if reply.wait().error is not None]

    assert 0 < len(refused) <= SLOTS * 2
    assert all(isinstance(reply.error, QueueFull) and reply.error.retry_after_ms > 0 for reply in refused)
    assert all(reply.ends == 1 for reply in replies)
    words.wait_until_idle()


def test_first_token_that_would_be_late_is_refused_before_any_work(words: Words) -> None:
    running = [words.ask(max_tokens=LONG) for _ in range(SLOTS)]
    until(lambda: all(len(reply.parts) > 20 for reply in running))

    refused = words.ask(max_tokens=8, first_token_ms=0.01).wait()

    assert isinstance(refused.error, DeadlineUnmeetable)
    assert refused.error.retry_after_ms > 0
    for reply in running:
        words.servable.cancel(reply.request)
    words.wait_until_idle()


def test_steps_of_a_slowed_device_teach_no_forecast_of_a_cool_one(words: Words) -> None:
    words.ask(max_tokens=60).wait()
    words.wait_until_idle()
    before = words.numbers["step_ms"]
    words.core.dispatcher.allow(Allowance(1, 6, 1.0))
    try:
        words.ask(max_tokens=60).wait()
        words.wait_until_idle()
    finally:
        words.core.dispatcher.allow(None)

    words.ask(max_tokens=1).wait()  # a step that reads a short prompt teaches nothing

    assert words.numbers["step_ms"] == before


def test_senders_take_turns_where_slots_are_full(words: Words) -> None:
    greedy, polite = object(), object()
    ends: list[object] = []
    held = [words.ask(max_tokens=40) for _ in range(SLOTS)]
    senders = [greedy] * SLOTS * 3 + [polite] * 2
    replies = [
        words.ask(Parts(sender=each, on_end=lambda reply: ends.append(reply.sender)), max_tokens=40) for each in senders
    ]

    for reply in (*held, *replies):
        reply.wait()

    assert max(index for index, sender in enumerate(ends) if sender is polite) < SLOTS * 3
    words.wait_until_idle()


def test_random_ends_leave_one_end_each_and_nothing_behind(words: Words) -> None:
    chance = random.Random(28)
    replies: list[Parts] = []
    for number in range(150):
        at, kind = chance.randint(1, 12), chance.choice(("cancel", "drop", "fail", "end", "late", "at once"))

        def act(reply: Parts, kind: str = kind) -> None:
            if kind == "cancel":
                words.servable.cancel(reply.request)
            elif kind == "drop":
                words.core.infer.drop(reply.sender)
            elif kind == "fail":
                raise OSError("the connection is gone")

        more = {"timeout_ms": float(chance.randint(1, 60))} if kind == "late" else {}
        tokens = chance.randint(1, 20) if kind == "end" else LONG
        replies.append(words.ask(at_part(at, act), max_tokens=20 if kind == "late" else tokens, **more))
        if kind == "at once":
            thread = threading.Thread(target=words.servable.cancel, args=(replies[-1].request,))
            thread.start()
            thread.join()
        if number in (60, 110):
            os.kill(words.host, signal.SIGKILL)
            until(lambda: words.host != 0)
        until(lambda: sum(not reply.ends for reply in replies) < SLOTS + 2)
    for reply in replies:
        reply.wait()
    words.wait_until_idle()

    assert [reply.ends for reply in replies] == [1] * len(replies)
    assert words.ask(max_tokens=8).wait().parts[-1].finish_reason == "length"
