"""A swap: a candidate release loaded beside the current versions of its model, until one of them is chosen.

Owns: which of them answers meanwhile, and that no change loses a request. Who chooses, and by what, is the updater's.
Thread: the updater's calls; their work is done on the loader's thread, and they wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from edge_runtime.errors import EdgeRuntimeError, LoadFailed, NotReady
from edge_runtime.models.calibration import Calibrator
from edge_runtime.models.context import ModelContext
from edge_runtime.models.folder import ModelFolder
from edge_runtime.models.loading import LoadedVersion
from edge_runtime.models.model_table import VersionState, VersionStatus
from edge_runtime.models.placement import Placement, log_loaded
from edge_runtime.models.servable import Servable, Shadow
from edge_runtime.models.served_folder import ServedFolder
from edge_runtime.models.split import Split, why_not_alike

log = logging.getLogger(__name__)


class Swap:
    """One candidate release beside the current versions of its model.

    current: the version that answered before, None when none did. gap_s: how long nothing of the model answered, where
    memory holds only one of the two; None where it holds both. Each method waits until it is done, and raises Draining
    when the daemon stops meanwhile, LoadFailed when the swap is over. Thread: any but the loader's.
    """

    def __init__(
        self,
        folder: ModelFolder,
        context: ModelContext,
        placement: Placement,
        served_folder: ServedFolder,
        calibrator: Calibrator,
    ) -> None:
        """folder: of the release, which is its only version."""
        self.model = folder.name
        self.current: Servable | None = None
        self.gap_s: float | None = None
        self.context = context
        self._folder = folder
        self._executor = context.executor
        self._table = context.table
        self._placement = placement
        self._sources = context.sources
        self._served_folder = served_folder
        self._calibrator = calibrator
        self._pending_loads = context.pending_loads
        self._clock = context.clock
        (self._version,) = folder.versions.values()
        self._status_before: VersionStatus | None = None
        self._origin: ModelFolder | None = None
        self._release_before: ModelFolder | None = None
        self._loaded: LoadedVersion | None = None
        self._currents: list[Servable] = []
        self._unloaded: list[Servable] = []
        self._mirror: Shadow | None = None
        self._is_switched = False
        self._is_over = False

    @property
    def candidate(self) -> Servable:
        """The release's servable. It counts in `metrics` of its own, which the model's numbers contain."""
        assert self._loaded is not None, "load() comes first"
        return self._loaded.servable

    def load(self, before_alone: Callable[[], None]) -> None:
        """Load the candidate beside the current versions; where memory holds only one, in their place, answering.

        before_alone: called where memory holds only one, when nothing of the model is loaded any more. Raises
        LoadFailed, and the errors of `before_alone`: all is as before. Thread: the loader's; once, first.
        """
        model, number = self.model, self._version.number
        self._sources.check_free(model)
        self._sources.swapping.add(model)
        self._status_before = self._table.status(model, number)
        self._origin = self._sources.folder_of(model)
        self._release_before = self._sources.releases.get(model)
        self._currents = self._table.live_of(model)
        self.current = max(self._currents, key=lambda servable: servable.number, default=None)
        started_s = self._clock.monotonic_s()
        if self._table.find(model, number) is None:
            self._table.set_status(VersionStatus(model, number, VersionState.LOADING))
        try:
            self._loaded = self._load_candidate(before_alone)
        except EdgeRuntimeError as error:
            self._restore_status()
            self._pending_loads.end(model, NotReady(f"model {model} version {number} failed to load: {error.message}"))
            raise
        finally:
            if self._loaded is None:
                self._end()
        if self._currents:
            self._table.arrange(model, self._currents, [self.candidate])
        log_loaded(self._loaded, self._clock.monotonic_s() - started_s)

    def split(self, percent: float) -> None:
        """Canary: the candidate answers this percentage of the requests that name no version; 0 ends it.

        After `switch` too: then both answer again. A request that names a version is answered by it, and by the current
        version where both have the same number. Inline models run each request alone meanwhile. Raises LoadFailed: no
        current version to share with, or specs that differ.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent: got {percent}; wanted 0 to 100")
        self._executor.call(lambda: self._split(percent))

    def shadow(self, mirror: Shadow) -> None:
        """Show a mirror the requests that the current version answers, until the next change.

        Inline models run each request alone meanwhile. Raises LoadFailed as `split`, and after `switch`.
        """
        self._executor.call(lambda: self._shadow(mirror))

    def switch(self) -> None:
        """Let the candidate answer everything from now on; the current versions stay loaded, out of the table."""
        self._executor.call(self._switch)

    def commit(self) -> None:
        """Keep the candidate; the versions that it replaces are closed when they have answered all they admitted."""
        self._executor.call(self._commit)

    def roll_back(self) -> None:
        """Let the current versions answer again; the candidate is closed when it has answered all it admitted.

        Raises LoadFailed: they had to be loaded again, and could not; then nothing of the model serves.
        """
        self._executor.call(self._roll_back)

    # ---- on the loader's thread: load -------------------------------------------------------------------------------

    def _load_candidate(self, before_alone: Callable[[], None]) -> LoadedVersion:
        """Load it beside the current versions if memory allows; its size is a guess before the first load, so try."""
        if self._must_be_alone():
            return self._load_alone(before_alone)
        try:
            return self._placement.bring_up(self._folder, self._version, is_apart=True)
        except LoadFailed:
            if not self._must_be_alone():
                raise
            return self._load_alone(before_alone)

    def _must_be_alone(self) -> bool:
        """Whether memory holds the candidate, but not beside the current versions."""
        has_room, currents = self._placement.has_room, self._currents
        return bool(currents) and not has_room(self._version) and has_room(self._version, without=currents)

    def _load_alone(self, before_alone: Callable[[], None]) -> LoadedVersion:
        """Unload the current versions, load the candidate and let it answer; requests wait meanwhile."""
        began_s = self._clock.monotonic_s()
        log.warning("memory holds one version only: unloading what serves first", extra={"model": self.model})
        self._clear(self._currents)
        try:
            before_alone()
            loaded = self._placement.bring_up(self._folder, self._version, is_apart=True)
        except EdgeRuntimeError:
            self._bring_back(self._currents, began_s)
            raise
        self._unloaded, self._currents = self._currents, []
        self._end_gap([loaded.servable], began_s)
        self._sources.releases[self.model] = self._folder
        self._is_switched = True
        return loaded

    def _clear(self, leaving: Sequence[Servable]) -> None:
        """Let nothing of the model answer from here on; its requests wait."""
        for number in {self._version.number, *(servable.number for servable in leaving)}:
            self._table.set_status(VersionStatus(self.model, number, VersionState.LOADING))
        self._table.arrange(self.model, (), ())
        for servable in leaving:
            self._placement.retire(servable)

    def _end_gap(self, live: Sequence[Servable], began_s: float) -> None:
        """Let these versions answer, and submit the requests that waited."""
        self._table.arrange(self.model, live, ())
        self.gap_s = self._clock.monotonic_s() - began_s
        self._pending_loads.end(self.model, None)
        log.warning("nothing of the model answered", extra={"model": self.model, "for_s": round(self.gap_s, 3)})

    def _bring_back(self, gone: Sequence[Servable], began_s: float) -> None:
        """Load the current versions again. Raises LoadFailed: nothing of the model serves, and its status says why."""
        origin = self._origin
        again: list[Servable] = []
        try:
            for servable in gone:
                if origin is None or servable.number not in origin.versions:
                    raise LoadFailed(f"model {self.model} version {servable.number} is gone from where it was")
                again.append(self._placement.bring_up(origin, origin.versions[servable.number]).servable)
        except LoadFailed as error:
            for servable in gone:
                self._table.set_status(VersionStatus(self.model, servable.number, VersionState.FAILED, error.message))
            if not again:
                self._pending_loads.end(
                    self.model, NotReady(f"model {self.model} failed to load again: {error.message}")
                )
                raise
        self.current = max(again, key=lambda servable: servable.number)
        self._end_gap(again, began_s)

    # ---- on the loader's thread: choose -----------------------------------------------------------------------------

    def _check_not_over(self) -> None:
        if self._is_over:
            raise LoadFailed(f"the swap of model {self.model} version {self._version.number} is over")

    def _split(self, percent: float) -> None:
        self._check_not_over()
        others = self._currents if self._is_switched else self._others()
        current = self._check_both(others)
        self._end_trial()
        self._is_switched = False
        self._give_name_back()
        live, beside = others, [self.candidate]
        if not percent:
            self._table.arrange(self.model, live, beside)
            return
        if self.candidate.number not in {servable.number for servable in live}:
            live, beside = [*live, self.candidate], []
        self._table.arrange(self.model, live, beside, Split(current, self.candidate, percent))

    def _shadow(self, mirror: Shadow) -> None:
        self._check_not_over()
        others = [] if self._is_switched else self._others()
        current, candidate = self._check_both(others), self.candidate
        if any(each.owned or each.chain is not None for each in (current, candidate)):
            raise LoadFailed(
                f"model {self.model}: copies are run of models that answer a request by one run, not of pipelines or "
                "language models; use switch"
            )
        self._end_trial()
        current.mirror = self._mirror = mirror
        self._table.arrange(self.model, self._others(), [candidate])

    def _check_both(self, others: Sequence[Servable]) -> Servable:
        """Return the current version. Raises LoadFailed: there is none to try the candidate beside."""
        if not others:
            raise LoadFailed(f"model {self.model}: nothing answers beside the candidate; use switch")
        current = max(others, key=lambda servable: servable.number)
        reason = why_not_alike(current, self.candidate)
        if reason is not None:
            raise LoadFailed(f"model {self.model}: the two cannot stand in for one another: {reason}; use switch")
        return current

    def _end_trial(self) -> None:
        """End a mirror or a split; the next arrangement of the table brings the lean path back."""
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None
        for servable in self._others():
            servable.mirror = None

    def _switch(self) -> None:
        self._check_not_over()
        if self._is_switched:
            return
        self._end_trial()
        # Asked again: a version that waited for its first request may have been loaded since.
        self._currents = self._others()
        self._table.arrange(self.model, [self.candidate], self._currents)
        self._sources.releases[self.model] = self._folder
        self._is_switched = True
        self._pending_loads.end(self.model, None)
        log.info("swapped in", extra={"model": self.model, "version": self.candidate.number})

    def _commit(self) -> None:
        self._switch()
        self._table.arrange(self.model, [self.candidate], ())
        for servable in self._currents:
            self._placement.retire(servable)
        for servable in (*self._currents, *self._unloaded):
            servable.metrics.unwatch()
        for status in self._table.statuses_of(self.model):
            if status.number != self._version.number:
                self._table.forget(self.model, status.number)
        assert self._loaded is not None
        self._calibrator.add(self._loaded)
        self._end()

    def _roll_back(self) -> None:
        self._check_not_over()
        candidate = self.candidate
        self._end_trial()
        self._give_name_back()
        try:
            if self._unloaded:
                self._swap_back()
            else:
                self._table.arrange(self.model, self._currents if self._is_switched else self._others(), ())
                self._restore_status()
                self._pending_loads.end(self.model, None)
                self._placement.retire(candidate)
        finally:
            self._end()
        log.warning("rolled back", extra={"model": self.model, "version": candidate.number})

    def _give_name_back(self) -> None:
        """Let loads on demand take the model from its source before the swap."""
        if self._release_before is not None:
            self._sources.releases[self.model] = self._release_before
        else:
            self._sources.releases.pop(self.model, None)

    def _swap_back(self) -> None:
        """Unload the candidate, then load the current versions again: memory holds only one of the two."""
        began_s = self._clock.monotonic_s()
        self._clear([self.candidate])
        try:
            self._bring_back(self._unloaded, began_s)
        finally:
            self._restore_status()

    def _others(self) -> list[Servable]:
        return [servable for servable in self._table.live_of(self.model) if servable is not self.candidate]

    def _restore_status(self) -> None:
        """Set the status of the candidate's number as it was, unless a version that serves has the same number."""
        number = self._version.number
        if self._table.find(self.model, number) is not None:
            return
        if self._status_before is None:
            self._table.forget(self.model, number)
        else:
            self._table.set_status(self._status_before)

    def _end(self) -> None:
        """End the swap; a model that is not an update's follows the models folder again."""
        self._is_over = True
        self._sources.swapping.discard(self.model)
        if self.model not in self._sources.releases:
            self._served_folder.catch_up(self.model)
