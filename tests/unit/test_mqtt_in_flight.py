"""How requests in flight end: an answer, a timeout that is believed only at the second look, or a lost connection."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import count
from typing import Any

import pytest

from edge_runtime.client.mqtt_in_flight import WITHDRAWN_S, Asked, InFlight
from edge_runtime.errors import QueueFull
from edge_runtime.transports.outbox import Outgoing
from edge_runtime.wire import codec

NUMBERS = count(1)
REPLY = codec.pack_array(b"\x80", [])


def ask(in_flight: InFlight, deadline_s: float) -> Asked:
    """A future that is in flight."""
    asked = Asked("edge/d/infer/m", 1.0)
    asked.future = Future[Any]()
    asked.decode = len
    asked.number = next(NUMBERS).to_bytes(8, "big")
    asked.message = Outgoing(asked.topic, b"")
    asked.deadline_s = deadline_s
    in_flight.take_slot(0.0, lambda: True)
    in_flight.add(asked)
    return asked


def result(asked: Asked) -> Any:
    assert asked.future is not None
    return asked.future.result(timeout=0)


def test_what_became_overdue_since_the_last_look_is_left_to_the_next() -> None:
    in_flight = InFlight(2)
    asked = ask(in_flight, deadline_s=10.0)
    assert in_flight.take_missed(9.9) == []
    assert in_flight.take_missed(99.0) == []  # held up in between: its reply may not be read yet
    assert in_flight.take_missed(99.1) == [asked]
    in_flight.fail(asked, TimeoutError("silence"))
    with pytest.raises(TimeoutError, match="silence"):
        result(asked)


def test_a_reply_between_two_looks_is_an_answer() -> None:
    in_flight = InFlight(2)
    asked = ask(in_flight, deadline_s=10.0)
    in_flight.take_missed(99.0)
    in_flight.answer(asked.number, REPLY)
    assert in_flight.take_missed(99.1) == []
    assert result(asked) == 2  # a header and an empty id


def test_a_caller_that_looks_at_the_clock_itself_is_not_among_the_missed() -> None:
    in_flight = InFlight(2)
    asked = ask(in_flight, deadline_s=10.0)
    asked.future = None
    assert [in_flight.take_missed(now_s) for now_s in (99.0, 99.1)] == [[], []]
    assert in_flight.give_up(asked)


def test_each_end_frees_one_slot_and_withdraws_what_has_no_answer() -> None:
    in_flight = InFlight(4)
    answered, given_up, _, lost = asked = [ask(in_flight, deadline_s) for deadline_s in (99.0, 99.0, 10.0, 99.0)]
    with pytest.raises(QueueFull):
        in_flight.take_slot(0.0, lambda: False)

    in_flight.answer(answered.number, REPLY)
    assert in_flight.give_up(given_up)
    in_flight.take_missed(11.0)
    for each in in_flight.take_missed(12.0):
        in_flight.fail(each, TimeoutError())
    in_flight.fail_all("the broker is gone")

    with pytest.raises(ConnectionError, match="the broker is gone"):
        result(lost)
    assert [each.message is not None and each.message.expires_s == WITHDRAWN_S for each in asked] == [
        each is not answered for each in asked
    ]
    for _ in asked:
        in_flight.take_slot(0.0, lambda: False)
    with pytest.raises(QueueFull):
        in_flight.take_slot(0.0, lambda: False)


def test_what_has_ended_cannot_be_ended_again() -> None:
    in_flight = InFlight(1)
    asked = ask(in_flight, deadline_s=10.0)
    in_flight.answer(asked.number, REPLY)
    in_flight.answer(asked.number, b"again, as QoS 1 may")
    assert not in_flight.give_up(asked)
    in_flight.fail_all("too late")
    assert result(asked) == 2
    in_flight.take_slot(0.0, lambda: False)
    with pytest.raises(QueueFull):
        in_flight.take_slot(0.0, lambda: False)
