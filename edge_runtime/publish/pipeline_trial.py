"""A pipeline tried with its models in a child process before it is published: serve it, ask it, describe it.

Owns: what a publisher's trial of a pipeline does beside that of a model (trial.py). Called by `releases`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from edge_runtime.backends.base import TriedInstance
from edge_runtime.config.settings import Config, ModelSettings
from edge_runtime.errors import LoadFailed, PublishError, RunFailed
from edge_runtime.models.folder import FolderTask, owned_name
from edge_runtime.models.warmup import make_inputs
from edge_runtime.pipelines import PIPELINE
from edge_runtime.publish.intake import Intake, StagedArtifact
from edge_runtime.publish.trial import (
    ArtifactFacts,
    ArtifactTrial,
    describe_tried,
    given_inputs,
)
from edge_runtime.sandbox.child import ChildFunction, run_child
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.tensors import Array


class WholeTask(Struct, frozen=True):
    """The task of the child. golden: an .npz with inputs by name, or one encoded picture; "" for made-up ones.

    config: how models are served. out: the file for golden tensors. work: a folder of the child's own.
    """

    config: Config
    pipeline: FolderTask
    golden: str
    out: str
    work: str
    memory_limit_bytes: int


TryPipeline = ChildFunction[WholeTask, ArtifactFacts]


def try_pipeline(
    child: TryPipeline, intake: Intake, turn: int, *, golden: Path | None = None, limit_s: float
) -> ArtifactTrial:
    """Serve a pipeline with an artifact of each of its models, and run it twice on its golden input.

    child: the function that the child calls. turn: the number of the artifact; a model with fewer gives its first.
    golden: an .npz with one array an input, or a picture; None: made up. Raises PublishError as `try_artifact`.
    """
    chosen = {part.model: part.artifacts[turn if turn < len(part.artifacts) else 0] for part in intake.parts}
    with tempfile.TemporaryDirectory(prefix="edge-runtime-trial-") as name:
        folder = Path(name)
        file = folder / PIPELINE.name
        file.write_text(intake.pipeline, encoding="utf-8")
        settings = msgspec.convert(intake.settings, ModelSettings)
        owned = tuple(_part_task(intake.model, part, chosen[part.model]) for part in intake.parts)
        task = WholeTask(
            Config(isolation="never", watch=False, calibrate=False),
            FolderTask(intake.model, intake.version, str(folder), {PIPELINE.name: str(file)}, settings, owned),
            str(golden.resolve()) if golden is not None else "",
            str(folder / "golden.bin"),
            str(folder),
            HostProbe().memory_available_bytes() or 0,
        )
        reads = [*(Path(each.path) for each in owned), *([] if golden is None else [golden])]
        ending = run_child(child, task, limit_s=limit_s, reads=reads, writes=[folder], has_children=True)
        words = ", ".join(f"{model}/{each.path.name}" for model, each in chosen.items())
        if ending.result is None:
            raise PublishError(f"{intake.model} with {words}: {ending.reason}; nothing was published")
        return ArtifactTrial("pipeline", words, ending.result, (folder / "golden.bin").read_bytes())


def describe_pipeline(served: TriedInstance, task: WholeTask) -> ArtifactFacts:
    """Run a pipeline that is served; leaves its golden tensors in `out`. In the child. Raises EdgeRuntimeError."""
    return describe_tried(served, _inputs(served, task), task.out, is_made_up=not task.golden)


# ---- private --------------------------------------------------------------------------------------------------------


def _part_task(pipeline: str, part: Intake, chosen: StagedArtifact) -> FolderTask:
    """Describe one of its models with one artifact, whichever of them a device would choose."""
    others = {each.path for each in part.artifacts if each != chosen}
    settings = msgspec.structs.replace(
        msgspec.convert(part.settings, ModelSettings), backend=chosen.backend, precision=chosen.precision or None
    )
    files = {file.name: str(file.path) for file in part.files if file.path not in others}
    return FolderTask(owned_name(pipeline, part.model), 1, str(chosen.path.parent), files, settings)


def _inputs(served: TriedInstance, task: WholeTask) -> Mapping[str, Array]:
    spec = served.spec
    if task.golden and Path(task.golden).suffix.lower() == ".npz":
        return given_inputs(Path(task.golden), spec)
    if task.golden:
        if len(spec.inputs) != 1 or spec.inputs[0].datatype != "BYTES":
            raise RunFailed(f"{task.golden}: is not a .npz, and a picture is for a pipeline whose only input takes one")
        return {spec.inputs[0].name: np.array([Path(task.golden).read_bytes()], object)}
    shapes = task.pipeline.settings.warmup.shapes
    is_known = all(each.has_fixed_inner_shape or each.name in shapes for each in spec.inputs)
    if not is_known or any(each.datatype == "BYTES" for each in spec.inputs):
        raise LoadFailed("no made-up input fits what it reads; give a real one with --golden FILE.npz, or a picture")
    return make_inputs(spec, 1, 1, shapes)
