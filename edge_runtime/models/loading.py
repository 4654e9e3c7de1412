"""From a version's folder to a servable: load it by its first plan that works, warm it up, decide how it runs.

Owns: whether it runs in a host or inside the daemon, inline or on workers, and the words of its status about the load.
Which backend takes which file is load_plans.py's. Thread: the loader's, or one of load_threads.py.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime import plugins
from edge_runtime.backends.base import Backend, Bound, HostedInstance, Instance, LoadOptions
from edge_runtime.backends.declaration import Declaration, why_always_hosted, why_not_inside
from edge_runtime.backends.registry import Backends
from edge_runtime.clock import Clock
from edge_runtime.config.settings import Isolation, ModelSettings
from edge_runtime.durable import open_within
from edge_runtime.errors import BackendError, BackendUnavailable, LoadFailed, NotBuiltYet
from edge_runtime.kept_state import INITIAL_STATE, SEQUENCES, SequenceOptions
from edge_runtime.model_spec import ByRequest, ModelSpec
from edge_runtime.models.chains import OwnChain
from edge_runtime.models.folder import FolderConfig, ModelFolder, VersionFolder
from edge_runtime.models.folder_files import folder_file
from edge_runtime.models.load_plans import (
    LoadPlan,
    LoadPlans,
    PassedOver,
    ServingLimits,
    left_out,
    variant_note,
    why_backend,
    why_not_loaded,
    worth_telling,
)
from edge_runtime.models.servable import (
    About,
    InlineBuffers,
    Layouts,
    ModelChain,
    SequenceTable,
    Servable,
    layout_of,
    row_bytes,
)
from edge_runtime.models.warmup import (
    FirstRuns,
    declared_sample,
    read_sample,
    time_bound,
    time_run,
    time_steps,
    warm_up,
)
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.level_queue import LevelQueue
from edge_runtime.request.policy import BatchLimits
from edge_runtime.request.queue import RequestQueue
from edge_runtime.request.scheduled_model import LatencyModel, Layout, ScheduledModel
from edge_runtime.steps import Form, InputKind, InputSteps, ModelSteps, OutputSteps, Preset, says_steps
from edge_runtime.telemetry.metrics import Metrics, ModelMetrics

log = logging.getLogger(__name__)

INLINE_RUN_S = 200e-6
"""A batch that runs quicker is run on the I/O thread: handing it over and back costs about as much."""

INLINE_ROWS = 32
"""Rows of an inline batch: as many as one drain gathers."""

BATCH_GAIN = 1.5
"""Before the curve is known, batches form when two rows take less than this many times one row's run."""

UNCALIBRATED_ROWS = 8
"""Batch limit until the curve is known, where batching seems to gain."""


MAX_INITIAL_BYTES = 64 << 10
"""Of a file of initial state: it goes to the host with its task, in one message."""

LEAST_AXES = 3
"""Of an input that somebody may have made a preset for, such as one of pictures: its file is read again for that."""

HELD_UP_S = 0.02
"""A first run of a tiny model may take as long where another thread has the interpreter: 5 ms a turn."""

PICTURE_LIMIT_S = 15.0
"""A run with pictures may last that long at least, whatever the last took: 64 million pixels of PNG take 3.5 s on a
Xeon."""


class LoadedVersion(Struct, frozen=True):
    """A servable ready to be published, and calibration's needs. note: for a person, may be empty.

    backend: None of a pipeline, whose steps have theirs. owned: the models that a pipeline brings with it.
    breaks_clients: those of the version before cannot use it.
    """

    servable: Servable
    backend: Backend | None
    artifact: Path
    options: LoadOptions
    first_runs: FirstRuns
    may_widen: bool
    note: str
    owned: tuple[LoadedVersion, ...] = ()
    breaks_clients: bool = False


class WarmVersion(NamedTuple):
    """A loaded version that was warmed up: all that its servable is made of.

    first, form_times: how long first runs took, and those of its forms. max_rows: the most of one request. chain: as of
    its backend's declaration.
    """

    folder: ModelFolder
    number: int
    instance: Instance
    options: LoadOptions
    about: About
    metrics: ModelMetrics
    first: FirstRuns
    form_times: Mapping[InputKind, Mapping[int, float]]
    max_rows: int
    chain: str = ""

    @property
    def settings(self) -> ModelSettings:
        """The model's."""
        return self.folder.settings


class VersionLoader:
    """Loads versions by their plans, in hosts or inside the daemon. isolation: the daemon's."""

    def __init__(
        self,
        *,
        plans: LoadPlans,
        backends: Backends,
        isolation: Isolation,
        limits: ServingLimits,
        dispatcher: Dispatcher,
        clock: Clock,
        metrics: Metrics,
        state: Path | None = None,
    ) -> None:
        """state: the daemon's state folder."""
        self._plans = plans
        self._backends = backends
        self._isolation: Isolation = isolation
        self._limits = limits
        self._dispatcher = dispatcher
        self._clock = clock
        self._metrics = metrics
        self._state = state
        # Whether a model runs inline is decided by times of microseconds: one is measured at a time.
        self._inside = threading.Lock()

    def cost(self, folder: ModelFolder, version: VersionFolder) -> tuple[int, int]:
        """Return the cost of a load, to sort by, the cheapest first. Thread: any."""
        return self._plans.cost(folder.settings, version)

    def load(self, folder: ModelFolder, version: VersionFolder, metrics: ModelMetrics | None = None) -> LoadedVersion:
        """Load and warm up one version. Raises LoadFailed with every reason when no backend of the profile can.

        NotBuiltYet among them: one will, when its engine is built, or its file converted. metrics: where it counts,
        None for the model's own numbers. Thread: any; those that load inside the daemon take turns.
        """
        if folder.settings_error is not None:
            raise LoadFailed(folder.settings_error)
        settings = folder.settings
        labels = labels_of(folder, version)
        passed: list[PassedOver] = []
        failed: type[LoadFailed] = LoadFailed
        tried: list[LoadPlan] = []
        for plan in self._ways(settings, version, passed, tried):
            choice, artifact = plan.choice, plan.artifact
            tried.append(plan)
            try:
                options = replace(plan.options, steps=steps_of(settings, folder, version, artifact))
                options = _as_configured(options, plan, folder.config)
                options = replace(options, shared_by=shared_by(settings, version, self._isolation_of(settings)))
                options = replace(options, sequence=self._sequence_of(settings, folder, version))
                backend, why_hosted = self._choose_place(settings, plan.declaration, artifact, options)
                with contextlib.nullcontext() if why_hosted else self._inside:
                    instance = backend.load(artifact, options)
                    about = replace(
                        _about(folder, labels, plan, options, instance.spec), why=why_backend(settings, plan, passed)
                    )
                    servable, first_runs = self._make_servable(
                        folder,
                        version,
                        instance,
                        options,
                        about,
                        metrics=metrics or self._metrics.model(folder.name),
                        chain=plan.declaration.chain,
                    )
            except BackendError as error:
                is_of_file = not isinstance(error, (BackendUnavailable, NotBuiltYet))
                passed.append(PassedOver(choice, error.message, is_of_file=is_of_file))
                failed = NotBuiltYet if isinstance(error, NotBuiltYet) else failed
                continue
            may_widen = instance.device == "CPU" and settings.threads is None and choice.threads is None
            may_widen = may_widen and options.sequence is None  # states are one host's
            log.debug(
                "chose a backend",
                extra={"model": folder.name, "backend": plan.backend, "passed_over": "; ".join(map(str, passed))},
            )
            notes = worth_telling(passed, instance.device)
            notes += left_out(version, plan, tried)
            if folder.config is not None:
                notes.extend(
                    f"{folder.config.file}: {note}"
                    for note in (
                        *folder.config.notes,
                        *folder.config.differences(instance.backend, instance.device),
                    )
                )
            else:
                notes.append(_fewer_instances(settings, servable, plan.declaration.why_one_run))
            notes.append(self._plans.front_note(settings, version, artifact))
            notes += [first_runs.note, variant_note(artifact, options)]
            if why_hosted and settings.mode == "inline":
                notes.append(f"it runs in a host, and not inline as mode says: {why_hosted}")
            notes.append(preset_note(settings, options.steps))
            note = "; ".join(filter(None, notes))
            return LoadedVersion(servable, backend, artifact, options, first_runs, may_widen, note)
        raise failed("; ".join(why_not_loaded(passed, version)))

    def _ways(
        self, settings: ModelSettings, version: VersionFolder, passed: list[PassedOver], tried: list[LoadPlan]
    ) -> Iterator[LoadPlan]:
        """Yield the ways to load a version, best first; after the last that was tried, those of its other files."""
        yield from self._plans.choose(settings, version, passed)
        if not any(each.is_of_file for each in passed):
            return
        try:
            yield from self._plans.instead(settings, version, tuple(tried))
        except LoadFailed as error:
            raise type(error)("; ".join([*why_not_loaded(passed, version), error.message])) from error

    def _choose_place(
        self, settings: ModelSettings, declaration: Declaration, artifact: Path, options: LoadOptions
    ) -> tuple[Backend, str]:
        """Return the backend that loads it in a host, with the reason, or here, with "".

        A file that the rule admits is loaded here at once: to try it in a host first would cost each start 0.3 s, and
        bench/single_operators.py found none that the rule admits and a load ends. Raises LoadFailed.
        """
        name, isolation = declaration.name, self._isolation_of(settings)
        why_always = why_always_hosted(declaration, artifact)
        if why_always is not None and settings.isolation == "never":
            raise LoadFailed(f'isolation = "never" is refused for {artifact.name}, which {why_always}; leave it out')
        if options.steps is not None and settings.isolation == "never":
            raise LoadFailed(
                'isolation = "never" is refused for declared steps, which read what callers send; leave it out'
            )
        if options.steps is not None:
            return self._backends.hosted(name), "its declared steps read what callers send"
        if options.sequence is not None:
            if settings.isolation == "never":
                raise LoadFailed('isolation = "never" is refused with [sequence]: a host keeps its state; leave it out')
            return self._backends.hosted(name), "its host keeps the state of its sequences"
        if why_always is not None:
            return self._backends.hosted(name), f"{artifact.name} {why_always}"
        library = self._backends.here(name)
        here: Backend = library
        if options.interface is not None:
            from edge_runtime.backends.declared_instance import DeclaringBackend

            here = DeclaringBackend(library)
        if isolation == "never":
            return here, ""
        why_hosted = (
            'isolation is "always"' if isolation == "always" else why_not_inside(declaration, artifact, options)
        )
        if why_hosted is not None:
            return self._backends.hosted(name), why_hosted
        return here, ""

    def _isolation_of(self, settings: ModelSettings) -> Isolation:
        return "always" if self._isolation == "always" else settings.isolation or self._isolation

    def _make_servable(
        self,
        folder: ModelFolder,
        version: VersionFolder,
        instance: Instance,
        options: LoadOptions,
        about: About,
        *,
        metrics: ModelMetrics,
        chain: str,
    ) -> tuple[Servable, FirstRuns]:
        """Warm an instance up and decide how it runs; it is closed where that fails. Raises BackendError."""
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(instance.close)
            first, form_times = self._warm_up(folder, version, instance, options)
            max_rows = self._most_rows(folder.settings, version, instance, first)
            warm = WarmVersion(
                folder, version.number, instance, options, about, metrics, first, form_times, max_rows, chain
            )
            servable = self._servable_of(warm)
            unless_made.pop_all()
        return servable, first

    @staticmethod
    def _warm_up(
        folder: ModelFolder, version: VersionFolder, instance: Instance, options: LoadOptions
    ) -> tuple[FirstRuns, Mapping[InputKind, Mapping[int, float]]]:
        """Run an instance first, on its sample where it has one, and its forms. Return what that took."""
        settings, sample = folder.settings, None
        if settings.warmup.inputs is not None and settings.warmup.runs:
            sample = read_sample(settings.warmup.inputs, instance.spec, (version.path, folder.path), version.within)
        elif folder.config is not None and folder.config.sample is not None:
            sample = declared_sample(folder.config.sample, instance.spec, folder.path, version.within)
        first, form_times = warm_up(instance, settings, sample), {}
        if isinstance(instance, HostedInstance):
            form_times = time_steps(instance.forms, options.steps or ModelSteps(), settings, first)
            instance.finish_warm_up()
        _check_range(instance, first, options)
        return first, form_times

    def _most_rows(self, settings: ModelSettings, version: VersionFolder, instance: Instance, first: FirstRuns) -> int:
        """Return the most rows of one request."""
        by_request, kept = instance.spec.by_request, instance.spec.sequences
        if not first.batches or (kept is not None and not kept.joins):
            return 1
        most = by_request.max_rows if by_request is not None else self._limits.max_batch_rows
        joined = settings.max_batch_rows or most
        return max(joined, most) if version.counts_requests else joined

    def _servable_of(self, warm: WarmVersion) -> Servable:
        """Make the servable, with those of its forms."""
        instance, settings, first = warm.instance, warm.settings, warm.first
        bound = _inline_bound(instance, settings, first, warm.max_rows)
        scheduled = self._scheduled(warm)
        sequences = self._sequences_of(warm.folder.name, settings, instance)
        forms = {}
        if isinstance(instance, HostedInstance):
            forms = {form: self._form(warm, scheduled, form, each, sequences) for form, each in instance.forms.items()}
        chain = self._chain_of(warm, scheduled, forms) if warm.chain else None
        return Servable(
            warm.folder.name,
            warm.number,
            settings,
            Layouts(instance),
            batches=first.batches,
            mode="inline" if bound is not None else "workers",
            max_rows=warm.max_rows,
            inline=InlineBuffers(bound) if bound is not None else None,
            scheduled=scheduled,
            dispatcher=self._dispatcher,
            clock=self._clock,
            metrics=warm.metrics,
            warm_length=first.length if first.times and first.sample is None else None,
            about=warm.about,
            forms=forms,
            chain=chain,
            sequences=sequences,
        )

    def _chain_of(self, warm: WarmVersion, scheduled: ScheduledModel, forms: Mapping[Form, Servable]) -> ModelChain:
        """Make the chain by which a model answers. scheduled: the model's, of which nothing runs by itself then."""
        scheduled.layout = Layout(None, concurrency=0)
        name, number, settings = warm.folder.name, warm.number, warm.settings
        parts = OwnChain(
            name, number, settings, warm.instance, scheduled, forms, self._dispatcher, self._clock, self._metrics
        )
        made: ModelChain = plugins.named(warm.chain)(parts)
        return made

    def _scheduled(self, warm: WarmVersion) -> ScheduledModel:
        """Make the model's queue and layout, with its limits."""
        instance, settings, first, max_rows = warm.instance, warm.settings, warm.first, warm.max_rows
        by_request = instance.spec.by_request
        run_limit_ms = settings.limits.run_limit_ms or self._limits.run_limit_ms
        layout = layout_of(
            instance,
            batches=first.batches and instance.spec.may_batch,
            threads=warm.options.threads,
            concurrency=min(instance.concurrency, warm.options.concurrency),
            run_times=LatencyModel(first.times),
            run_limit_s=run_limit_ms / 1e3 if run_limit_ms is not None else None,
            warm_row_bytes=_warm_row_bytes(instance, settings, first),
        )
        limits = BatchLimits(
            max_rows=min(
                first_batch_limit(settings, first, max_rows, by_request), instance.spec.max_rows or max_rows, max_rows
            ),
            max_delay_s=settings.max_queue_delay_ms / 1e3,
            preferred_rows=tuple(sorted(settings.preferred_batch_rows)),
            in_order=settings.queue is not None,
        )
        return ScheduledModel(
            warm.folder.name,
            layout,
            limits,
            max_queue_rows=settings.max_queue_rows or self._limits.queue_rows,
            max_queue_bytes=settings.max_queue_bytes or self._limits.queue_bytes,
            # One that streams may have sent responses by then.
            may_rerun=settings.rerun and not (by_request is not None and by_request.streams),
            metrics=warm.metrics,
            queue=_queue_of(settings),
            has_lines=instance.spec.sequences is not None,
            may_slow=settings.may_slow,
        )

    def _sequences_of(self, model: str, settings: ModelSettings, instance: Instance) -> SequenceTable | None:
        """Return the table of a model's live sequences; None where it keeps no state."""
        kept = instance.spec.sequences
        if kept is None or settings.sequence is None:
            return None
        make = plugins.named(plugins.declared("states", SEQUENCES).table)
        made: SequenceTable = make(model, kept, settings.sequence.idle_ms / 1e3, instance, self._clock)
        return made

    def _sequence_of(
        self, settings: ModelSettings, folder: ModelFolder, version: VersionFolder
    ) -> SequenceOptions | None:
        """Return the options of sequences for a model's host; None without `[sequence]`. Raises LoadFailed."""
        if settings.sequence is None:
            return None
        initial: dict[str, bytes] = {}
        for state in settings.sequence.state:
            if state.initial is not None:
                path = folder.path / INITIAL_STATE / state.initial
                try:
                    with open_within(path, version.within) as file:
                        initial[state.input] = file.read(MAX_INITIAL_BYTES + 1)
                except OSError as error:
                    raise LoadFailed(f"failed to open text file for read {path}: {error.strerror}") from None
                if len(initial[state.input]) > MAX_INITIAL_BYTES:
                    raise LoadFailed(f"{path}: an initial state has more than {MAX_INITIAL_BYTES} bytes")
        rest_bytes = sum(each.kept_bytes(settings.output) for each in settings.input.values())
        options = SequenceOptions(settings.sequence, initial, settings.batch, rest_bytes=rest_bytes)
        if settings.sequence.snapshot:
            key_of = plugins.named(plugins.declared("states", SEQUENCES).key)
            name, number = folder.name, version.number
            options = replace(options, model=name, version=number, key=key_of(self._state, name, number))
        return options

    def _form(
        self, warm: WarmVersion, own: ScheduledModel, form: Form, instance: Instance, sequences: SequenceTable | None
    ) -> Servable:
        """Who answers requests of one form: with the model's own limits, and a queue and a curve of its own.

        own: the model's. instance: of the form. The curve begins with the first runs of the form, decoding included.
        """
        settings, batches, steps = warm.settings, warm.first.batches, warm.about.steps
        layout = layout_of(
            instance,
            batches=batches,
            threads=own.layout.threads,
            concurrency=own.layout.concurrency,
            run_times=LatencyModel(warm.form_times.get(form.kind, warm.first.times)),
            run_limit_s=own.layout.run_limit_s,
        )
        declared = steps.inputs.values() if steps is not None else ()
        if form.kind != "tensor" and not any(each.is_sized(form.kind) for each in declared):
            layout.least_limit_s = PICTURE_LIMIT_S
        scheduled = ScheduledModel(
            own.name,
            layout,
            own.limits,
            max_queue_rows=own.max_queue_rows,
            max_queue_bytes=own.max_queue_bytes,
            may_rerun=settings.rerun,
            metrics=own.metrics,
            queue=_queue_of(settings),
            has_lines=own.has_lines,
            may_slow=own.may_slow,
        )
        return Servable(
            own.name,
            warm.number,
            settings,
            Layouts(instance),
            batches=batches,
            mode="workers",
            max_rows=warm.max_rows,
            inline=None,
            scheduled=scheduled,
            dispatcher=self._dispatcher,
            clock=self._clock,
            metrics=own.metrics,
            about=About(steps=steps),
            form=form,
            sequences=sequences,
        )


def load_tried(library: Backend, artifact: Path, options: LoadOptions, settings: ModelSettings) -> Instance:
    """Load a model that is tried alone, as its callers see it: without the states that a daemon would keep.

    Each of its runs is a sequence of one. Raises LoadFailed, BackendUnavailable.
    """
    if settings.sequence is None:
        return library.load(artifact, options)
    sequence = SequenceOptions(settings.sequence, {}, settings.batch)
    made: Instance = plugins.named(plugins.declared("states", SEQUENCES).instance)(
        library.load(artifact, replace(options, sequence=sequence)), sequence
    )
    return made


def _about(
    folder: ModelFolder, labels: Mapping[str, tuple[str, ...]], plan: LoadPlan, options: LoadOptions, spec: ModelSpec
) -> About:
    """Return the facts of a loaded version. labels: those that its settings of another server name."""
    steps = options.steps
    offered = _offered(plan.artifact, spec) if steps is None or not steps.inputs else None
    return About(folder.config, labels, steps, offered, plan.conversion)


def steps_of(settings: ModelSettings, folder: ModelFolder, version: VersionFolder, artifact: Path) -> ModelSteps | None:
    """Return the steps that a version declares, whole; None where it declares none. Raises LoadFailed."""
    steps: ModelSteps | None
    if settings.preset is None and not any(map(says_steps, settings.input.values())):
        found = _with_inputs_of_files(settings, folder, version)
        steps = steps_of(found, folder, version, artifact) if found is not settings else None
        if steps is not None:
            return steps
    tables: list[InputSteps | OutputSteps] = [*settings.input.values(), *settings.output.values()]
    if settings.preset is None and not any(map(says_steps, tables)):
        return None
    from edge_runtime.hosts.steps_instance import declaration_of

    steps = plugins.named(declaration_of(settings.input.values(), settings.preset).read)(
        settings, folder, version, artifact
    )
    return steps


def _with_inputs_of_files(settings: ModelSettings, folder: ModelFolder, version: VersionFolder) -> ModelSettings:
    """Add the tables of inputs that files of a version, or beside its settings, stand for. Raises LoadFailed."""
    for name in plugins.names("kinds"):
        path = version.files.get(name, folder.path / name)
        kind = folder_file(name) if path.is_file() else None
        if kind is None or not kind.inputs:
            continue
        try:
            with open_within(path, version.within):
                tables = plugins.named(kind.inputs)(path)
        except OSError as error:
            raise LoadFailed(f"{path}: cannot be read: {error.strerror}") from error
        if tables:
            return replace(settings, input={**settings.input, **tables})
    return settings


def _offered(artifact: Path, spec: ModelSpec) -> Preset | None:
    """Return the preset that a file's metadata names; None of a model without an input that is more than a table."""
    if all(len(each.shape) < LEAST_AXES for each in spec.inputs):
        return None
    from edge_runtime.hosts.steps_instance import step_declarations

    offers = (plugins.named(each.offer)(artifact) for each in step_declarations() if each.offer)
    return next((each for each in offers if each is not None), None)


def preset_note(settings: ModelSettings, steps: ModelSteps | None) -> str:
    """Say which preset filled the steps where `model.toml` does not name it; "" where it does, or none did."""
    if steps is None or steps.preset is None or settings.preset is not None:
        return ""
    return f'its metadata says preset = "{steps.preset}", which filled what its tables of steps leave out'


def _as_configured(options: LoadOptions, plan: LoadPlan, config: FolderConfig | None) -> LoadOptions:
    """Return options with a model's settings of another server: its own for code, else its interface to callers."""
    if config is None:
        return options
    if plan.declaration.is_code:
        return replace(options, extra={**config.code_options, **options.extra})
    return replace(options, interface=config.interface)


def labels_of(folder: ModelFolder, version: VersionFolder) -> dict[str, tuple[str, ...]]:
    """Read the labels that settings of another server name, by output. Raises LoadFailed."""
    files = folder.config.label_files if folder.config is not None else {}
    if not files:
        return {}
    from edge_runtime.models.labels import read_labels

    return {output: read_labels(file, (version.path, folder.path), version.within) for output, file in files.items()}


def _fewer_instances(settings: ModelSettings, servable: Servable, why_one_run: str) -> str:
    """Say why fewer runs are on at once than `instances` asks for; "" where they are as many.

    why_one_run: as of the backend's declaration.
    """
    runs = servable.layouts.narrow.concurrency
    if settings.instances is None or runs >= settings.instances:
        return ""
    return f"instances = {settings.instances}: {runs} at once, since {why_one_run or 'the cores allow no more'}"


def _queue_of(settings: ModelSettings) -> RequestQueue | LevelQueue:
    return RequestQueue() if settings.queue is None else LevelQueue(settings.queue, settings.priority)


def _check_range(instance: Instance, first: FirstRuns, options: LoadOptions) -> None:
    """Raise LoadFailed where axis 0 does not hold rows, and the artifact was compiled for a guessed length of it.

    A request runs alone then, at its own length, and a longer one would fail that another backend answers.
    """
    bound = instance.spec.max_rows
    if bound is None or first.batches or options.max_rows is not None or "max_shapes" in options.extra:
        return
    raise LoadFailed(
        f"axis 0 of its inputs does not hold rows that can be run together, and it was built for at most {bound} "
        "there: say how long it can be, with max_batch_rows or max_shapes"
    )


def shared_by(settings: ModelSettings, version: VersionFolder, isolation: Isolation) -> str:
    """Return with which models a version may share a host while it is quiet, by a word that all of them have; or "".

    Neighbours could read each other, so those of the models folder share with each other alone: a release has a host of
    its own, for who signed it is not known here. One with a limit of its own, or whose requests never run again, pays
    for no neighbour's end.
    """
    limits = settings.limits
    is_apart = limits.host_memory_bytes is not None or limits.run_limit_ms is not None or not settings.rerun
    return "models folder" if version.within and isolation == "auto" and not is_apart else ""


def first_batch_limit(
    settings: ModelSettings, first: FirstRuns, max_rows: int, by_request: ByRequest | None = None
) -> int:
    """Return the rows joined into one run before the curve is known: as set, else a guess from one and two rows.

    by_request: what a model that sees each request says of that; its requests do not run together unless it says so.
    """
    if not first.batches or (by_request is not None and not by_request.joins):
        return 1
    if by_request is not None:
        return max_rows
    if settings.max_batch_rows is not None:
        return settings.max_batch_rows
    one, two = first.times.get(1, math.inf), first.times.get(2, math.inf)
    return min(UNCALIBRATED_ROWS, max_rows) if two < one * BATCH_GAIN else 1


def _inline_bound(instance: Instance, settings: ModelSettings, first: FirstRuns, max_rows: int) -> Bound | None:
    """Bound buffers when the model is to run inline; None for workers."""
    if isinstance(instance, HostedInstance):
        return None  # a run there is waited for, and the I/O thread may not wait
    is_asked_for = settings.mode == "inline"
    wants_queue = settings.mode == "workers" or settings.max_queue_delay_ms > 0 or settings.queue is not None
    is_quick = _quickest_s(instance, settings, first) <= INLINE_RUN_S * 2
    if not is_asked_for and (wants_queue or not is_quick):
        return None
    rows = min(INLINE_ROWS, max_rows)
    bound = instance.bind(rows) if _fits_lean_path(instance, first) else None
    if bound is None and is_asked_for:
        raise LoadFailed('mode = "inline" needs tensors of fixed inner shape, and no BOOL; leave mode out')
    if bound is None or is_asked_for or time_bound(bound, bound.max_rows) <= INLINE_RUN_S:
        return bound
    return None


def _quickest_s(instance: Instance, settings: ModelSettings, first: FirstRuns) -> float:
    """Seconds of one row's run. One that other work of this process has held up is measured again."""
    took_s = first.times.get(1, math.inf)
    if not INLINE_RUN_S * 2 < took_s < HELD_UP_S:
        return took_s
    inputs = first.inputs(instance.spec, 1, settings.warmup.shapes)
    return min(took_s, *(time_run(instance, inputs) for _ in range(3)))


def _warm_row_bytes(instance: Instance, settings: ModelSettings, first: FirstRuns) -> int:
    """Bytes of one row of the warm-up's inputs, where rows differ in size; else 0."""
    if not first.times or row_bytes(instance.spec):
        return 0
    inputs = first.inputs(instance.spec, 1, settings.warmup.shapes)
    return sum(array.nbytes for array in inputs.values())


def _fits_lean_path(instance: Instance, first: FirstRuns) -> bool:
    """Whether requests are rows of fixed size that may be taken as they come (a BOOL byte must be 0 or 1)."""
    has_bool = any(tensor.datatype == "BOOL" for tensor in instance.spec.inputs)
    tensors = (*instance.spec.inputs, *instance.spec.outputs)
    # Of fixed shape with axis 0 of length 1, one row is one request.
    is_one_row = all(tensor.shape[:1] == (1,) and tensor.has_fixed_inner_shape for tensor in tensors)
    return not has_bool and (first.batches or is_one_row) and row_bytes(instance.spec) > 0
