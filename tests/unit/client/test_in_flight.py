"""How requests in flight end: an answer, or a missing reply that is believed only after further looks."""

from __future__ import annotations

from edge_runtime.client.in_flight import LOOK_S, LOOKS, NEVER_S, Call, InFlight


def sent(in_flight: InFlight, deadline_s: float) -> Call:
    """A call that is in flight."""
    call = Call(b"", (), 1.0, len)
    in_flight.number(call)
    in_flight.add(call, deadline_s)
    return call


def missed(in_flight: InFlight, now_s: float) -> list[Call]:
    return [call for call, _ in in_flight.take_missed(now_s)]


def test_a_call_that_became_overdue_since_the_last_look_is_left_to_the_next() -> None:
    in_flight = InFlight(2, looks=1)
    call = sent(in_flight, deadline_s=10.0)
    assert missed(in_flight, 9.9) == []
    assert missed(in_flight, 99.0) == []  # held up in between: its reply may not be read yet
    assert missed(in_flight, 99.1) == [call]
    assert missed(in_flight, 99.2) == []


def test_a_call_that_became_overdue_between_two_looks_is_missed_at_the_third() -> None:
    in_flight = InFlight(2, looks=1)
    first, second = (sent(in_flight, deadline_s) for deadline_s in (10.0, 10.2))
    assert [missed(in_flight, now_s) for now_s in (10.1, 10.3, 10.5)] == [[], [first], [second]]


def test_silence_is_believed_after_all_looks_with_the_time_by_which_the_first_was_late() -> None:
    in_flight = InFlight(2)
    call = sent(in_flight, deadline_s=10.0)
    for look in range(LOOKS):
        assert in_flight.take_missed(10.25 + look * LOOK_S) == []
    assert in_flight.take_missed(10.25 + LOOKS * LOOK_S) == [(call, 0.25)]


def test_a_reply_between_two_looks_is_an_answer() -> None:
    in_flight = InFlight(2, looks=1)
    call = sent(in_flight, deadline_s=10.0)
    assert missed(in_flight, 99.0) == []
    assert in_flight.take(call.number) is call
    assert missed(in_flight, 99.1) == []


def test_a_caller_that_looks_at_the_clock_itself_is_not_among_the_missed() -> None:
    in_flight = InFlight(2, looks=1)
    call = sent(in_flight, deadline_s=NEVER_S)
    assert [missed(in_flight, now_s) for now_s in (99.0, 99.1)] == [[], []]
    assert in_flight.take(call.number) is call


def test_each_end_frees_one_slot() -> None:
    in_flight = InFlight(3, looks=1)
    answered, _, _ = (sent(in_flight, deadline_s) for deadline_s in (99.0, 10.0, 99.0))
    assert in_flight.is_full
    in_flight.take(answered.number)
    assert not in_flight.is_full
    sent(in_flight, 99.0)
    assert in_flight.is_full
    missed(in_flight, 11.0)
    missed(in_flight, 12.0)
    assert not in_flight.is_full
    assert len(in_flight.take_all()) == 2
    assert in_flight.calls == {}


def test_a_call_that_has_ended_cannot_be_ended_again() -> None:
    in_flight = InFlight(1, looks=1)
    call = sent(in_flight, deadline_s=10.0)
    assert in_flight.take(call.number) is call
    assert in_flight.take(call.number) is None
    assert in_flight.take_all() == []
    assert [missed(in_flight, now_s) for now_s in (99.0, 99.1)] == [[], []]


def test_numbers_are_used_once_and_begin_at_the_given_one() -> None:
    in_flight = InFlight(8, first_number=1 << 40)
    numbers = [sent(in_flight, 1.0).number for _ in range(3)]
    assert [int.from_bytes(number, "little") for number in numbers] == [1 << 40, (1 << 40) + 1, (1 << 40) + 2]
    assert {len(number) for number in numbers} == {8}
