"""The models folder as a walk over it found it: frozen values. What could not be served is a `Problem` that says why.

Knows no disk: walk.py makes these. Whoever watches, loads, tunes or publishes models reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge_runtime.config.settings import ModelSettings

Stamp = tuple[str, int, int, int, int]
Fingerprint = tuple[Stamp, ...]
"""(name, size, mtime_ns, inode, mode) of every file, sorted by name. Compare it; nothing else is promised about it.

The mode is in it so that a file which could not be read is tried again after a chmod.
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the folder that is not served, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        path = str(self.path)
        return self.reason if self.reason.startswith(path) else f"{path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class VersionFolder:
    """One version as it lies on disk. `files`: plain files by name; `path`: the folder that holds them.

    The fingerprint covers folders below it too, so that a change of external data is noticed.
    """

    model: str
    number: int
    path: Path
    files: Mapping[str, Path]
    fingerprint: Fingerprint
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One model as it lies on disk.

    `settings_error` says why `model.toml` cannot be used; `settings` are the defaults then.
    """

    name: str
    path: Path
    settings: ModelSettings
    settings_error: str | None
    versions: Mapping[int, VersionFolder]
    settings_fingerprint: Fingerprint = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Scan:
    """Everything found in one walk. `unreadable`: folders that are there (or were) and could not be listed."""

    models: Mapping[str, ModelFolder] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    unreadable: frozenset[Path] = frozenset()
