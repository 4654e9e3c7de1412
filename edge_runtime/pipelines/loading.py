"""From a pipeline's file to a servable: its steps' models are there, they fit, its Python steps are loaded.

Owns: which models a pipeline waits for, who asks whom, and that no step's new version answers that a live pipeline
could not go on with. How a request runs through is chain.py's. Thread: the
loader's, but for `PipelineInstance`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.backends.base import DECODE_PICTURE, Instance, LoadOptions, StepFunction
from edge_runtime.config.loading import read_settings
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import BackendError, ConfigError, LoadFailed, NotBuiltYet, RunFailed, WaitsForModels
from edge_runtime.model_spec import ModelSpec
from edge_runtime.models.chains import MAX_DEPTH, ChainParts
from edge_runtime.models.folder import Fingerprint, FolderConfig, ModelFolder, VersionFolder, owned_name
from edge_runtime.models.loading import INLINE_ROWS, INLINE_RUN_S, LoadedVersion, labels_of
from edge_runtime.models.model_table import VersionState
from edge_runtime.models.servable import BARE, About, InlineBuffers, Layouts, Servable, layout_of
from edge_runtime.models.warmup import FirstRuns
from edge_runtime.pipelines import PIPELINE, STEPS_FILE
from edge_runtime.pipelines.definition import Pipeline, Step, read_pipeline
from edge_runtime.request.policy import BatchLimits
from edge_runtime.request.scheduled_model import LatencyModel, Layout, ScheduledModel
from edge_runtime.steps import Form
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.tensors import Array, Tensors

if TYPE_CHECKING:
    from edge_runtime.hosts.instance import HostInstance
    from edge_runtime.models.placement import Placement
    from edge_runtime.models.served_folder import ServedFolder
    from edge_runtime.pipelines.fit import Fit
    from edge_runtime.pipelines.upkeep import PipelineUpkeep

log = logging.getLogger(__name__)


COMING = (VersionState.LOADING, VersionState.BUILDING, VersionState.CONVERTING, VersionState.UNLOADING)
"""States of a model that a pipeline waits for."""


class PipelineInstance:
    """The instance of a pipeline: it has specs and the host of its Python steps, and runs nothing itself."""

    backend = "pipeline"
    device = ""
    precision = ""
    concurrency = 1

    def __init__(self, spec: ModelSpec, python: HostInstance | None) -> None:
        self.spec = spec
        self._python = python

    @property
    def memory_bytes(self) -> int:
        """Memory of its Python steps; its models have their own."""
        return self._python.memory_bytes if self._python is not None else 0

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Raise RunFailed: requests run through its chain."""
        del inputs, outputs
        raise RunFailed("a pipeline is not a model that runs by itself")

    def bind(self, max_rows: int) -> None:
        """Return None: its steps have buffers of their own."""

    def close(self) -> None:
        """Free nothing: its chain ends its Python steps, whose host is closed beside it."""


class Attempt(Struct):
    """The last time that a pipeline's version was loaded: what it asks, and what was there.

    basis: of each step, what would make another attempt worth it when it differs. fit: None where it failed.
    """

    pipeline: Pipeline
    basis: tuple[object, ...] = ()
    fit: Fit | None = None


class _Absence(Struct, frozen=True):
    """Why a step has no servable. is_coming: it will be by itself; is_built: after minutes."""

    words: str
    is_coming: bool
    is_built: bool = False


class PipelineLoader:
    """Loads pipelines, and knows the needs of live ones. attempts: by model and version."""

    def __init__(self, parts: ChainParts) -> None:
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self._context = parts.context
        self._sources = parts.context.sources
        self._backends = parts.backends
        self._limits = parts.limits
        self._table = parts.context.table
        self._infer = parts.infer
        self._dispatcher = parts.context.dispatcher
        self._clock = parts.context.clock
        self._metrics = parts.context.metrics
        self._upkeep: PipelineUpkeep | None = None

    # ---- loading -----------------------------------------------------------------------------------------------------

    def steps_to_load(self, folder: ModelFolder, version: VersionFolder) -> list[tuple[ModelFolder, VersionFolder]]:
        """Return the versions that a pipeline asks, that are not loaded, and could be: on demand, or left out.

        Empty where the file cannot be read, or pipelines ask each other in a circle, which `load` says.
        """
        try:
            pipeline = self._begin(folder, version)
        except LoadFailed:
            return []
        except Exception:  # it must not keep other models from being loaded; `load` fails by it, too
            log.exception("pipeline %s cannot be read", folder.name)
            return []
        found: dict[tuple[str, int], tuple[ModelFolder, VersionFolder]] = {}
        for step in pipeline.steps:
            if step.model is None or self._answering(step) is not None:
                continue
            of_step = self._sources.folder_of(step.model)
            status = max(
                (each for each in self._table.statuses_of(step.model) if step.version in {None, each.number}),
                key=lambda each: each.number,
                default=None,
            )
            number = step.version if status is None else status.number
            may_load = status is None or status.state in {VersionState.ON_DEMAND, VersionState.UNLOADED}
            if of_step is not None and number is not None and number in of_step.versions and may_load:
                found[step.model, number] = of_step, of_step.versions[number]
        return list(found.values())

    def load(
        self,
        folder: ModelFolder,
        version: VersionFolder,
        metrics: ModelMetrics | None = None,
        owned: Sequence[LoadedVersion] = (),
    ) -> LoadedVersion:
        """Make a servable of a pipeline. Raises LoadFailed with every reason; WaitsForModels: it will be by itself."""
        if folder.settings_error is not None:
            raise LoadFailed(folder.settings_error)
        if folder.settings.queue is not None:
            raise LoadFailed("[queue]: a pipeline has no queue of its own; set it for the models of its steps")
        pipeline = self._begin(folder, version)
        attempt = self.attempts[folder.name, version.number] = Attempt(pipeline, self.look(pipeline))
        config = folder.config if version.chain_file is None else None
        fit = self._fit(pipeline, config)
        labels = labels_of(folder, version) if config is not None else {}
        about = About(config, {**fit.labels, **labels}, fit.steps)
        parts = tuple(each.servable for each in owned)
        servable = self._make_servable(
            folder, version, fit, about, metrics or self._metrics.model(folder.name), owned=parts
        )
        attempt.fit = fit
        file = version.chain_file or version.path
        first = FirstRuns(fit.batches, {})
        note = "; ".join(f"{config.file}: {each}" for each in config.notes) if config is not None else ""
        return LoadedVersion(
            servable,
            None,
            file,
            LoadOptions(),
            first,
            may_widen=False,
            note=note,
            owned=tuple(owned),
        )

    def asked_models(self, folder: ModelFolder, version: VersionFolder) -> tuple[str, ...]:
        """Return the models that a version's steps ask. Raises LoadFailed."""
        return self.read(folder, version).models

    def take_news(self, placement: Placement, served: ServedFolder) -> None:
        """Keep pipelines in step with their models, if the table has changed."""
        if self._upkeep is None:
            from edge_runtime.pipelines.upkeep import PipelineUpkeep

            self._upkeep = PipelineUpkeep(self, self._context, placement, served)
        self._upkeep.take_news()

    def read(self, folder: ModelFolder, version: VersionFolder) -> Pipeline:
        """Return a version's pipeline, from its file or its config. Raises LoadFailed."""
        file = version.chain_file
        if file is not None:
            pipeline = _read_file(file)
        elif folder.config is not None and isinstance(folder.config.chain, Pipeline):
            pipeline = folder.config.chain
        else:
            raise LoadFailed(f"{version.path} holds no {PIPELINE.name}")
        owned = {each.name: number for each in folder.owned for number in each.versions}
        if not owned:
            return pipeline
        # Of an ensemble that was published: its text has no place for them.
        rows = pipeline.max_batch_rows or folder.settings.max_batch_rows
        steps = tuple(_with_owned(step, folder.name, owned) for step in pipeline.steps)
        return replace(pipeline, steps=steps, max_batch_rows=rows)

    # ---- what live pipelines need ------------------------------------------------------------------------------------

    def check_swap(self, candidate: Servable) -> None:
        """Raise LoadFailed where a live pipeline could not go on with a version that is to answer.

        A pipeline whose own file has changed, too, to go with it, is not a reason: it is loaded at once afterwards. Nor
        is one that is being swapped itself: its update judges it.
        """
        for servable in self._table.live():
            pipeline = _pipeline_of(servable)
            if pipeline is None or servable.model in self._sources.swapping:
                continue
            fit = self._fit_with(pipeline, candidate)
            if fit is None or not fit.faults:
                continue
            following = self._newest(servable.model)
            fit_of_following = self._fit_with(following, candidate) if following is not None else None
            if fit_of_following is None or fit_of_following.faults:
                raise LoadFailed(f"pipeline {servable.model!r} cannot go on with it: {'; '.join(fit.faults)}")

    def _fit_with(self, pipeline: Pipeline, candidate: Servable) -> Fit | None:
        """Fit a pipeline with this version in the place of what answers its steps; None: they ask for another."""
        newest = max((each.number for each in self._table.live_of(candidate.model)), default=0)
        servables: dict[str, Servable] = {}
        for step in pipeline.steps:
            is_asked = step.version == candidate.number or (step.version is None and candidate.number >= newest)
            found = candidate if step.model == candidate.model and is_asked else self._answering(step)
            if step.model is not None and found is None:
                return None  # it waits for another step
            if found is not None:
                servables[step.name] = found
        if not any(each is candidate for each in servables.values()):
            return None
        from edge_runtime.pipelines.fit import fit_pipeline

        return fit_pipeline(pipeline, servables, self._limits.max_batch_rows)

    def _newest(self, model: str) -> Pipeline | None:
        """Return a pipeline as it lies in its folder now; None where there is none that can be read."""
        folder = self._sources.folder_of(model)
        if folder is None or not folder.versions:
            return None
        try:
            return self.read(folder, folder.versions[max(folder.versions)])
        except LoadFailed:
            return None

    def look(self, pipeline: Pipeline) -> tuple[object, ...]:
        """Look at what answers each step now: another attempt is worth it when this differs."""
        found: list[object] = []
        for step in pipeline.steps:
            if step.model is None:
                continue
            servable = self._answering(step)
            if servable is not None:
                found.append((step.name, servable.number, self._fingerprint(servable.model, servable.number)))
                continue
            statuses = [each for each in self._table.statuses_of(step.model) if step.version in {None, each.number}]
            if not statuses:
                found.append((step.name, self._table.is_complete))
            for status in statuses:
                is_there = status.state in {VersionState.ON_DEMAND, VersionState.READY}
                state: object = (
                    self._fingerprint(status.model, status.number)
                    if is_there
                    else (status.state, "" if status.state in COMING else status.reason)
                )
                found.append((step.name, status.number, state))
        return tuple(found)

    def check(self, servable: Servable) -> Fit:
        """Fit a live pipeline to its models again. Raises LoadFailed; WaitsForModels: a model is coming back."""
        pipeline = _pipeline_of(servable)
        assert pipeline is not None
        return self._fit(pipeline)

    # ---- private -----------------------------------------------------------------------------------------------------

    def _begin(self, folder: ModelFolder, version: VersionFolder) -> Pipeline:
        """Read a pipeline, and note whom it asks. Raises LoadFailed: a circle of pipelines, or too long a way."""
        pipeline = self.read(folder, version)
        key = folder.name, version.number
        self.attempts.setdefault(key, Attempt(pipeline)).pipeline = pipeline
        way = self._circle(folder.name, (folder.name,))
        if way is not None and way[0] == way[-1]:
            raise LoadFailed(f"pipelines ask each other in a circle: {' → '.join(way)}")
        if way is not None:
            raise LoadFailed(f"pipelines ask each other {len(way)} deep: {' → '.join(way)}; at most {MAX_DEPTH}")
        return pipeline

    def _circle(self, model: str, way: tuple[str, ...]) -> tuple[str, ...] | None:
        """Find a way from a model back to the first of the way, or one that is too long."""
        if len(way) > MAX_DEPTH:
            return way
        asked = {
            each: None
            for (name, number), attempt in self.attempts.items()
            if name == model and (len(way) == 1 or self._table.status(name, number) is not None)
            for each in attempt.pipeline.models
        }
        for each in asked:
            if each == way[0]:
                return (*way, each)
            if each not in way and (found := self._circle(each, (*way, each))) is not None:
                return found
        return None

    def _answering(self, step: Step) -> Servable | None:
        """Return who answers a step now."""
        if step.model is None:
            return None
        split = self._table.split_of(step.model)
        if split is not None and step.version in {None, split.current.number}:
            return split.current
        live = self._table.live_of(step.model)
        if step.version is None:
            return max(live, key=lambda each: each.number, default=None)
        return self._table.find(step.model, step.version)

    def _fit(self, pipeline: Pipeline, config: FolderConfig | None = None) -> Fit:
        """Raise LoadFailed with all that is missing, else with all that does not fit. config: of an ensemble."""
        from edge_runtime.pipelines.fit import fit_pipeline

        servables: dict[str, Servable] = {}
        missing: dict[str, _Absence] = {}
        for step in pipeline.steps:
            found = self._answering(step)
            if found is not None:
                servables[step.name] = found
            elif step.model is not None:
                absence = self._why_absent(step)
                missing[absence.words if absence.is_coming else f"step {step.name!r}: {absence.words}"] = absence
        if missing and all(absence.is_coming for absence in missing.values()):
            is_built = any(absence.is_built for absence in missing.values())
            raise (NotBuiltYet if is_built else WaitsForModels)("; ".join(missing))
        if missing:
            raise LoadFailed("; ".join(words for words, absence in missing.items() if not absence.is_coming))
        if config is not None:
            steps = {name: (each.spec, each.max_rows if each.batches else 0) for name, each in servables.items()}
            if faults := list(config.chain_faults(steps)):
                raise LoadFailed("; ".join(faults))
        fit = fit_pipeline(pipeline, servables, self._limits.max_batch_rows)
        if fit.faults:
            raise LoadFailed("; ".join(fit.faults))
        return fit

    def _why_absent(self, step: Step) -> _Absence:
        model = step.model or ""
        known = self._table.statuses_of(model)
        named = [status for status in known if step.version in {None, status.number}]
        if not known:
            return (
                _Absence(f"there is no model {model!r}", is_coming=False) if self._table.is_complete else _waits(model)
            )
        if not named:
            there = ", ".join(str(status.number) for status in known)
            return _Absence(f"model {model!r} has no version {step.version}; it has {there}", is_coming=False)
        status = max(named, key=lambda each: (each.state in COMING, each.number))
        if status.state in COMING:
            return _waits(model, status.state)
        if status.state is VersionState.FAILED:
            return _Absence(f"model {model!r} failed to load: {status.reason}", is_coming=False)
        if status.state is VersionState.ON_DEMAND:
            return _Absence(f"model {model!r} is not in memory: {status.reason or 'on demand'}", is_coming=False)
        return _Absence(f"model {model!r} is {status.state.value}", is_coming=False)

    def _fingerprint(self, model: str, number: int) -> Fingerprint | None:
        folder = self._sources.folder_of(model)
        version = folder.versions.get(number) if folder is not None else None
        return version.fingerprint if version is not None else None

    def _make_servable(
        self,
        folder: ModelFolder,
        version: VersionFolder,
        fit: Fit,
        about: About,
        metrics: ModelMetrics,
        *,
        owned: tuple[Servable, ...],
    ) -> Servable:
        from edge_runtime.pipelines.chain import Chain, chain_model
        from edge_runtime.pipelines.inline_chain import bind_inline_chain

        pipeline = fit.pipeline
        settings = folder.settings
        host = self._load_functions(version, settings, fit.functions) if fit.functions else None
        named = [step.name for step in pipeline.steps if step.python is not None]
        own = (
            {
                name: self._function_servable(folder, version, each)
                for name, each in zip(named, host.functions, strict=True)
            }
            if host is not None
            else {}
        )

        scheduled = chain_model(
            folder.name,
            max_queue_rows=settings.max_queue_rows or self._limits.queue_rows,
            max_queue_bytes=settings.max_queue_bytes or self._limits.queue_bytes,
            metrics=metrics,
        )
        chain = Chain(
            pipeline,
            fit.spec,
            scheduled=scheduled,
            infer=self._infer,
            table=self._table,
            dispatcher=self._dispatcher,
            clock=self._clock,
            metrics=self._metrics,
            python_steps=own,
        )
        chain.seed(sorted({1, fit.max_rows}))
        bound = None
        if settings.mode != "workers":
            bound = bind_inline_chain(
                pipeline,
                fit.spec,
                table=self._table,
                clock=self._clock,
                metrics=metrics,
                max_rows=min(INLINE_ROWS, fit.max_rows),
                limit_s=INLINE_RUN_S,
            )
        form = BARE
        if fit.steps is not None:
            form = Form("picture" if fit.steps.inputs else "tensor", answers=bool(fit.steps.outputs))
        return Servable(
            folder.name,
            version.number,
            settings,
            Layouts(PipelineInstance(fit.spec, host), others=(host,) if host is not None else ()),
            batches=fit.batches,
            mode="pipeline",
            max_rows=fit.max_rows,
            inline=InlineBuffers(bound) if bound is not None else None,
            scheduled=scheduled,
            dispatcher=self._dispatcher,
            clock=self._clock,
            metrics=metrics,
            about=about,
            form=form,
            chain=chain,
            owned=owned,
        )

    def _load_functions(
        self, version: VersionFolder, settings: ModelSettings, functions: tuple[StepFunction, ...]
    ) -> HostInstance:
        """Start the host of a version's Python steps. Raises LoadFailed."""
        is_own = all(each.name == DECODE_PICTURE for each in functions)
        file: Path | None = version.chain_file if is_own else version.files.get(STEPS_FILE)
        if file is None:
            raise LoadFailed(f"{version.path} holds no {STEPS_FILE}, which its Python steps are in")
        memory_bytes = settings.limits.host_memory_bytes or self._limits.host_memory_bytes
        options = LoadOptions(
            threads=settings.threads or 1,
            extra=dict(settings.options),
            host_memory_bytes=memory_bytes,
            functions=functions,
            within=version.within,
        )
        try:
            host = self._backends.hosted("python").load(file, options)
        except LoadFailed:
            raise
        except BackendError as error:
            raise LoadFailed(error.message) from None
        from edge_runtime.hosts.instance import HostInstance

        assert isinstance(host, HostInstance)
        host.finish_warm_up()
        return host

    def _function_servable(self, folder: ModelFolder, version: VersionFolder, instance: Instance) -> Servable:
        """A Python step as the chain asks it: with a queue of its own, each request alone, and counted nowhere else."""
        settings = folder.settings
        run_limit_ms = settings.limits.run_limit_ms or self._limits.run_limit_ms
        layout = layout_of(
            instance, run_times=LatencyModel({}), run_limit_s=run_limit_ms / 1e3 if run_limit_ms is not None else None
        )
        metrics = ModelMetrics()
        scheduled = self._scheduled(folder.name, settings, layout, metrics, max_rows=1)
        return Servable(
            folder.name,
            version.number,
            settings,
            Layouts(instance),
            batches=False,
            mode="workers",
            max_rows=1,
            inline=None,
            scheduled=scheduled,
            dispatcher=self._dispatcher,
            clock=self._clock,
            metrics=metrics,
        )

    def _scheduled(
        self, name: str, settings: ModelSettings, layout: Layout, metrics: ModelMetrics, *, max_rows: int
    ) -> ScheduledModel:
        return ScheduledModel(
            name,
            layout,
            BatchLimits(max_rows=max_rows),
            max_queue_rows=settings.max_queue_rows or self._limits.queue_rows,
            max_queue_bytes=settings.max_queue_bytes or self._limits.queue_bytes,
            may_rerun=settings.rerun,
            metrics=metrics,
        )


def _pipeline_of(servable: Servable) -> Pipeline | None:
    """Return the pipeline that a servable runs; None: it is a model."""
    if servable.chain is None:
        return None
    from edge_runtime.pipelines.chain import Chain

    return servable.chain.pipeline if isinstance(servable.chain, Chain) else None


def _read_file(file: Path) -> Pipeline:
    """Read a `pipeline.toml`. Raises LoadFailed."""
    try:
        return read_pipeline(read_settings(file), str(file))
    except ConfigError as error:
        raise LoadFailed(error.message) from None


def _with_owned(step: Step, pipeline: str, owned: Mapping[str, int]) -> Step:
    """A step of a pipeline that brings its models with it asks those, in their only version: another release has more.

    owned: versions by name.
    """
    name = owned_name(pipeline, step.model) if step.model is not None else ""
    return replace(step, model=name, version=owned[name]) if name in owned else step


def _waits(model: str, state: VersionState = VersionState.LOADING) -> _Absence:
    words = f"waits for model {model!r}, which is {state.value}"
    return _Absence(words, is_coming=True, is_built=state.is_being_made)
