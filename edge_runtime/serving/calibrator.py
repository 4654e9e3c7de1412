"""Calibration of loaded versions, one step at a time while the machine is idle.

Owns: which versions still want their curve, and the second, wide instance where it pays. Thread: the loader's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from edge_runtime.backends.base import Instance
from edge_runtime.errors import BackendError
from edge_runtime.scheduling.dispatcher import Dispatcher, Layout
from edge_runtime.scheduling.latency_model import LatencyModel
from edge_runtime.serving.calibration import Curve, CurveCache, measure, measure_rows
from edge_runtime.serving.loading import Loaded
from edge_runtime.serving.servable import Layouts, Servable, run_in_order

log = logging.getLogger(__name__)

WIDE_GAIN = 1.2
"""A run on all cores has to be this much quicker to be worth a second copy of the model: measured 1.0-2.0 on CPUs."""

WIDE_MIN_RUN_S = 0.001
"""Shorter runs lose to waking the other cores what they gain."""


@dataclass(frozen=True, slots=True)
class CalibratorSettings:
    """hardware: text that names CPU and cores, part of the cache key. budget_bytes None: memory is not bounded."""

    hardware: str = ""
    budget_bytes: int | None = None


class Calibrator:
    """Measures versions that were loaded, or finds their curve in the cache, and puts it to work."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        curves: CurveCache,
        settings: CalibratorSettings,
        used_bytes: Callable[[], int],
    ) -> None:
        self._dispatcher = dispatcher
        self._curves = curves
        self._settings = settings
        self._used_bytes = used_bytes
        self._waiting: list[Loaded] = []

    @property
    def has_work(self) -> bool:
        """Whether a version still wants its curve."""
        return bool(self._waiting)

    def add(self, loaded: Loaded) -> None:
        """A version was published. Inline ones need no curve; neither does what could not even be warmed up."""
        if loaded.servable.mode == "workers" and loaded.first_runs.times:
            self._waiting.append(loaded)

    def discard(self, servable: Servable | None) -> None:
        """A version is about to be closed."""
        self._waiting = [loaded for loaded in self._waiting if loaded.servable is not servable]

    def step(self, is_interrupted: Callable[[], bool]) -> None:
        """Calibrate one version; when `is_interrupted` says that work came, it is put back for another time."""
        loaded = self._waiting.pop(0)
        key = self._key(loaded)
        curve = self._curves.read(key)
        if curve is None:
            curve = self._measure(loaded, is_interrupted)
            if curve is None:
                self._waiting.append(loaded)
                return
            self._curves.write(key, curve)
        elif curve.wide_s is not None:
            self._widen(loaded, curve.wide_s)
        _apply(loaded.servable, curve)
        _log(loaded.servable, curve)

    def _measure(self, loaded: Loaded, is_interrupted: Callable[[], bool]) -> Curve | None:
        servable = loaded.servable
        curve: Curve | None = None
        rows = servable.max_rows if servable.batches else 1
        rows = min(rows, servable.spec.max_rows or rows)
        for times in measure(servable.layouts.narrow, rows, loaded.first_runs.length, servable.settings.warmup.shapes):
            curve = Curve(times)
            if is_interrupted():
                return None
        if curve is None or not self._may_widen(loaded, curve):
            return curve
        return Curve(curve.times, self._widen(loaded, None))

    # ---- the wide layout --------------------------------------------------------------------------------------------

    def _may_widen(self, loaded: Loaded, curve: Curve) -> bool:
        servable, budget = loaded.servable, self._settings.budget_bytes
        has_room = budget is None or self._used_bytes() + servable.memory_bytes <= budget
        return (
            loaded.may_widen
            and has_room
            and self._dispatcher.cores > loaded.options.threads
            and curve.times.get(1, 0.0) >= WIDE_MIN_RUN_S
        )

    def _widen(self, loaded: Loaded, known_s: float | None) -> float | None:
        """Load the version once more with all cores a run, and keep it when one row runs that much quicker.

        known_s: the run time measured before, so that only loading is left to do. Returns the run time, None when not
        kept.
        """
        servable = loaded.servable
        cores = self._dispatcher.cores
        try:
            wide = loaded.backend.load(loaded.artifact, replace(loaded.options, threads=cores, concurrency=1))
        except BackendError as error:
            log.info("no wide layout", extra={"model": servable.model, "reason": error.message})
            return None
        run_s = known_s if known_s is not None else self._gain(loaded, wide)
        if run_s is None:
            wide.close()
            return None
        servable.layouts = Layouts(servable.layouts.narrow, wide)
        servable.scheduled.wide = Layout(run_in_order(wide), cores, 1, LatencyModel({1: run_s}))
        return run_s

    def _gain(self, loaded: Loaded, wide: Instance) -> float | None:
        shapes = loaded.servable.settings.warmup.shapes
        try:
            narrow_s = measure_rows(loaded.servable.layouts.narrow, 1, loaded.first_runs.length, shapes)
            wide_s = measure_rows(wide, 1, loaded.first_runs.length, shapes)
        except BackendError:
            return None
        return wide_s if wide_s * WIDE_GAIN <= narrow_s else None

    def _key(self, loaded: Loaded) -> str:
        # Imported here: an inline model never gets this far, and the library behind it takes 3 MB.
        import hashlib

        from edge_runtime.repository.digest import sha256_of_file

        instance = loaded.servable.layouts.narrow
        parts = (
            sha256_of_file(loaded.artifact),
            instance.backend,
            loaded.backend.probe().version,
            instance.device,
            instance.precision,
            str(loaded.options.threads),
            self._settings.hardware,
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _apply(servable: Servable, curve: Curve) -> None:
    """Put the curve to work: new run times, and a new batch limit unless one was set."""
    scheduled = servable.scheduled
    scheduled.layout.run_times = LatencyModel(curve.times)
    if servable.settings.max_batch_rows is None and servable.batches:
        scheduled.limits = replace(scheduled.limits, max_rows=min(curve.best_rows(), servable.max_rows))


def _log(servable: Servable, curve: Curve) -> None:
    fields = {
        "model": servable.model,
        "version": servable.number,
        "batch_rows": servable.scheduled.limits.max_rows,
        "run_ms": round(curve.times.get(1, 0.0) * 1e3, 3),
    }
    if curve.wide_s is not None:
        fields["run_all_cores_ms"] = round(curve.wide_s * 1e3, 3)
    log.info("calibrated", extra=fields)
