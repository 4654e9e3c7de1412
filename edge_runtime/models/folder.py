"""The models folder as values: each model, its versions, and a `Problem` for each path that cannot be served.

Reads no disk: walk.py makes these values, and the watcher, the loader, tuning and publishing read them. Owns which of a
model's versions are served.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from edge_runtime import plugins
from edge_runtime.config.settings import ModelSettings, Versions
from edge_runtime.model_spec import Interface, ModelSpec, TensorSpec
from edge_runtime.models.folder_files import FolderFile, folder_file
from edge_runtime.models.names import SETTINGS_FILE

Stamp = tuple[str, int, int, int, int]
Fingerprint = tuple[Stamp, ...]
"""(name, size, mtime_ns, inode, mode) of every file, sorted by name. For comparison only.

It has the mode so that an unreadable file is tried again after a chmod.
"""


DEFAULT_LATEST = 1
"""A device has memory for one version of a model; a new one replaces it."""


class Problem(Struct, frozen=True):
    """A path in the folder that is not served, and why. model: whose it is, or would be; "" of the folder itself.

    is_of_version: of a version, or of the settings of a model that has some, whose own states say it.
    """

    path: Path
    reason: str
    model: str = ""
    is_of_version: bool = False

    def __str__(self) -> str:
        path = str(self.path)
        return self.reason if self.reason.startswith(path) else f"{path}: {self.reason}"


class VersionFolder(Struct, frozen=True):
    """One version on disk. files: plain files by name. path: their folder.

    fingerprint: covers folders below it too, so that a change of external data is noticed. within: the real folders
    and files that its files must lie in, wherever links lead; () for a folder that only the daemon writes.
    """

    model: str
    number: int
    path: Path
    files: Mapping[str, Path]
    fingerprint: Fingerprint
    problems: tuple[Problem, ...] = ()
    within: tuple[str, ...] = ()

    @property
    def counts_requests(self) -> bool:
        """Return whether its `max_batch_rows` counts requests, as a file of it says."""
        return any((kind := folder_file(name)) is not None and kind.counts_requests for name in self.files)

    @property
    def chain_file(self) -> Path | None:
        """Return the file that says which models it asks, its own or its model's; None where it asks none so."""
        for name, path in self.files.items():
            kind = folder_file(name)
            if kind is not None and kind.is_version:
                return path
        return None


class SampleInput(Struct, frozen=True):
    """One input of a sample: of a file, of zeros, or made up where neither is said. tensor: without its rows."""

    tensor: TensorSpec
    file: str = ""
    is_zero: bool = False


class DeclaredSample(Struct, frozen=True):
    """Inputs for the first runs. key: which declares them, for people. rows: each the same; 0: the model has no rows.

    folder: of their files, in the model's own.
    """

    key: str
    rows: int
    inputs: tuple[SampleInput, ...]
    folder: str


class FolderConfig(Protocol):
    """The settings of a model in another server's file, read by the capability that knows it. A frozen value."""

    @property
    def file(self) -> str:
        """Return the file's name."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the keys of `model.toml` that it stands for."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Return its settings that have no meaning here, for people."""
        ...

    @property
    def model_file(self) -> str:
        """Return the name of a version's file or folder; "" for the usual one."""
        ...

    @property
    def usual_file(self) -> str:
        """Return the artifact that such a model has here; "" where it does not say."""
        ...

    @property
    def label_files(self) -> Mapping[str, str]:
        """Return the files of labels, by output."""
        ...

    @property
    def interface(self) -> Interface:
        """Return the interface that callers see of the model."""
        ...

    @property
    def code_options(self) -> Mapping[str, str]:
        """Return options of a load for a model that is code: it may read the file itself."""
        ...

    @property
    def sample(self) -> DeclaredSample | None:
        """Return the inputs for the first runs; None for made-up ones."""
        ...

    @property
    def chain(self) -> object | None:
        """Return the value that a loader of models that ask others reads in place of a file; None: any other model."""
        ...

    def chain_faults(self, steps: Mapping[str, tuple[ModelSpec, int]]) -> Iterator[str]:
        """Yield why a chain cannot be served by these models: by step, its tensors and its most rows, 0 for none."""
        ...

    def differences(self, backend: str, device: str) -> Iterator[str]:
        """Yield where the device profile serves the model otherwise than the file says."""
        ...


class ModelFolder(Struct, frozen=True):
    """One model on disk. settings_error: why its settings cannot be used; `settings` are the defaults then.

    config: its settings of another server, where it has some; own_keys: those of its `model.toml`. `settings` are both,
    and of a key that both have, those of `model.toml`. owned: of a pipeline that brings its models with it, each of one
    version and under its `owned_name`.
    """

    name: str
    path: Path
    settings: ModelSettings
    settings_error: str | None
    versions: Mapping[int, VersionFolder]
    settings_fingerprint: Fingerprint = ()
    problems: tuple[Problem, ...] = ()
    owned: tuple[ModelFolder, ...] = ()
    config: FolderConfig | None = None
    own_keys: Mapping[str, Any] = field(default_factory=dict)

    def all_problems(self) -> Iterator[Problem]:
        """Yield the problems of its settings, of its folder and of its versions."""
        found = [(problem, False) for problem in self.problems]
        if self.settings_error is not None:
            found.append((Problem(self.settings_file, self.settings_error), bool(self.versions)))
        found.extend((problem, True) for version in self.versions.values() for problem in version.problems)
        for problem, is_of_version in found:
            yield replace(problem, model=self.name, is_of_version=is_of_version)

    @property
    def is_pipeline(self) -> bool:
        """Whether it asks other models: a file of a version says so, or its config."""
        return any(map(self.asks_models, self.versions.values()))

    def asks_models(self, version: VersionFolder) -> bool:
        """Return whether a version asks other models."""
        return version.chain_file is not None or (self.config is not None and self.config.chain is not None)

    def chain_kind(self, version: VersionFolder) -> FolderFile:
        """Return the kind of file that says which models a version asks. Raises LookupError: it asks none."""
        file = version.chain_file
        name = file.name if file is not None else self.config.file if self.config is not None else ""
        kind = folder_file(name)
        if kind is None or not kind.loader:
            raise LookupError(f"{self.name} version {version.number} asks no other model")
        return kind

    @property
    def settings_file(self) -> Path:
        """Return the file of settings that a fault is in."""
        error = self.settings_error or ""
        names = (name for name in plugins.names("kinds") if error.startswith(f"{self.path / name}"))
        return self.path / next(names, SETTINGS_FILE)


class FolderTask(Struct, frozen=True):
    """A model of one version, with the models that it brings with it, as JSON for a child process."""

    name: str
    number: int
    path: str
    files: dict[str, str]
    settings: ModelSettings
    owned: tuple[FolderTask, ...] = ()

    @classmethod
    def of(cls, folder: ModelFolder) -> FolderTask:
        """Describe a folder of one version."""
        (version,) = folder.versions.values()
        return cls(
            folder.name,
            version.number,
            str(version.path.absolute()),
            {name: str(path.absolute()) for name, path in version.files.items()},
            folder.settings,
            tuple(map(cls.of, folder.owned)),
        )

    def folder(self) -> ModelFolder:
        """Return the folder that was described."""
        path, files = Path(self.path), {name: Path(file) for name, file in self.files.items()}
        version = VersionFolder(self.name, self.number, path, files, ())
        owned = tuple(each.folder() for each in self.owned)
        return ModelFolder(self.name, path, self.settings, None, {self.number: version}, owned=owned)


class Scan(Struct, frozen=True):
    """The result of one walk. unreadable: folders that exist (or did) and could not be listed."""

    models: Mapping[str, ModelFolder] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    unreadable: frozenset[Path] = frozenset()


def owned_name(pipeline: str, model: str) -> str:
    """Return the name of a model that a pipeline brings with it: no model name, so that nothing else can have it."""
    return f"{pipeline}/{model}"


def is_owned_name(name: str) -> bool:
    """Return whether a name is one of `owned_name`."""
    return "/" in name


def select_versions(available: Collection[int], policy: Versions) -> tuple[int, ...]:
    """Choose from the available versions; newest first, so that the most requested one is loaded first.

    `specific` names the versions, else `all` takes every one, else the newest
    `latest` are taken. Empty when no version is available, or none of the named ones.
    """
    newest_first = sorted(set(available), reverse=True)
    if policy.specific:
        wanted = set(policy.specific)
        return tuple(number for number in newest_first if number in wanted)
    if policy.all:
        return tuple(newest_first)
    return tuple(newest_first[: policy.latest or DEFAULT_LATEST])
