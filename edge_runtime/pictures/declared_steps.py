"""The steps that a model's folder declares, whole: settings, and the files that they name.

Reads: `model.toml`'s tables, label files, the artifact's own metadata. Thread: the loader's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from edge_runtime.answers import kind_of, layout_of
from edge_runtime.config.settings import ModelSettings
from edge_runtime.model_spec import DYNAMIC, ModelSpec
from edge_runtime.models.folder import ModelFolder, VersionFolder
from edge_runtime.models.labels import read_labels
from edge_runtime.pictures.model_metadata import read_interface, read_metadata
from edge_runtime.pictures.presets import fill_inputs, fill_outputs
from edge_runtime.steps import ModelSteps, Preset, says_steps

LEAST_SIDE = 8
"""Of a picture in one line: scikit-learn's digits are the smallest."""


def declared_steps(
    settings: ModelSettings, folder: ModelFolder, version: VersionFolder, artifact: Path
) -> ModelSteps | None:
    """Return the steps of a version, whole; None where none are declared.

    What the tables leave out comes from the preset, or from the artifact's own metadata. Raises LoadFailed: a file is
    missing or no text, or a preset does not declare enough.
    """
    is_filled = settings.preset is not None
    given = {name: each for name, each in settings.input.items() if is_filled or says_steps(each)}
    taken = {name: each for name, each in settings.output.items() if is_filled or says_steps(each)}
    if not given and not taken and not is_filled:
        return None
    metadata = read_metadata(artifact)
    preset = settings.preset or metadata.preset
    spec = read_interface(artifact) if preset is not None else None
    inputs = fill_inputs(given, preset, spec, metadata, adds=is_filled)
    outputs = fill_outputs(taken, preset, spec, metadata, adds=is_filled)
    labels: dict[str, tuple[str, ...]] = {}
    for name, steps in list(outputs.items()):
        if isinstance(steps.labels, tuple):
            labels[name] = steps.labels
            outputs[name] = replace(steps, labels=None)
        elif steps.labels is not None:
            labels[name] = read_labels(steps.labels, (version.path, folder.path), version.within)
        elif metadata.names and layout_of(kind_of(steps)).has_classes:
            labels[name] = metadata.names
    return ModelSteps(inputs, outputs, labels, preset)


def why_no_picture(model: str, spec: ModelSpec, offered: Preset | None = None, *, is_pipeline: bool = False) -> str:
    """Say that a model declares no steps for a picture, with the lines to write. offered: its metadata's preset."""
    if is_pipeline:
        there = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in spec.inputs)
        return (
            f"pipeline {model!r} takes no picture: it has the inputs {there}; it takes one where an input goes to a "
            "model that declares pictures (models show says whom each step asks), or is BYTES"
        )
    if offered is not None:
        return (
            f"model {model!r} declares no steps for a picture; its own metadata says which family it is of, so write "
            f'into its model.toml:\npreset = "{offered}"'
        )
    fitting = [each for each in spec.inputs if len(each.shape) == 4 and {1, 3} & {each.shape[1], each.shape[3]}]
    flat = [each for each in spec.inputs if _flat_side(each.shape)]
    fitting = fitting or flat
    if not fitting:
        there = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in spec.inputs)
        return (
            f"model {model!r} takes no picture: it has the inputs {there}; wanted one of "
            "[rows, 3, height, width] or [rows, height, width, 3], which [input.NAME] of model.toml can declare"
        )
    tensor = fitting[0]
    lines = [f"[input.{_key(tensor.name)}]"]
    if tensor in flat or 1 in (tensor.shape[1], tensor.shape[3]):
        lines.append('color = "gray"')
    if tensor in flat:
        lines.append(f"size = [{_flat_side(tensor.shape)}, {_flat_side(tensor.shape)}]")
    elif DYNAMIC in tensor.shape[1:]:
        lines.append("size = [224, 224]  # height, width")
    if tensor.datatype.startswith("F"):
        lines.append('range = "0..1"  # what its numbers mean; or "-1..1", "0..255", or mean and scale')
    lines += ['fit = "stretch"  # or "crop", "letterbox"']
    if spec.outputs:
        lines += [f"[output.{_key(spec.outputs[0].name)}]", 'answer = "classes"  # or "boxes" with layout, …']
    return (
        f"model {model!r} declares no steps for a picture, and how it was trained cannot be guessed; write into its "
        "model.toml, as it was trained:\n" + "\n".join(lines)
    )


def _flat_side(shape: Sequence[int]) -> int:
    """The side of a square picture whose gray pixels are an axis; 0 where they are none, or as few as features are."""
    side = math.isqrt(max(shape[1], 0)) if len(shape) == 2 else 0
    return side if side >= LEAST_SIDE and side * side == shape[1] else 0


def _key(name: str) -> str:
    """A name as a key of TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)
