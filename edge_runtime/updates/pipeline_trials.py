"""Pipelines served in child processes by the daemon's own core: a release on a device, and before it is published.

Owns: what such a child does. It serves one pipeline with the models that it brings, and nothing else: no door, no
folder of models. Called in the children of updates/trial.py and publish/pipeline_trial.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_runtime.clock import Clock
from edge_runtime.config.settings import Config
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.model_spec import ModelSpec
from edge_runtime.models.folder import FolderTask
from edge_runtime.models.servable import Servable
from edge_runtime.publish.pipeline_trial import WholeTask, describe_pipeline
from edge_runtime.publish.trial import ArtifactFacts
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.sandbox.process_memory import data_bytes, limited_memory, peak_bytes, start_peak
from edge_runtime.tensors import Array, Tensors
from edge_runtime.updates.golden import read_golden
from edge_runtime.updates.self_inference import infer_once
from edge_runtime.updates.trial import LIBRARY_BYTES, PipelineTask, TrialResult, run_golden

ASKED_S = 3600.0
"""The child's own limit is shorter, and ends it."""

CORE_BYTES = 256 << 20
"""The memory of the core beside models and their libraries: stacks of its threads, most of them untouched."""


@dataclass(frozen=True, slots=True)
class ServedPipeline:
    """A pipeline as it is asked for a trial."""

    servable: Servable
    clock: Clock

    @property
    def spec(self) -> ModelSpec:
        """Its inputs and outputs."""
        return self.servable.spec

    @property
    def precision(self) -> str:
        """Of its models."""
        return self.servable.precision

    def run(self, inputs: Tensors) -> list[Array]:
        """Ask it once, as a client would. Raises the error that a client would get."""
        outputs = infer_once(self.servable, inputs, self.clock, ASKED_S)
        return [outputs[spec.name] for spec in self.spec.outputs]


def try_pipeline_in_child(task: PipelineTask, _: ShowProgress) -> TrialResult:
    """Serve a release's pipeline and hold its answers to the golden one. Raises LoadFailed, RunFailed, MemoryError."""
    golden = read_golden(task.golden, Path(task.golden_file).read_bytes(), task.min_agreement)
    before_bytes = start_peak()
    with (
        limited_memory(task.memory_bytes, besides=data_bytes() + LIBRARY_BYTES + CORE_BYTES),
        _served(task.config, task.pipeline, Path(task.work), task.engines) as served,
    ):
        run_s = run_golden(served, task, golden)
        peak = max(peak_bytes() - before_bytes, 0)
        return TrialResult(backend="pipeline", precision=served.precision, peak_memory_bytes=peak, run_s=run_s, note="")


def describe_pipeline_in_child(task: WholeTask, _: ShowProgress) -> ArtifactFacts:
    """Serve a pipeline that is to be published, and describe it. Raises LoadFailed, RunFailed, MemoryError."""
    before_bytes = start_peak()
    files = [Path(file) for part in task.pipeline.owned for file in part.files.values()]
    with _served(task.config, task.pipeline, Path(task.work), "") as served:
        facts = describe_pipeline(served, task)
        peak = max(peak_bytes() - before_bytes, sum(file.stat().st_size for file in files))
        return msgspec.structs.replace(facts, peak_memory_bytes=peak)


@contextmanager
def _served(config: Config, pipeline: FolderTask, work: Path, engines: str) -> Iterator[ServedPipeline]:
    """Serve a pipeline with the models that it brings. work: for the core's state. engines: those built for it."""
    tempfile.tempdir = str(work)  # the child sees no other
    state = work / "state"
    state.mkdir()
    if engines:
        (state / "engines").symlink_to(engines)
    (work / "models").mkdir()
    whole = msgspec.structs.replace(config, models=str(work / "models"), state=str(state))
    with Runtime(core=assemble_core(whole)) as runtime:
        runtime.core.loader.serve_release(pipeline.folder())
        servable = runtime.core.table.resolve(pipeline.name, None)
        yield ServedPipeline(servable, runtime.core.clock)
