"""A place in memory for a version: others leave for it, it is loaded and held to what it was measured to take.

Owns: what versions were measured to take, and which models nobody may be made to leave for. Thread: the loader's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from edge_runtime.errors import LoadFailed
from edge_runtime.repository.folder import Fingerprint, ModelFolder, VersionFolder
from edge_runtime.scheduling.dispatcher import Dispatcher
from edge_runtime.serving.calibrator import Calibrator
from edge_runtime.serving.loading import Loaded, VersionLoader
from edge_runtime.serving.memory_budget import Eviction, Resident, plan_eviction
from edge_runtime.serving.servable import Servable
from edge_runtime.serving.servables import Servables, State
from edge_runtime.telemetry.metrics import Metrics, ModelMetrics

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""A replaced version has this long to answer what it admitted; requests carry shorter deadlines than this."""


class Placement:
    """Loads versions where memory allows, and closes them.

    budget_bytes None: memory is not bounded. held: models under exchange, whose versions never leave for others.
    """

    def __init__(
        self,
        *,
        versions: VersionLoader,
        servables: Servables,
        dispatcher: Dispatcher,
        calibrator: Calibrator,
        metrics: Metrics,
        budget_bytes: int | None,
    ) -> None:
        self._versions = versions
        self._servables = servables
        self._dispatcher = dispatcher
        self._calibrator = calibrator
        self._metrics = metrics
        self._budget_bytes = budget_bytes
        self._measured: dict[tuple[str, int], tuple[tuple[Path, Fingerprint], int]] = {}
        self.held: set[str] = set()

    def has_room(self, version: VersionFolder, without: Collection[Servable] = ()) -> bool:
        """Whether a version fits, were those not there that may leave for it, and those `without`."""
        return not self._plan(self._bytes_wanted(version), without).missing_bytes

    def has_room_beside(self, version: VersionFolder) -> bool:
        """Whether a version fits with all that is loaded of its model."""
        return not self._plan(self._bytes_wanted(version), (), keeping=version.model).missing_bytes

    def is_held_up(self, version: VersionFolder) -> bool:
        """Whether a version fits, but for models under exchange: it will when that is over."""
        held = [each for each in self._servables.loaded() if each.model in self.held]
        return not self.has_room(version) and self.has_room(version, without=held)

    def load(
        self,
        folder: ModelFolder,
        version: VersionFolder,
        *,
        without: Collection[Servable] = (),
        metrics: ModelMetrics | None = None,
        check: Callable[[Loaded], None] | None = None,
    ) -> Loaded:
        """Make room, load, warm up. without: what will leave for it, and is not counted. check: looks at it last.

        Raises LoadFailed only: a library's surprise is a failed load too.
        """
        try:
            self._make_room(self._bytes_wanted(version), without)
            loaded = self._versions.load(folder, version, metrics)
        except LoadFailed:
            raise
        except Exception as error:
            log.exception("loading failed unexpectedly", extra={"model": folder.name, "version": version.number})
            raise LoadFailed(f"{type(error).__name__}: {error}") from error
        servable = loaded.servable
        self._measured[version.model, version.number] = (version.path, version.fingerprint), servable.memory_bytes
        try:
            # Files are only a guess at what a library makes of them: hold the budget by what was measured.
            self._make_room(servable.memory_bytes, without)
            if check is not None:
                check(loaded)
        except LoadFailed:
            servable.close(0.0)
            raise
        self._watch_queue(servable)
        return loaded

    def retire(self, servable: Servable | None) -> None:
        """Close a version that left the live table, after what it admitted was answered."""
        if servable is None:
            return
        self._calibrator.discard(servable)
        servable.close(DRAIN_S)
        self._metrics.retire(servable.model, servable.metrics, servable)
        log.info("unloaded", extra={"model": servable.model, "version": servable.number})

    # ---- private ----------------------------------------------------------------------------------------------------

    def _bytes_wanted(self, version: VersionFolder) -> int:
        """What these very files were measured to take, else a guess."""
        known = self._measured.get((version.model, version.number))
        if known is not None and known[0] == (version.path, version.fingerprint):
            return known[1]
        return self._versions.bytes_wanted(version)

    def _make_room(self, wanted: int, without: Collection[Servable]) -> None:
        plan = self._plan(wanted, without)
        if plan.missing_bytes:
            raise LoadFailed(
                f"needs {wanted} bytes; {plan.missing_bytes} are missing in the memory budget of {self._budget_bytes} "
                "even after every model that is not pinned would leave"
            )
        for resident in plan.leave:
            self.retire(
                self._servables.withdraw(resident.model, resident.number, State.ON_DEMAND, "left to free memory")
            )

    def _plan(self, wanted: int, without: Collection[Servable], keeping: str = "") -> Eviction:
        if self._budget_bytes is None:
            return Eviction((), 0)
        residents = [
            Resident(each.model, each.number, each.memory_bytes, each.used_s, self._must_stay(each, keeping))
            for each in self._servables.loaded()
            if each not in without
        ]
        return plan_eviction(residents, wanted, self._budget_bytes)

    def _must_stay(self, servable: Servable, keeping: str) -> bool:
        return servable.settings.pinned or servable.model in self.held or servable.model == keeping

    def _watch_queue(self, servable: Servable) -> None:
        servable.metrics.watch("queue_rows", lambda: self._dispatcher.queued(servable.scheduled)[0])
        servable.metrics.watch("queue_bytes", lambda: self._dispatcher.queued(servable.scheduled)[1])
