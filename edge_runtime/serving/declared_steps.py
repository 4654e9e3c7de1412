"""The steps that a model's folder declares, whole: settings, and the files that they name.

Reads: `model.toml`'s tables, label files. Thread: the loader's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec
from edge_runtime.repository.folder import ModelFolder, VersionFolder
from edge_runtime.steps import ModelSteps

MAX_LABELS_BYTES = 4 << 20
"""Of one file: 100 000 labels of 40 bytes."""


def declared_steps(
    settings: ModelSettings, folder: ModelFolder, version: VersionFolder, artifact: Path
) -> ModelSteps | None:
    """Return the steps of a version; None where none are declared. Raises LoadFailed: a file is missing or no text."""
    del artifact
    if not settings.input and not settings.output:
        return None
    labels = {
        name: _read_labels(steps.labels, folder, version)
        for name, steps in settings.output.items()
        if steps.labels is not None
    }
    return ModelSteps(settings.input, settings.output, labels)


def why_no_picture(model: str, spec: ModelSpec) -> str:
    """Say that a model declares no steps for a picture, with the lines to write."""
    fitting = [each for each in spec.inputs if len(each.shape) == 4 and {1, 3} & {each.shape[1], each.shape[3]}]
    if not fitting:
        there = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in spec.inputs)
        return (
            f"model {model!r} takes no picture: it has the inputs {there}; wanted one of "
            "[rows, 3, height, width] or [rows, height, width, 3], which [input.NAME] of model.toml can declare"
        )
    tensor = fitting[0]
    lines = [f"[input.{_key(tensor.name)}]"]
    if 1 in (tensor.shape[1], tensor.shape[3]):
        lines.append('color = "gray"')
    if DYNAMIC in tensor.shape[1:]:
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


def _key(name: str) -> str:
    """A name as a key of TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _read_labels(name: str, folder: ModelFolder, version: VersionFolder) -> tuple[str, ...]:
    """Labels of a file in the version's folder, or beside `model.toml`; one a line."""
    if Path(name).name != name:
        raise LoadFailed(f"labels = {name!r}: wanted the name of a file beside model.toml or in the version's folder")
    for place in (version.path / name, folder.path / name):
        try:
            with place.open("rb") as file:
                data = file.read(MAX_LABELS_BYTES + 1)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise LoadFailed(f"{place}: {error.strerror}") from error
        if len(data) > MAX_LABELS_BYTES:
            raise LoadFailed(f"{place}: labels have over {MAX_LABELS_BYTES} bytes")
        try:
            return tuple(line.strip() for line in data.decode("utf-8-sig").splitlines())
        except UnicodeDecodeError as error:
            raise LoadFailed(f"{place}: labels are no UTF-8: {error}") from error
    raise LoadFailed(f"labels = {name!r}: no such file in {version.path} nor in {folder.path}")
