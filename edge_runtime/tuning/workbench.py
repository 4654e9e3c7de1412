"""A models folder of our own with one model in it, as one candidate is to be served; and variants put to use.

Owns: the folder. The owner's model is copied into it, since a data file with a second name would be refused; it is
never changed. Thread: one owner.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from edge_runtime.errors import StorageFailed
from edge_runtime.repository.durable import PART_SUFFIX, growing, sync_folder
from edge_runtime.repository.folder import VersionFolder
from edge_runtime.repository.names import SETTINGS_FILE

_PIECE_BYTES = 1 << 20


class Workbench:
    """One model that is served in several ways, one after another. root: an empty folder of our own."""

    def __init__(self, root: Path, version: VersionFolder) -> None:
        self._root = root
        self._version = version

    @property
    def models(self) -> Path:
        """The models folder."""
        return self._root / "models"

    @property
    def folder(self) -> Path:
        """The version's folder in it."""
        return self.models / self._version.model / str(self._version.number)

    def lay_out(self) -> None:
        """Bring the version's files here, those of folders below it too (external data)."""
        self.folder.mkdir(parents=True)
        own = {path.name for path in self._version.files.values()}
        for source in self._version.files.values():
            shutil.copy2(source, self.folder / source.name)
        # Only a version folder is the model's alone; files beside others in the models folder have no folders below.
        if self._version.path.name == str(self._version.number):
            for below in self._version.path.iterdir():
                if below.is_dir() and below.name not in own:
                    shutil.copytree(below, self.folder / below.name)

    def add(self, files: Sequence[Path]) -> None:
        """Bring a variant's files beside them; one of the same name is replaced."""
        for source in files:
            target = self.folder / source.name
            shutil.copy2(source, target)

    def set_up(self, settings: str) -> None:
        """What `model.toml` says from now on."""
        (self.folder.parent / SETTINGS_FILE).write_text(settings, encoding="utf-8")


def place(files: Sequence[Path], folder: Path) -> list[Path]:
    """Put a variant's files into a version's folder, each whole and durable, the graph last; returns where they are.

    files: the graph first. An old graph is gone before its weights change: it would read the new ones at the places
    of the old. Raises StorageFailed: nothing half-written stays, and what was there is as it was, except where the
    message says otherwise.
    """
    if not files:  # the model as it is
        return []
    targets = [folder / source.name for source in reversed(files)]
    parts = [target.with_name(f"{target.name}{PART_SUFFIX}") for target in targets]
    try:
        for source, part in zip(reversed(files), parts, strict=True):
            _copy(source, part)
        _rename(parts, targets)
    finally:
        for part in parts:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    return targets


def _copy(source: Path, part: Path) -> None:
    try:
        with source.open("rb") as content, growing(part, keep=False) as file:
            while piece := content.read(_PIECE_BYTES):
                file.write(piece)
            file.commit(part)
    except OSError as error:
        raise StorageFailed(f"{part}: cannot be written: {error.strerror}; the model is as it was") from error


def _rename(parts: Sequence[Path], targets: Sequence[Path]) -> None:
    *_, graph = targets
    try:
        if len(targets) > 1:
            graph.unlink(missing_ok=True)
            sync_folder(graph.parent)
        for part, target in zip(parts, targets, strict=True):
            part.replace(target)
        sync_folder(graph.parent)
    except OSError as error:
        raise StorageFailed(f"{graph}: cannot be written: {error.strerror}; the variant may be missing") from error
