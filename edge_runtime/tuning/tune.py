"""One tune of one model from beginning to end: what is known, what is measured next, and what is chosen.

Owns: the order of steps and all results so far. `results` is complete after every step, so that an interrupted tune has
everything measured by then. Called by the command line. Thread: the caller's.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

import edge_runtime
from edge_runtime import plugins
from edge_runtime.config.settings import Config, LimitSettings
from edge_runtime.errors import ConfigError, EdgeRuntimeError, LoadFailed
from edge_runtime.hosts.steps_instance import InputReader, steps_declaration
from edge_runtime.model_spec import ModelSpec
from edge_runtime.models.digest import sha256_of_file
from edge_runtime.models.folder import ModelFolder, VersionFolder
from edge_runtime.models.kinds import kind_of
from edge_runtime.models.loading import steps_of
from edge_runtime.models.names import SETTINGS_FILE, is_ignored, parse_version
from edge_runtime.models.table_choice import Value
from edge_runtime.models.warmup import made_up_rows, read_sample
from edge_runtime.steps import Form, ModelSteps
from edge_runtime.tensors import Array
from edge_runtime.tuning.applying import apply_choice, with_choice
from edge_runtime.tuning.artifacts import (
    MAKERS,
    WayFiles,
    digest_of_version,
    offers_of,
    own_graph,
    package_versions,
    settings_precision,
)
from edge_runtime.tuning.candidates import PLAIN, Candidate, ThreadLayout, Way, ways
from edge_runtime.tuning.comparison import JudgingInputs, WayComparison
from edge_runtime.tuning.daemons import DaemonPool, ServingFailed, TrialDaemon, running_daemon
from edge_runtime.tuning.folders import ModelCopy, tune_folder
from edge_runtime.tuning.measurement import Requests, frames_of, look_first, measure_fully, take_slice
from edge_runtime.tuning.options import TunedDevice, TuneOptions
from edge_runtime.tuning.plan import Space, TuneStep, has_answer, is_settled, next_step
from edge_runtime.tuning.race import with_slice
from edge_runtime.tuning.results import (
    FullMeasurement,
    KeptResults,
    QuickLook,
    TuneResults,
    WayResult,
    digest_of,
    with_full,
)
from edge_runtime.tuning.samples import MADE_UP, Samples, make_samples, read_samples, read_texts, sent_samples
from edge_runtime.tuning.trial import WayFinding, WayTrials, write_arrays
from edge_runtime.typed_toml import parse_toml

RESERVE_S = 80.0
"""Time reserved for the last measurements, of the choice and of what serves now: each takes 20 to 40 s."""

RESERVE_SHARE = 0.3
"""The reserve of a short tune, as a share of its time."""

BUSY_SHARE = 0.3
"""Load a core above which other work distorts the figures."""

TUNED_KEYS = ("backend", "device", "precision", "threads", "instances", "max_batch_rows")
"""Keys of `model.toml` that a tune sets."""


T = TypeVar("T", bound=msgspec.Struct)

Show = Callable[[str, str, float], None]
"""Shows the present step, a detail, and the share of the time that has passed."""


class Tune:
    """Measures until everything is measured or the time is over. Made by `open_tune`."""

    def __init__(
        self,
        model: ModelFolder,
        version: VersionFolder,
        device: TunedDevice,
        options: TuneOptions,
        *,
        root: Path,
    ) -> None:
        self.version = version
        self.device = device
        self.options = options
        self.results = TuneResults({}, {}, {})
        self.notes: list[str] = []
        self.samples: Samples | None = None
        self.space: Space | None = None
        self._files: WayFiles
        self._comparison: WayComparison
        self._kept: KeptResults
        self._model = model
        self._root = root
        self._show: Show
        self._settings_text = settings_text(model)
        self._copy = ModelCopy(root / "model", version, model.path)
        self._pool = DaemonPool(self._serving)
        self._numbers: dict[Candidate, int] = {}
        self._began_s = 0.0

    def run(self, show: Show) -> None:
        """Measure. Raises EdgeRuntimeError: the model cannot be served at all, or the inputs do not fit it."""
        self._show = show
        self._began_s = time.monotonic()
        self._note_load()
        space = self._prepare()
        while (known := next_step(space, self.results)) is not None and self._recall(known):
            pass
        try:
            while (step := self._next_step(space)) is not None:
                if not self._recall(step):
                    self._take(step)
        finally:
            self._pool.close()

    def apply(self, choice: FullMeasurement, why: Sequence[str]) -> list[Path]:
        """Write a choice with its reasons, and return the written files. Raises StorageFailed, ConfigError."""
        candidate = choice.candidate
        made = self._files.made_for(candidate.way)
        return apply_choice(self._model, self.version.path, self._values_of(candidate), made, why)

    def _values_of(self, candidate: Candidate) -> dict[str, Value | None]:
        """The keys of `model.toml` for a candidate; None for those that the daemon decides."""
        way, layout = candidate.way, candidate.layout
        known = self.results.ways.get(way)
        return {
            "backend": way.backend,
            "device": None if way.device == self._usual_device(way) else way.device,
            "precision": settings_precision(way, known.runs_in if known is not None else ""),
            "threads": layout.threads,
            "instances": layout.instances,
            "max_batch_rows": layout.max_batch_rows,
        }

    def _usual_device(self, way: Way) -> str:
        """The profile's device for a backend, which `model.toml` need not repeat; no release may name a device."""
        choices = self.device.profile.backends
        return next((choice.device for choice in choices if choice.name == way.backend), "")

    # ---- preparation ------------------------------------------------------------------------------------------------

    def _prepare(self) -> Space:
        self._show("looking at the model", "", 0.0)
        found = self._find_ways()
        steps = self._steps(self._own_graph(found[0]))
        self._copy.fill(self._files_beside(steps))
        trials = WayTrials(self.device, self._model.settings, self._began_s + self.options.time_s)
        described = self._describe(trials, found[0])
        self.samples = samples = self._read_samples(described, steps)
        count, drop = len(samples.judging.inputs), self.options.drop
        if 0 < count * drop < 1 and drop < 1:
            self._note_once(f"{drop:.2%} of {count} inputs is less than one of them; more inputs tell a drop so small")
        inputs = self._root / "judging.npz"
        write_arrays(inputs, samples.judging.inputs)
        calibration = self._root / "calibration.npz"
        write_arrays(calibration, samples.calibrating)
        source = digest_of_version(self.version)
        texts = (str(samples.sent),) if samples.sent else ()
        data = digest_of((sha256_of_file(inputs), sha256_of_file(calibration), str(samples.judging.labels), *texts))
        kept = None if self.device.state is None else self.device.state / "tuning"
        makers = (edge_runtime.__version__, *package_versions(MAKERS))
        made_in = (kept or self._root) / "made" / digest_of((source, data, *makers))[:32]
        self._files = WayFiles(self.version, self._copy, made_in, calibration)
        self._comparison = WayComparison(
            found[0], described, JudgingInputs(inputs, samples.judging.labels, self.options.scores),
            trials=trials, files=self._files, root=self._root,
        )  # fmt: skip
        self._kept = KeptResults(None if kept is None else kept / "results", self._about(source, data))
        rows = self.device.profile.batching.max_batch_rows if described.batches else 1
        cores = self.device.profile.limits.cores
        said = self._said(found)
        every = tuple(dict.fromkeys([*found, *(() if said is None else (said.way,))]))
        self.space = Space(every, cores, rows, self.options.objective, self.options.drop, said)
        return self.space

    def _said(self, found: Sequence[Way]) -> Candidate | None:
        """The candidate that `model.toml` and the profile make of the model now; None where no way is like it."""
        settings, choices = self._model.settings, self.device.profile.backends
        name = settings.backend or found[0].backend
        choice = next((each for each in choices if each.name == name), None)
        if choice is None or name not in {way.backend for way in found}:
            return None
        precision = settings.precision or choice.precision
        way = Way(name, settings.device or choice.device, PLAIN if precision == "f32" else precision)
        threads = settings.threads or choice.threads
        return Candidate(way, ThreadLayout(threads, settings.instances, settings.max_batch_rows))

    def _note_load(self) -> None:
        cores, load = self.device.profile.limits.cores, os.getloadavg()[0]
        if load > cores * BUSY_SHARE:
            self.notes.append(
                f"the device was busy when this began (load {load:.1f} on {cores} cores): rates may be higher without"
            )

    def _find_ways(self) -> list[Way]:
        choices = self.device.profile.backends
        offers, notes = offers_of(self.version, choices)
        self.notes += notes
        found = ways(choices, offers, self.device.facts)
        if not found or found[0].precision != PLAIN:
            there = ", ".join(self.version.files) or "nothing"
            for path in self.version.files.values():
                if (kind := kind_of(path)) is not None and kind.converts_to:
                    raise LoadFailed(
                        f"{path} is {kind.name}, which is served converted; to tune what is made of it: edge-runtime "
                        f"convert {shlex.quote(str(path))} --to {kind.converts_to}, then tune that in its place"
                    )
            raise LoadFailed(
                f"{self.version.path}: holds {there}; wanted the model itself, such as model.onnx, which variants are "
                "compared with, and a backend here that loads it" + "".join(f"; {note}" for note in notes)
            )
        return found

    def _describe(self, trials: WayTrials, first: Way) -> WayFinding:
        """The model's inputs and outputs, by the way that all others are compared with."""
        finding = trials.look(first, self._copy.folder / self._own_graph(first).name)
        if finding.fault:
            raise LoadFailed(f"{self._model.name}: {first.backend} cannot serve it as it is: {finding.fault}")
        return finding

    def _own_graph(self, first: Way) -> Path:
        graph = own_graph(self.version, first)
        assert graph is not None, "a way leads only where the version has its file"
        return graph

    def _steps(self, graph: Path) -> ModelSteps:
        """The steps that the model declares. Raises LoadFailed."""
        return steps_of(self._model.settings, self._model, self.version, graph) or ModelSteps()

    def _files_beside(self, steps: ModelSteps) -> list[Path]:
        """Files that `model.toml` names: labels beside it, since others lie in the version's folder, and the sample.

        Where a host opens files for the steps, such as a tokenizer, all that lies there tells of them.
        """
        settings = self._model.settings
        named = [each.labels for each in settings.output.values() if isinstance(each.labels, str)]
        places = [self._model.path / Path(name).name for name in named]
        if (sample := settings.warmup.inputs) is not None:
            places += [self._model.path / Path(sample).name, self.version.path / Path(sample).name]
        found = [path for path in places if path.is_file()]
        if steps.files and self._model.path != self.version.path:
            beside = (each for each in self._model.path.iterdir() if parse_version(each.name) is None)
            found += [each for each in beside if each.name != SETTINGS_FILE and not is_ignored(each.name)]
        return list(dict.fromkeys(found))

    def _read_samples(self, described: WayFinding, steps: ModelSteps) -> Samples:
        options = self.options
        reader = _reader_of_texts(steps, described.spec)
        if options.data is not None:
            texts = read_texts(options.data, reader, options.labels, self._note_once) if reader is not None else None
            return texts or read_samples(options.data, described.spec, options.labels, self._note_once, steps)
        if options.labels is not None:
            raise ConfigError("--labels says what inputs show; give them with --data")
        if (name := self._model.settings.warmup.inputs) is not None:
            self.notes.append(f"inputs are those of {name}: what they say of accuracy is little; give more with --data")
            return Samples((read_sample(name, described.spec, (self._copy.folder.parent,)),))
        self.notes.append("inputs were made up: what they say of accuracy holds for noise only; give some with --data")
        if reader is not None:
            return sent_samples(_made_up_texts(steps, reader), reader, is_made_up=True)
        shapes = self._model.settings.warmup.shapes
        return make_samples(described.spec, described.length, shapes, batches=described.batches)

    def _note_once(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _about(self, source: str, data: str) -> tuple[str, ...]:
        """All facts that every result depends on."""
        facts, limits = self.device.facts, self.device.profile.limits
        said = {k: v for k, v in parse_toml(self._settings_text, "model.toml").items() if k not in TUNED_KEYS}
        plain = json.dumps(said, sort_keys=True, default=str)
        versions = package_versions(choice.name for choice in self.device.profile.backends)
        return (
            edge_runtime.__version__, *versions, source, data, str(self.options.objective), str(self.options.scores),
            plain, facts.architecture, facts.cpu_model or "", facts.device_tree_model or "", str(limits.cores),
            self.device.profile.name,
        )  # fmt: skip

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _next_step(self, space: Space) -> TuneStep | None:
        """The next step; None when all is measured, or the time is over and there is an answer."""
        left_s = self._left_s()
        is_hurried = left_s < min(RESERVE_S, self.options.time_s * RESERVE_SHARE)
        step = next_step(space, self.results, is_hurried=is_hurried)
        if step is not None and (left_s > 0 or not has_answer(self.results)):
            return step
        if is_hurried and not is_settled(space, self.results):
            self.notes.append("the time was over before all was measured; the same command goes on from here")
        return None

    def _left_s(self) -> float:
        return self.options.time_s - (time.monotonic() - self._began_s)

    def _recall(self, step: TuneStep) -> bool:
        """Take a step's result from the kept ones; False where there is none."""
        candidate, way, known = step.candidate, step.candidate.way, self.results
        if step.kind == "way" and (compared := self._read(WayResult, way, way.key)) is not None:
            known.ways[way] = self._accepted(compared)
        elif step.kind == "quick" and (look := self._read(QuickLook, way, candidate.key)) is not None:
            known.quick[candidate] = look
            # A full result of an earlier tune is an answer, whatever this tune measures first.
            if (full := self._read(FullMeasurement, way, candidate.key)) is not None:
                known.full[candidate] = full
        elif (
            step.kind == "full"
            and candidate not in known.full
            and (full := self._read(FullMeasurement, way, candidate.key)) is not None
        ):
            known.full[candidate] = full
        else:
            return False
        return True

    def _take(self, step: TuneStep) -> None:
        """Measure a step."""
        candidate, way, known = step.candidate, step.candidate.way, self.results
        share = 1 - self._left_s() / self.options.time_s
        if step.kind == "way":
            self._show(f"comparing {_told(way)}", "", share)
            compared = self._comparison.compare(way)
            known.ways[way] = self._accepted(compared)
            self._keep(compared, way, way.key)
        elif step.kind == "quick":
            self._show(f"looking at {_told(way)}", candidate.layout.key, share)
            known.quick[candidate] = look = self._look_first(candidate)
            self._keep(look, way, candidate.key)
        elif step.kind == "slice":
            self._show("comparing by turns", f"round {step.round}: {_told(way)} {candidate.layout.key}", share)
            known.quick[candidate] = look = self._take_slice(known.quick[candidate], step.round)
            self._keep(look, way, candidate.key)
        else:
            self._show(f"measuring {_told(way)}", candidate.layout.key, share)
            known.full[candidate] = full = with_full(known.full.get(candidate), self._measure_fully(candidate))
            if not full.is_cut:
                self._keep(full, way, candidate.key)

    def _accepted(self, compared: WayResult) -> WayResult:
        """The same, marked where the caller accepts accuracy that the inputs cannot show."""
        if compared.accuracy is None or not self.options.accepts_unjudged:
            return compared
        accuracy = msgspec.structs.replace(compared.accuracy, is_accepted=True)
        return msgspec.structs.replace(compared, accuracy=accuracy)

    def _read(self, kind: type[T], way: Way, subject: str) -> T | None:
        if self.options.is_fresh:
            return None
        try:
            return self._kept.read(kind, subject, self._files.digest_of(way))
        except EdgeRuntimeError:
            return None

    def _keep(self, result: WayResult | QuickLook | FullMeasurement, way: Way, subject: str) -> None:
        """Keep a result for the next tune. A failed step is not kept: the next tune tries it again."""
        if not result.reason:
            self._kept.write(result, subject, self._files.digest_of(way))

    def _look_first(self, candidate: Candidate) -> QuickLook:
        try:
            daemon = self._pool.daemon(candidate)
            return look_first(candidate, daemon, self._frames(), self.options.objective)
        except (ServingFailed, EdgeRuntimeError) as error:
            self._pool.stop(candidate)
            return QuickLook(candidate, str(error))

    def _take_slice(self, look: QuickLook, number: int) -> QuickLook:
        candidate = look.candidate
        try:
            daemon = self._pool.daemon(candidate)
            taken = take_slice(look, number, daemon, self._frames(), self.options.objective)
        except (ServingFailed, EdgeRuntimeError) as error:
            self._pool.stop(candidate)
            return QuickLook(candidate, str(error))
        return msgspec.structs.replace(look, slices=with_slice(look.slices, taken))

    def _measure_fully(self, candidate: Candidate) -> FullMeasurement:
        look = self.results.quick[candidate]
        # A busy device may have answered none of many requests in that short time.
        guess = max(look.rate, 0.5 / look.alone_s) if look.alone_s else look.rate
        until_s = self._began_s + self.options.time_s
        try:
            daemon = self._pool.daemon(candidate, alone=True)
            objective = self.options.objective
            return measure_fully(candidate, daemon, self._frames(), objective, guess=guess, until_s=until_s)
        except (ServingFailed, EdgeRuntimeError) as error:
            self._pool.stop(candidate)
            return FullMeasurement(candidate, str(error))

    def _frames(self) -> Requests:
        assert self.samples is not None
        return frames_of(self._model.name, *self.samples.load)

    @contextmanager
    def _serving(self, candidate: Candidate) -> Iterator[TrialDaemon]:
        """A daemon that serves a candidate, ready. It reads the copied model once, at its start."""
        self._files.graph_of(candidate.way)  # makes and copies it
        values = {**self._values_of(candidate), "on_demand": None, "pinned": None}
        self._copy.write_settings(with_choice(self._settings_text, values, (), "model.toml"))
        name, place = self._model.name, self._root / f"daemon-{self._number_of(candidate)}"
        place.mkdir(exist_ok=True)
        with running_daemon(
            trial_config(self.device, self._copy.models, place / "state"), name, place / "log"
        ) as daemon:
            daemon.wait_ready()
            yield daemon

    def _number_of(self, candidate: Candidate) -> int:
        return self._numbers.setdefault(candidate, len(self._numbers))


def trial_config(device: TunedDevice, models: Path, state: Path) -> Config:
    """The owner's configuration, as far as it decides how models run; the daemon publishes and fetches nothing."""
    own, limits = device.config, device.profile.limits
    return Config(
        models=str(models),
        state=str(state),
        profile=device.profile.name,
        backends=own.backends,
        python_models=own.python_models,
        limits=LimitSettings(
            limits.memory_bytes, limits.cores, limits.queue_rows, limits.queue_bytes, limits.max_run_ms
        ),
    )


@contextmanager
def open_tune(model: ModelFolder, version: VersionFolder, device: TunedDevice, options: TuneOptions) -> Iterator[Tune]:
    """A tune with a folder of its own, removed afterwards. One at a time for each state folder.

    Raises ConfigError: another tune runs, or the model's settings cannot be read.
    """
    if model.settings_error is not None:
        raise ConfigError(model.settings_error)
    with tune_folder(device.state) as root:
        yield Tune(model, version, device, options, root=root)


def _reader_of_texts(steps: ModelSteps, spec: ModelSpec) -> InputReader | None:
    """The reader of a model's texts; None where it takes none, or further inputs beside them. Raises LoadFailed."""
    declared = next((each for each in steps.inputs.values() if each.element == "text"), None)
    if declared is None:
        return None
    make = plugins.named(steps_declaration(declared.source).reader)
    reader: InputReader | None = make(spec, steps, 1, 1)
    return reader if reader is not None and {each.name for each in spec.inputs} <= {*reader.fills} else None


def _made_up_texts(steps: ModelSteps, reader: InputReader) -> list[tuple[Array, str]]:
    """Texts of different lengths, one a request; of a model that ranks, pairs."""
    kind = reader.kinds[-1 if steps.preset == "reranking" else 0]
    spec = reader.sent_spec(kind)
    many = ModelSpec((msgspec.structs.replace(spec, shape=(MADE_UP, *spec.shape[1:])),), ())
    rows = made_up_rows(many, Form(kind, answers=True), steps)[spec.name]
    return [(rows[at : at + 1], "a made-up text") for at in range(MADE_UP)]


def settings_text(model: ModelFolder) -> str:
    """The text of a model's `model.toml`, "" without one."""
    path = model.path / "model.toml"
    return path.read_text(encoding="utf-8-sig") if path.is_file() else ""


def _told(way: Way) -> str:
    return " ".join(filter(None, (way.backend, way.device, way.precision or "as it is")))
