"""One release on its way from being offered to serving, or to being refused.

Owns: the order of the steps, and what a failure in each of them means. The journal has each step before it begins
(rollout_progress.py), so that a restart after any crash knows the way. The version before serves until the swap, stays
loaded until the end, and is what a restart loads unless the journal says `committed`. Thread: the updater's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from edge_runtime.clock import Clock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import Draining, LoadFailed, ReleaseFailed, StorageFailed, UpdateError
from edge_runtime.models.loader import Loader
from edge_runtime.models.swap import Swap
from edge_runtime.updates.golden import GoldenTensors
from edge_runtime.updates.manifest import ReleaseBounds
from edge_runtime.updates.observation import Judgement, Observation, Verdict, thresholds_of
from edge_runtime.updates.release_checks import DeviceTraits
from edge_runtime.updates.releases import Releases, StagedRelease
from edge_runtime.updates.repository_view import SignedRelease
from edge_runtime.updates.rollout_progress import Interrupted, RolloutProgress
from edge_runtime.updates.staging import Staging
from edge_runtime.updates.states import MAX_TRIES, Event
from edge_runtime.updates.trial import Outcome, ReleaseTrials

log = logging.getLogger(__name__)

INSTALLED, REFUSED, PUT_OFF = "installed", "refused", "put off"
"""How a rollout ends: the release serves; it is never tried again; the next check tries it again."""

WITHDRAWN = "taken back by an operator"
STOPPED = "the daemon stopped meanwhile; it is tried again after its start"


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """How a rollout ended. outcome: INSTALLED, REFUSED or PUT_OFF.

    gap_s: how long nothing of the model answered, where memory holds one version only. lost: why the version before
    does not answer now, where memory holds one version only; "" where it does.
    """

    outcome: str
    reason: str
    gap_s: float | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """The parts that every rollout of this device works with."""

    device: DeviceTraits
    releases: Releases
    loader: Loader
    trials: ReleaseTrials
    settings: UpdateSettings
    clock: Clock


_EVENTS = {
    Verdict.HEALTHY: Event.PASSED,
    Verdict.REGRESSED: Event.FAILED,
    Verdict.UNDECIDED: Event.UNJUDGED,
}


class _Doubtful(UpdateError):
    """The release may be at fault, or the device."""


class Rollout:
    """One release. `run` once."""

    def __init__(
        self, signed: SignedRelease, staging: Staging, progress: RolloutProgress, context: RolloutContext
    ) -> None:
        self._release = signed.release
        self._signed = signed
        self._staging = staging
        self._progress = progress
        self._context = context
        self._gap_s: float | None = None
        self._is_tried = False

    def run(self) -> RolloutResult:
        """Verify, stage, try in a child, swap, observe, commit; return how it ended.

        Raises StorageFailed only where the journal cannot be written at all: the version before serves then.
        """
        try:
            self._verify()
            self._stage()
            self._try_if_both_fit()
            staged = self._context.releases.open(self._release)  # again: a file may have changed since the trial
            golden = staged.golden_tensors()
            swap = self._swap(staged)
            judgement = self._observe(swap, staged, golden)
            if judgement.verdict is not Verdict.HEALTHY:
                return self._roll_back(swap, judgement)
            swap.commit()
            return self._result(INSTALLED, judgement.reason)
        except Interrupted:  # before it answered a request
            return self._refuse(WITHDRAWN, Event.WITHDRAWN)
        except ReleaseFailed as error:
            return self._refuse(error.message, Event.FAILED)
        except _Doubtful as error:
            return self._put_off(error.message, is_doubtful=True)
        except (UpdateError, StorageFailed, LoadFailed, Draining) as error:
            return self._put_off(error.message)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        """Tell the journal: signatures were verified when the repository was read."""
        self._progress.advance(Event.OFFERED)
        self._progress.advance(Event.VERIFIED)

    def _stage(self) -> None:
        """Fetch what is missing and lay the release out. Raises Interrupted."""
        releases, device, signed = self._context.releases, self._context.device, self._signed
        chosen = self._staging.stage(
            signed.manifest, device.suffixes, releases.artifacts(), self._progress, precisions=device.precisions
        )
        releases.lay_out(self._release, signed.manifest_data, chosen)
        self._progress.advance(Event.STAGED)
        self._progress.check_wanted()

    def _try_if_both_fit(self) -> None:
        """Try it in a child process, unless memory must be made free for that first: `_swap` does so then."""
        staged = self._context.releases.open(self._release)
        self._context.trials.prepare(staged, self._progress.stop)
        self._progress.check_wanted()
        if self._context.loader.holds_both(staged.folder):
            self._try(staged)
        self._progress.check_wanted()

    def _try(self, staged: StagedRelease) -> None:
        """Load it and run its golden input in a child process, once.

        Raises ReleaseFailed (its own fault), UpdateError (nothing was found out; _Doubtful: it may be its fault).
        """
        if self._is_tried:
            return
        self._is_tried = True
        self._progress.show("tried in a child process")
        report = self._context.trials.run(staged, self._progress.stop)
        match report.outcome:
            case Outcome.FAILED:
                raise ReleaseFailed(report.reason)
            case Outcome.UNCLEAR:
                raise _Doubtful(report.reason)
            case Outcome.HINDERED:
                raise UpdateError(report.reason)

    def _swap(self, staged: StagedRelease) -> Swap:
        """Load it beside the version before, which still answers.

        Where memory holds only one of them, the version before is unloaded first, also for the trial, and nothing of
        the model answers until one of them is loaded: the gap that is reported.
        """
        try:
            swap = self._context.loader.swap(staged.folder, before_alone=partial(self._try, staged))
        except LoadFailed as error:
            if self._progress.stop.is_set():
                raise UpdateError(STOPPED) from error
            raise _Doubtful(f"it loads in a child process, but not here: {error.message}") from error
        self._gap_s = swap.gap_s
        return swap

    def _observe(self, swap: Swap, staged: StagedRelease, golden: GoldenTensors) -> Judgement:
        """Let it answer, judge it, and write the verdict into the journal.

        Rolls the swap back on any error, also where the journal cannot be written: what is not written down did not
        happen.
        """
        try:
            staged.check_unchanged()
            self._progress.advance(Event.SWAPPED)
            event, judgement = self._judge(swap, staged.manifest.bounds, golden)
            self._progress.advance(event, judgement.reason)
        except BaseException:
            swap.roll_back()
            raise
        return judgement

    def _judge(self, swap: Swap, bounds: ReleaseBounds | None, golden: GoldenTensors) -> tuple[Event, Judgement]:
        """Return the verdict and its event; an operator's withdrawal is one too. Raises UpdateError: the daemon stops.

        From here on the release can no longer be withdrawn.
        """
        try:
            self._progress.check_wanted()
            settings, clock = self._context.settings, self._context.clock
            thresholds = thresholds_of(settings, bounds, self._context.device.profile)
            judgement = Observation(swap, golden, settings, clock, self._progress, thresholds=thresholds).judge()
            self._progress.decide()
        except Interrupted:
            if not self._progress.is_withdrawn:
                raise UpdateError(STOPPED) from None
            return Event.WITHDRAWN, Judgement(Verdict.REGRESSED, WITHDRAWN)
        return _EVENTS[judgement.verdict], judgement

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _roll_back(self, swap: Swap, judgement: Judgement) -> RolloutResult:
        """Have the version before serve again, and refuse the release unless nothing can be said of it."""
        release, reason, lost = self._release, judgement.reason, ""
        log.warning("rolling back", extra={"model": release.model, "release": release.counter, "reason": reason})
        try:
            swap.roll_back()
        except LoadFailed as error:
            # Memory holds only one of them. A release that is at fault is so all the same, and must not come back.
            lost = f"it was unloaded for release {release.counter}, and did not load again: {error.message}"
        if judgement.verdict is Verdict.UNDECIDED:
            return self._result(PUT_OFF, reason, lost)
        return self._refuse(reason, Event.REVERTED, lost)

    def _refuse(self, reason: str, event: Event, lost: str = "") -> RolloutResult:
        """Refuse it for good after an event: a fault of its own, a withdrawal, or a rollback."""
        self._progress.advance(event, reason)
        self._progress.advance(Event.NOTED, reason)
        return self._result(REFUSED, reason, lost)

    def _put_off(self, reason: str, *, is_doubtful: bool = False) -> RolloutResult:
        """Leave it to the next check. is_doubtful: it may be at fault: this try counts, and the last one refuses it."""
        if is_doubtful and self._progress.tries >= MAX_TRIES:
            return self._refuse(f"{reason}; so {self._progress.tries} times", Event.FAILED)
        try:
            self._progress.put_off(reason, keeps_tries=is_doubtful)
        except Interrupted:
            return self._refuse(WITHDRAWN, Event.WITHDRAWN)
        return self._result(PUT_OFF, reason)

    def _result(self, outcome: str, reason: str, lost: str = "") -> RolloutResult:
        return RolloutResult(outcome, reason, self._gap_s, lost)
