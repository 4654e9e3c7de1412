"""The bounds of bytes that wait for their answers."""

from __future__ import annotations

import pytest

from edge_runtime.errors import QueueFull
from edge_runtime.request.request import REQUEST_BYTES, UnansweredBytes

NBYTES = 9 * REQUEST_BYTES
EACH = 10 * REQUEST_BYTES


def fill(unanswered: UnansweredBytes, sender: str) -> int:
    """Hold until it is refused; return how many requests were held."""
    held = 0
    while holds(unanswered, sender):
        held += 1
    return held


def holds(unanswered: UnansweredBytes, sender: object) -> bool:
    had_room = unanswered.has_room(sender, NBYTES)
    try:
        unanswered.hold(sender, NBYTES)
    except QueueFull:
        assert not had_room
        return False
    assert had_room
    return True


def test_a_sender_is_refused_above_its_own_bound_and_may_ask_again_after_an_answer() -> None:
    unanswered = UnansweredBytes(sender_bytes=3 * EACH, total_bytes=100 * EACH)
    assert fill(unanswered, "greedy") == 3
    unanswered.give_back("greedy", EACH)
    assert unanswered.hold("greedy", NBYTES) == EACH
    assert unanswered.hold("polite", NBYTES) == EACH


def test_the_first_request_of_a_sender_may_be_above_its_own_bound() -> None:
    unanswered = UnansweredBytes(sender_bytes=1, total_bytes=100 * EACH)
    assert fill(unanswered, "one") == 1


@pytest.mark.parametrize("greedy", [1, 2, 3, 10])
def test_another_sender_finds_room_however_much_greedy_senders_hold(greedy: int) -> None:
    unanswered = UnansweredBytes(total_bytes=100 * EACH)
    while sum(holds(unanswered, number) for number in range(greedy)):
        pass
    assert unanswered.total < 100 * EACH
    assert unanswered.hold("polite", NBYTES) == EACH


def test_nothing_is_kept_of_a_sender_that_has_its_answers() -> None:
    unanswered = UnansweredBytes()
    held = [unanswered.hold("one", NBYTES) for _ in range(3)]
    assert unanswered.has("one")
    for nbytes in held:
        unanswered.give_back("one", nbytes)
    assert not unanswered.has("one")
    assert unanswered.total == 0
