"""The life of a release: every way ends with something that serves, and nothing is tried for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.updates.states import (
    MAX_TRIES,
    STATES,
    Event,
    ReleaseState,
    after_restart,
    next_state,
)

TRANSITIONS = {(state, event): end for state, row in STATES.items() for event, end in row.after.items()}


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ([Event.OFFERED, Event.VERIFIED, Event.STAGED, Event.SWAPPED, Event.PASSED], ReleaseState.IDLE),
        ([Event.OFFERED, Event.HINDERED], ReleaseState.IDLE),
        ([Event.OFFERED, Event.VERIFIED, Event.HINDERED], ReleaseState.IDLE),
        ([Event.OFFERED, Event.VERIFIED, Event.STAGED, Event.HINDERED], ReleaseState.IDLE),
        ([Event.OFFERED, Event.VERIFIED, Event.STAGED, Event.FAILED, Event.NOTED], ReleaseState.IDLE),
        (
            [Event.OFFERED, Event.VERIFIED, Event.STAGED, Event.SWAPPED, Event.FAILED, Event.REVERTED, Event.NOTED],
            ReleaseState.IDLE,
        ),
        ([Event.OFFERED, Event.VERIFIED, Event.STAGED, Event.SWAPPED, Event.WITHDRAWN], ReleaseState.ROLLING_BACK),
        ([Event.OFFERED, Event.VERIFIED, Event.STAGED, Event.SWAPPED, Event.UNJUDGED], ReleaseState.IDLE),
    ],
)
def test_a_release_goes_its_way(events: list[Event], end: ReleaseState) -> None:
    state = ReleaseState.IDLE
    for event in events:
        state = next_state(state, event)
    assert state is end


def test_an_event_that_cannot_happen_is_a_bug_and_said_so() -> None:
    with pytest.raises(ValueError, match="passed cannot happen to a release that is staging"):
        next_state(ReleaseState.STAGING, Event.PASSED)


def test_only_a_release_that_serves_is_rolled_back() -> None:
    assert {state for (state, _), end in TRANSITIONS.items() if end is ReleaseState.ROLLING_BACK} == {
        ReleaseState.OBSERVING
    }


def test_a_release_is_never_held_guilty_for_what_it_did_not_do() -> None:
    for (_, event), end in TRANSITIONS.items():
        assert end is not ReleaseState.REJECTING or event in {Event.FAILED, Event.REVERTED, Event.WITHDRAWN}


def test_every_state_is_reached_and_left() -> None:
    assert {state for state, _ in TRANSITIONS} == set(ReleaseState)
    assert set(TRANSITIONS.values()) == set(ReleaseState)


@pytest.mark.parametrize(
    ("state", "tries", "end"),
    [
        (ReleaseState.IDLE, 0, ReleaseState.IDLE),
        (ReleaseState.VERIFYING, 0, ReleaseState.IDLE),
        (ReleaseState.STAGING, 9, ReleaseState.STAGING),
        (ReleaseState.WARMING, 1, ReleaseState.STAGING),
        (ReleaseState.WARMING, MAX_TRIES, ReleaseState.REJECTING),
        (ReleaseState.OBSERVING, MAX_TRIES - 1, ReleaseState.STAGING),
        (ReleaseState.OBSERVING, MAX_TRIES, ReleaseState.REJECTING),
        (ReleaseState.ROLLING_BACK, 0, ReleaseState.REJECTING),
        (ReleaseState.REJECTING, 0, ReleaseState.REJECTING),
    ],
)
def test_a_restart_goes_on_with_the_old_release_serving(state: ReleaseState, tries: int, end: ReleaseState) -> None:
    assert after_restart(state, tries) is end


@given(st.lists(st.sampled_from([*Event, None]), max_size=80))
def test_a_release_that_kills_the_process_is_tried_three_times_whatever_happens(events: list[Event | None]) -> None:
    """None is a process that ends without a word; a try is counted before it can."""
    state, tries = ReleaseState.IDLE, 0
    kills = 0
    for event in events:
        if event is None:
            kills += STATES[state].counts_tries
            state = after_restart(state, tries)
        elif (state, event) in TRANSITIONS:
            state = next_state(state, event)
            tries += state is ReleaseState.WARMING
            if state is ReleaseState.REJECTING:
                return
    assert kills <= 2 * MAX_TRIES
