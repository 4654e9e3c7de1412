"""The steps of a model of series, whole: its tables, and the files of labels that they name. Thread: the loader's."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from edge_runtime.config.settings import ModelSettings
from edge_runtime.models.folder import ModelFolder, VersionFolder
from edge_runtime.models.labels import read_labels
from edge_runtime.steps import ModelSteps, says_steps


def declared_series(
    settings: ModelSettings, folder: ModelFolder, version: VersionFolder, artifact: Path
) -> ModelSteps | None:
    """Return the steps of a version. Raises LoadFailed: a file of labels cannot be read."""
    del artifact
    inputs = {name: each for name, each in settings.input.items() if says_steps(each)}
    outputs = {name: each for name, each in settings.output.items() if says_steps(each)}
    labels: dict[str, tuple[str, ...]] = {}
    for name, steps in outputs.items():
        if isinstance(steps.labels, str):
            labels[name] = read_labels(steps.labels, (version.path, folder.path), version.within)
            continue
        labels[name] = steps.labels or ()
        outputs = {**outputs, name: replace(steps, labels=None)}
    return ModelSteps(inputs, outputs, {name: each for name, each in labels.items() if each})
