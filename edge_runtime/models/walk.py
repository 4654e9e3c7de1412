"""The walk over the models folder, which gives the values of folder.py.

Owns: the layout `<models>/<name>/[model.toml]/<version>/<artifacts>` and the two short forms for a model without
version folders, both version 1: `<models>/<name>.onnx` (or another suffix of `LOOSE_SUFFIXES`, `.xml` with its `.bin`)
and `<models>/<name>/<any>.onnx`; a `FolderFile` in the place of artifacts (`pipeline.toml` with its `steps.py`), in a
version or in the model's own folder, where it stands for every version without one; the bounds on depth and number; and
which symbolic links are followed: those to places inside the models folder. A model that the configuration names has a
place of its own: its folder, or its file. Never loads, never writes; it reads `model.toml` and other files of settings,
and the first bytes of files whose names alone do not say what they are (kinds.py). A path that cannot be served is a
`Problem` that says why; no content of a folder raises. Called by the watcher and the command line.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from edge_runtime import plugins
from edge_runtime.backends.declaration import Declaration
from edge_runtime.config.loading import lay_over, read_model_keys
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import ConfigError
from edge_runtime.models.folder import Fingerprint, FolderConfig, ModelFolder, Problem, Scan, Stamp, VersionFolder
from edge_runtime.models.folder_files import folder_file
from edge_runtime.models.kinds import kind_of, may_be_model, what_it_lacks
from edge_runtime.models.names import (
    NAME_RULE,
    PART_FOLDERS,
    SETTINGS_FILE,
    VARIANTS,
    artifact_candidates,
    is_ignored,
    is_model_name,
    loose_suffixes,
    parse_version,
    suffix_of,
    variant_name,
    variant_of,
    weights_name,
)

MAX_DEPTH = 4
"""Folders below a version folder whose files are watched (external data may lie there); deeper ones are reported."""

MAX_REASON = 300
"""Characters of a surprise that a person reads."""

MAX_VERSION_FILES = 4096
"""Files of one version that are watched: a model split into one file a tensor has fewer, a wrong mount has more."""


class Files(Struct):
    """The plain files of one folder while it is read: their names, the stamps of all files below, and problems."""

    names: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    stamps: list[Stamp] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of all stamped files."""
        return tuple(sorted(self.stamps))


class Listing:
    """Folders listed and files stamped within one models folder, for one walk.

    Paths are text here and in `_FolderWalk`: building Path objects costs more than the system calls.
    """

    def __init__(self, root: Path, named: Path | None = None) -> None:
        """Start a walk. named: a file of the folder that may be a link to anywhere, since its operator named it."""
        self.unreadable: set[str] = set()
        """Folders that exist (or did) and could not be listed."""
        self._home = os.path.realpath(root)
        self._named = named
        self.within = (self._home, *([os.path.realpath(named)] if named is not None and named.is_symlink() else []))
        """Folders that files of a version must lie in."""

    def entries(
        self, path: str, problems: list[Problem], *, absent_is_a_problem: bool = False
    ) -> list[os.DirEntry[str]]:
        """List a folder. A vanished one is empty; an unreadable one is noted in `unreadable`."""
        try:
            with os.scandir(path) as found:
                return list(found)
        except FileNotFoundError:
            if absent_is_a_problem:
                problems.append(Problem(Path(path), "no such folder; create it, or name another one"))
                self.unreadable.add(path)
        except OSError as error:
            problems.append(Problem(Path(path), f"cannot be listed: {error.strerror}"))
            self.unreadable.add(path)
        return []

    def read_files(self, entries: list[os.DirEntry[str]], files: Files, prefix: str = "", depth: int = 0) -> None:
        """Stamp every plain file below; note the names of those in the folder itself (no prefix)."""
        for entry in entries:
            if is_ignored(entry.name):
                continue
            if len(files.stamps) >= MAX_VERSION_FILES:
                files.problems.append(Problem(Path(entry.path), f"more than {MAX_VERSION_FILES} files; not watched"))
                return
            try:
                if entry.is_dir(follow_symlinks=False):
                    if not prefix:
                        files.folders.append(entry.name)
                    self._read_folder(entry, files, prefix, depth)
                    continue
                is_plain = entry.is_file(follow_symlinks=False)
                found = entry.stat(follow_symlinks=False) if is_plain else self._stat_other(entry, files.problems)
                if found is not None:
                    files.stamps.append(
                        (prefix + entry.name, found.st_size, found.st_mtime_ns, found.st_ino, found.st_mode)
                    )
                    if not prefix:
                        files.names.append(entry.name)
            except FileNotFoundError:
                continue  # it vanished since the folder was listed: the next scan sees the rest

    def why_not_followed(self, entry: os.DirEntry[str]) -> str | None:
        """Return why a symbolic link is refused; None: it is not a link, or leads to a place in the models folder."""
        if not entry.is_symlink():
            return None
        try:
            place = os.path.realpath(entry.path, strict=True)
        except OSError as error:
            return f"is a symbolic link that cannot be followed: {error.strerror}"
        if not Path(place).is_relative_to(self._home) and Path(entry.path) != self._named:
            return f"is a symbolic link that leads outside the models folder, to {place}; copy the files instead"
        if Path(os.path.realpath(Path(entry.path).parent)).is_relative_to(place):
            return f"is a symbolic link to a folder that it lies in, {place}"
        return None

    def _read_folder(self, entry: os.DirEntry[str], files: Files, prefix: str, depth: int) -> None:
        if depth >= MAX_DEPTH:
            files.problems.append(Problem(Path(entry.path), f"more than {MAX_DEPTH} folders deep; not watched"))
            return
        self.read_files(self.entries(entry.path, files.problems), files, f"{prefix}{entry.name}/", depth + 1)

    def _stat_other(self, entry: os.DirEntry[str], problems: list[Problem]) -> os.stat_result | None:
        """Return the plain file that a link inside the models folder leads to; anything else is a problem."""
        if entry.is_symlink():
            reason = self.why_not_followed(entry)
            if reason is not None:
                problems.append(Problem(Path(entry.path), reason))
                return None
        found = entry.stat()
        if stat.S_ISREG(found.st_mode):
            return found
        problems.append(Problem(Path(entry.path), "is not a plain file; ignored"))
        return None


CODE_FILE = "model.py"

SAVED_MODEL_FILE = "saved_model.pb"

SAVED_MODEL_SUFFIX = ".savedmodel"
"""Of a folder that is a SavedModel, as Triton has it in a version: `1/model.savedmodel/saved_model.pb`."""

SERVED_FIRST = (".onnx", ".xml", ".plan")
"""Kinds that every profile prefers, so that several of one are always a question."""

ULTRALYTICS_FOLDER = "weights"
"""Where a training of Ultralytics leaves `best.pt`, and its exports."""

EXPORT_FOLDER = "onnx"
"""Where sentence-transformers and Optimum leave the graphs of a model, beside its `config.json`."""

IS_A_FOLDER = "is a folder; wanted a file of that name"


def scan(root: Path | None, known: Scan | None = None, named: Mapping[str, Path] | None = None) -> Scan:
    """Walk the models folder, and the places of named models, once.

    root: None where only named models are. named: a model's folder or file, by its name; it stands before the models
    folder's model of that name. known: an earlier scan of the same places, whose values are used again where nothing
    changed; without it the result is the same at a higher cost (each `model.toml` is read). Raises nothing: an
    unlistable root is a problem.
    """
    known = known or Scan()
    found = _FolderWalk(root, known).models_folder() if root is not None else Scan()
    for name, place in (named or {}).items():
        hidden = found.models.get(name)
        one = _named_model(name, place, known)
        problems = (*found.problems, *one.problems)
        if hidden is not None:
            reason = f"ignored: the configuration serves {place} as {name!r}"
            problems = (*problems, Problem(hidden.path, reason, name))
        others = {other: model for other, model in found.models.items() if other != name}
        found = Scan(dict(sorted((others | dict(one.models)).items())), problems, found.unreadable | one.unreadable)
    return found


# ---- private --------------------------------------------------------------------------------------------------------


def _named_model(name: str, place: Path, known: Scan) -> Scan:
    """The one model of a place: a folder of versions or artifacts, or a file."""
    if not is_model_name(name):
        return Scan({}, (Problem(place, f"{name!r} is not a model name; wanted {NAME_RULE}", name),))
    walk = _FolderWalk(place.parent, known, place) if place.is_file() else _FolderWalk(place, known)
    return walk.one_model(name, place)


class _FolderWalk:
    """One walk, from the models folder down to its files."""

    def __init__(self, root: Path, known: Scan, named: Path | None = None) -> None:
        self._root = str(root)
        self._known = known
        self._listing = Listing(root, named)
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
                self._report(entry.path, f"the folder's name is not a model name; wanted {NAME_RULE}")
            elif (reason := self._listing.why_not_followed(entry)) is not None:
                self._report(entry.path, reason)
            elif (model := self._model_or_problem(entry.name, entry.path)) is not None:
                models[entry.name] = model
        for model in self._flat_models(files, taken=models):
            models[model.name] = model
        named = [replace(problem, model=self._model_of(problem.path)) for problem in self._problems]
        named.extend(problem for name in sorted(models) for problem in models[name].all_problems())
        return Scan(dict(sorted(models.items())), tuple(named), frozenset(map(Path, self._listing.unreadable)))

    def one_model(self, name: str, place: Path) -> Scan:
        """Read a place that is one model: the root itself, or a file in it."""
        is_root = str(place) == self._root
        model = self._model(name, self._root, is_root=True) if is_root else self._one_file(name, place)
        named = [replace(problem, model=name) for problem in self._problems]
        named.extend(model.all_problems() if model is not None else ())
        return Scan(
            {name: model} if model is not None else {}, tuple(named), frozenset(map(Path, self._listing.unreadable))
        )

    def _model_of(self, path: Path) -> str:
        """Return the model that a path of the models folder is of, or would be; "" of the folder itself."""
        if str(path) == self._root:
            return ""
        first, *below = path.relative_to(self._root).parts
        return first if below or not suffix_of(first) or path.is_dir() else _stem(first)

    # ---- a folder that is a model

    def _model_or_problem(self, name: str, path: str) -> ModelFolder | None:
        """As `_model`; a fault that no reader foresaw costs that model alone, and leaves it as it was."""
        try:
            return self._model(name, path)
        except Exception as error:  # noqa: BLE001  a model's files must not keep the others from being seen
            self._report(path, f"cannot be read: {type(error).__name__}: {error}"[:MAX_REASON])
            self._listing.unreadable.add(path)
            return None

    def _model(self, name: str, path: str, *, is_root: bool = False) -> ModelFolder | None:
        known = self._known.models.get(name)
        problems: list[Problem] = []
        entries = self._listing.entries(path, problems, absent_is_a_problem=is_root)
        if not entries and path in self._listing.unreadable:
            self._problems.extend(problems)
            return None
        versions: dict[int, VersionFolder] = {}
        settings = self._settings(name, [entry for entry in entries if _is_of_settings(entry)])
        if known is not None and known.config is not settings.config:
            known = None  # another config may name another file
        said_before = len(self._problems)
        shared = self._shared_files(entries, problems)
        others: list[os.DirEntry[str]] = []
        for entry in entries:
            number = parse_version(entry.name)
            if _is_of_settings(entry):
                continue
            if number is None or not _is_folder(entry):
                others.append(entry)
            elif (reason := self._listing.why_not_followed(entry)) is not None:
                problems.append(Problem(Path(entry.path), reason))
            elif (version := self._version(name, number, entry.path, known, shared)) is not None:
                versions[number] = _as_configured(version, settings.config)
        if versions:
            problems.extend(_beside_versions(others))
        elif (version := self._flat_version(name, path, others, known)) is not None:
            versions[version.number] = _as_configured(version, settings.config)
        elif settings.config is not None and settings.config.chain is not None:
            # Its version's folder is empty, and what copies a repository may leave out empty folders: git does.
            versions[1] = VersionFolder(name, 1, Path(path), {}, (), within=self._listing.within)
        else:
            problems.extend(list(_exports(others)) or list(_files_that_lack(others)) or _not_a_version(others))
            has_said_why = bool(problems) or len(self._problems) > said_before
            if not has_said_why and not any(entry.path in self._listing.unreadable for entry in entries):
                problems.append(Problem(Path(path), "holds no version; wanted 1/model.onnx (or another artifact)"))
        return replace(settings, path=Path(path), versions=dict(sorted(versions.items())), problems=tuple(problems))

    def _shared_files(self, entries: list[os.DirEntry[str]], problems: list[Problem]) -> Files:
        """Return the files in a model's own folder that stand in the place of artifacts for each version without."""
        files = Files()
        kinds = [kind for entry in entries if (kind := folder_file(entry.name)) is not None and kind.is_version]
        if names := {name for kind in kinds for name in (kind.name, *kind.beside)}:
            named = [entry for entry in entries if entry.name in names and not _is_folder(entry)]
            self._listing.read_files(named, files)
            problems.extend(files.problems)
        return files

    def _version(
        self, name: str, number: int, path: str, known: ModelFolder | None, shared: Files
    ) -> VersionFolder | None:
        files = Files()
        entries = self._listing.entries(path, files.problems)
        if path in self._listing.unreadable:
            self._problems.extend(files.problems)
            return None
        self._listing.read_files(entries, files)
        return self._version_value(name, number, path, files, known, shared)

    def _flat_version(
        self, name: str, path: str, entries: list[os.DirEntry[str]], known: ModelFolder | None
    ) -> VersionFolder | None:
        """Return version 1 of artifacts in the model's own folder, where it has no version folder."""
        if not any(_may_be_version(entry.name) for entry in entries if not is_ignored(entry.name)):
            return None
        return self._short_form(name, path, entries, known)

    def _short_form(
        self, name: str, path: str, entries: list[os.DirEntry[str]], known: ModelFolder | None
    ) -> VersionFolder | None:
        """Return version 1 of these entries; None: no artifact among them is a plain file that may be read."""
        files = Files()
        self._listing.read_files(entries, files)
        if (
            any(map(_is_version_file, files.names))
            or _saved_model_of(files)
            or any(_is_artifact(f"{path}/{file}") for file in files.names)
        ):
            return self._version_value(name, 1, path, files, known, Files())
        self._problems.extend(files.problems)
        return None

    def _version_value(  # noqa: PLR0917 (one call each form)
        self, name: str, number: int, path: str, files: Files, known: ModelFolder | None, shared: Files
    ) -> VersionFolder:
        """Return a version. shared: the files of the model's own folder that it has too, unless it has its own."""
        of_model = [(f"../{stamp[0]}", *stamp[1:]) for stamp in shared.stamps if stamp[0] not in files.names]
        fingerprint = tuple(sorted([*files.stamps, *of_model]))
        before = known.versions.get(number) if known is not None else None
        within = self._listing.within
        if before is not None and before.fingerprint == fingerprint and _is_as_before(before, path, files, within):
            return before
        problems = (*files.problems, *_artifact_problems(path, files.names), *_folder_problems(path, files))
        paths = {file: Path(path, file) for file in sorted(files.names)}
        for file in shared.names:
            paths.setdefault(file, Path(path).parent / file)
        if nested := _saved_model_of(files):
            paths.setdefault(SAVED_MODEL_FILE, Path(path, nested))
        return VersionFolder(name, number, Path(path), paths, fingerprint, problems, within)

    def _settings(self, name: str, entries: list[os.DirEntry[str]]) -> ModelFolder:
        """Return a model with the settings of its folder's files, and nothing else yet."""
        files = Files()
        self._listing.read_files(entries, files)
        fingerprint = files.fingerprint()
        known = self._known.models.get(name)
        if (
            known is not None
            and fingerprint
            and (known.settings_fingerprint, known.settings_error) == (fingerprint, None)
        ):
            return known
        made = ModelFolder(name, Path(), ModelSettings(), None, {}, fingerprint)
        if files.problems:
            return replace(made, settings_error=str(files.problems[0]))
        return _read_settings(made, {entry.name: Path(entry.path) for entry in entries})

    # ---- files that are models

    def _flat_models(self, entries: list[os.DirEntry[str]], taken: Mapping[str, ModelFolder]) -> Iterator[ModelFolder]:
        """Yield the models `<models>/<name>.onnx` and the like. A file is of the longest name that it begins with."""
        owned, others = _owned(entries)
        for entry in others:
            if suffix_of(entry.name) == ".xml":
                self._report(entry.path, f"an OpenVINO IR needs its weights, {weights_name(entry.name)}, beside it")
            elif entry.name == SAVED_MODEL_FILE:
                self._report(entry.path, f"is part of a SavedModel: put its whole folder here, as NAME/{entry.name}")
            elif not entry.is_symlink() and (lack := what_it_lacks(entry.path)) is not None:
                self._report(entry.path, lack)
        for stem in sorted(owned):
            files = owned[stem]
            if not is_model_name(stem):
                self._report(files[0].path, f"{stem!r} is not a model name; wanted {NAME_RULE}")
            elif stem in taken or f"{self._root}/{stem}" in self._listing.unreadable:
                self._report(files[0].path, f"ignored: the folder {stem}/ is that model; move the file to {stem}/1/")
            elif (model := self._flat_model(stem, files)) is not None:
                yield model

    def _one_file(self, name: str, file: Path) -> ModelFolder | None:
        """Return the model of one file, with the files that belong to it beside it."""
        found = self._listing.entries(self._root, self._problems)
        owned, _ = _owned([entry for entry in found if not is_ignored(entry.name) and not _is_folder(entry)])
        if _stem(file.name) not in owned:
            wanted = "is not a model; wanted a file .onnx, .xml with its .bin, or another that docs/models.md lists"
            self._report(str(file), what_it_lacks(str(file)) or wanted)
            return None
        return self._flat_model(name, owned[_stem(file.name)])

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
    """Return whether it is a folder, or a link to one or to nothing (whose own problem is reported then)."""
    try:
        if entry.is_dir():
            return True
        return entry.is_symlink() and not Path(entry.path).exists() and not suffix_of(entry.name)
    except OSError:
        return True


def _is_as_before(before: VersionFolder, path: str, files: Files, within: tuple[str, ...]) -> bool:
    """Return whether a version with the same fingerprint is unchanged: the same place, no problem then or now."""
    return not files.problems and not before.problems and str(before.path) == path and before.within == within


def _is_artifact_name(name: str) -> bool:
    return suffix_of(name) in loose_suffixes() or name in (CODE_FILE, SAVED_MODEL_FILE)


def _may_be_artifact(name: str) -> bool:
    return _is_artifact_name(name) or may_be_model(name) or name.endswith(SAVED_MODEL_SUFFIX)


def _may_be_version(name: str) -> bool:
    return _is_version_file(name) or _may_be_artifact(name)


def _is_version_file(name: str) -> bool:
    kind = folder_file(name)
    return kind is not None and kind.is_version


def _is_settings(name: str) -> bool:
    kind = folder_file(name)
    return name == SETTINGS_FILE or (kind is not None and bool(kind.reader))


def _is_of_settings(entry: os.DirEntry[str]) -> bool:
    return _is_settings(entry.name) or (entry.name in PART_FOLDERS and entry.is_dir(follow_symlinks=False))


def _is_artifact(path: str) -> bool:
    """Return whether a file is an artifact: by its name, or by its bytes where other files have such names too."""
    name = path.rpartition("/")[2]
    if _is_artifact_name(name) or not may_be_model(name):
        return _is_artifact_name(name)
    kind = kind_of(Path(path))
    return kind is not None and kind.is_model


def _saved_model_of(files: Files) -> str:
    """Return the path of `saved_model.pb` in the one folder `<any>.savedmodel`; "" where there is none, or several."""
    suffix = f"{SAVED_MODEL_SUFFIX}/{SAVED_MODEL_FILE}"
    found = [name for name, *_ in files.stamps if name.endswith(suffix) and name.count("/") == 1]
    return found[0] if len(found) == 1 else ""


def _is_flat_model(entry: os.DirEntry[str], names: Collection[str]) -> bool:
    suffix = suffix_of(entry.name)
    if suffix in loose_suffixes():
        return suffix != ".xml" or weights_name(entry.name) in names
    return may_be_model(entry.name) and not entry.is_symlink() and _is_artifact(entry.path) and entry.name[0] != "."


def _owned(
    entries: list[os.DirEntry[str]],
) -> tuple[dict[str, list[os.DirEntry[str]]], list[os.DirEntry[str]]]:
    """Files by the model that they belong to, the longest name that a file begins with; and those of no model."""
    names = {entry.name for entry in entries}
    models = (entry.name for entry in entries if _is_flat_model(entry, names) and entry.name != SAVED_MODEL_FILE)
    owned: dict[str, list[os.DirEntry[str]]] = {_stem(name): [] for name in models}
    others: list[os.DirEntry[str]] = []
    for entry in entries:
        owner = next((stem for stem in _stems(entry.name) if stem in owned), None)
        (owned[owner] if owner is not None else others).append(entry)
    return owned, others


def _stem(name: str) -> str:
    """Return the model of a file: the name before its suffix, and before the precision of a variant."""
    stem = name.rpartition(".")[0]
    return stem.rpartition(".")[0] if variant_of(name) else stem


def _stems(name: str) -> Iterator[str]:
    """Yield the part of a name before each of its dots, longest first."""
    while name := name.rpartition(".")[0]:
        yield name


def _read_settings(model: ModelFolder, files: Mapping[str, Path]) -> ModelFolder:
    """Return a model with the settings of its files, or why those cannot be used."""
    config, own_keys = None, {}
    path = files.get(SETTINGS_FILE)
    try:
        kind = next((kind for name in files if (kind := folder_file(name)) is not None and kind.reader), None)
        if kind is not None:
            path = files[kind.name]
            config = plugins.named(kind.reader)(path, model.name)
        if SETTINGS_FILE in files:
            path = files[SETTINGS_FILE]
            own_keys = read_model_keys(path)
        settings = lay_over(config.settings if config is not None else {}, own_keys, str(path))
    except ConfigError as error:
        return replace(model, settings_error=error.message, config=config)
    except OSError as error:
        return replace(model, settings_error=f"{path}: cannot be read: {error.strerror}", config=config)
    return replace(model, settings=settings, config=config, own_keys=own_keys)


def _as_configured(version: VersionFolder, config: FolderConfig | None) -> VersionFolder:
    """Return a version with the file that its config names in the place of the usual one, whatever it is called."""
    named, usual = (config.model_file, config.usual_file) if config is not None else ("", "")
    there = {name for name, *_ in version.fingerprint} if usual else set()
    # A SavedModel is a folder, and a large ONNX model may be one: 1/model.onnx/model.onnx.
    found = next((each for each in (named, f"{named or usual}/{usual}") if each in there), None)
    if found is None or not usual or version.files.get(usual) == version.path / found:
        return version
    files = {**version.files, usual: version.path / found}
    problems = tuple(each for each in version.problems if each.path != version.path and each.path.name != named)
    return replace(version, files=dict(sorted(files.items())), problems=problems)


def _beside_versions(entries: list[os.DirEntry[str]]) -> Iterator[Problem]:
    """Yield models beside version folders, and folders that are not versions."""
    for entry in entries:
        if is_ignored(entry.name) or _is_folder(entry):
            continue
        if _is_artifact_name(entry.name) or (not entry.is_symlink() and _is_artifact(entry.path)):
            yield Problem(Path(entry.path), "ignored: the model has version folders; move it into one")
    yield from _files_that_lack(entries)
    yield from _not_a_version(entries)


def _exports(entries: list[os.DirEntry[str]]) -> Iterator[Problem]:
    """Yield the graphs of an export that lies here as it was downloaded: with its texts it is taken by `import`."""
    if all(entry.name != "config.json" for entry in entries):
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.name == EXPORT_FOLDER and _is_folder(entry) and _has_model(path):
            model = path.parent
            yield Problem(
                path,
                "is where sentence-transformers and Optimum leave a model's graphs, which is not a version: move "
                f"{model} out of the models folder, and have it imported, its texts and variants included: "
                f"edge-runtime import {model.name} --models {model.parent} (docs/import.md)",
            )


def _not_a_version(entries: list[os.DirEntry[str]]) -> Iterator[Problem]:
    for entry in entries:
        if is_ignored(entry.name) or not _is_folder(entry):
            continue
        path = Path(entry.path)
        is_training = entry.name == ULTRALYTICS_FOLDER
        trained = _trained_there(path if is_training else path / ULTRALYTICS_FOLDER, path.parent)
        if trained is not None:
            yield trained
        elif _is_artifact_name(entry.name):
            yield Problem(path, IS_A_FOLDER)
        else:
            yield Problem(path, f"is not a version; {_as_version(path)}")


def _as_version(folder: Path) -> str:
    """Say what to do with a folder in a model's folder that is not a version."""
    number = re.fullmatch(r"(?:v|version[-_ ]?)?0*([1-9]\d{0,17})", folder.name, re.IGNORECASE)
    if number is not None:
        return f"wanted a positive integer without leading zeros: rename it to {number[1]}"
    if not folder.name.isdigit() and (_has_model(folder) or _has_model(folder / "1")):
        return f"where it is a model of its own, move it to {folder.parent.parent / folder.name}"
    return "wanted a positive integer without leading zeros"


def _has_model(folder: Path) -> bool:
    try:
        with os.scandir(folder) as found:
            return any(_is_artifact(entry.path) for entry in islice(found, MAX_VERSION_FILES))
    except OSError:
        return False


def _trained_there(folder: Path, model: Path) -> Problem | None:
    """Return what to do with the best model of a training of Ultralytics; None where its folder holds none."""
    exported = folder / "best.onnx"
    if exported.is_file():
        wanted = model / "1" / "model.onnx"
        return Problem(exported, f"is where Ultralytics left it, which is not a version: copy it to {wanted}")
    lack = what_it_lacks(str(folder / "best.pt"))
    return Problem(folder / "best.pt", lack) if lack is not None else None


def _files_that_lack(entries: list[os.DirEntry[str]]) -> Iterator[Problem]:
    """Yield files that are not artifacts by their names, and are models all the same, or would be."""
    for entry in entries:
        if is_ignored(entry.name) or entry.is_symlink() or _is_folder(entry) or _is_artifact(entry.path):
            continue
        lack = what_it_lacks(entry.path)
        if lack is not None:
            yield Problem(Path(entry.path), lack)


def _folder_problems(path: str, files: Files) -> Iterator[Problem]:
    """Yield folders that have an artifact's name, where no file has one."""
    if not any(map(_is_artifact_name, files.names)):
        for name in filter(_is_artifact_name, sorted(files.folders)):
            yield Problem(Path(path, name), IS_A_FOLDER)


def _artifact_problems(path: str, names: list[str]) -> Iterator[Problem]:
    """Yield a problem for each kind of artifact of which there are several, none with the canonical name."""
    wanted = [variant_name(f"model{suffix}", precision) for suffix in loose_suffixes() for precision in ("", *VARIANTS)]
    several = {name: found for name in wanted if len(found := artifact_candidates(names, name)) > 1}
    if several and backend_of_parts(names) is not None:
        return
    is_one_clear = any(len(artifact_candidates(names, f"model{suffix}")) == 1 for suffix in loose_suffixes())
    for name, found in several.items():
        # Other models lie beside an ONNX as what it was made of (`best.pt`, `last.pt`), and are not asked for.
        if suffix_of(name) in SERVED_FIRST or not is_one_clear:
            reason = f"holds {' and '.join(found)}; which one is the artifact? Name it {name}"
            yield Problem(Path(path), reason)


def backend_of_parts(names: Collection[str]) -> Declaration | None:
    """Return the backend that loads files of these names as one model, each under a name of its own."""
    declared = (plugins.declared("backends", name) for name in plugins.names("backends"))
    found: Declaration
    for found in declared:
        if found.beside and set(found.beside) <= set(names) and not set(found.artifacts).isdisjoint(names):
            return found
    return None
