"""One device's updates: which releases the repository offers, which of them this device takes, and which serve.

Owns: the order of one check: refresh -> assignments -> for each model its rollout, one after another, so that a
regression has one cause. A failure here leaves the serving versions as they are. Thread: the worker's; `board`,
`status` and `withdraw` any.
"""

from __future__ import annotations

import logging
import threading
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from edge_runtime.clock import Calendar, Clock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.durable import SYSTEM_DISK, Disk
from edge_runtime.errors import ConfigError, EdgeRuntimeError, StorageFailed, TrustError, UpdateError
from edge_runtime.models.loader import Loader
from edge_runtime.updates.active import ActiveReleases
from edge_runtime.updates.device_time import DeviceTime
from edge_runtime.updates.fetch import FetchLimits, Pacer
from edge_runtime.updates.group_configuration import GroupConfiguration
from edge_runtime.updates.journal import Journal
from edge_runtime.updates.manifest import Assignment
from edge_runtime.updates.release_checks import DeviceTraits, KnownReleases, choose_offers, why_not_fit, why_not_offered
from edge_runtime.updates.releases import Releases
from edge_runtime.updates.report import (
    AVAILABLE,
    PASSED_OVER,
    REFUSED_BEFORE,
    RUNS,
    CheckResult,
    Offered,
    StatusBoard,
)
from edge_runtime.updates.repository_view import RepositoryView, SignedRelease
from edge_runtime.updates.rollout import INSTALLED, PUT_OFF, Rollout, RolloutContext, RolloutResult
from edge_runtime.updates.rollout_progress import RolloutProgress
from edge_runtime.updates.source import Source
from edge_runtime.updates.staging import Staging
from edge_runtime.updates.states import Release, ReleaseState
from edge_runtime.updates.store import ArtifactStore, MetadataStore
from edge_runtime.updates.trial import ReleaseTrials
from edge_runtime.updates.trust import TrustedSet, check_marks, marks_of, update_start
from edge_runtime.updates.tuf_client import METADATA_LIMITS, TufClient

log = logging.getLogger(__name__)

DOWNLOAD_LIMIT_S = 24 * 3600.0
"""One release over a slow link: 1 GB at 12 KB/s. The bytes that came are kept for the next try."""

MAX_ROOT_BYTES = 512_000


class Updater:
    """Made once; `open` before anything else, `close` at the end."""

    def __init__(
        self,
        settings: UpdateSettings,
        device: DeviceTraits,
        loader: Loader,
        trials: ReleaseTrials,
        folder: Path,
        *,
        clock: Clock,
        stop: threading.Event,
        configuration: GroupConfiguration,
        disk: Disk = SYSTEM_DISK,
        calendar: Calendar | None = None,
    ) -> None:
        """folder: for this object alone. stop: set when the daemon stops. configuration: of the device's group.

        Raises ConfigError: the root file cannot be read, or is not a root of trust.
        """
        self._settings = settings
        self._bootstrap = _read_root(settings.root_file)
        self._device = device
        self._loader = loader
        self._clock = clock
        self._stop = stop
        self.configuration = configuration
        self._metadata = MetadataStore(folder / "metadata", disk=disk)
        self._artifacts = ArtifactStore(folder / "artifacts", reserve_bytes=settings.reserve_bytes, disk=disk)
        self._journal = Journal(folder / "journal", disk=disk)
        self._time = DeviceTime(self._journal, calendar)
        releases = Releases(folder / "releases", self._artifacts, disk=disk)
        self._active = ActiveReleases(self._journal, releases, loader, self._time)
        self._context = RolloutContext(device, releases, loader, trials, settings, clock)
        self._under_way: RolloutProgress | None = None
        self.board = StatusBoard(self._journal, self._active, configuration, device.device_id)

    # ---- life -------------------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Keep the models folder from serving the models of updates. Before the loader starts. Thread: any."""
        self._loader.reserve(release.model for release in self._journal.recorded())

    def open(self) -> None:
        """Open the journal and serve every active release whose files are whole. May be called again.

        Raises StorageFailed: the journal cannot be opened or written to now; the active releases serve all the same.
        """
        try:
            self._serve()
        finally:
            self._loader.expect_no_more()
        at_utc = self._time.now_text()
        for rollout in self._journal.restart(at_utc).values():
            if rollout.state is ReleaseState.REJECTING:
                log.warning("refused: it ended the process", extra={"model": rollout.release.model})
                self._journal.reject(rollout.release, at_utc, rollout.reason)
        self.board.read_journal()

    def _serve(self) -> None:
        try:
            self._journal.open()
        except StorageFailed:
            self._active.serve_recorded()
            raise
        self._time.recall()
        self._active.serve()  # first, since it writes nothing

    def serve_suspects(self) -> None:
        """Serve the releases that `open` left, because the process ended while it loaded them before."""
        self._active.serve_suspects()
        self.board.read_journal()

    def close(self) -> None:
        """Close the journal. Idempotent."""
        self._journal.close()

    # ---- what a check does ------------------------------------------------------------------------------------------

    def check(self, source: Source, *, installs: bool, configures: bool = True) -> CheckResult:
        """Ask the repository, and, where it `installs`, install every release that is meant for this device.

        configures: whether a new configuration of its group is taken over.
        Never raises for a fault of the repository or the disk: the result has the reason.
        """
        try:
            offered = self._check(source, installs=installs, configures=configures)
            checked = CheckResult(self._time.now_text(), is_ok=True, source=source.name, offers=offered)
        except Exception as error:  # noqa: BLE001 (the update loop: an error that no code expects must be reported too)
            reason = self._time.explained(error) if isinstance(error, EdgeRuntimeError) else _unforeseen(error)
            log.warning("no update", extra={"source": source.name, "reason": reason})
            checked = CheckResult(self._time.now_text(), is_ok=False, reason=reason, source=source.name)
        self.board.end_check(checked)
        return checked

    def roll_back(self, model: str, number: int | None) -> Release:
        """Serve the previous release again and refuse the active one. Returns the release that serves now.

        number: of the release that was active when an operator asked; None where that is unknown. Raises UpdateError:
        there is none, it is another one by now, or its files are not whole; nothing has changed then.
        """
        active = self.board.active(model)
        if number is not None and active != number:
            raise UpdateError(
                f"rollback of {model}: release {number} served when this was asked, and by now it is "
                f"{active if active is not None else 'none'}; nothing is taken back. Look at `edge-runtime update "
                "status`, and ask again if that one is to go"
            )
        try:
            return self._active.roll_back(model)
        finally:
            self.board.read_journal()

    def withdraw(self, model: str) -> bool:
        """Withdraw a model's release under way; False: none is under way, or its fate is decided. Thread: any."""
        under_way = self._under_way
        return under_way is not None and under_way.release.model == model and under_way.withdraw()

    def now_utc(self) -> datetime:
        """Return the instant that expiry is judged by."""
        return self._time.now_utc()

    @property
    def is_rolling_out(self) -> bool:
        """Return whether a release is under way, for as long as it is observed. Thread: any."""
        return self._under_way is not None

    @property
    def observed(self) -> str:
        """Return what is under way and no operation may interrupt, in words; "" for nothing. Thread: any."""
        under_way = self._under_way
        if under_way is not None:
            return f"release {under_way.release.counter} of {under_way.release.model} is under way"
        return "the group's configuration is observed" if self.configuration.is_observed else ""

    def status(self) -> dict[str, Any]:
        """Return what runs, the release under way, refusals with their reasons, the last check, the time.

        Waits for no disk. Thread: any.
        """
        return {**self.board.summary(), "clock": self._time.as_json()}

    # ---- private ----------------------------------------------------------------------------------------------------

    def _check(self, source: Source, *, installs: bool, configures: bool) -> tuple[Offered, ...]:
        with self._metadata.lock():
            repository = self._refresh(source)
            group = self.configuration.follow(repository)
            self.configuration.take(repository, installs=configures)
            assignments = repository.assignments(group)
            chosen = choose_offers(assignments, self._device.device_id)
            known = self._active.known_releases()  # of a model, which no other model's rollout changes
            offered = [self._take(repository, each, known, installs=installs) for _, each in sorted(chosen.items())]
            offered += [_left_out(each) for each in assignments if chosen.get(each.model) is not each]
            if installs:
                self._active.serve_again()
                self._active.take_away({each.model for each in assignments})
                waiting = {chosen[each.model].manifest_sha256 for each in offered if each.action == PUT_OFF}
                self._active.tidy(repository.digests, waiting)
        return tuple(offered)

    def _refresh(self, source: Source) -> RepositoryView:
        """Bring the metadata up to date, and write its versions into the journal before any other use of it."""
        pacer = Pacer(METADATA_LIMITS, self._clock, self._stop)
        client = TufClient(
            source.metadata,
            self._metadata,
            now_utc=self._time.now_utc(),
            bootstrap=self._bootstrap,
            device_time=self._time,
            pacer=pacer,
        )
        client.refresh()
        trusted = client.trusted
        marks = marks_of(trusted.root, trusted.timestamp, trusted.snapshot)
        known = self._journal.marks()
        check_marks(marks, known)
        if any(known.get(name) != version for name, version in marks.items()):
            self._journal.raise_marks(marks)
        self._time.learn(trusted.root, trusted.timestamp)
        if self._journal.is_state_lost:
            self._journal.found_whole()
        return RepositoryView(client, source.targets, self._artifacts, pacer)

    def _take(
        self, repository: RepositoryView, assignment: Assignment, known: KnownReleases, *, installs: bool
    ) -> Offered:
        """Install one assignment, or say why not. An error ends this model's part of the check only."""
        offered = partial(Offered, assignment.model, assignment.release.counter, assignment.percent)
        try:
            reason = why_not_offered(assignment, known)
            if reason == "":
                return offered(RUNS, "", known.active[assignment.model].version)
            if reason is not None:
                return offered(REFUSED_BEFORE if assignment.manifest_sha256 in known.refused else PASSED_OVER, reason)
            signed = repository.release(assignment)
            version = signed.release.version
            reason = why_not_fit(signed.manifest, self._device)
            if reason is not None:
                return offered(PASSED_OVER, reason, version)
            if not installs:
                return offered(AVAILABLE, "", version)
            result = self._roll_out(repository, signed)
            return offered(result.outcome, result.reason, version, result.gap_s)
        except Exception as error:  # noqa: BLE001 (one model's files must not keep all others from their updates)
            return offered(PUT_OFF, error.message if isinstance(error, EdgeRuntimeError) else _unforeseen(error))

    def _roll_out(self, repository: RepositoryView, signed: SignedRelease) -> RolloutResult:
        release = signed.release
        limits = FetchLimits(DOWNLOAD_LIMIT_S, cap_bytes_per_s=self._settings.cap_bytes_per_s)
        staging = Staging(repository, Pacer(limits, self._clock, self._stop))
        progress = RolloutProgress(release, self._journal, self._time, self.board, self._stop)
        self._under_way = progress
        try:
            result = Rollout(signed, staging, progress, self._context).run()
        finally:
            self._under_way = None
        if result.outcome == INSTALLED:
            self._active.mark_served(release)
        elif result.lost:
            self._active.mark_lost(release.model, result.lost)
        log.info(
            result.outcome,
            extra={
                "model": release.model,
                "release": release.counter,
                "version": release.version,
                "reason": result.reason,
            },
        )
        return result


# ---- private --------------------------------------------------------------------------------------------------------


def _unforeseen(error: Exception) -> str:
    log.error("a bug of the updater's", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _left_out(assignment: Assignment) -> Offered:
    return Offered(
        assignment.model,
        assignment.release.counter,
        assignment.percent,
        PASSED_OVER,
        f"it is for {assignment.percent:g} % of the group, and this device is not among them, or a newer one is for it",
    )


def _read_root(path: str) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"update.root_file: {path}: {error.strerror}; wanted the 1.root.json that the repository's owner gave you"
        ) from None
    if len(data) > MAX_ROOT_BYTES:
        raise ConfigError(
            f"update.root_file: {path} has {len(data)} bytes; wanted a root file of at most {MAX_ROOT_BYTES}"
        )
    try:
        TrustedSet(data, update_start())
    except TrustError as error:
        raise ConfigError(
            f"update.root_file: {path} is not a root of trust: {error.message}; wanted the 1.root.json that the "
            "repository's owner gave you"
        ) from None
    return data
