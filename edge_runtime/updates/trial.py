"""A release tried in a child process before the daemon loads it, and the judgement of how that went.

Owns: what a trial does, and which ending is the release's fault. Loads nothing in the daemon's process: a native abort,
an endless load or too much memory ends the child only. Called by the updater's thread, which waits here.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from edge_runtime.backends.base import Backend, Instance, LoadOptions, TriedInstance
from edge_runtime.backends.declaration import Declaration
from edge_runtime.backends.registry import declared_backend
from edge_runtime.builds.build_cache import BuildCache
from edge_runtime.config.settings import Config, ModelSettings
from edge_runtime.errors import BackendUnavailable, LoadFailed, RunFailed
from edge_runtime.model_spec import TensorSpec
from edge_runtime.models.folder import FolderTask, ModelFolder, VersionFolder
from edge_runtime.models.warmup import warm_up
from edge_runtime.sandbox.child import ChildFunction, run_child
from edge_runtime.sandbox.ending import Cause, Ending, ShowProgress
from edge_runtime.sandbox.process_memory import data_bytes, limited_memory, peak_bytes, start_peak
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.tensors import Array
from edge_runtime.updates.golden import GoldenTensors, golden_faults, not_finite, read_golden
from edge_runtime.updates.manifest import Golden, TensorForm

if TYPE_CHECKING:  # the child imports this module too, and gets its task without these
    from edge_runtime.hosts.steps_instance import StepsInstance
    from edge_runtime.models.load_plans import LoadPlan, LoadPlans
    from edge_runtime.updates.releases import StagedRelease

GOLDEN_RUNS = 10
GOLDEN_RUNS_S = 5.0
"""A slow model is run less often: one run shows whether it is right."""

NICENESS = 10
"""Beside 0, the daemon's: a tenth of a core where all are busy."""

STACK_BYTES = 8 << 20
"""Of each thread that a library makes; it counts as memory though hardly any of it is touched."""

LIBRARY_BYTES = 128 << 20
"""The memory of a library itself with its first model, most of it untouched: OpenVINO some 50 MB for a tiny one."""


Task = TypeVar("Task", "TrialTask", "PipelineTask")


class Outcome(Enum):
    """PASSED: the release may be loaded. FAILED: by its own fault, on this device. HINDERED: nothing was found out.

    UNCLEAR: the child ended without a result, most likely for want of memory; more trials show whose fault it is.
    """

    PASSED = "passed"
    FAILED = "failed"
    UNCLEAR = "unclear"
    HINDERED = "hindered"


_OUTCOMES = {
    Cause.RETURNED: Outcome.PASSED,
    Cause.RAISED: Outcome.FAILED,
    Cause.STOPPED: Outcome.HINDERED,
    Cause.TIMED_OUT: Outcome.FAILED,
    Cause.TOO_LARGE: Outcome.FAILED,
    Cause.CROWDED: Outcome.FAILED,
    Cause.OVERFULL: Outcome.FAILED,
    Cause.IDLE: Outcome.FAILED,
    # The kernel kills when the device runs out of memory, below the limit that the release has.
    Cause.KILLED: Outcome.UNCLEAR,
    Cause.CRASHED: Outcome.FAILED,
    # An installation that changes meanwhile ends a child so; no model does.
    Cause.SILENT: Outcome.UNCLEAR,
}


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """memory_bytes: what the model may take beyond its library. limit_s: for load, warm-up and golden runs in all."""

    memory_bytes: int
    limit_s: float


class TrialAttempt(Struct, frozen=True):
    """One backend, the artifact that it loads, and how."""

    declaration: Declaration
    artifact: str
    options: LoadOptions

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.declaration.name


class TrialTask(Struct, frozen=True):
    """The task of the child: try the first attempt that loads. memory_bytes: of the model beyond its library.

    engines: the folder of engines that were built for the release; the child builds none. min_agreement: the bound of
    its golden rows; 0 for none.
    """

    attempts: tuple[TrialAttempt, ...]
    settings: ModelSettings
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    golden: Golden
    golden_file: str
    memory_bytes: int
    engines: str = ""
    min_agreement: float = 0.0


class PipelineTask(Struct, frozen=True):
    """The task of a pipeline's child: serve it with its models, and ask it its golden input.

    config: how the daemon serves models. work: a folder of the child's own. The rest as of TrialTask.
    """

    config: Config
    pipeline: FolderTask
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    golden: Golden
    golden_file: str
    memory_bytes: int
    work: str
    engines: str = ""
    min_agreement: float = 0.0


class TrialResult(Struct, frozen=True):
    """The measurements of a trial. run_s: the median golden run, at a low priority beside the serving versions.

    note: which attempts failed before, and why.
    """

    backend: str
    precision: str
    peak_memory_bytes: int
    run_s: float
    note: str


@dataclass(frozen=True, slots=True)
class TrialReport:
    """How a trial went. reason: in words, "" when it passed. result: present when it passed."""

    outcome: Outcome
    reason: str = ""
    result: TrialResult | None = None


class ReleaseTrials:
    """Tries releases as this device would load them. Thread: the updater's."""

    def __init__(
        self,
        plans: LoadPlans,
        limits: TrialLimits,
        engines: Path,
        *,
        config: Config,
    ) -> None:
        """engines: the folder of engines built for this device. config: how it serves models."""
        self._plans = plans
        self._limits = limits
        self._engines = engines
        self._config = config

    def prepare(self, staged: StagedRelease, stop: threading.Event) -> None:
        """Build the files that backends here need of a release, its engines above all, before it is tried or loaded."""
        for folder in staged.folder.owned or (staged.folder,):
            (version,) = folder.versions.values()
            self._plans.prepare(folder, version, stop)

    def run(self, staged: StagedRelease, stop: threading.Event) -> TrialReport:
        """Load a release and run its golden input in a child process. stop: set when the daemon stops; ends the trial.

        Raises UpdateError: the golden file was changed. Never longer than the limit, and leaves no process.
        """
        if staged.folder.owned:
            return self._try_pipeline(staged, stop)
        plans = self._plans.of(staged.folder, staged.version)
        return try_release(staged, plans, self._limits, stop=stop, engines=self._engines)

    def _try_pipeline(self, staged: StagedRelease, stop: threading.Event) -> TrialReport:
        """Serve a pipeline with its models in a child process, and run its golden input on it."""
        # Imported here: it brings the publisher's side, of which a device without pipelines needs nothing.
        from edge_runtime.updates.pipeline_trials import try_pipeline_in_child

        try:
            work = tempfile.TemporaryDirectory(prefix="edge-runtime-trial-", ignore_cleanup_errors=True)
        except OSError as error:
            return TrialReport(Outcome.HINDERED, f"no folder can be made to try it in: {error.strerror}")
        with work as folder:
            task = PipelineTask(
                config=self._config,
                pipeline=FolderTask.of(staged.folder),
                inputs=staged.manifest.inputs,
                outputs=staged.manifest.outputs,
                golden=staged.manifest.golden,
                golden_file=str(staged.golden),
                memory_bytes=self._limits.memory_bytes,
                work=folder,
                engines=str(self._engines),
                min_agreement=staged.manifest.min_agreement,
            )
            reads = [staged.folder.path, self._engines]
            return _try(
                staged, try_pipeline_in_child, task, self._limits, reads=reads, writes=[Path(folder)], stop=stop
            )


def try_release(
    staged: StagedRelease,
    plans: Sequence[LoadPlan],
    limits: TrialLimits,
    *,
    stop: threading.Event | None = None,
    free_bytes: int | None = None,
    child: ChildFunction[TrialTask, TrialResult] | None = None,
    engines: Path | None = None,
) -> TrialReport:
    """Load the first plan that can be loaded and run the golden input on it, in a child process.

    plans: of `LoadPlans`, in their order. stop: set when the daemon stops; ends the trial. free_bytes: free
    memory, measured where it is None. child: the function that the child calls. engines: the folder of those built for
    the release. Raises UpdateError: the golden file was changed. Never longer than the limit, and leaves no process.
    """
    task = TrialTask(
        attempts=tuple(TrialAttempt(each.declaration, str(each.artifact.absolute()), each.options) for each in plans),
        settings=staged.folder.settings,
        inputs=staged.manifest.inputs,
        outputs=staged.manifest.outputs,
        golden=staged.manifest.golden,
        golden_file=str(staged.golden),
        memory_bytes=limits.memory_bytes,
        engines=str(engines or ""),
        min_agreement=staged.manifest.min_agreement,
    )
    reads = [*{plan.artifact.parent for plan in plans}, staged.golden, *([] if engines is None else [engines])]
    return _try(staged, child or try_in_child, task, limits, reads=reads, stop=stop, free_bytes=free_bytes)


def _try(
    staged: StagedRelease,
    child: ChildFunction[Task, TrialResult],
    task: Task,
    limits: TrialLimits,
    *,
    reads: Sequence[Path],
    writes: Sequence[Path] = (),
    stop: threading.Event | None,
    free_bytes: int | None = None,
) -> TrialReport:
    """Run a trial in a child, where memory allows one. Raises UpdateError: the golden file was changed."""
    free = HostProbe().memory_available_bytes() if free_bytes is None else free_bytes
    needed = min(staged.manifest.peak_memory_bytes, limits.memory_bytes)
    if free is not None and free < needed:
        return TrialReport(Outcome.HINDERED, f"it needs {needed} bytes of memory to be tried; {free} are free")
    staged.golden_tensors()
    try:
        ending = run_child(
            child,
            task,
            limit_s=limits.limit_s,
            niceness=NICENESS,
            reads=reads,
            writes=writes,
            has_children=bool(staged.folder.owned),  # a pipeline's models run in hosts there
            starts_none=not staged.folder.owned,
            stop=stop,
        )
    except OSError as error:
        return TrialReport(Outcome.HINDERED, f"no process can be made to try it in: {error.strerror}")
    return judge(ending)


def judge(ending: Ending[TrialResult]) -> TrialReport:
    """Return the outcome that a child's ending means for the release. Pure."""
    reason = "the daemon stopped during the trial" if ending.cause is Cause.STOPPED else ending.reason
    return TrialReport(_OUTCOMES[ending.cause], reason, ending.result)


# ---- in the child ---------------------------------------------------------------------------------------------------


def try_in_child(task: TrialTask, _: ShowProgress, make_backend: Callable[[str], Backend] | None = None) -> TrialResult:
    """Try the attempts in their order. Raises LoadFailed, RunFailed, MemoryError."""
    golden = read_golden(task.golden, Path(task.golden_file).read_bytes(), task.min_agreement)
    reasons: list[str] = []
    for attempt in task.attempts:
        try:
            if make_backend is not None:
                library = make_backend(attempt.backend)
            else:
                library = declared_backend(attempt.declaration, builds=BuildCache(Path(task.engines)))
            library.probe()  # imports the library, which is not the model's memory
            stacks_bytes = attempt.options.threads * attempt.options.concurrency * STACK_BYTES
            with limited_memory(task.memory_bytes, besides=data_bytes() + LIBRARY_BYTES + stacks_bytes):
                return _try_one(library, attempt, task, golden, "; ".join(reasons))
        except (BackendUnavailable, LoadFailed) as error:
            reasons.append(f"{attempt.backend}: {error.message}")
    raise LoadFailed(f"no backend here can load it: {'; '.join(reasons)}")


def _try_one(library: Backend, attempt: TrialAttempt, task: TrialTask, golden: GoldenTensors, note: str) -> TrialResult:
    """Raises LoadFailed and BackendUnavailable: the next attempt may do; RunFailed: no attempt follows."""
    from edge_runtime.models.loading import load_tried

    before_bytes = start_peak()
    instance = load_tried(library, Path(attempt.artifact), attempt.options, task.settings)
    try:
        try:
            warm_up(instance, task.settings)
        except RunFailed as error:
            raise LoadFailed(error.message) from error
        run_s = run_golden(instance, task, golden, _asked(instance, task, attempt, golden))
        peak = max(peak_bytes() - before_bytes, 0)
        return TrialResult(
            backend=instance.backend,
            precision=instance.precision,
            peak_memory_bytes=peak,
            run_s=run_s,
            note=note,
        )
    finally:
        instance.close()


def run_golden(
    instance: TriedInstance,
    task: TrialTask | PipelineTask,
    golden: GoldenTensors,
    form: TriedInstance | StepsInstance | None = None,
) -> float:
    """Return the median seconds of a run. Raises RunFailed: the model is not as described, or answers wrongly.

    form: of it, which takes the golden input; None: itself does.
    """
    form = form or instance
    _check_described(instance, task)
    names = [spec.name for spec in instance.spec.outputs]
    times: list[float] = []
    began_s = time.perf_counter()
    while len(times) < GOLDEN_RUNS and (not times or time.perf_counter() - began_s < GOLDEN_RUNS_S):
        started_s = time.perf_counter()
        outputs = form.run(golden.inputs)
        times.append(time.perf_counter() - started_s)
        got = dict(zip(names, outputs, strict=True))
        bad = not_finite(golden.forms, got)
        if bad is not None:
            raise RunFailed(f"its output {bad!r} has NaN or infinite values for its golden input")
        found = golden_faults(golden, got, instance.precision)
        if found:
            raise RunFailed(f"its golden output is wrong at precision {instance.precision}: {'; '.join(found)}")
    return median(times)


def sent_forms(instance: Instance, settings: ModelSettings, artifact: Path, threads: int) -> list[StepsInstance]:
    """Return the forms in which callers send what a model's host makes tensors of, such as texts, with its own outputs.

    Only of a model whose host opens files for that, which lie beside the artifact. Raises LoadFailed: they do not fit.
    """
    from edge_runtime.hosts.steps_instance import make_forms
    from edge_runtime.models.loading import steps_of

    files = {path.name: path for path in artifact.parent.iterdir() if path.is_file()}
    version = VersionFolder("", 1, artifact.parent, files, ())
    steps = steps_of(settings, ModelFolder("", artifact.parent, settings, None, {1: version}), version, artifact)
    if steps is None or not steps.files:
        return []
    made = make_forms(instance, steps, threads)
    return [each for each in made if each.form.kind != "tensor" and not each.form.answers]


def _asked(
    instance: Instance, task: TrialTask, attempt: TrialAttempt, golden: GoldenTensors
) -> Instance | StepsInstance:
    """The form that takes the golden input: the model itself, or one that makes its tensors of that.

    Raises RunFailed: none does, or the model is not as described; LoadFailed: its files do not fit it.
    """
    _check_described(instance, task)
    if golden.inputs.keys() <= {spec.name for spec in instance.spec.inputs}:
        return instance
    for form in sent_forms(instance, task.settings, Path(attempt.artifact), attempt.options.threads):
        if takes(form, golden.inputs):
            return form
    raise RunFailed(f"it does not take its golden input: {', '.join(golden.inputs)}")


def takes(form: StepsInstance, inputs: Mapping[str, Array]) -> bool:
    """Return whether these arrays are the inputs of a form."""
    specs = {spec.name: spec for spec in form.spec.inputs}
    return specs.keys() == inputs.keys() and all(specs[name].fits(each.shape) for name, each in inputs.items())


def _check_described(instance: TriedInstance, task: TrialTask | PipelineTask) -> None:
    """Raise RunFailed unless a model's inputs and outputs are those that its manifest describes."""
    _check_specs("input", instance.spec.inputs, task.inputs)
    _check_specs("output", instance.spec.outputs, task.outputs)


def _check_specs(what: str, specs: Sequence[TensorSpec], forms: Sequence[TensorForm]) -> None:
    """Raise RunFailed unless a model's tensors are those that its manifest describes.

    Backends differ in which lengths they call open, so an open length fits any; they agree on ranks, except that an
    output's may be unknown.
    """
    described = {form.name: form for form in forms}
    found = {spec.name: spec for spec in specs}
    if set(found) != set(described):
        raise RunFailed(f"its {what}s are {', '.join(found)}; its manifest says {', '.join(described)}")
    for name, form in described.items():
        spec = found[name]
        if spec.datatype != form.datatype or not _is_shape(spec.shape, form.shape, may_be_unknown=what == "output"):
            raise RunFailed(
                f"its {what} {name!r} is {spec.datatype} {list(spec.shape)}; "
                f"its manifest says {form.datatype} {list(form.shape)}"
            )


def _is_shape(found: tuple[int, ...], described: tuple[int, ...], *, may_be_unknown: bool) -> bool:
    if may_be_unknown and not (found and described):
        return True
    return len(found) == len(described) and all(
        got == wanted or -1 in (got, wanted) for got, wanted in zip(found, described, strict=True)
    )
