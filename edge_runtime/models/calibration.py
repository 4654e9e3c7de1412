"""Calibration: the curve of run time by rows, measured while the machine is idle, kept, and put to work.

Owns: which versions still want their curve, the measurement within a budget, its cache file, the batch limit from it
(pure), and the second, wide instance where it pays. Thread: the loader's. Ready never waits for it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.backends.base import HostedInstance, Instance
from edge_runtime.durable import write_atomically
from edge_runtime.errors import BackendError, LoadFailed, StorageFailed
from edge_runtime.model_spec import DYNAMIC
from edge_runtime.models.context import ModelContext
from edge_runtime.models.loading import LoadedVersion
from edge_runtime.models.servable import BARE, Layouts, Servable, layout_of
from edge_runtime.models.warmup import made_up_rows, time_run
from edge_runtime.request.scheduled_model import LatencyModel
from edge_runtime.steps import ModelSteps
from edge_runtime.tensors import Array

log = logging.getLogger(__name__)

BUDGET_S = 1.0
"""Idle time for one version's curve."""

GAIN = 1.1
"""A batch has to serve this much more rows a second to be worth the wait it adds for its first request; less is noise:
models that batching cannot help measured up to 1.07 on a busy machine."""

REPEATS = 5
"""Runs a point; the quickest counts, since noise only ever adds."""

SETTLING_RUNS = 2
"""Runs at a new number of rows before it is timed: the library plans and allocates in the first."""


WIDE_GAIN = 1.2
"""A run on all cores has to be this much quicker to be worth a second copy of the model: measured 1.0-2.0 on CPUs."""

WIDE_MIN_RUN_S = 0.001
"""Shorter runs lose their gain to waking the other cores."""


class RunCurve(Struct, frozen=True):
    """Run seconds by rows; wide_s: of one row on all cores, None where that is not worth a second copy."""

    times: Mapping[int, float]
    wide_s: float | None = None

    def best_rows(self) -> int:
        """The fewest rows that serve nearly the most rows a second; 1 when batching gains nothing."""
        best, best_rate = 1, 1 / self.times[1] if 1 in self.times else 0.0
        for rows in sorted(self.times):
            rate = rows / self.times[rows]
            if rate >= best_rate * GAIN:
                best, best_rate = rows, rate
        return best


def row_counts(max_rows: int) -> list[int]:
    """Powers of two up to `max_rows`."""
    counts = [1]
    while counts[-1] * 2 <= max_rows:
        counts.append(counts[-1] * 2)
    return counts


RunInputs = Callable[[int], Mapping[str, Array]]
"""Makes the inputs of a run of this many rows."""


def measure(instance: Instance, max_rows: int, inputs: RunInputs) -> Iterator[Mapping[int, float]]:
    """Measure one number of rows a step, yielding the times so far, so that the caller can stop when work comes.

    Stops by itself when the budget is spent, when two doublings in a row gain nothing, or when a run fails.
    """
    times: dict[int, float] = {}
    spent_s, best_rate, idle_steps = 0.0, 0.0, 0
    for rows in row_counts(max_rows):
        expected_s = times[rows // 2] * 2 * (SETTLING_RUNS + REPEATS) if rows > 1 else 0.0
        if spent_s + expected_s > BUDGET_S or idle_steps == 2:
            return
        started_s = time.perf_counter()
        try:
            times[rows] = measure_rows(instance, inputs(rows))
        except BackendError as error:
            log.info("calibration stopped", extra={"rows": rows, "reason": error.message})
            return
        spent_s += time.perf_counter() - started_s
        rate = rows / times[rows]
        idle_steps = 0 if rate >= best_rate * GAIN else idle_steps + 1
        best_rate = max(best_rate, rate)
        yield dict(times)


def measure_rows(instance: Instance, inputs: Mapping[str, Array]) -> float:
    """Return the seconds of the quickest of a few settled runs on these inputs. Raises RunFailed."""
    runs = [time_run(instance, inputs) for _ in range(SETTLING_RUNS + REPEATS)]
    return min(runs[SETTLING_RUNS:])


MAX_CURVES = 512
"""On disk, of 4 KiB each: a device has some dozens of models, and a detector may send any number."""


class CurveCache:
    """Curves on disk, one small JSON file each, named by a key of all that the curve depends on; the oldest leave."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, key: str) -> RunCurve | None:
        """Return the curve of a key; None where there is none, or its file is damaged."""
        if self._folder is None:
            return None
        try:
            fields = json.loads((self._folder / f"{key}.json").read_bytes())
            times = {int(rows): float(run_s) for rows, run_s in fields["times"].items()}
            wide_s = None if fields["wide_s"] is None else float(fields["wide_s"])
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None
        is_sane = times and all(rows > 0 and 0 < run_s < 3600 for rows, run_s in times.items())
        return RunCurve(times, wide_s) if is_sane else None

    def write(self, key: str, curve: RunCurve) -> None:
        """Write a curve. A full or read-only disk is logged, and costs the next start a measurement."""
        if self._folder is None:
            return
        fields = {"times": dict(curve.times), "wide_s": curve.wide_s}
        try:
            write_atomically(self._folder / f"{key}.json", json.dumps(fields).encode())
            files = list(self._folder.glob("*.json"))
            if len(files) > MAX_CURVES:
                min(files, key=lambda file: file.stat().st_mtime_ns).unlink()
        except (OSError, StorageFailed) as error:
            log.warning("the calibration of %s is not kept: %s", key[:12], error)


class Calibrator:
    """Measures versions that were loaded, or finds their curve in the cache, and puts it to work.

    is_on: False, and no version is calibrated. hardware: text that names CPU and cores, part of the cache key.
    budget_bytes None: memory is not bounded.
    """

    def __init__(
        self, context: ModelContext, curves: CurveCache, *, is_on: bool, hardware: str, budget_bytes: int | None
    ) -> None:
        self._executor = context.executor
        self._dispatcher = context.dispatcher
        self._table = context.table
        self._marks = context.marks
        self._curves = curves
        self._is_on = is_on
        self._hardware = hardware
        self._budget_bytes = budget_bytes
        self._waiting: list[LoadedVersion] = []

    @property
    def has_work(self) -> bool:
        """Whether a version wants its curve now.

        None does while the device is slowed: a curve is kept on disk, and that of a hot device would stay the model's.
        """
        return bool(self._waiting) and not self._dispatcher.is_slowed

    def add(self, loaded: LoadedVersion) -> None:
        """Queue a version that was published, and the models that it brought with it.

        Inline ones need no curve, nor do those that a chain answers, nor those that could not be warmed up.
        """
        for part in loaded.owned:
            self.add(part)
        is_run = loaded.servable.mode == "workers" and loaded.servable.chain is None
        if self._is_on and is_run and loaded.first_runs.times:
            self._waiting.append(loaded)

    def discard(self, servable: Servable | None) -> None:
        """Forget a version that is about to be closed."""
        self._waiting = [loaded for loaded in self._waiting if loaded.servable is not servable]

    def step(self) -> None:
        """Calibrate one version; when work comes meanwhile, the version is put back for another time."""
        loaded = self._waiting.pop(0)
        with self._marks.calibrating(loaded.servable.model, loaded.servable.number):
            self._calibrate(loaded)

    def _calibrate(self, loaded: LoadedVersion) -> None:
        key = self._key(loaded)
        curve = self._curves.read(key)
        if curve is None:
            curve = self._measure(loaded)
            if curve is None:
                self._waiting.append(loaded)
                return
            self._curves.write(key, curve)
        elif curve.wide_s is not None:
            self._widen(loaded, curve.wide_s)
        _apply(loaded, curve)
        _log(loaded.servable, curve)

    def _measure(self, loaded: LoadedVersion) -> RunCurve | None:
        servable = loaded.servable
        asked = _asked(loaded)
        curve: RunCurve | None = None
        rows = servable.max_rows if servable.batches else 1
        rows = min(rows, servable.spec.max_rows or rows)
        for times in measure(asked.layouts.narrow, rows, partial(_inputs, loaded, asked)):
            curve = RunCurve(times)
            if self._executor.has_work() or not self._dispatcher.is_idle() or self._dispatcher.is_slowed:
                return None
        if curve is None or not self._may_widen(loaded, curve):
            return curve
        return RunCurve(curve.times, self._widen(loaded, None))

    # ---- the wide layout --------------------------------------------------------------------------------------------

    def _may_widen(self, loaded: LoadedVersion, curve: RunCurve) -> bool:
        servable, budget = loaded.servable, self._budget_bytes
        has_room = budget is None or self._table.memory_bytes() + servable.memory_bytes <= budget
        return (
            loaded.may_widen
            and has_room
            and self._dispatcher.cores > loaded.options.threads
            and curve.times.get(1, 0.0) >= WIDE_MIN_RUN_S
        )

    def _widen(self, loaded: LoadedVersion, known_s: float | None) -> float | None:
        """Load the version once more with all cores a run, and keep it when one row runs that much quicker.

        known_s: the run time measured before, so that only loading is left to do. Returns the run time, None when not
        kept.
        """
        servable, backend = loaded.servable, loaded.backend
        assert backend is not None
        cores = self._dispatcher.cores
        try:
            # A run on two cores wakes the other one 50 times: MobileNetV2 takes 4.5 ms, and 4.0 where that core spins.
            options = replace(loaded.options, threads=cores, concurrency=1, spins_in_runs=True)
            wide = backend.load(loaded.artifact, options)
        except BackendError as error:
            log.info("no wide layout", extra={"model": servable.model, "reason": error.message})
            return None
        run_s = known_s if known_s is not None else self._gain(loaded, wide)
        if isinstance(wide, HostedInstance):
            try:
                wide.finish_warm_up()
            except LoadFailed:
                run_s = None
        if run_s is None:
            wide.close()
            return None
        servable.layouts = Layouts(servable.layouts.narrow, wide)
        own_s = _asked(loaded).scheduled.layout.run_times.mean_s(1)
        for each in (servable, *servable.forms.values()):
            narrow = each.scheduled.layout
            added_s = max(narrow.run_times.mean_s(1) - own_s, 0.0)  # of decoding, which is as long there
            each.scheduled.wide = layout_of(
                _form_of(wide, each), threads=cores, run_times=LatencyModel({1: run_s + added_s}),
                run_limit_s=narrow.run_limit_s,
            )  # fmt: skip
            each.scheduled.wide.least_limit_s = narrow.least_limit_s
        return run_s

    def _gain(self, loaded: LoadedVersion, wide: Instance) -> float | None:
        asked = _asked(loaded)
        inputs = _inputs(loaded, asked, 1)
        try:
            narrow_s = measure_rows(asked.layouts.narrow, inputs)
            wide_s = measure_rows(_form_of(wide, asked), inputs)
        except BackendError:
            return None
        return wide_s if wide_s * WIDE_GAIN <= narrow_s else None

    def _key(self, loaded: LoadedVersion) -> str:
        # Imported here: an inline model never gets this far, and the library behind it takes 3 MB.
        import hashlib

        from edge_runtime.models.digest import sha256_of_file

        instance, backend = loaded.servable.layouts.narrow, loaded.backend
        assert backend is not None
        parts = (
            sha256_of_file(loaded.artifact),
            instance.backend,
            backend.probe().version,
            instance.device,
            instance.precision,
            str(loaded.options.threads),
            self._hardware,
            *([repr(loaded.options.steps)] if _asked(loaded) is not loaded.servable else ()),
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _asked(loaded: LoadedVersion) -> Servable:
    """Return the servable whose runs show the curve: the form of texts and the like, where these make open axes.

    Else the model's own. A run on one token, which an open axis leads to, tells nothing of sentences.
    """
    servable = loaded.servable
    first = loaded.first_runs
    is_guessed = first.sample is None and not servable.settings.warmup.shapes
    if is_guessed and any(DYNAMIC in each.shape[1:] for each in servable.spec.inputs):
        for form, each in servable.forms.items():
            if form.answers and form.kind != "tensor":
                return each
    return servable


def _form_of(instance: Instance, servable: Servable) -> Instance:
    """The instance itself, or its form that answers what the servable does."""
    if servable.form == BARE or not isinstance(instance, HostedInstance):
        return instance
    return instance.forms[servable.form]


def _inputs(loaded: LoadedVersion, asked: Servable, rows: int) -> Mapping[str, Array]:
    """Return made-up inputs of this many rows, of the model or of one of its forms."""
    inputs = loaded.first_runs.inputs(asked.spec, rows, asked.settings.warmup.shapes)
    sent = made_up_rows(asked.spec, asked.form, loaded.options.steps or ModelSteps())
    return inputs | {name: np.repeat(made, rows, axis=0) if len(made) == 1 else made for name, made in sent.items()}


def _apply(loaded: LoadedVersion, curve: RunCurve) -> None:
    """Apply the curve: new run times, and a new batch limit unless one was set, for its forms too.

    Forms that send what they were not measured with keep their run times, which have its decoding in them.
    """
    servable, asked = loaded.servable, _asked(loaded)
    for each in {servable, asked}:
        each.scheduled.layout.measured(curve.times)
    if servable.settings.max_batch_rows is None and servable.batches:
        rows = min(curve.best_rows(), servable.max_rows)
        for each in (servable, *servable.forms.values()):
            each.scheduled.limits = replace(each.scheduled.limits, max_rows=rows)


def _log(servable: Servable, curve: RunCurve) -> None:
    fields = {
        "model": servable.model,
        "version": servable.number,
        "batch_rows": servable.scheduled.limits.max_rows,
        "run_ms": round(curve.times.get(1, 0.0) * 1e3, 3),
    }
    if curve.wide_s is not None:
        fields["run_all_cores_ms"] = round(curve.wide_s * 1e3, 3)
    log.info("calibrated", extra=fields)
