"""Intake of a model's folder: the files that may be published, copied aside and hashed.

Owns: the rule that a release is weights and graphs, never code, and that the published bytes are the tried ones: every
file is copied first, through descriptors that follow no link, and only the copies are read afterwards. Never loads a
model. Called by `releases`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edge_runtime.backends.declaration import Declaration
from edge_runtime.backends.onnx.files import check_onnx_files
from edge_runtime.errors import ConfigError, LoadFailed, PublishError
from edge_runtime.models.folder import ModelFolder, VersionFolder
from edge_runtime.models.kinds import kind_of
from edge_runtime.models.labels import read_labels
from edge_runtime.models.loading import steps_of
from edge_runtime.models.names import (
    FILE_RULE,
    NAME_RULE,
    SETTINGS_FILE,
    VARIANTS,
    artifact_candidates,
    is_code,
    is_file_name,
    is_ignored,
    is_model_name,
    parse_version,
    suffix_of,
    variant_name,
    variant_of,
    weights_name,
)
from edge_runtime.models.walk import MAX_VERSION_FILES, backend_of_parts
from edge_runtime.pipelines import PIPELINE, STEPS_FILE
from edge_runtime.pipelines.definition import Pipeline, read_pipeline
from edge_runtime.publish.folder import RepositoryFolder
from edge_runtime.steps import ModelSteps
from edge_runtime.triton import CONFIG
from edge_runtime.triton.config import read_config_file
from edge_runtime.typed_toml import parse_toml
from edge_runtime.updates.manifest import read_release_settings
from edge_runtime.updates.release_paths import RESERVED_FILES, step_file

MAX_FILE_BYTES = 16 << 30
"""More than any device of ours has memory for."""

MAX_SETTINGS_BYTES = 1 << 16

_GRAPHS = {"model.onnx": "onnxruntime", "model.xml": "openvino", "model.tflite": "litert"}
"""Artifacts that a release carries, and the backend that tries each before it is published."""

_PIECE_BYTES = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file of a release, copied aside. backend: which loads it, or whose data it is. precision: of a variant.

    model: of a pipeline, the one of its models that the file is of.
    """

    name: str
    path: Path
    sha256: str
    length: int
    backend: str
    precision: str = ""
    model: str = ""

    @property
    def published_name(self) -> str:
        """Return the last part of its target's path."""
        return step_file(self.name, self.model) if self.model else self.name


@dataclass(frozen=True, slots=True)
class StagedArtifact:
    """One graph of a release, copied aside. precision: of a variant (`model.int8.onnx`), "" for the model itself."""

    backend: str
    path: Path
    precision: str = ""


@dataclass(frozen=True, slots=True)
class Intake:
    """A version that may be tried. artifacts: each graph, the model itself first; files: these and their data.

    left_out: names of other files in the folder, which are not published. settings: of `model.toml`, as written; of a
    model whose host opens files, such as a tokenizer, with all steps that files beside it tell, which stay behind.
    has_steps: it is one.
    pipeline: the text of `pipeline.toml`; its models are `parts`, and `files` are theirs. has_versions: it lies in a
    version folder.
    """

    model: str
    version: int
    settings: Mapping[str, Any]
    artifacts: tuple[StagedArtifact, ...]
    files: tuple[StagedFile, ...]
    left_out: tuple[str, ...]
    pipeline: str = ""
    parts: tuple[Intake, ...] = ()
    has_versions: bool = True
    has_steps: bool = False


def take_in(
    folder: RepositoryFolder,
    path: Path,
    model: str | None = None,
    version: int | None = None,
    models: Path | None = None,
) -> Intake:
    """Copy a version of a model, or of a pipeline with its models, aside.

    path: `<name>/` with version folders or files in it, or `<name>/<version>/`. model, version: None means the folder's
    name and the newest version. models: where a pipeline's models lie; None: beside it. Raises PublishError: it is not
    a model, has code or a link, is too large, or has a name that cannot be published.
    """
    place = _find_version(path, model, version)
    names = _plain_names(place.path)
    declared = _read_pipeline(place)
    if declared is not None:
        return _take_in_pipeline(folder, place, declared, models or place.home.parent)
    return _take_in_model(folder, place, names)


@dataclass(frozen=True, slots=True)
class _PipelineText:
    """A pipeline, the file that says it, and its text as `pipeline.toml`."""

    pipeline: Pipeline
    file: Path
    text: str


def _read_pipeline(place: _VersionFiles) -> _PipelineText | None:
    """Return the pipeline that a folder holds; None: it is a model."""
    config = place.home / CONFIG.name
    try:
        for file in (place.path / PIPELINE.name, place.home / PIPELINE.name):
            if file.is_file():
                text = _read_text(file)
                return _PipelineText(read_pipeline(text, str(file)), file, text)
        ensemble = read_config_file(config, place.model).chain if config.is_file() else None
        if ensemble is None:
            return None
        text = _ensemble_text(ensemble)
        return _PipelineText(read_pipeline(text, str(config)), config, text)
    except ConfigError as error:
        raise PublishError(error.message) from error


def _ensemble_text(pipeline: Pipeline) -> str:
    """Write a Triton ensemble as `pipeline.toml`. A JSON string is one of TOML too."""
    quote = json.dumps
    lines: list[str] = []
    for step in pipeline.steps:
        inputs = ", ".join(f"{quote(name)} = {quote(str(place))}" for name, place in step.inputs.items())
        lines += ["[[step]]", f"name = {quote(step.name)}", f"model = {quote(step.model)}"]
        lines += [f"version = {step.version}"] if step.version is not None else []
        lines += [f"inputs = {{{inputs}}}", ""]
    for name, spec in pipeline.inputs.items():
        lines += [f"[input.{quote(name)}]", f"datatype = {quote(spec.datatype)}", f"shape = {list(spec.shape)}", ""]
    lines += ["[output]", *(f"{quote(name)} = {quote(str(place))}" for name, place in pipeline.outputs.items()), ""]
    return "\n".join(lines)


def _take_in_pipeline(folder: RepositoryFolder, place: _VersionFiles, declared: _PipelineText, models: Path) -> Intake:
    pipeline, file = declared.pipeline, declared.file
    _plain_names(place.home)
    for step in pipeline.steps:
        if step.python is not None:
            raise PublishError(
                f"{file}: step {step.name} is Python, and an update never carries code: publish the pipeline without "
                "it, or put it on devices by other means"
            )
    parts = tuple(_take_in_part(folder, file, pipeline, name, models) for name in pipeline.models)
    return Intake(
        place.model,
        place.version,
        _read_settings(place),
        (),
        tuple(each for part in parts for each in part.files),
        tuple(f"{part.model}/{name}" for part in parts for name in part.left_out),
        declared.text,
        parts,
        has_versions=place.path != place.home,
    )


def _take_in_part(folder: RepositoryFolder, file: Path, pipeline: Pipeline, name: str, models: Path) -> Intake:
    """Copy the model aside that steps of a pipeline ask by this name."""
    asked = {step.version for step in pipeline.steps if step.model == name}
    if len(asked) > 1:
        raise PublishError(f"{file}: asks {name} in more than one version; a release carries one of each model")
    if not (models / name).is_dir():
        raise PublishError(
            f"{file}: asks {name}, and there is no folder {models / name}; put it there as {name}/1/, or name the "
            "folder of its models with --models"
        )
    place = _find_version(models / name, None, asked.pop())
    names = _plain_names(place.path)
    if _read_pipeline(place) is not None:
        raise PublishError(f"{file}: asks {name}, which is a pipeline itself; a release carries a pipeline of models")
    return _take_in_model(folder, place, names, name)


def _take_in_model(folder: RepositoryFolder, place: _VersionFiles, names: list[str], part: str = "") -> Intake:
    """part: its name in the pipeline that it is published with."""
    whole = backend_of_parts(names)
    graphs = [] if whole is not None else _graphs(names, place.path)
    if not graphs and whole is None:
        ways = "".join(f"; {way}" for name in names if (way := _way_to_publish(place.path / name)))
        raise PublishError(
            f"{place.path}: holds {', '.join(names) or 'nothing'}; wanted a model as .onnx, .tflite, or .xml and .bin"
            f"{ways}"
        )
    wanted = _files_of(graphs, place.path)
    if whole is not None:
        graphs = [next(name for name in whole.artifacts if name in names)]
        wanted = _files_of_whole(whole, graphs[0], names)
    _check_wanted(place.path, wanted, names)
    _check_space(folder, place.path, wanted)
    files = tuple(_stage(folder, place.path / name, *of, part=part) for name, of in wanted.items())
    by_name = {file.name: file for file in files}
    for name in graphs:
        if suffix_of(name) == ".onnx":
            _data_of(by_name[name].path)  # the copy, in case the original was changed meanwhile
    artifacts = tuple(StagedArtifact(by_name[name].backend, by_name[name].path, variant_of(name)) for name in graphs)
    settings = _read_settings(place)
    steps = _steps_of(place, names, settings, artifacts[0].path)
    read = {SETTINGS_FILE, CONFIG.name, *wanted}
    if steps is not None:
        sources = [Path(each) for each in steps.files.values()]
        _check_wanted_files(sources)
        files += tuple(_stage(folder, each, "", "", part=part) for each in sources)
        settings = _with_steps(settings, steps)
        read |= {each.name for each in sources}
    left_out = tuple(name for name in names if name not in read)
    return Intake(place.model, place.version, settings, artifacts, files, left_out, has_steps=steps is not None)


def _steps_of(
    place: _VersionFiles, names: Sequence[str], settings: Mapping[str, Any], artifact: Path
) -> ModelSteps | None:
    """Return the steps of a model whose host opens files for them; None of any other. Raises PublishError."""
    typed = read_release_settings(settings, str(place.settings))
    version = VersionFolder(place.model, place.version, place.path, {name: place.path / name for name in names}, ())
    folder = ModelFolder(place.model, place.home, typed, None, {place.version: version})
    try:
        steps = steps_of(typed, folder, version, artifact)
    except LoadFailed as error:
        raise PublishError(f"{place.path}: {error.message}") from error
    return steps if steps is not None and steps.files else None


def _with_steps(settings: Mapping[str, Any], steps: ModelSteps) -> dict[str, Any]:
    """Return settings with all that these steps say, so that a device needs none of the files that said it."""
    fields = msgspec.to_builtins(steps)
    tables = {
        key: {name: {k: v for k, v in each.items() if v is not None} for name, each in fields[f"{key}s"].items()}
        for key in ("input", "output")
    }
    for name, labels in fields["labels"].items():
        tables["output"].setdefault(name, {})["labels"] = labels
    return {**settings, **tables}


def _check_wanted_files(paths: Iterable[Path]) -> None:
    for path in paths:
        if not is_file_name(path.name) or path.name in RESERVED_FILES or is_code(path.name):
            raise PublishError(f"{path}: cannot be published; wanted {FILE_RULE}, no code, and not manifest.json")
        if path.lstat().st_size > MAX_FILE_BYTES:
            raise PublishError(f"{path}: has over {MAX_FILE_BYTES} bytes")


def _graphs(names: list[str], folder: Path) -> list[str]:
    """Return the models among the files of a folder, and behind them their variants.

    Raises PublishError: which of several is not said.
    """
    graphs = [name for wanted in _GRAPHS if (name := _one_of(names, wanted, folder)) is not None]
    if graphs:
        variants = (_one_of(names, variant_name(each, precision), folder) for precision in VARIANTS for each in _GRAPHS)
        graphs += [name for name in variants if name is not None]
    return graphs


def _files_of_whole(backend: Declaration, artifact: str, names: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return what a backend reads of a folder that it loads as one model, as `_files_of`: a device has all or none."""
    graphs = (artifact, *backend.beside)
    weights = tuple(weights_name(name) for name in graphs if suffix_of(name) == ".xml")
    data = tuple(name for name in backend.data if name in names)
    return dict.fromkeys((*graphs, *weights, *data), (backend.name, ""))


def _files_of(graphs: Sequence[str], folder: Path) -> dict[str, tuple[str, str]]:
    """Return the backend and the precision of each file that these graphs need.

    Data that several graphs share counts as the model's own, which every device fetches.
    """
    wanted: dict[str, tuple[str, str]] = {}
    for name in graphs:
        suffix = suffix_of(name)
        data: tuple[str, ...] = (weights_name(name),) if suffix == ".xml" else ()
        if suffix == ".onnx":
            data = _data_of(folder / name)
        for file in (name, *data):
            wanted.setdefault(file, (_GRAPHS[f"model{suffix}"], variant_of(name)))
    return wanted


@dataclass(frozen=True, slots=True)
class _VersionFiles:
    model: str
    version: int
    path: Path
    settings: Path

    @property
    def home(self) -> Path:
        """Return the model's folder, which holds its version folders or is the version itself."""
        return self.settings.parent


def _find_version(path: Path, model: str | None, version: int | None) -> _VersionFiles:
    folder = path.resolve()
    if not folder.is_dir():
        way = _way_to_publish(folder)
        raise PublishError(
            f"{path}: is not a folder; wanted a model's folder, for example models/digits{f'; {way}' if way else ''}"
        )
    own_number = parse_version(folder.name)
    inside = sorted(number for entry in folder.iterdir() if entry.is_dir() and (number := parse_version(entry.name)))
    if inside:
        number = version or inside[-1]
        if number not in inside:
            raise PublishError(f"{path}: has no version {number}; it has {', '.join(map(str, inside))}")
        if (folder / str(number)).is_symlink():
            raise PublishError(f"{path / str(number)}: is a symbolic link; copy the files there")
        place = _VersionFiles(model or folder.name, number, folder / str(number), folder / SETTINGS_FILE)
    elif own_number is not None:
        place = _VersionFiles(model or folder.parent.name, version or own_number, folder, folder.parent / SETTINGS_FILE)
    else:
        place = _VersionFiles(model or folder.name, version or 1, folder, folder / SETTINGS_FILE)
    if not is_model_name(place.model):
        raise PublishError(f"{place.model[:80]!r} is not a model name; wanted {NAME_RULE}; give one with --model")
    return place


def _plain_names(folder: Path) -> list[str]:
    """Return the names of a folder's files. Raises PublishError for links, devices and code, needed or not."""
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_ignored(entry.name) or (entry.is_dir(follow_symlinks=False)):
                continue
            if entry.is_symlink() or not entry.is_file(follow_symlinks=False):
                raise PublishError(f"{entry.path}: is not a plain file; copy its content there")
            if entry.name == STEPS_FILE:
                raise PublishError(
                    f"{entry.path}: is code, and an update never carries code: publish the pipeline without Python "
                    "steps, or put it on devices by other means"
                )
            if is_code(entry.name):
                way = _way_to_publish(Path(entry.path)) or "convert the model to ONNX"
                raise PublishError(
                    f"{entry.path}: is code, or compiled for one machine; an update carries neither: {way}, or put it "
                    "on devices by other means"
                )
            names.append(entry.name)
            if len(names) > MAX_VERSION_FILES:
                raise PublishError(f"{folder}: holds more than {MAX_VERSION_FILES} files; is it the right folder?")
    return sorted(names)


def _way_to_publish(path: Path) -> str:
    """Return the kind of a file that has to be converted, and the command that does; "" for any other file."""
    kind = kind_of(path)
    if kind is None or not kind.converts_to:
        return ""
    source = path.parent if path.name == "saved_model.pb" else path
    return (
        f"{path.name} is {kind.name}, and a release carries what is made of it: edge-runtime convert "
        f"{shlex.quote(str(source))} --to {kind.converts_to} --output {shlex.quote(f'{path.parent}/')}"
    )


def _one_of(names: list[str], wanted: str, folder: Path) -> str | None:
    place = artifact_candidates(names, wanted)
    if len(place) > 1:
        raise PublishError(f"{folder}: holds {' and '.join(place)}; which one is the model? Name it {wanted}")
    return place[0] if place else None


def _data_of(artifact: Path) -> tuple[str, ...]:
    """Return the data files of an ONNX model. Raises PublishError: it is none, or names files that it must not."""
    try:
        return check_onnx_files(artifact).locations
    except LoadFailed as error:
        raise PublishError(f"{artifact}: {error.message}") from error


def _check_wanted(folder: Path, wanted: Iterable[str], names: list[str]) -> None:
    for name in wanted:
        if "/" in name:
            raise PublishError(f"{folder}: the model's data {name!r} is in a folder; export it beside the model")
        if name not in names:
            raise PublishError(f"{folder}: {name!r} is missing, or hidden; the model cannot do without it")
        if not is_file_name(name) or name in RESERVED_FILES:
            raise PublishError(f"{folder}: {name!r} cannot be published; wanted {FILE_RULE}, not manifest.json")
        size = (folder / name).lstat().st_size
        if size > MAX_FILE_BYTES:
            raise PublishError(f"{folder / name}: has {size} bytes, wanted at most {MAX_FILE_BYTES}")


def _check_space(folder: RepositoryFolder, source: Path, names: Iterable[str]) -> None:
    nbytes = sum((source / name).lstat().st_size for name in names)
    free = shutil.disk_usage(folder.path).free
    if nbytes > free:
        raise PublishError(f"{folder.path}: {free} bytes are free and the model has {nbytes}; free some space")


def _stage(folder: RepositoryFolder, source: Path, backend: str, precision: str, *, part: str) -> StagedFile:
    digest, length = hashlib.sha256(), 0

    def pieces() -> Iterator[bytes]:
        nonlocal length
        for piece in _read(source):
            digest.update(piece)
            length += len(piece)
            yield piece

    path = folder.stage(f"models/{part}/{source.name}" if part else f"model/{source.name}", pieces())
    return StagedFile(source.name, path, digest.hexdigest(), length, backend, precision, part)


def _read(path: Path) -> Iterator[bytes]:
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        raise PublishError(f"{path}: {error.strerror}") from error
    with os.fdopen(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PublishError(f"{path}: is not a plain file; copy its content there")
        left = status.st_size
        while piece := file.read(_PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                raise PublishError(f"{path}: grew while it was copied; wait until it is written")
            yield piece


def _read_text(path: Path) -> str:
    data = b"".join(_read(path))
    if len(data) > MAX_SETTINGS_BYTES:
        raise PublishError(f"{path}: has {len(data)} bytes, wanted at most {MAX_SETTINGS_BYTES}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PublishError(f"{path}: is not UTF-8 text") from error


def _read_settings(place: _VersionFiles) -> dict[str, Any]:
    """Read `model.toml`, over what a Triton config says but for versions. Raises PublishError."""
    path, config, settings = place.settings, place.home / CONFIG.name, dict[str, Any]()
    try:
        if config.is_file():
            settings = dict(read_config_file(config, place.model).settings)
            settings.pop("versions", None)
        if path.exists() or path.is_symlink():
            settings |= parse_toml(_read_text(path), str(path))
        typed = read_release_settings(settings, str(path))
        for name, output in typed.output.items():
            if isinstance(output.labels, str):  # a release has the labels themselves: the manifest signs them
                labels = list(read_labels(output.labels, (place.path, place.home)))
                settings["output"][name]["labels"] = labels
    except (ConfigError, LoadFailed) as error:
        raise PublishError(error.message) from error
    return settings
