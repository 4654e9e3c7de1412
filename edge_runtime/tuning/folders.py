"""The folders that a tune works in: its own in the state folder, short-lived temporary ones, and a copy of the model.

Owns: that one tune at a time works below a state folder, and that a killed tune's folders go with the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edge_runtime.errors import ConfigError
from edge_runtime.models.folder import VersionFolder
from edge_runtime.models.names import SETTINGS_FILE
from edge_runtime.sandbox.folder_lock import lock_folder, remove_left_behind

PREFIX = "edge-runtime-tune-"


@contextmanager
def tune_folder(state: Path | None) -> Iterator[Path]:
    """An empty folder, below `state` if there is one; removed afterwards. Raises ConfigError: another tune holds it."""
    if state is None:
        with temporary_folder() as folder:
            yield folder
        return
    root = state.absolute() / "tuning" / "now"
    root.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(root.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{root.parent}: another tune runs here, and would disturb this one; wait for it"
            ) from None
        _remove(root)  # a killed tune's
        try:
            root.mkdir()
        except OSError as error:
            raise ConfigError(f"{root}: cannot be made: {error.strerror}; remove what is there") from None
        try:
            yield root
        finally:
            shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(lock)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """An empty temporary folder with a path short enough for a socket's; removed afterwards. Raises OSError."""
    remove_left_behind(Path(tempfile.gettempdir()), PREFIX)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        lock = lock_folder(folder)
        try:
            yield folder
        finally:
            os.close(lock)


class ModelCopy:
    """A models folder with a copy of one model, which candidates are served from one after another.

    A copy, because a data file with a second name is refused; the owner's files never change. root: an empty folder.
    Thread: one owner.
    """

    def __init__(self, root: Path, version: VersionFolder, home: Path) -> None:
        """home: the model's own folder."""
        self._version = version
        self._home = home
        self.models = root / "models"
        self.folder = self.models / version.model / str(version.number)

    def fill(self, beside: Sequence[Path] = ()) -> None:
        """Copy the version's files, and its folders (external data). beside: files that belong beside `model.toml`."""
        self.folder.mkdir(parents=True)
        for source in beside:
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, self.folder.parent / source.name)
        own = {path.name for path in self._version.files.values()}
        self.add(list(self._version.files.values()))
        # Only a version folder is the model's alone; files beside others in the models folder have no folders below.
        if self._version.path.name == str(self._version.number) or self._version.path == self._home:
            for below in self._version.path.iterdir():
                if below.is_dir() and below.name not in own:
                    shutil.copytree(below, self.folder / below.name)

    def add(self, files: Sequence[Path]) -> None:
        """Copy a variant's files beside them, in place of those with the same name."""
        for source in files:
            shutil.copy2(source, self.folder / source.name)

    def write_settings(self, settings: str) -> None:
        """Write the model's `model.toml`."""
        (self.folder.parent / SETTINGS_FILE).write_text(settings, encoding="utf-8")


def _remove(root: Path) -> None:
    """Remove a file or folder; of a link, only the link."""
    if root.is_symlink() or root.is_file():
        root.unlink(missing_ok=True)
    shutil.rmtree(root, ignore_errors=True)
