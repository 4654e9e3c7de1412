"""Calls that wait for their turn as a whole: by their senders' turns, and within their deadlines."""

from __future__ import annotations

import pytest

from edge_runtime.errors import Cancelled, DeadlineExceeded, DeadlineUnmeetable, EdgeRuntimeError, QueueFull
from edge_runtime.messages import RequestHeader
from edge_runtime.request.call_line import MAX_WAITING, CallLine, WaitingCall
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.scheduled_model import LatencyModel, Layout, ScheduledModel
from tests.fakes.clock import FakeClock
from tests.fakes.runs import FunctionRunner

CORES = 2
RUN_S = 0.1


class Line:
    """A line before a model, and what became of the calls that joined it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.dispatcher = Dispatcher(self.clock, CORES)
        self.line = CallLine("model", self.dispatcher, self.clock)
        run = FunctionRunner(lambda arrays: arrays)
        self._asks = ScheduledModel("model", Layout(run, 1, 1, LatencyModel({1: RUN_S})))
        self.begun: list[str] = []
        self._under_way: list[WaitingCall] = []
        self.refused: dict[str, EdgeRuntimeError] = {}

    def join(self, name: str, sender: str = "", timeout_ms: float | None = None, work_s: float = RUN_S) -> None:
        call = WaitingCall(
            RequestHeader(model="model", timeout_ms=timeout_ms),
            sender or name,
            10,
            self.clock.monotonic_s(),
            self._asks,
            work_s,
            lambda: self._begin(name, call),
            lambda error: self.refused.update({name: error}),
        )
        self.line.join(call)

    def end(self) -> None:
        """End the call that began first."""
        self.line.end(self._under_way.pop(0))

    def _begin(self, name: str, call: WaitingCall) -> None:
        self.begun.append(name)
        self._under_way.append(call)


@pytest.fixture
def line() -> Line:
    return Line()


def test_as_many_calls_begin_as_there_are_cores_and_each_end_brings_the_next(line: Line) -> None:
    for name in "abcd":
        line.join(name)
    assert line.begun == ["a", "b"]
    line.end()
    assert line.begun == ["a", "b", "c"]
    line.end()
    line.end()
    line.end()
    assert line.begun == ["a", "b", "c", "d"]
    line.join("e")
    assert line.begun[-1] == "e"


def test_senders_take_turns_by_calls(line: Line) -> None:
    for name in ("a1", "a2", "a3", "a4", "a5"):
        line.join(name, sender="a")
    line.join("b1", sender="b")
    for _ in range(4):
        line.end()
    assert line.begun[:2] == ["a1", "a2"]
    assert "b1" in line.begun[2:4], "it does not wait for all of the other's"


def test_a_call_that_cannot_end_in_time_is_refused_as_it_comes(line: Line) -> None:
    line.join("a")
    line.join("b")
    line.join("c")
    with pytest.raises(DeadlineUnmeetable) as caught:
        line.join("d", timeout_ms=150)
    assert caught.value.retry_after_ms is not None
    assert caught.value.retry_after_ms > 0
    line.join("e", timeout_ms=1_000)
    assert line.refused == {}


def test_a_call_whose_time_is_over_at_its_turn_is_refused_and_the_next_begins(line: Line) -> None:
    for name in "ab":
        line.join(name)
    line.join("late", timeout_ms=500)
    line.join("next")
    line.clock.advance(0.45)
    line.end()
    assert isinstance(line.refused["late"], DeadlineUnmeetable | DeadlineExceeded)
    assert line.begun == ["a", "b", "next"]


def test_the_timer_refuses_a_call_that_waits_at_its_deadline(line: Line) -> None:
    for name in "ab":
        line.join(name)
    line.join("late", timeout_ms=500)
    line.clock.advance(0.6)
    expired, _ = line.dispatcher.expire()
    for each in expired:
        each.refuse(DeadlineExceeded("over"))
    assert isinstance(line.refused["late"], DeadlineExceeded)
    line.end()
    assert line.begun == ["a", "b"]


def test_a_waiting_call_of_a_sender_that_has_gone_is_taken_back(line: Line) -> None:
    for name in "abc":
        line.join(name)
    line.dispatcher.drop("c")
    assert isinstance(line.refused["c"], Cancelled)
    line.end()
    assert line.begun == ["a", "b"]


def test_a_full_line_refuses(line: Line) -> None:
    for number in range(CORES + MAX_WAITING):
        line.join(f"{number}", sender="one")
    with pytest.raises(QueueFull):
        line.join("more", sender="one")
    assert len(line.begun) == CORES
