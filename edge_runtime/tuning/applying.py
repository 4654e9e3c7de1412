"""A choice put to work: the variant into the version's folder, then `model.toml`, then the picture.

Owns: the order. A daemon that serves the folder sees a variant that nobody asks for, then the settings that ask for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.errors import ConfigError, StorageFailed
from edge_runtime.repository.durable import write_atomically
from edge_runtime.repository.folder import ModelFolder
from edge_runtime.repository.names import SETTINGS_FILE
from edge_runtime.tuning.results import Full
from edge_runtime.tuning.session import Session
from edge_runtime.tuning.settings_file import with_choice
from edge_runtime.tuning.workbench import place


@dataclass(frozen=True, slots=True)
class Applied:
    """The files that were written."""

    files: tuple[Path, ...]


def check_can_apply(model: ModelFolder) -> Path:
    """Where the settings go. Raises ConfigError: the model has no folder of its own, or it cannot be written.

    Asked before anything is measured: minutes later is late to hear it.
    """
    if model.path.name != model.name:
        raise ConfigError(
            f"{model.path}: {model.name} is a file there, and settings belong into a folder: move it to "
            f"{model.name}/1/, or look only, with --dry-run"
        )
    if not os.access(model.path, os.W_OK):
        raise ConfigError(
            f"{model.path}: cannot be written, and {SETTINGS_FILE} belongs there; look only, with --dry-run (and "
            "--output F for the picture), or make it writable"
        )
    return model.path / SETTINGS_FILE


def apply_choice(session: Session, model: ModelFolder, choice: Full, why: Sequence[str]) -> Applied:
    """Write what serves the choice from now on. Raises StorageFailed, ConfigError: what was there is as it was."""
    settings = check_can_apply(model)
    engine = choice.candidate.engine
    # Read again: the owner may have written while it was measured.
    text = settings.read_text(encoding="utf-8-sig") if settings.is_file() else ""
    changed = with_choice(text, session.values_of(choice.candidate), why, str(settings))
    placed = place(session.engines.artifact_of(engine).made, session.version.path)
    write_atomically(settings, changed.encode())
    return Applied((*placed, settings))


def write_picture(path: Path, svg: str) -> None:
    """The picture's file, whole. Raises StorageFailed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(f"{path.parent}: cannot be made: {error.strerror}") from error
    write_atomically(path, svg.encode())
