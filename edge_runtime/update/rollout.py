"""One release on its way from being offered to serving, or to being refused: the effects of the state table.

Owns: one release's state. Each step is written into the journal before it is begun, by way of `states.next_state`, so
that whatever ends the process leaves a state from which a restart knows the way. The old version serves until `swap`,
stays loaded until the end, and is what a restart loads unless the journal says `committed`. Thread: the updater's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from edge_runtime.clock import Clock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import Draining, LoadFailed, ReleaseFailed, StorageFailed, UpdateError
from edge_runtime.repository.golden import GoldenTensors
from edge_runtime.serving.exchange import Exchange
from edge_runtime.serving.loader import Loader
from edge_runtime.update.download import Progress
from edge_runtime.update.health_gate import Judgement, Thresholds, Verdict
from edge_runtime.update.journal import Journal
from edge_runtime.update.journal_tables import Release
from edge_runtime.update.observation import Interrupted, Observation
from edge_runtime.update.releases import Releases, StagedRelease
from edge_runtime.update.report import Step
from edge_runtime.update.states import COUNTS_A_TRY, MAX_TRIES, TRANSITIONS, Event, State, next_state
from edge_runtime.update.trial import Outcome, TrialReport

log = logging.getLogger(__name__)

INSTALLED, REFUSED, PUT_OFF = "installed", "refused", "put off"
"""How a rollout ends: it serves; it is never tried again; the next check tries again."""


@dataclass(frozen=True, slots=True)
class Result:
    """How it ended. outcome: INSTALLED, REFUSED or PUT_OFF. gap_s: how long nothing served, if memory held one only.

    lost: why the version before does not answer now, where memory held one only; "" where it does.
    """

    release: Release
    outcome: str
    reason: str
    gap_s: float | None = None
    fetched_bytes: int = 0
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Means:
    """What every rollout works with. tell: where each step is shown. stop: set when the daemon stops."""

    journal: Journal
    releases: Releases
    loader: Loader
    settings: UpdateSettings
    clock: Clock
    now_text: Callable[[], str]
    wait: Callable[[float], bool]
    stop: threading.Event
    tell: Callable[[Step], None]
    try_release: Callable[[StagedRelease], TrialReport]
    """Load it and run its golden input in a child process."""
    prepare: Callable[[StagedRelease], None] = lambda _: None
    """Have built what this device runs it with; may take minutes."""


TAKEN_BACK = "taken back by an operator"


class _Doubtful(UpdateError):
    """It may be the release's fault, or the device's."""


class Rollout:
    """One release. `run` once."""

    def __init__(self, release: Release, means: Means) -> None:
        self.release = release
        self._means = means
        self._state = State.IDLE
        self._gap_s: float | None = None
        self._fetched_bytes = 0
        self._tries = 0
        self._is_tried = False
        self._withdrawn = threading.Event()
        self._is_decided = False
        self._deciding = threading.Lock()

    def withdraw(self) -> bool:
        """An operator does not want it: the version before it comes back, and this one is refused. Thread: any.

        False: too late, it is decided what becomes of it.
        """
        with self._deciding:
            if not self._is_decided:
                self._withdrawn.set()
            return not self._is_decided

    def run(self, bring: Callable[[Progress], int]) -> Result:
        """Bring its files here, try it, let it serve, judge it.

        bring: fetches what is missing and lays the release out, told of progress by what it is given; returns the bytes
        fetched. Raises StorageFailed only where not even the journal can be written: the old version serves then.
        """
        try:
            return self._run(bring)
        except Interrupted:
            self._happened(Event.WITHDRAWN, TAKEN_BACK)
            return self._rejected(TAKEN_BACK)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _run(self, bring: Callable[[Progress], int]) -> Result:
        """Raises Interrupted: an operator does not want it, before it answered a request."""
        try:
            self._happened(Event.OFFERED)
            self._happened(Event.VERIFIED)
            self._fetched_bytes = bring(self._progress)
            self._happened(Event.STAGED)
            self._check_wanted()
            staged = self._means.releases.open(self.release)
            self._means.prepare(staged)
            self._check_wanted()
            if self._means.loader.holds_both(staged.folder):
                self._try(staged)
            self._check_wanted()
            return self._serve()
        except ReleaseFailed as error:
            return self._refuse(error.message)
        except _Doubtful as error:
            if self._tries >= MAX_TRIES:
                return self._refuse(f"{error.message}; so {self._tries} times")
            return self._put_off(error.message, is_counted=True)
        except (UpdateError, StorageFailed, LoadFailed, Draining) as error:
            return self._put_off(error.message)

    def _try(self, staged: StagedRelease) -> None:
        """Let a child process find out what is wrong with it, if anything. Once."""
        if self._is_tried:
            return
        self._is_tried = True
        self._tell("tried in a child process")
        report = self._means.try_release(staged)
        match report.outcome:
            case Outcome.FAILED:
                raise ReleaseFailed(report.reason)
            case Outcome.UNCLEAR:
                raise _Doubtful(report.reason)
            case Outcome.HINDERED:
                raise UpdateError(report.reason)

    def _serve(self) -> Result:
        """Load it beside the old one, let it answer, and keep the one that does well.

        Where memory holds only one of them, the old one is unloaded first, also for the trial, and nobody is answered
        until one of them is loaded: the gap that is reported.
        """
        # Between the trial and now somebody may have written there.
        staged = self._means.releases.open(self.release)
        golden = staged.golden_tensors()
        try:
            exchange = self._means.loader.exchange(staged.folder, before_alone=lambda: self._try(staged))
        except LoadFailed as error:
            raise _Doubtful(f"it loads in a child process, but not here: {error.message}") from error
        self._gap_s = exchange.gap_s
        try:
            staged.check_unchanged()
            judgement = self._observe(exchange, golden)
            self._decide()
            is_well = judgement.verdict is not Verdict.REGRESSED
            self._happened(Event.PASSED if is_well else Event.FAILED, judgement.reason)
        except Interrupted:
            return self._interrupted(exchange)
        except BaseException:
            # Also where the journal could not take it: what is not written down did not happen.
            exchange.roll_back()
            raise
        if not is_well:
            return self._take_back(exchange, judgement.reason)
        exchange.commit()
        return self._result(INSTALLED, judgement.reason)

    def _observe(self, exchange: Exchange, golden: GoldenTensors) -> Judgement:
        """Begin with copies or some requests, where that is asked for, then all of them."""
        self._happened(Event.SWAPPED)
        self._check_wanted()
        settings = self._means.settings
        observation = Observation(
            exchange.newcomer,
            exchange.incumbent,
            golden,
            thresholds=Thresholds(settings.window_s, settings.failure_share, settings.latency_ratio),
            clock=self._means.clock,
            wait=self._wait,
            tell=self._tell,
        )
        if exchange.incumbent is not None and settings.observe != "swap":
            judgement = self._begin_gently(exchange, observation, golden)
            if judgement.verdict is Verdict.REGRESSED:
                return judgement
        self._tell("answers all requests")
        exchange.swap()
        return observation.judge_alone(lambda: self._share(exchange))

    def _share(self, exchange: Exchange) -> bool:
        """Let both answer every other request, where they can stand in for one another."""
        try:
            exchange.split(50)
        except LoadFailed:
            return False
        return True

    def _begin_gently(self, exchange: Exchange, observation: Observation, golden: GoldenTensors) -> Judgement:
        """Let it answer some requests, or run copies; where the two cannot be compared so, it answers all at once."""
        settings = self._means.settings
        try:
            if settings.observe == "canary":
                self._tell(f"answers {settings.canary_percent:g} % of the requests")
                exchange.split(settings.canary_percent)
                return observation.judge_beside()
            self._tell("runs copies of requests")
            mirror = exchange.mirror(
                settings.shadow_share, golden.tolerance_at(exchange.newcomer.layouts.narrow.precision)
            )
        except LoadFailed as error:
            log.warning("it answers all requests at once", extra={"model": exchange.model, "reason": error.message})
            return Judgement(Verdict.UNDECIDED, error.message)
        return observation.judge_copies(mirror, settings.shadow_agreement)

    def _take_back(self, exchange: Exchange, reason: str) -> Result:
        log.warning(
            "rolling back", extra={"model": self.release.model, "release": self.release.counter, "reason": reason}
        )
        lost = ""
        try:
            exchange.roll_back()
        except LoadFailed as error:
            # Memory held only one of them. This one is at fault all the same, and is not to come back for that.
            lost = f"it was unloaded for release {self.release.counter}, and did not load again: {error.message}"
        self._happened(Event.REVERTED, reason)
        return replace(self._rejected(reason), lost=lost)

    def _interrupted(self, exchange: Exchange) -> Result:
        """An operator wants the old one; or the daemon stops, and whatever was being tried did not end it."""
        if self._withdrawn.is_set():
            self._happened(Event.WITHDRAWN, TAKEN_BACK)
            return self._take_back(exchange, TAKEN_BACK)
        exchange.roll_back()
        self._means.journal.take_back_try(self.release.model)
        return self._result(PUT_OFF, "the daemon stopped meanwhile; it is tried again after its start")

    def _decide(self) -> None:
        """From here on nobody takes it back. Raises Interrupted: somebody has."""
        with self._deciding:
            self._check_wanted()
            self._is_decided = True

    def _check_wanted(self) -> None:
        if self._withdrawn.is_set():
            raise Interrupted

    def _refuse(self, reason: str) -> Result:
        """Its own fault, before it answered a request."""
        self._happened(Event.FAILED, reason)
        return self._rejected(reason)

    def _rejected(self, reason: str) -> Result:
        self._happened(Event.NOTED, reason)
        return self._result(REFUSED, reason)

    def _put_off(self, reason: str, *, is_counted: bool = False) -> Result:
        """Not its fault, or not surely, before it answered a request. is_counted: the third time it is its fault."""
        if TRANSITIONS.get((self._state, Event.WITHDRAWN)) is State.REJECTING:
            self._decide()
        if self._means.stop.is_set():
            if self._state in COUNTS_A_TRY:
                self._means.journal.take_back_try(self.release.model)
        elif (self._state, Event.HINDERED) in TRANSITIONS:
            self._happened(Event.HINDERED, reason, keeps_tries=is_counted)
        return self._result(PUT_OFF, reason)

    # ---- state ------------------------------------------------------------------------------------------------------

    def _happened(self, event: Event, reason: str = "", *, keeps_tries: bool = False) -> None:
        """Go on to the next state, in the journal first."""
        state = next_state(self._state, event)
        journal, at_utc = self._means.journal, self._means.now_text()
        match event:
            case Event.PASSED:
                journal.commit(self.release, at_utc)
            case Event.NOTED:
                journal.reject(self.release, at_utc, reason)
            case Event.HINDERED:
                journal.drop(self.release, at_utc, reason, keeps_tries=keeps_tries)
            case _:
                self._tries = journal.advance(self.release, state, at_utc, reason).tries
        self._state = state
        self._tell(reason)

    def _tell(self, detail: str) -> None:
        self._means.tell(Step(self.release, self._state, detail))

    def _progress(self, done_bytes: int, total_bytes: int) -> None:
        if self._means.stop.is_set():
            raise UpdateError("the daemon stops; what was fetched is kept")
        self._check_wanted()
        self._means.tell(Step(self.release, self._state, "", done_bytes, total_bytes))

    def _wait(self, seconds: float) -> bool:
        return self._withdrawn.is_set() or self._means.wait(seconds)

    def _result(self, outcome: str, reason: str) -> Result:
        return Result(self.release, outcome, reason, self._gap_s, self._fetched_bytes)
