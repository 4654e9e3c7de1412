"""The life of one release on a device, as a table, with what a restart makes of each state (DESIGN 8).

Pure. Owns: which state follows which, and how often a release may be tried. The effects are the rollout's, the memory
is the journal's: a state is written down before what it stands for is begun, so that a restart finds it.

    IDLE -> VERIFYING -> STAGING -> WARMING -> OBSERVING -> IDLE (committed)
                 |          |          |           '-> ROLLING_BACK -> REJECTING
                 '----------'          '-> REJECTING -> IDLE (its hash is never tried again)
"""

from __future__ import annotations

from enum import Enum

MAX_TRIES = 3
"""How often a release may take the process or its child down before it is refused: a power cut in the middle of a load
is no crash of the model, and looks like one."""


class State(Enum):
    """Where a release stands."""

    IDLE = "idle"
    VERIFYING = "verifying"
    STAGING = "staging"
    WARMING = "warming"
    OBSERVING = "observing"
    ROLLING_BACK = "rolling_back"
    REJECTING = "rejecting"


class Event(Enum):
    """What happened to it. SWAPPED: it is loaded in the daemon and about to run requests, copies, some or all of them.

    HINDERED: not its own fault (no network, a full disk, no memory now). FAILED: its own. WITHDRAWN: an operator does
    not want it, which is as good as a fault: the next check must not bring it again.
    """

    OFFERED = "offered"
    VERIFIED = "verified"
    STAGED = "staged"
    SWAPPED = "swapped"
    PASSED = "passed"
    HINDERED = "hindered"
    WITHDRAWN = "withdrawn"
    FAILED = "failed"
    REVERTED = "reverted"
    NOTED = "noted"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.IDLE, Event.OFFERED): State.VERIFYING,
    # What cannot be verified is somebody else's word: nothing is held against the release that it claims to be.
    (State.VERIFYING, Event.VERIFIED): State.STAGING,
    (State.VERIFYING, Event.HINDERED): State.IDLE,
    (State.VERIFYING, Event.WITHDRAWN): State.REJECTING,
    # Bytes are fetched again at the next check; their parts stay.
    (State.STAGING, Event.STAGED): State.WARMING,
    (State.STAGING, Event.HINDERED): State.IDLE,
    (State.STAGING, Event.WITHDRAWN): State.REJECTING,
    # Loaded in a child and run on its golden input, then beside the old one, then swapped in.
    (State.WARMING, Event.SWAPPED): State.OBSERVING,
    (State.WARMING, Event.HINDERED): State.IDLE,
    (State.WARMING, Event.WITHDRAWN): State.REJECTING,
    (State.WARMING, Event.FAILED): State.REJECTING,
    # It serves, and the old one is at hand; the pointer to the active release is still the old one's.
    (State.OBSERVING, Event.PASSED): State.IDLE,
    (State.OBSERVING, Event.WITHDRAWN): State.ROLLING_BACK,
    (State.OBSERVING, Event.FAILED): State.ROLLING_BACK,
    (State.ROLLING_BACK, Event.REVERTED): State.REJECTING,
    (State.REJECTING, Event.NOTED): State.IDLE,
}

COUNTS_A_TRY = frozenset((State.WARMING, State.OBSERVING))
"""A process that ends in one of these may have been ended by the release."""


def next_state(state: State, event: Event) -> State:
    """What follows. Raises ValueError for what cannot happen: a bug, never a release's fault."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"{event.value} cannot happen to a release that is {state.value}") from None


def after_restart(state: State, tries: int) -> State:
    """Where a release goes on when the process begins again; `tries` counts those that ended without a word.

    The old release serves after every restart: the pointer changes only at the end, in the commit.
    """
    match state:
        case State.IDLE | State.VERIFYING:
            return State.IDLE
        case State.STAGING:
            return State.STAGING
        case State.WARMING | State.OBSERVING:
            return State.STAGING if tries < MAX_TRIES else State.REJECTING
        case State.ROLLING_BACK | State.REJECTING:
            return State.REJECTING
