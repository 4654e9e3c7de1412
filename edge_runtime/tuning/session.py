"""One tune of one model from beginning to end: what is known, what is measured next, and what is chosen.

Owns: the order of things and everything found so far; `results` is whole after every step, so that whoever breaks off
has what was measured by then. Files are written by `applying`. Thread: the caller's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

import edge_runtime
from edge_runtime.config.settings import Config, LimitSettings
from edge_runtime.errors import ConfigError, EdgeRuntimeError, LoadFailed
from edge_runtime.repository.digest import sha256_of_file
from edge_runtime.repository.folder import ModelFolder, VersionFolder
from edge_runtime.tuning.arrays_file import write_arrays
from edge_runtime.tuning.candidates import PLAIN, Candidate, Engine, engines
from edge_runtime.tuning.conversion import MAKERS, digest_of
from edge_runtime.tuning.engine_artifacts import (
    EngineArtifacts,
    backend_versions,
    digest_of_version,
    offers_of,
    own_graph,
    settings_precision,
)
from edge_runtime.tuning.engine_child import Finding
from edge_runtime.tuning.engine_comparison import EngineComparison, Judgement
from edge_runtime.tuning.engine_trial import EngineTrial
from edge_runtime.tuning.journal import Journal
from edge_runtime.tuning.measurement import frames_of, look_quickly, measure_fully
from edge_runtime.tuning.plan import Space, Step, has_answer, next_step
from edge_runtime.tuning.results import EngineResult, Full, Quick, Results
from edge_runtime.tuning.samples import Samples, make_samples, read_samples
from edge_runtime.tuning.served import Served, ServingFailed, served
from edge_runtime.tuning.session_folder import session_folder
from edge_runtime.tuning.settings_file import Value, with_choice
from edge_runtime.tuning.wish import Device, Wish
from edge_runtime.tuning.workbench import Workbench
from edge_runtime.typed_toml import parse_toml

RESERVE_S = 40.0
"""Kept of the time for the last measurement: a search at the objective takes 20 to 40 s."""

RESERVE_SHARE = 0.3
"""Of a short time."""

BUSY_SHARE = 0.3
"""Load a core, from which other work shows in the figures."""

TUNED_KEYS = ("backend", "device", "precision", "threads", "instances", "max_batch_rows")
"""Keys of `model.toml` that a tune decides."""


T = TypeVar("T", bound=msgspec.Struct)

Show = Callable[[str, str, float], None]
"""Told what is done now, a detail, and the share of the time that is over."""


class Session:
    """Measure until all is measured or the time is over: `run`. Use inside `opened`."""

    def __init__(
        self, model: ModelFolder, version: VersionFolder, device: Device, wish: Wish, *, root: Path, show: Show
    ) -> None:
        self.version = version
        self.device = device
        self.wish = wish
        self.results = Results({}, {}, {})
        self.notes: list[str] = []
        self.samples: Samples | None = None
        self.space: Space | None = None
        self._engines: EngineComparison | None = None
        self._model = model
        self._root = root
        self._show = show
        self._settings_text = _settings_text(model)
        self._bench = Workbench(root / "bench", version)
        self._journal = Journal(None, ())
        self._began_s = 0.0

    def run(self) -> None:
        """Measure. Raises EdgeRuntimeError: the model cannot be served at all, or the inputs do not fit it."""
        self._began_s = time.monotonic()
        self._note_load()
        self._prepare()
        assert self.space is not None
        while (kept := next_step(self.space, self.results)) is not None and self._recall(kept):
            pass
        while (step := self._next_step(self.space)) is not None:
            if not self._recall(step):
                self._take(step)

    @property
    def engines(self) -> EngineComparison:
        """What is known of each engine's files and answers, once `run` began."""
        assert self._engines is not None
        return self._engines

    def values_of(self, candidate: Candidate) -> dict[str, Value | None]:
        """What `model.toml` is to say for a candidate; None for what is left to the daemon."""
        engine, layout = candidate.engine, candidate.layout
        known = self.results.engines.get(engine)
        return {
            "backend": engine.backend,
            "device": None if engine.device == self._usual_device(engine) else engine.device,
            "precision": settings_precision(engine, known.runs_in if known is not None else ""),
            "threads": layout.threads,
            "instances": layout.instances,
            "max_batch_rows": layout.max_batch_rows,
        }

    def _usual_device(self, engine: Engine) -> str:
        """What the profile says of a backend, which need not be said again; no release may say a device."""
        choices = self.device.profile.backends
        return next((choice.device for choice in choices if choice.name == engine.backend), "")

    # ---- preparation ------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._show("looking at the model", "", 0.0)
        choices = self.device.profile.backends
        offers, notes = offers_of(self.version, choices)
        self.notes += notes
        found = engines(choices, offers, self.device.facts)
        if not found or found[0].precision != PLAIN:
            there = ", ".join(self.version.files) or "nothing"
            raise LoadFailed(
                f"{self.version.path}: holds {there}; wanted the model itself, such as model.onnx, which variants are "
                "compared with, and a backend here that loads it" + "".join(f"; {note}" for note in notes)
            )
        self._bench.lay_out()
        trial = EngineTrial(self.device, self._model.settings, self._began_s + self.wish.time_s)
        described = self._describe(trial, found[0])
        samples = self._read_samples(described)
        inputs = self._root / "judging.npz"
        write_arrays(inputs, samples.judging.inputs)
        calibration = self._root / "calibration.npz"
        write_arrays(calibration, samples.calibrating)
        source = digest_of_version(self.version)
        data = digest_of((sha256_of_file(inputs), sha256_of_file(calibration), str(samples.judging.labels)))
        kept = None if self.device.state is None else self.device.state / "tuning"
        makers = (edge_runtime.__version__, *backend_versions(MAKERS))
        made_in = (kept or self._root) / "made" / digest_of((source, data, *makers))[:32]
        self._engines = EngineComparison(
            found[0], described, Judgement(inputs, samples.judging.labels, self.wish.scores),
            trial=trial, artifacts=EngineArtifacts(self.version, made_in, calibration),
            bench=self._bench, root=self._root,
        )  # fmt: skip
        self._journal = Journal(None if kept is None else kept / "results", self._about(source, data))
        rows = self.device.profile.batching.max_batch_rows if described.batches else 1
        self.space = Space(tuple(found), self.device.profile.limits.cores, rows, self.wish.objective, self.wish.drop)

    def _note_load(self) -> None:
        cores, load = self.device.profile.limits.cores, os.getloadavg()[0]
        if load > cores * BUSY_SHARE:
            self.notes.append(
                f"the device was busy when this began (load {load:.1f} on {cores} cores): rates may be higher without"
            )

    def _describe(self, trial: EngineTrial, first: Engine) -> Finding:
        """What the model takes and gives, by the engine that all others are compared with."""
        graph = own_graph(self.version, first)
        assert graph is not None, "an engine leads only where the version has its file"
        finding = trial.look(first, self._bench.folder / graph.name)
        if finding.fault:
            raise LoadFailed(f"{self._model.name}: {first.backend} cannot serve it as it is: {finding.fault}")
        return finding

    def _read_samples(self, described: Finding) -> Samples:
        wish = self.wish
        if wish.data is None:
            if wish.labels is not None:
                raise ConfigError("--labels says what inputs show; give them with --data")
            shapes = self._model.settings.warmup.shapes
            samples = make_samples(described.spec, described.length, shapes, batches=described.batches)
            self.notes.append(
                "inputs were made up: what they say of accuracy holds for noise only; give some with --data"
            )
        else:
            samples = read_samples(wish.data, described.spec, wish.labels, self._note_once)
        self.samples = samples
        return samples

    def _note_once(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _about(self, source: str, data: str) -> tuple[str, ...]:
        facts, limits = self.device.facts, self.device.profile.limits
        said = {k: v for k, v in parse_toml(self._settings_text, "model.toml").items() if k not in TUNED_KEYS}
        plain = json.dumps(said, sort_keys=True, default=str)
        versions = backend_versions(choice.name for choice in self.device.profile.backends)
        return (
            edge_runtime.__version__, *versions, source, data, str(self.wish.objective), str(self.wish.scores), plain,
            facts.architecture, facts.cpu_model or "", facts.device_tree_model or "", str(limits.cores),
            self.device.profile.name,
        )  # fmt: skip

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _next_step(self, space: Space) -> Step | None:
        """What to do now; None when all is measured, or the time is over and there is an answer."""
        left_s = self._left_s()
        is_hurried = left_s < min(RESERVE_S, self.wish.time_s * RESERVE_SHARE)
        step = next_step(space, self.results, is_hurried=is_hurried)
        if step is not None and (left_s > 0 or not has_answer(self.results)):
            return step
        if is_hurried and next_step(space, self.results) is not None:
            self.notes.append("the time was over before all was measured; the same command goes on from here")
        return None

    def _left_s(self) -> float:
        return self.wish.time_s - (time.monotonic() - self._began_s)

    def _recall(self, step: Step) -> bool:
        """Take a step's result from the journal; False where it has none."""
        candidate, engine, known = step.candidate, step.candidate.engine, self.results
        if step.kind == "engine" and (compared := self._kept(EngineResult, engine, engine.key)) is not None:
            known.engines[engine] = compared
        elif step.kind == "quick" and (look := self._kept(Quick, engine, candidate.key)) is not None:
            known.quick[candidate] = look
            # Known in full from an earlier tune, it is an answer whatever comes first in this one.
            if (full := self._kept(Full, engine, candidate.key)) is not None:
                known.full[candidate] = full
        elif step.kind == "full" and (full := self._kept(Full, engine, candidate.key)) is not None:
            known.full[candidate] = full
        else:
            return False
        return True

    def _take(self, step: Step) -> None:
        candidate, engine, known = step.candidate, step.candidate.engine, self.results
        share = 1 - self._left_s() / self.wish.time_s
        if step.kind == "engine":
            self._show(f"comparing {_told(engine)}", "", share)
            known.engines[engine] = compared = self.engines.compare(engine)
            self._keep(compared, engine, engine.key)
        elif step.kind == "quick":
            self._show(f"looking at {_told(engine)}", candidate.layout.key, share)
            known.quick[candidate] = look = self._measured_quickly(candidate)
            self._keep(look, engine, candidate.key)
        else:
            self._show(f"measuring {_told(engine)}", candidate.layout.key, share)
            known.full[candidate] = full = self._measured_fully(candidate)
            if not full.is_cut:
                self._keep(full, engine, candidate.key)

    def _kept(self, kind: type[T], engine: Engine, subject: str) -> T | None:
        if self.wish.is_fresh:
            return None
        try:
            return self._journal.read(kind, subject, self.engines.digest_of(engine))
        except EdgeRuntimeError:
            return None

    def _keep(self, result: EngineResult | Quick | Full, engine: Engine, subject: str) -> None:
        """For the next tune, once it is among the results of this one. What failed is tried again then."""
        if not result.reason:
            self._journal.write(result, subject, self.engines.digest_of(engine))

    def _measured_quickly(self, candidate: Candidate) -> Quick:
        try:
            with self._serving(candidate) as (daemon, frames):
                return look_quickly(candidate, daemon, frames, self.wish.objective)
        except (ServingFailed, EdgeRuntimeError) as error:
            return Quick(candidate, str(error))

    def _measured_fully(self, candidate: Candidate) -> Full:
        look = self.results.quick[candidate]
        # A busy device may have answered nothing of many in that short time.
        guess = max(look.rate, 0.5 / look.alone_s) if look.alone_s else look.rate
        try:
            with self._serving(candidate) as (daemon, frames):
                until_s = self._began_s + self.wish.time_s
                objective = self.wish.objective
                return measure_fully(candidate, daemon, frames, objective, guess=guess, until_s=until_s)
        except (ServingFailed, EdgeRuntimeError) as error:
            return Full(candidate, str(error))

    @contextmanager
    def _serving(self, candidate: Candidate) -> Iterator[tuple[Served, list[bytes]]]:
        assert self.samples is not None
        self.engines.graph_of(candidate.engine)  # made and on the bench
        values = {**self.values_of(candidate), "on_demand": None, "pinned": None}
        self._bench.set_up(with_choice(self._settings_text, values, (), "model.toml"))
        name = self._model.name
        with served(self._config(), name, self._root / "daemon.log") as daemon:
            yield daemon, frames_of(name, self.samples.inputs[0])

    def _config(self) -> Config:
        """The owner's configuration as far as it says how models run; nothing of it is published or fetched."""
        own, limits = self.device.config, self.device.profile.limits
        return Config(
            models=str(self._bench.models),
            state=str(self._root / "state"),
            profile=self.device.profile.name,
            backends=own.backends,
            python_models=own.python_models,
            limits=LimitSettings(
                limits.memory_bytes, limits.cores, limits.queue_rows, limits.queue_bytes, limits.max_run_ms
            ),
        )


@contextmanager
def opened(model: ModelFolder, version: VersionFolder, device: Device, wish: Wish, show: Show) -> Iterator[Session]:
    """A session with a folder of its own, which is gone afterwards. One at a time for each state folder.

    Raises ConfigError: another tune runs, or the model's settings cannot be read.
    """
    if model.settings_error is not None:
        raise ConfigError(model.settings_error)
    with session_folder(device.state) as root:
        yield Session(model, version, device, wish, root=root, show=show)


# ---- private --------------------------------------------------------------------------------------------------------


def _settings_text(model: ModelFolder) -> str:
    path = model.path / "model.toml"
    return path.read_text(encoding="utf-8-sig") if path.is_file() else ""


def _told(engine: Engine) -> str:
    return " ".join(filter(None, (engine.backend, engine.device, engine.precision or "as it is")))
