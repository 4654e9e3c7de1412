"""Introspection of the models folder: one walk over it gives the values of folder.py.

Owns: the layout `<models>/<name>/[model.toml]/<version>/<artifacts>` and the two short forms for a model without
version folders, both version 1: `<models>/<name>.onnx` (or `.xml` with its `.bin`, or `.plan`) and
`<models>/<name>/<any>.onnx`. Never opens an artifact, never loads, never writes; `model.toml` is the only file it
reads. What cannot be served is a `Problem` that says why; nothing here raises for what a folder holds.

Symbolic links are followed only to places inside the models folder. Called by the watcher and the command line.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from edge_runtime.config.loading import load_model_settings
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import ConfigError
from edge_runtime.repository.conversion_advice import conversion_advice
from edge_runtime.repository.folder import ModelFolder, Problem, Scan, VersionFolder
from edge_runtime.repository.listing import Files, Listing
from edge_runtime.repository.names import (
    LOOSE_SUFFIXES,
    NAME_RULE,
    SETTINGS_FILE,
    VARIANTS,
    artifact_candidates,
    is_ignored,
    is_model_name,
    parse_version,
    suffix_of,
    variant_name,
    variant_of,
    weights_name,
)

CODE_FILE = "model.py"

IS_A_FOLDER = "is a folder; wanted a file of that name"


def scan(root: Path, known: Scan | None = None) -> Scan:
    """Walk the models folder once.

    known: an earlier scan of the same root, whose values are used again where nothing changed; without it the result is
    the same, only dearer (each `model.toml` is read). Raises nothing: a root that cannot be listed is a problem.
    """
    return _Walk(root, known or Scan()).models_folder()


# ---- private --------------------------------------------------------------------------------------------------------


class _Walk:
    """One scan on its way down. Paths are text here: building Path objects costs more than the system calls."""

    def __init__(self, root: Path, known: Scan) -> None:
        self._root = str(root)
        self._known = known
        self._listing = Listing(root)
        self._problems: list[Problem] = []

    def models_folder(self) -> Scan:
        models: dict[str, ModelFolder] = {}
        files: list[os.DirEntry[str]] = []
        entries = self._listing.entries(self._root, self._problems, absent_is_a_problem=True)
        for entry in sorted(entries, key=lambda entry: entry.name):
            if is_ignored(entry.name):
                continue
            if not _is_folder(entry):
                files.append(entry)
            elif not is_model_name(entry.name):
                self._report(entry.path, f"the folder's name is no model name; wanted {NAME_RULE}")
            elif (reason := self._listing.why_not_followed(entry)) is not None:
                self._report(entry.path, reason)
            elif (model := self._model(entry.name, entry.path)) is not None:
                models[entry.name] = model
        for model in self._flat_models(files, taken=models):
            models[model.name] = model
        found = [problem for name in sorted(models) for problem in _problems_of(models[name])]
        return Scan(
            dict(sorted(models.items())), (*self._problems, *found), frozenset(map(Path, self._listing.unreadable))
        )

    # ---- a folder that is a model

    def _model(self, name: str, path: str) -> ModelFolder | None:
        known = self._known.models.get(name)
        problems: list[Problem] = []
        entries = self._listing.entries(path, problems)
        if not entries and path in self._listing.unreadable:
            self._problems.extend(problems)
            return None
        versions: dict[int, VersionFolder] = {}
        settings_entry: os.DirEntry[str] | None = None
        said_before = len(self._problems)
        others: list[os.DirEntry[str]] = []
        for entry in entries:
            number = parse_version(entry.name)
            if entry.name == SETTINGS_FILE:
                settings_entry = entry
            elif number is None or not _is_folder(entry):
                others.append(entry)
            elif (reason := self._listing.why_not_followed(entry)) is not None:
                problems.append(Problem(Path(entry.path), reason))
            elif (version := self._version(name, number, entry.path, known)) is not None:
                versions[number] = version
        if versions:
            problems.extend(_beside_versions(others))
        elif (version := self._flat_version(name, path, others, known)) is not None:
            versions[version.number] = version
        else:
            problems.extend(list(_to_be_converted(others)) or _not_a_version(others))
            has_said_why = bool(problems) or len(self._problems) > said_before
            if not has_said_why and not any(entry.path in self._listing.unreadable for entry in entries):
                problems.append(Problem(Path(path), "holds no version; wanted 1/model.onnx (or another artifact)"))
        return self._with_settings(name, path, settings_entry, dict(sorted(versions.items())), tuple(problems))

    def _version(self, name: str, number: int, path: str, known: ModelFolder | None) -> VersionFolder | None:
        files = Files()
        entries = self._listing.entries(path, files.problems)
        if path in self._listing.unreadable:
            self._problems.extend(files.problems)
            return None
        self._listing.read_files(entries, files)
        return self._version_value(name, number, path, files, known)

    def _flat_version(
        self, name: str, path: str, entries: list[os.DirEntry[str]], known: ModelFolder | None
    ) -> VersionFolder | None:
        """Artifacts that lie in the model's own folder, when there is no version folder: version 1."""
        if not any(_is_artifact_name(entry.name) for entry in entries if not is_ignored(entry.name)):
            return None
        return self._short_form(name, path, entries, known)

    def _short_form(
        self, name: str, path: str, entries: list[os.DirEntry[str]], known: ModelFolder | None
    ) -> VersionFolder | None:
        """Version 1 of these entries; None when no artifact among them is a plain file that may be read."""
        files = Files()
        self._listing.read_files(entries, files)
        if any(_is_artifact_name(file) for file in files.names):
            return self._version_value(name, 1, path, files, known)
        self._problems.extend(files.problems)
        return None

    def _version_value(
        self, name: str, number: int, path: str, files: Files, known: ModelFolder | None
    ) -> VersionFolder:
        fingerprint = files.fingerprint()
        before = known.versions.get(number) if known is not None else None
        if before is not None and before.fingerprint == fingerprint and _is_as_before(before, path, files):
            return before
        problems = (*files.problems, *_artifact_problems(path, files.names), *_folder_problems(path, files))
        paths = {file: Path(path, file) for file in sorted(files.names)}
        return VersionFolder(name, number, Path(path), paths, fingerprint, problems)

    def _with_settings(
        self,
        name: str,
        path: str,
        entry: os.DirEntry[str] | None,
        versions: dict[int, VersionFolder],
        problems: tuple[Problem, ...],
    ) -> ModelFolder:
        if entry is None:
            return ModelFolder(name, Path(path), ModelSettings(), None, versions, (), problems)
        files = Files()
        self._listing.read_files([entry], files)
        fingerprint = files.fingerprint()
        known = self._known.models.get(name)
        if (
            known is not None
            and fingerprint
            and (known.settings_fingerprint, known.settings_error) == (fingerprint, None)
        ):
            settings, error = known.settings, None
        elif files.problems:
            settings, error = ModelSettings(), str(files.problems[0])
        else:
            settings, error = _load_settings(Path(entry.path))
        return ModelFolder(name, Path(path), settings, error, versions, fingerprint, problems)

    # ---- files that are models

    def _flat_models(self, entries: list[os.DirEntry[str]], taken: Mapping[str, ModelFolder]) -> Iterator[ModelFolder]:
        """`<models>/<name>.onnx` and its kin. A file belongs to the longest model name that it begins with."""
        names = {entry.name for entry in entries}
        owned: dict[str, list[os.DirEntry[str]]] = {_stem(name): [] for name in names if _is_flat_model(name, names)}
        for entry in entries:
            owner = next((stem for stem in _stems(entry.name) if stem in owned), None)
            if owner is not None:
                owned[owner].append(entry)
            elif suffix_of(entry.name) == ".xml":
                self._report(entry.path, f"an OpenVINO IR needs its weights, {weights_name(entry.name)}, beside it")
            elif (advice := conversion_advice(entry.path)) is not None:
                self._report(entry.path, advice)
        for stem in sorted(owned):
            files = owned[stem]
            if not is_model_name(stem):
                self._report(files[0].path, f"{stem!r} is no model name; wanted {NAME_RULE}")
            elif stem in taken or f"{self._root}/{stem}" in self._listing.unreadable:
                self._report(files[0].path, f"ignored: the folder {stem}/ is that model; move the file to {stem}/1/")
            elif (model := self._flat_model(stem, files)) is not None:
                yield model

    def _flat_model(self, name: str, entries: list[os.DirEntry[str]]) -> ModelFolder | None:
        version = self._short_form(name, self._root, entries, self._known.models.get(name))
        if version is None:
            return None
        problems: list[Problem] = []
        if any(entry.name == f"{name}.toml" for entry in entries):
            reason = f"ignored: settings belong in {name}/{SETTINGS_FILE}, with the model in {name}/1/"
            problems.append(Problem(Path(self._root, f"{name}.toml"), reason))
        return ModelFolder(name, Path(self._root), ModelSettings(), None, {1: version}, (), tuple(problems))

    def _report(self, path: str, reason: str) -> None:
        self._problems.append(Problem(Path(path), reason))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link that leads to one or to nothing (whose own problem is reported then)."""
    try:
        if entry.is_dir():
            return True
        return entry.is_symlink() and not Path(entry.path).exists() and not suffix_of(entry.name)
    except OSError:
        return True


def _is_as_before(before: VersionFolder, path: str, files: Files) -> bool:
    """Whether a version with the same fingerprint needs no second look: same place, nothing wrong then or now."""
    return not files.problems and not before.problems and str(before.path) == path


def _is_artifact_name(name: str) -> bool:
    return suffix_of(name) in LOOSE_SUFFIXES or name == CODE_FILE


def _is_flat_model(name: str, names: Collection[str]) -> bool:
    return suffix_of(name) in LOOSE_SUFFIXES and (suffix_of(name) != ".xml" or weights_name(name) in names)


def _stem(name: str) -> str:
    """The model that a file is of: what comes before its suffix, and before the precision of a variant."""
    stem = name.rpartition(".")[0]
    return stem.rpartition(".")[0] if variant_of(name) else stem


def _stems(name: str) -> Iterator[str]:
    """What comes before each dot of a name, longest first."""
    while name := name.rpartition(".")[0]:
        yield name


def _load_settings(path: Path) -> tuple[ModelSettings, str | None]:
    try:
        return load_model_settings(path), None
    except ConfigError as error:
        return ModelSettings(), error.message
    except OSError as error:
        return ModelSettings(), f"{path}: cannot be read: {error.strerror}"


def _beside_versions(entries: list[os.DirEntry[str]]) -> Iterator[Problem]:
    """Artifacts that somebody put beside version folders, and folders that are no versions."""
    for entry in entries:
        if not is_ignored(entry.name) and not _is_folder(entry) and _is_artifact_name(entry.name):
            yield Problem(Path(entry.path), "ignored: the model has version folders; move it into one")
    yield from _not_a_version(entries)


def _not_a_version(entries: list[os.DirEntry[str]]) -> Iterator[Problem]:
    for entry in entries:
        if not is_ignored(entry.name) and _is_folder(entry):
            reason = "is not a version; wanted a positive integer without leading zeros"
            yield Problem(Path(entry.path), IS_A_FOLDER if _is_artifact_name(entry.name) else reason)


def _to_be_converted(entries: list[os.DirEntry[str]]) -> Iterator[Problem]:
    for entry in entries:
        advice = None if is_ignored(entry.name) or _is_folder(entry) else conversion_advice(entry.path)
        if advice is not None:
            yield Problem(Path(entry.path), advice)


def _folder_problems(path: str, files: Files) -> Iterator[Problem]:
    """Folders that have an artifact's name, where no file has."""
    if not any(map(_is_artifact_name, files.names)):
        for name in filter(_is_artifact_name, sorted(files.folders)):
            yield Problem(Path(path, name), IS_A_FOLDER)


def _artifact_problems(path: str, names: list[str]) -> Iterator[Problem]:
    """One problem for each kind of artifact that is there more than once with no canonical name among them."""
    wanted = (variant_name(f"model{suffix}", precision) for suffix in LOOSE_SUFFIXES for precision in ("", *VARIANTS))
    for name in wanted:
        found = artifact_candidates(names, name)
        if len(found) > 1:
            reason = f"holds {' and '.join(found)}; which one is the artifact? Name it {name}"
            yield Problem(Path(path), reason)


def _problems_of(model: ModelFolder) -> Iterator[Problem]:
    if model.settings_error is not None:
        yield Problem(model.path / SETTINGS_FILE, model.settings_error)
    yield from model.problems
    for version in model.versions.values():
        yield from version.problems
