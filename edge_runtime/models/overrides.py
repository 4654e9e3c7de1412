"""Overrides that a caller lays over a model at its load: settings, and files in the place of the model's own.

Owns: which files a caller may bring, and the folder in which they are kept, below the state folder: never in the models
folder. They last until the model is loaded without them, and no longer than the daemon. Thread: the loader's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import DecodeFailed, LoadFailed
from edge_runtime.models.folder import FolderConfig, ModelFolder

MAX_FILES = 64
MAX_MODELS = 64
"""Models with files of a caller's: each body has its own bound, so this bounds the disk that they take."""

FILE_RULE = "VERSION/NAME, such as 1/model.onnx: .onnx, .xml, .bin or .data, without folders"

_FILE = re.compile(r"([1-9][0-9]{0,17})/([A-Za-z0-9_][A-Za-z0-9._-]{0,127}\.(?:onnx|xml|bin|data))")
"""No code and no compiled engine: only what a library reads as a model."""


class Override(Struct, frozen=True):
    """settings: keys of `model.toml` with their values. files: by path below the model's folder; none: its own.

    config: that the settings are of, in the place of the model's own.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    config: FolderConfig | None = None

    def over(self, model: ModelFolder) -> ModelFolder:
        """Lay the settings over those of a model's `model.toml`. Raises DecodeFailed where they do not go together."""
        if self.config is not None:
            model = replace(model, config=self.config, settings_error=None)
            base: Mapping[str, Any] = model.own_keys
        else:
            base = msgspec.to_builtins(model.settings)
        return replace(model, settings=_settings({**base, **self.settings})) if self.settings else model


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise DecodeFailed for settings that no model can have."""
    _settings(settings)


def _settings(keys: Mapping[str, Any]) -> ModelSettings:
    try:
        return msgspec.convert(keys, ModelSettings)
    except msgspec.ValidationError as error:
        raise DecodeFailed(f"config: {error}") from None


NO_OVERRIDE = Override()


def check_file(path: str) -> str:
    """Return a path that a caller's file may have below its model's folder. Raises DecodeFailed."""
    if _FILE.fullmatch(path) is None:
        raise DecodeFailed(f"file: got {path[:80]!r}, wanted {FILE_RULE}")
    return path


class OverrideFiles:
    """The folder of callers' files. The files of killed daemons are removed before the first write."""

    def __init__(self, folder: Path | None) -> None:
        """folder: None where the daemon has no state folder."""
        self._folder = folder
        self._places: set[Path] = set()

    def write(self, model: str, files: Mapping[str, bytes]) -> Path:
        """Write a model's folder. Raises LoadFailed."""
        if self._folder is None:
            raise LoadFailed("there is no state folder to keep the files in; name one with --state")
        if len(self._places) >= MAX_MODELS:
            raise LoadFailed(f"{MAX_MODELS} models have files of callers; load one without them first")
        import tempfile

        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._places:
                self._remove_left()
            place = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-{model}-", dir=self._folder))
        except OSError as error:
            raise LoadFailed(f"the files cannot be kept: {error.strerror}") from None
        self._places.add(place)
        try:
            for path, content in files.items():
                file = place / check_file(path)
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)
        except OSError as error:
            self.remove(place)
            raise LoadFailed(f"the files cannot be kept: {error.strerror}") from None
        return place

    def remove(self, place: Path) -> None:
        """Remove a folder that `write` returned."""
        import shutil

        self._places.discard(place)
        shutil.rmtree(place, ignore_errors=True)

    def _remove_left(self) -> None:
        """Remove folders of processes that are gone. One with this process's number had it before."""
        import shutil

        assert self._folder is not None
        for place in self._folder.iterdir():
            owner = place.name.partition("-")[0]
            if owner == str(os.getpid()) or not Path("/proc", owner).exists():
                shutil.rmtree(place, ignore_errors=True)

    def close(self) -> None:
        """Remove every folder."""
        for place in list(self._places):
            self.remove(place)
