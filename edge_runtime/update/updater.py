"""One device's updates: what the repository offers, what of it is taken, what serves because of it.

Owns: the journal, the metadata and the files of releases, and the order of one check: refresh -> assignments -> for
each model its rollout, one after another, so that what regresses is known. Serving is the loader's, asked through an
exchange. Whatever goes wrong here leaves what serves as it is. Thread: the worker's; `status` and `history` any.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_runtime.clock import Clock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import ConfigError, EdgeRuntimeError, StorageFailed, TrustError
from edge_runtime.repository.durable import SYSTEM_DISK, Disk
from edge_runtime.repository.manifest import Assignment, Manifest
from edge_runtime.serving.loader import Loader
from edge_runtime.update.active import ActiveReleases
from edge_runtime.update.catalogue import Catalogue
from edge_runtime.update.device_time import DeviceTime
from edge_runtime.update.download import Progress
from edge_runtime.update.fetch import Limits, Pace
from edge_runtime.update.journal import Journal
from edge_runtime.update.journal_tables import Release
from edge_runtime.update.marks import check_marks, marks_of
from edge_runtime.update.offers import Device, Memory, offers, why_not_fit, why_not_offered
from edge_runtime.update.releases import Releases, StagedRelease
from edge_runtime.update.report import (
    AVAILABLE,
    PASSED_OVER,
    REFUSED_BEFORE,
    RUNS,
    SHOWN_HISTORY,
    Checked,
    Offered,
    Remembered,
    Step,
)
from edge_runtime.update.rollout import INSTALLED, PUT_OFF, Means, Result, Rollout
from edge_runtime.update.source import Source
from edge_runtime.update.staging import Staging
from edge_runtime.update.states import State
from edge_runtime.update.store import ArtifactStore, MetadataStore
from edge_runtime.update.trial import TrialReport
from edge_runtime.update.trust import TrustedSet, update_start
from edge_runtime.update.tuf_client import METADATA_LIMITS, TufClient

log = logging.getLogger(__name__)

DOWNLOAD_LIMIT_S = 24 * 3600.0
"""One release over a slow link: 1 GB at 12 KB/s. What came is kept for the next try."""

MAX_ROOT_BYTES = 512_000


class Updater:
    """Made once; `open` before anything else, `close` at the end."""

    def __init__(
        self,
        settings: UpdateSettings,
        device: Device,
        loader: Loader,
        folder: Path,
        *,
        clock: Clock,
        try_release: Callable[[StagedRelease], TrialReport],
        wait: Callable[[float], bool],
        stop: threading.Event,
        disk: Disk = SYSTEM_DISK,
        utc_clock: Callable[[], datetime] | None = None,
        prepare: Callable[[StagedRelease], None] = lambda _: None,
    ) -> None:
        """folder: for this object alone. wait: waits so many seconds, True when the daemon stops, as `stop` says too.

        prepare: has built what this device runs a release with, before it is tried. Raises ConfigError: the root file
        cannot be read, or is none.
        """
        self.device = device
        self._settings = settings
        self._bootstrap = _read_root(settings.root_file)
        self._loader = loader
        self._clock = clock
        self._stop = stop
        self._metadata = MetadataStore(folder / "metadata", disk=disk)
        self._artifacts = ArtifactStore(folder / "artifacts", reserve_bytes=settings.reserve_bytes, disk=disk)
        self._journal = Journal(folder / "journal", disk=disk)
        self._time = DeviceTime(self._journal, utc_clock)
        self._releases = Releases(folder / "releases", self._artifacts, disk=disk)
        self._active = ActiveReleases(self._journal, self._releases, loader, self._time)
        self._means = Means(
            self._journal,
            self._releases,
            loader,
            settings,
            clock,
            self._time.now_text,
            wait,
            stop,
            self._tell,
            try_release,
            prepare,
        )
        self._rollout: Rollout | None = None
        self._step: Step | None = None
        self._checked: Checked | None = None
        self._remembered = Remembered()

    # ---- life -------------------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Keep the models folder from serving what updates serve. Before the loader starts. Thread: any."""
        self._loader.reserve(release.model for release in self._journal.recorded())

    def open(self) -> None:
        """Open the memory and let every active release answer that is whole.

        Raises StorageFailed: the memory cannot be opened or written to now; what was active answers all the same. May
        be called again then.
        """
        try:
            self._journal.open()
        except StorageFailed:
            self._active.serve_recorded()
            raise
        self._time.recall()
        self._active.serve()  # first, since it writes nothing
        at_utc = self._time.now_text()
        for rollout in self._journal.restart(at_utc).values():
            if rollout.state is State.REJECTING:
                log.warning("refused: it ended the process", extra={"model": rollout.release.model})
                self._journal.reject(rollout.release, at_utc, rollout.reason)
        self._remember()

    def close(self) -> None:
        """Give the database back. Idempotent."""
        self._journal.close()

    # ---- what a check does ------------------------------------------------------------------------------------------

    def check(self, source: Source, *, installs: bool) -> Checked:
        """Ask the repository, and, where it `installs`, bring every release that is meant for this device.

        Never raises for what the repository or the disk does: the answer says why it did not go well.
        """
        try:
            offered = self._check(source, installs=installs)
            self._checked = Checked(self._time.now_text(), is_ok=True, source=source.name, offers=offered)
        except Exception as error:  # noqa: BLE001 (the update loop: what nobody thought of must be told too)
            reason = self._time.explained(error) if isinstance(error, EdgeRuntimeError) else _unforeseen(error)
            log.warning("no update", extra={"source": source.name, "reason": reason})
            self._checked = Checked(self._time.now_text(), is_ok=False, reason=reason, source=source.name)
        finally:
            self._step = None
            self._remember()
        return self._checked

    def roll_back(self, model: str) -> Release:
        """See `ActiveReleases.roll_back`."""
        try:
            return self._active.roll_back(model)
        finally:
            self._remember()

    def withdraw(self, model: str) -> bool:
        """Take back the release of a model that is under way; False where none is, or it is decided. Thread: any."""
        rollout = self._rollout
        if rollout is None or rollout.release.model != model:
            return False
        return rollout.withdraw()

    # ---- what is told, from any thread, without waiting for the disk -------------------------------------------------

    @property
    def is_rolling_out(self) -> bool:
        """Whether a release is under way, which may take as long as it is observed."""
        return self._rollout is not None

    def history(self, count: int) -> list[dict[str, Any]]:
        """The last things that happened, newest first."""
        return [asdict(entry) for entry in self._remembered.history[:count]]

    def status(self) -> dict[str, Any]:
        """What runs, what is under way, what was refused and why, how the last check ended, what time it is here."""
        return {**self.summary(), "clock": self._time.told()}

    def summary(self) -> dict[str, Any]:
        """The same, but for what changes with time alone: for the state on MQTT."""
        step, checked = self._step, self._checked
        return {
            "state": step.state.value if step is not None else State.IDLE.value,
            "group": self._settings.group,
            "device_id": self.device.device_id,
            "under_way": step.as_json() if step is not None else None,
            "checked": checked.as_json() if checked is not None else None,
            **self._remembered.as_json(),
        }

    # ---- private ----------------------------------------------------------------------------------------------------

    def _check(self, source: Source, *, installs: bool) -> tuple[Offered, ...]:
        with self._metadata.lock():
            catalogue = self._refresh(source)
            assignments = catalogue.assignments(self._settings.group)
            chosen = offers(assignments, self.device.device_id)
            memory = self._active.memory()  # of a model, which no other model's rollout changes
            offered = [self._take(catalogue, each, memory, installs=installs) for _, each in sorted(chosen.items())]
            offered += [_left_out(each) for each in assignments if chosen.get(each.model) is not each]
            if installs:
                self._active.serve_again()
                self._active.take_away({each.model for each in assignments})
                waiting = {each.model for each in offered if each.action == PUT_OFF}
                self._tidy(catalogue, {chosen[model].manifest_sha256 for model in waiting})
        return tuple(offered)

    def _tidy(self, catalogue: Catalogue, waiting: set[str]) -> None:
        """Nobody's update waits for this: the next check goes on with it."""
        try:
            # What was fetched of one that waits is wanted again, whichever files those are.
            self._active.tidy(None if waiting else catalogue.digests, waiting)
        except StorageFailed as error:
            log.warning("what is no longer needed stays", extra={"reason": error.message})

    def _refresh(self, source: Source) -> Catalogue:
        """Bring the metadata up to date, and remember how far it had come before anything is done with it."""
        client = TufClient(
            source.metadata,
            self._metadata,
            now_utc=self._time.now_utc(),
            bootstrap=self._bootstrap,
            time_below=self._time.below,
            make_pace=lambda: self._pace(METADATA_LIMITS),
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
        return Catalogue(client, source.targets, self._artifacts, lambda: self._pace(METADATA_LIMITS))

    def _take(self, catalogue: Catalogue, assignment: Assignment, memory: Memory, *, installs: bool) -> Offered:
        """What becomes of one assignment: its trouble is its own, and the next one is looked at."""
        counter = assignment.release.counter

        def told(action: str, reason: str = "", version: int | None = None, gap_s: float | None = None) -> Offered:
            return Offered(assignment.model, counter, assignment.percent, action, reason, version, gap_s)

        try:
            reason = why_not_offered(assignment, memory)
            if reason is not None:
                return told(_action(reason, assignment.manifest_sha256 in memory.refused), reason)
            manifest, data = catalogue.manifest(assignment)
            release = Release(manifest.model, manifest.version, manifest.release_counter, assignment.manifest_sha256)
            reason = why_not_fit(manifest, self.device)
            if reason is not None:
                return told(PASSED_OVER, reason, manifest.version)
            if not installs:
                return told(AVAILABLE, "", manifest.version)
            result = self._roll_out(catalogue, release, manifest, data)
            return told(result.outcome, result.reason, manifest.version, result.gap_s)
        except EdgeRuntimeError as error:
            return told(PUT_OFF, error.message)
        except Exception as error:  # noqa: BLE001 (one model's files must not keep all others from their updates)
            return told(PUT_OFF, _unforeseen(error))

    def _roll_out(self, catalogue: Catalogue, release: Release, manifest: Manifest, data: bytes) -> Result:
        staging = Staging(
            catalogue.client,
            catalogue.fetcher,
            self._artifacts,
            make_pace=lambda: self._pace(Limits(DOWNLOAD_LIMIT_S, cap_bytes_per_s=self._settings.cap_bytes_per_s)),
        )

        def bring(progress: Progress) -> int:
            device = self.device
            here = self._releases.artifacts()
            chosen = staging.stage(manifest, device.suffixes, here, progress, precisions=device.precisions)
            self._releases.lay_out(release, data, chosen)
            return staging.fetched_bytes

        self._rollout = Rollout(release, self._means)
        try:
            result = self._rollout.run(bring)
        finally:
            self._rollout = None
        if result.outcome == INSTALLED:
            self._active.noted(release)
        elif result.lost:
            self._active.lost(release.model, result.lost)
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

    def _pace(self, limits: Limits) -> Pace:
        return Pace(limits, self._clock, self._stop.wait)

    def _tell(self, step: Step) -> None:
        before, self._step = self._step, step
        if before is None or before.state is not step.state:
            self._remember()

    def _remember(self) -> None:
        """Take a picture of the journal for whoever asks from another thread."""
        journal = self._journal
        with contextlib.suppress(StorageFailed):  # the last picture is better than none
            self._remembered = Remembered(
                journal.active(),
                journal.previous(),
                tuple(journal.refused().values()),
                dict(self._active.not_served),
                journal.is_state_lost,
                tuple(journal.history(SHOWN_HISTORY)),
            )


def _unforeseen(error: Exception) -> str:
    log.error("a bug of the updater's", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _action(reason: str, was_refused: bool) -> str:
    """What became of an assignment that is not taken: by what `why_not_offered` said."""
    if not reason:
        return RUNS
    return REFUSED_BEFORE if was_refused else PASSED_OVER


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
            f"update.root_file: {path} is no root of trust: {error.message}; wanted the 1.root.json that the "
            "repository's owner gave you"
        ) from None
    return data
