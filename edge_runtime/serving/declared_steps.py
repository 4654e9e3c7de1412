"""The steps that a model's folder declares, whole: settings, and the files that they name.

Reads: `model.toml`'s tables, label files. Thread: the loader's.
"""

from __future__ import annotations

from pathlib import Path

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import LoadFailed
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
