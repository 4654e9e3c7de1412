"""The life of a release: every way ends with something that serves, and nothing is tried for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.update.states import COUNTS_A_TRY, MAX_TRIES, TRANSITIONS, Event, State, after_restart, next_state


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ([Event.OFFERED, Event.VERIFIED, Event.STAGED, Event.SWAPPED, Event.PASSED], State.IDLE),
        ([Event.OFFERED, Event.HINDERED], State.IDLE),
        ([Event.OFFERED, Event.VERIFIED, Event.HINDERED], State.IDLE),
        ([Event.OFFERED, Event.VERIFIED, Event.STAGED, Event.HINDERED], State.IDLE),
        ([Event.OFFERED, Event.VERIFIED, Event.STAGED, Event.FAILED, Event.NOTED], State.IDLE),
        (
            [Event.OFFERED, Event.VERIFIED, Event.STAGED, Event.SWAPPED, Event.FAILED, Event.REVERTED, Event.NOTED],
            State.IDLE,
        ),
        ([Event.OFFERED, Event.VERIFIED, Event.STAGED, Event.SWAPPED, Event.WITHDRAWN], State.ROLLING_BACK),
    ],
)
def test_a_release_goes_its_way(events: list[Event], end: State) -> None:
    state = State.IDLE
    for event in events:
        state = next_state(state, event)
    assert state is end


def test_what_cannot_happen_is_a_bug_and_said_so() -> None:
    with pytest.raises(ValueError, match="passed cannot happen to a release that is staging"):
        next_state(State.STAGING, Event.PASSED)


def test_only_a_release_that_serves_is_rolled_back() -> None:
    assert {state for (state, _), end in TRANSITIONS.items() if end is State.ROLLING_BACK} == {State.OBSERVING}


def test_a_release_is_never_held_guilty_for_what_it_did_not_do() -> None:
    for (_, event), end in TRANSITIONS.items():
        assert end is not State.REJECTING or event in {Event.FAILED, Event.REVERTED, Event.WITHDRAWN}


def test_every_state_is_reached_and_left() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State)
    assert set(TRANSITIONS.values()) == set(State)


@pytest.mark.parametrize(
    ("state", "tries", "end"),
    [
        (State.IDLE, 0, State.IDLE),
        (State.VERIFYING, 0, State.IDLE),
        (State.STAGING, 9, State.STAGING),
        (State.WARMING, 1, State.STAGING),
        (State.WARMING, MAX_TRIES, State.REJECTING),
        (State.OBSERVING, MAX_TRIES - 1, State.STAGING),
        (State.OBSERVING, MAX_TRIES, State.REJECTING),
        (State.ROLLING_BACK, 0, State.REJECTING),
        (State.REJECTING, 0, State.REJECTING),
    ],
)
def test_a_restart_goes_on_with_the_old_release_serving(state: State, tries: int, end: State) -> None:
    assert after_restart(state, tries) is end


@given(st.lists(st.sampled_from([*Event, None]), max_size=80))
def test_whatever_happens_a_release_that_kills_the_process_is_tried_three_times(events: list[Event | None]) -> None:
    """None is a process that ends without a word; a try is counted before it can."""
    state, tries = State.IDLE, 0
    kills = 0
    for event in events:
        if event is None:
            kills += state in COUNTS_A_TRY
            state = after_restart(state, tries)
        elif (state, event) in TRANSITIONS:
            state = next_state(state, event)
            tries += state is State.WARMING
            if state is State.REJECTING:
                return
    assert kills <= 2 * MAX_TRIES
