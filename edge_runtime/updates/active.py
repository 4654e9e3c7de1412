"""The active releases: served at start, rolled back, taken away, and the files that they need.

Owns: which active release does not serve, and why. The journal says which are active, the loader serves them. Thread:
the updater's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress

from edge_runtime.errors import EdgeRuntimeError, StorageFailed, UpdateError
from edge_runtime.models.loader import Loader
from edge_runtime.models.model_table import VersionState, VersionStatus
from edge_runtime.updates.device_time import DeviceTime
from edge_runtime.updates.journal import Journal
from edge_runtime.updates.release_checks import KnownReleases
from edge_runtime.updates.releases import Releases
from edge_runtime.updates.states import Release

log = logging.getLogger(__name__)

MAX_STARTS = 5
"""How often the process may end while it loads a release at its start, before the one before it is taken. A replaced
library can make a good model crash. More than MAX_TRIES, since power fails several times in a row."""


class ActiveReleases:
    """The active releases of this device. not_served: by model, why its active release does not answer."""

    def __init__(self, journal: Journal, releases: Releases, loader: Loader, time: DeviceTime) -> None:
        self.not_served: dict[str, str] = {}
        self._journal = journal
        self._releases = releases
        self._loader = loader
        self._time = time
        self._served: set[Release] = set()
        self._lost: set[str] = set()
        self._suspects: list[Release] = []

    def serve(self) -> None:
        """Serve every active release; the one before it, where it is damaged, does not load, or crashes.

        Leaves one that was being loaded when the process ended before to `serve_suspects`. Writes only the count of
        starts: where the disk does not take it, nothing is counted.
        """
        for model, release in sorted(self._journal.active().items()):
            if 0 < self._journal.starts(release) < MAX_STARTS:
                reason = "waits for all others: the daemon ended while it was loaded"
                self._loader.note(VersionStatus(model, release.version, VersionState.LOADING, reason))
                self._suspects.append(release)
            else:
                self._serve_counted(release)

    def serve_suspects(self) -> None:
        """Serve the releases that `serve` left, when nothing waits for them any more."""
        suspects, self._suspects = self._suspects, []
        for release in suspects:
            self._serve_counted(release)

    def _serve_counted(self, release: Release) -> None:
        before = tuple(filter(None, (self._journal.previous().get(release.model),)))
        if self._journal.starts(release) >= MAX_STARTS:
            ended = f"release {release.counter}: the process ended {MAX_STARTS} times while it was loaded at a start"
            self._loader.note(VersionStatus(release.model, release.version, VersionState.FAILED, ended))
            if before:
                self._serve_first(before, ended)
            else:
                self._does_not_serve(release, ended)
            return
        starts = self._begin_start(release)
        self._serve_first((release, *before))
        if starts:
            with suppress(StorageFailed):
                self._journal.end_start(release)

    def _begin_start(self, release: Release) -> int:
        with suppress(StorageFailed):
            return self._journal.begin_start(release)
        return 0

    def serve_recorded(self) -> None:
        """Serve what the second record has, where the journal cannot be opened: on a full disk, most likely."""
        for release in self._journal.recorded():
            self._serve_first((release,))

    def mark_served(self, release: Release) -> None:
        """Note that a release was committed and serves."""
        self.not_served.pop(release.model, None)

    def mark_lost(self, model: str, reason: str) -> None:
        """Note that an active release was unloaded for another one, and did not load again."""
        self._lost.add(model)
        self.not_served[model] = reason
        self._served = {release for release in self._served if release.model != model}

    def serve_again(self) -> None:
        """Serve the lost releases again, now that their hindrance may be over."""
        active = self._journal.active()
        for model in sorted(self._lost & set(active)):
            self.not_served.pop(model, None)
            self._serve_first((active[model],))
        self._lost &= set(self.not_served)

    def known_releases(self) -> KnownReleases:
        """Return the releases to check offers against. One that does not serve is left out, to be installed again."""
        active = {model: release for model, release in self._journal.active().items() if model not in self.not_served}
        refused = {sha256: each.reason for sha256, each in self._journal.refused().items()}
        return KnownReleases(self._journal.counters(), active, refused, self._journal.committed())

    def roll_back(self, model: str) -> Release:
        """Serve the release before the active one again, and refuse the active one. Returns the one that serves now.

        Raises UpdateError: there is none, or it is damaged; nothing has changed then.
        """
        active, previous = self._journal.active().get(model), self._journal.previous().get(model)
        if active is None:
            raise UpdateError(f"no release of {model!r} is active here; `edge-runtime update status` says which are")
        if previous is None:
            raise UpdateError(f"release {active.counter} of {model} is the first one here; there is none to go back to")
        staged = self._releases.open(previous)
        swap = self._loader.swap(staged.folder)
        try:
            staged.check_unchanged()
            reason = f"rolled back to release {previous.counter} by an operator"
            self._journal.go_back(previous, self._time.now_text(), reason)
        except BaseException:
            swap.roll_back()
            raise
        swap.commit()
        self.mark_served(previous)
        return previous

    def take_away(self, assigned: Collection[str]) -> None:
        """Remove the models that the group no longer names, and their rollouts."""
        for model, rollout in self._journal.rollouts().items():
            if model not in assigned:
                self._journal.drop(rollout.release, self._time.now_text(), "its group no longer names it")
        for model in sorted(set(self._journal.active()) - set(assigned)):
            self._journal.take_away(model, self._time.now_text(), "its group no longer names it")
            self._loader.release_away(model)
            self.not_served.pop(model, None)
            log.info("taken away", extra={"model": model})

    def tidy(self, digests: Collection[str], waiting: Collection[str]) -> None:
        """Remove all files but those of active releases, of the ones before them, and of releases under way.

        digests: of files in the store that the next check needs again. waiting: manifests of releases that it tries
        again; their files are needed, whichever those are, so the store keeps all. A failure stops no update: the next
        check removes the rest.
        """
        kept = [*self._journal.active().values(), *self._journal.previous().values()]
        kept += [rollout.release for rollout in self._journal.rollouts().values()]
        manifests = {release.manifest_sha256 for release in kept} | set(waiting)
        try:
            self._releases.keep_only(manifests, digests=None if waiting else digests)
        except StorageFailed as error:
            log.warning("files that no release needs stay", extra={"reason": error.message})

    def _serve_first(self, choice: Iterable[Release], *reasons_before: str) -> None:
        reasons = [*reasons_before]
        for release in choice:
            try:
                if release not in self._served:
                    staged = self._releases.open(release)
                    self._loader.serve_release(staged.folder)
                    staged.check_unchanged()
                    self._served.add(release)
            except EdgeRuntimeError as error:
                reasons.append(f"release {release.counter}: {error.message}")
                continue
            break
        if reasons:
            self._does_not_serve(release, *reasons)

    def _does_not_serve(self, release: Release, *reasons: str) -> None:
        self.not_served[release.model] = "; ".join(reasons)
        log.error("an active release does not serve", extra={"model": release.model, "reason": reasons[0]})
