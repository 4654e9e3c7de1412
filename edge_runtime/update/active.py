"""The releases that serve: let in at start, gone back from, taken away, and what of the disk they need.

Owns: which active release does not serve, and why. The journal says which are active, the loader lets them answer.
Thread: the updater's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress

from edge_runtime.errors import EdgeRuntimeError, StorageFailed, UpdateError
from edge_runtime.serving.loader import Loader
from edge_runtime.update.device_time import DeviceTime
from edge_runtime.update.journal import Journal
from edge_runtime.update.journal_tables import Release
from edge_runtime.update.offers import Memory
from edge_runtime.update.releases import Releases

log = logging.getLogger(__name__)

MAX_STARTS = 5
"""How often the process may end while it loads a release at its start, before the one before it is taken instead: a
library that was replaced can make a good model crash. More than MAX_TRIES, since power that fails does so in a row."""


class ActiveReleases:
    """What updates have brought so far. not_served: by model, why its active release does not answer."""

    def __init__(self, journal: Journal, releases: Releases, loader: Loader, time: DeviceTime) -> None:
        self.not_served: dict[str, str] = {}
        self._journal = journal
        self._releases = releases
        self._loader = loader
        self._time = time
        self._served: set[Release] = set()
        self._lost: set[str] = set()

    def serve(self) -> None:
        """Let every active release answer; one that is not whole, does not load, or crashes, by the one before it.

        What is written here only counts starts: where the disk does not take it, nothing is counted.
        """
        previous = self._journal.previous()
        for model, release in sorted(self._journal.active().items()):
            starts = self._begin_start(release)
            before = tuple(filter(None, (previous.get(model),)))
            if starts > MAX_STARTS and before:
                ended = (
                    f"release {release.counter}: the process ended {MAX_STARTS} times while it was loaded at a start"
                )
                self._serve_first(before, ended)
                continue
            self._serve_first((release, *before))
            if starts:
                with suppress(StorageFailed):
                    self._journal.end_start(release)

    def _begin_start(self, release: Release) -> int:
        with suppress(StorageFailed):
            return self._journal.begin_start(release)
        return 0

    def serve_recorded(self) -> None:
        """The same by what can be read of it, where the journal cannot be opened: on a full disk, most likely."""
        for release in self._journal.recorded():
            self._serve_first((release,))

    def noted(self, release: Release) -> None:
        """A release was committed: it serves."""
        self.not_served.pop(release.model, None)

    def lost(self, model: str, reason: str) -> None:
        """What was active had to leave for another release, and did not come back."""
        self._lost.add(model)
        self.not_served[model] = reason
        self._served = {release for release in self._served if release.model != model}

    def serve_again(self) -> None:
        """Let what was lost answer again: what hindered it may be over."""
        active = self._journal.active()
        for model in sorted(self._lost & set(active)):
            self.not_served.pop(model, None)
            self._serve_first((active[model],))
        self._lost &= set(self.not_served)

    def memory(self) -> Memory:
        """What offers are judged by. A release that does not serve counts as not there, so that it is brought again."""
        active = {
            model: release.manifest_sha256
            for model, release in self._journal.active().items()
            if model not in self.not_served
        }
        refused = {sha256: each.reason for sha256, each in self._journal.refused().items()}
        return Memory(self._journal.counters(), active, refused)

    def roll_back(self, model: str) -> Release:
        """Let the release before the active one answer again, and refuse the active one. Returns what serves now.

        Raises UpdateError: there is none, or it is not whole any more; nothing has changed then.
        """
        active, previous = self._journal.active().get(model), self._journal.previous().get(model)
        if active is None:
            raise UpdateError(f"no release of {model!r} is active here; `edge-runtime update status` says which are")
        if previous is None:
            raise UpdateError(f"release {active.counter} of {model} is the first one here; there is none to go back to")
        staged = self._releases.open(previous)
        exchange = self._loader.exchange(staged.folder)
        try:
            staged.check_unchanged()
            reason = f"rolled back to release {previous.counter} by an operator"
            self._journal.go_back(previous, self._time.now_text(), reason)
        except BaseException:
            exchange.roll_back()
            raise
        exchange.commit()
        self.noted(previous)
        return previous

    def take_away(self, assigned: Collection[str]) -> None:
        """Models that the group no longer names are not meant for this device, nor is what was under way of them."""
        for model, rollout in self._journal.rollouts().items():
            if model not in assigned:
                self._journal.drop(rollout.release, self._time.now_text(), "its group no longer names it")
        for model in sorted(set(self._journal.active()) - set(assigned)):
            self._journal.take_away(model, self._time.now_text(), "its group no longer names it")
            self._loader.release_away(model)
            self.not_served.pop(model, None)
            log.info("taken away", extra={"model": model})

    def tidy(self, digests: Iterable[str] | None, waiting: Collection[str]) -> None:
        """Keep what serves, what an operator can go back to, and what is under way; all else goes from the disk.

        digests: of files in the store that the next check needs again; None: all of them. waiting: manifests of
        releases that it tries again. Raises StorageFailed.
        """
        kept = [*self._journal.active().values(), *self._journal.previous().values()]
        kept += [rollout.release for rollout in self._journal.rollouts().values()]
        manifests = {release.manifest_sha256 for release in kept} | set(waiting)
        self._releases.keep_only(manifests, digests=None if digests is None else set(digests))

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
            self.not_served[release.model] = "; ".join(reasons)
            log.error("an active release does not serve", extra={"model": release.model, "reason": reasons[0]})
