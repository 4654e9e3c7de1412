"""A release on a device: its identity, and its states as one table: what follows each, and what a restart makes of it.

Pure. Owns: the table, and how often a release may be tried. The effects are the rollout's, the memory is the journal's,
which has a state before the step that it stands for begins, so that a restart finds it.

    IDLE -> VERIFYING -> STAGING -> WARMING -> OBSERVING -> IDLE (committed)
                 |          |          |           '-> ROLLING_BACK -> REJECTING
                 '----------'          '-> REJECTING -> IDLE (its hash is never tried again)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec

MAX_TRIES = 3
"""How often a release may take the process or its child down before it is refused: a power cut in the middle of a load
is not a crash of the model, and looks like one."""


class Release(msgspec.Struct, frozen=True):
    """The identity of a release."""

    model: str
    version: int
    counter: int
    manifest_sha256: str


class ReleaseState(Enum):
    """The state of a release under way."""

    IDLE = "idle"
    VERIFYING = "verifying"
    STAGING = "staging"
    WARMING = "warming"
    OBSERVING = "observing"
    ROLLING_BACK = "rolling_back"
    REJECTING = "rejecting"


class Event(Enum):
    """The life of a release. SWAPPED: it is loaded in the daemon and about to run requests, or copies of them.

    HINDERED: not its own fault (no network, a full disk, no memory now). FAILED: its own. WITHDRAWN: an operator does
    not want it; that counts as a fault, since the next check must not bring it again. UNJUDGED: it was observed, and
    nothing can be said of it.
    """

    OFFERED = "offered"
    VERIFIED = "verified"
    STAGED = "staged"
    SWAPPED = "swapped"
    PASSED = "passed"
    HINDERED = "hindered"
    WITHDRAWN = "withdrawn"
    FAILED = "failed"
    UNJUDGED = "unjudged"
    REVERTED = "reverted"
    NOTED = "noted"


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A release under way. tries: how many of its tries had no result."""

    release: Release
    state: ReleaseState
    tries: int
    reason: str


@dataclass(frozen=True, slots=True)
class StateRow:
    """One row of the table. after: the next state by event. restart: the state after the process begins again.

    counts_tries: the release may have ended a process that ends in this state; the MAX_TRIES-th time it is rejected.
    """

    after: Mapping[Event, ReleaseState]
    restart: ReleaseState
    counts_tries: bool = False


# The version before serves after every restart: the pointer to the active release changes in the commit alone.
STATES: dict[ReleaseState, StateRow] = {
    ReleaseState.IDLE: StateRow({Event.OFFERED: ReleaseState.VERIFYING}, restart=ReleaseState.IDLE),
    # Metadata that does not verify says nothing about the release that it claims to be: nothing is held against that.
    ReleaseState.VERIFYING: StateRow(
        {
            Event.VERIFIED: ReleaseState.STAGING,
            Event.HINDERED: ReleaseState.IDLE,
            Event.WITHDRAWN: ReleaseState.REJECTING,
        },
        restart=ReleaseState.IDLE,
    ),
    # The next check fetches what is missing; parts of files stay.
    ReleaseState.STAGING: StateRow(
        {
            Event.STAGED: ReleaseState.WARMING,
            Event.HINDERED: ReleaseState.IDLE,
            Event.WITHDRAWN: ReleaseState.REJECTING,
        },
        restart=ReleaseState.STAGING,
    ),
    # Loaded in a child and run on its golden input, then loaded beside the version before.
    ReleaseState.WARMING: StateRow(
        {
            Event.SWAPPED: ReleaseState.OBSERVING,
            Event.HINDERED: ReleaseState.IDLE,
            Event.WITHDRAWN: ReleaseState.REJECTING,
            Event.FAILED: ReleaseState.REJECTING,
        },
        restart=ReleaseState.STAGING,
        counts_tries=True,
    ),
    # It serves, the version before stays loaded, and the pointer to the active release still names that one.
    ReleaseState.OBSERVING: StateRow(
        {
            Event.PASSED: ReleaseState.IDLE,
            Event.UNJUDGED: ReleaseState.IDLE,
            Event.WITHDRAWN: ReleaseState.ROLLING_BACK,
            Event.FAILED: ReleaseState.ROLLING_BACK,
        },
        restart=ReleaseState.STAGING,
        counts_tries=True,
    ),
    ReleaseState.ROLLING_BACK: StateRow({Event.REVERTED: ReleaseState.REJECTING}, restart=ReleaseState.REJECTING),
    ReleaseState.REJECTING: StateRow({Event.NOTED: ReleaseState.IDLE}, restart=ReleaseState.REJECTING),
}


def next_state(state: ReleaseState, event: Event) -> ReleaseState:
    """Return the state that follows. Raises ValueError: the event cannot happen, which is a bug of ours."""
    try:
        return STATES[state].after[event]
    except KeyError:
        raise ValueError(f"{event.value} cannot happen to a release that is {state.value}") from None


def after_restart(state: ReleaseState, tries: int) -> ReleaseState:
    """Return the state in which a release goes on after a restart. tries: how many had no result."""
    row = STATES[state]
    return ReleaseState.REJECTING if row.counts_tries and tries >= MAX_TRIES else row.restart
