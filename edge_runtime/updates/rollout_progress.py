"""The state of one release under way, written into the journal before its step begins, and whether it is still wanted.

Owns: the effects of the state table in the journal, and the moment after which an operator can no longer withdraw the
release. Thread: the updater's; `withdraw` any.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from edge_runtime.errors import UpdateError
from edge_runtime.updates.device_time import DeviceTime
from edge_runtime.updates.journal import Journal
from edge_runtime.updates.report import RolloutStep, StatusBoard
from edge_runtime.updates.states import STATES, Event, Release, ReleaseState, next_state


class Interrupted(Exception):
    """An operator withdrew the release, or the daemon stops, before its observation had a result."""


class RolloutProgress:
    """The state of one release under way."""

    def __init__(
        self, release: Release, journal: Journal, time: DeviceTime, board: StatusBoard, stop: threading.Event
    ) -> None:
        self.release = release
        self.tries = 0
        """How often it was tried without a result, this try included."""
        self._journal = journal
        self._time = time
        self._board = board
        self.stop = stop
        """Set when the daemon stops."""
        self._state = ReleaseState.IDLE
        self._withdrawn = threading.Event()
        self._is_decided = False
        self._deciding = threading.Lock()

    # ---- state ------------------------------------------------------------------------------------------------------

    def advance(self, event: Event, reason: str = "", *, keeps_tries: bool = False) -> None:
        """Enter the state that follows an event, in the journal first. Raises StorageFailed: the state is as it was."""
        state = next_state(self._state, event)
        at_utc = self._time.now_text()
        match event:
            case Event.PASSED:
                self._journal.commit(self.release, at_utc)
            case Event.NOTED:
                self._journal.reject(self.release, at_utc, reason)
            case Event.HINDERED | Event.UNJUDGED:
                self._journal.drop(self.release, at_utc, reason, keeps_tries=keeps_tries)
            case _:
                self.tries = self._journal.advance(self.release, state, at_utc, reason).tries
        self._state = state
        self.show(reason)

    def put_off(self, reason: str, *, keeps_tries: bool = False) -> None:
        """Leave the release to the next check. Raises Interrupted: an operator withdrew it meanwhile.

        keeps_tries: the try counts, since the release may be at fault.
        """
        if STATES[self._state].after.get(Event.WITHDRAWN) is ReleaseState.REJECTING:
            self.decide()
        if self.stop.is_set():
            self.uncount_try()
        elif Event.HINDERED in STATES[self._state].after:
            self.advance(Event.HINDERED, reason, keeps_tries=keeps_tries)

    def uncount_try(self) -> None:
        """The daemon stops on purpose: the release did not end the process."""
        if STATES[self._state].counts_tries:
            self._journal.take_back_try(self.release.model)

    # ---- what operators see and want --------------------------------------------------------------------------------

    def show(self, detail: str, observed: Sequence[tuple[str, str, str]] = ()) -> None:
        """Show what happens within the current state. observed: as of RolloutStep."""
        self._board.show(RolloutStep(self.release, self._state, detail, observed=observed))

    def show_bytes(self, done_bytes: int, total_bytes: int) -> None:
        """Show how much is fetched. Raises UpdateError (the daemon stops) and Interrupted, which end the download."""
        if self.stop.is_set():
            raise UpdateError("the daemon stops; what was fetched is kept")
        self.check_wanted()
        self._board.show(RolloutStep(self.release, self._state, "", done_bytes, total_bytes))

    def wait(self, seconds: float) -> bool:
        """Wait; True: stop waiting, because the daemon stops or an operator withdrew the release."""
        return self._withdrawn.is_set() or self.stop.wait(seconds)

    def withdraw(self) -> bool:
        """Take the release back for an operator: the version before serves, and this release is refused. Thread: any.

        Returns False when its fate is already decided.
        """
        with self._deciding:
            if not self._is_decided:
                self._withdrawn.set()
            return not self._is_decided

    @property
    def is_withdrawn(self) -> bool:
        """Return whether an operator withdrew it."""
        return self._withdrawn.is_set()

    def check_wanted(self) -> None:
        """Raise Interrupted when an operator withdrew it."""
        if self._withdrawn.is_set():
            raise Interrupted

    def decide(self) -> None:
        """From here on `withdraw` returns False. Raises Interrupted: an operator was faster."""
        with self._deciding:
            self.check_wanted()
            self._is_decided = True
