"""Which files a model consists of, checked before a library reads them.

Owns: the rule that a location in a model never leads out of its version folder, and the rules for an OpenVINO IR
(`model.xml` that declares no entities, with a `model.bin` large enough for every constant), a TensorFlow SavedModel, a
TensorFlow Lite file and a PaddlePaddle program. Follows no link, imports no library. backends/onnx/files.py has the
rules for ONNX.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.parsers import expat

from msgspec import Struct

from edge_runtime.backends.protobuf_fields import ProtobufFields
from edge_runtime.errors import LoadFailed

SAVED_MODEL_FILE = "saved_model.pb"
"""The one name that this file of a TensorFlow SavedModel has; its folder is the model."""

MAX_FOLDER_FILES = 4096
"""Of a SavedModel: it has a file for each shard of its variables, and some vocabularies."""

_SAVED_MODEL_FIELDS = (1, 2)
_PADDLE_FIELDS = (1, 2, 3, 4, 5)
"""Numbers of a SavedModel's and a ProgramDesc's own fields. Source: saved_model.proto, framework.proto."""

_MAX_FIELDS = 10_000
"""Of the outermost message: graphs, or blocks."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ArtifactFiles(Struct, frozen=True):
    """One artifact: the locations of its data files, relative to its folder, and the bytes of all files together.

    precision: of most of its weights ("f32", "bf16", "f16", "f64", "int8", "mixed"), "" where it is unknown.
    holds_int8: a good part of them is int8, so the model was quantised.
    """

    locations: tuple[str, ...]
    total_bytes: int
    precision: str = ""
    holds_int8: bool = False


class HasMoreFiles(LoadFailed):
    """A model does not lie in the one file that its process was given."""


def open_artifact(artifact: Path, opened: int = -1) -> tuple[int, os.stat_result]:
    """Open a model file for reading; the caller owns the descriptor. Raises LoadFailed unless it is a regular file.

    opened: a descriptor of the file, for a process that cannot open it; -1: it is opened by its path.
    """
    try:
        # O_NONBLOCK: opening a fifo would otherwise wait for its other end.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(artifact, flags) if opened < 0 else os.dup(opened)
    except OSError as error:
        raise LoadFailed(f"cannot read {artifact}: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise LoadFailed(f"{artifact} is {_kind(status.st_mode)}; wanted a regular file")
    return descriptor, status


def artifact_size(artifact: Path) -> int:
    """Size in bytes of a model file. Raises LoadFailed unless it is a regular file."""
    descriptor, status = open_artifact(artifact)
    os.close(descriptor)
    return status.st_size


def plain_file_size(folder: Path, location: str) -> int:
    """Size in bytes of the plain file that `location` names, relative to `folder`.

    Plain: a regular file with one name (no hard link), reached through real folders only (no symbolic link), inside
    `folder`. Raises LoadFailed with the broken rule. Source: the escapes published for onnx and onnxruntime,
    CVE-2022-25882, CVE-2024-27318, CVE-2026-27489 (symlink), CVE-2026-34446 (hard link).
    """
    parts = _parts(location)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            below = os.open(part, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        status = os.stat(parts[-1], dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError as error:
        raise LoadFailed(f"the model's data file {location[:200]!r} is not there; copy it to {folder} too") from error
    except OSError as error:
        reason = f"{error.strerror}; wanted a plain file inside {folder}, reached without symbolic links"
        raise _refused(location, reason) from error
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _refused(location, f"it is {_kind(status.st_mode)}; wanted a plain file, so copy the data there")
    if status.st_nlink > 1:
        raise _refused(location, f"it has {status.st_nlink} names (hard links); wanted one, so copy the data there")
    return status.st_size


def check_ir_files(artifact: Path) -> ArtifactFiles:
    """Check one IR. Raises LoadFailed, naming the bad file of the two and its fault."""
    descriptor, status = open_artifact(artifact)
    with os.fdopen(descriptor, "rb") as file:
        weights_end = _Layers(artifact.name).weights_end(file)
    weights = artifact.with_suffix(".bin")
    if not os.path.lexists(weights):
        if weights_end:
            raise LoadFailed(f"{artifact.name} needs {weights.name} beside it ({weights_end} bytes of weights)")
        return ArtifactFiles((), status.st_size)
    size = plain_file_size(artifact.parent, weights.name)
    if weights_end > size:
        raise LoadFailed(f"{weights.name} is {size} bytes, but {artifact.name} wants {weights_end}; copy both again")
    return ArtifactFiles((weights.name,), status.st_size + size)


def check_tflite_files(artifact: Path) -> ArtifactFiles:
    """Check one TensorFlow Lite file, which holds all that it needs. Raises LoadFailed: it is none."""
    descriptor, status = open_artifact(artifact)
    with os.fdopen(descriptor, "rb") as file:
        head = file.read(8)
    if head[4:] != b"TFL3":
        raise LoadFailed(f"{artifact.name} is not a TensorFlow Lite file: it begins with {head!r}; copy it again")
    return ArtifactFiles((), status.st_size)


def check_saved_model_files(artifact: Path) -> ArtifactFiles:
    """Check `saved_model.pb` and what a SavedModel has below its folder. Raises LoadFailed, naming the bad file."""
    size = _check_message(artifact, "TensorFlow SavedModel", _SAVED_MODEL_FIELDS)
    locations = tuple(_below(artifact.parent, ("variables", "assets")))
    return ArtifactFiles(locations, size + sum(plain_file_size(artifact.parent, each) for each in locations))


def check_paddle_files(artifact: Path) -> ArtifactFiles:
    """Check a PaddlePaddle program and its weights, `.pdiparams`. Raises LoadFailed, naming the bad file of the two."""
    size = _check_message(artifact, "PaddlePaddle program", _PADDLE_FIELDS)
    weights = artifact.with_suffix(".pdiparams")
    if not os.path.lexists(weights):
        return ArtifactFiles((), size)
    return ArtifactFiles((weights.name,), size + plain_file_size(artifact.parent, weights.name))


# ---- private --------------------------------------------------------------------------------------------------------


def _check_message(artifact: Path, kind: str, known: Collection[int]) -> int:
    """Return the size of a file that is one protobuf message with these fields. Raises LoadFailed: it is another."""
    descriptor, status = open_artifact(artifact)
    try:
        message = ProtobufFields(descriptor, status.st_size, artifact.name, _MAX_FIELDS, kind)
        numbers = {number for number, *_ in message.fields(0, status.st_size)}
    finally:
        os.close(descriptor)
    if not numbers or not numbers.issubset(known):
        found = ", ".join(map(str, sorted(numbers))) or "none"
        raise LoadFailed(f"{artifact.name} is not a {kind}: it has the fields {found}; copy it again")
    return status.st_size


def _below(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the locations of files below some folders, links of every kind included. Raises LoadFailed: too many."""
    left = MAX_FOLDER_FILES
    for name in names:
        if (folder / name).is_symlink():
            yield name
        for path, folders, files in os.walk(folder / name):
            links = [each for each in folders if Path(path, each).is_symlink()]
            left -= len(folders) + len(files)
            if left < 0:
                raise LoadFailed(f"{folder / name} holds more than {MAX_FOLDER_FILES} files; is it the right folder?")
            yield from (Path(path, each).relative_to(folder).as_posix() for each in (*links, *files))


def _parts(location: str) -> list[str]:
    """Split a location into names. Raises LoadFailed for a location that another reader could take differently."""
    if not location:
        raise _refused(location, "it is empty; wanted a file name")
    if "\0" in location or "\\" in location:
        raise _refused(location, "it holds a NUL or a backslash; wanted names separated by /")
    if location.startswith("/"):
        raise _refused(location, "it is absolute; wanted a path relative to the model's folder")
    if location.startswith("*/") or "_MEM_ADDR_" in location:
        raise _refused(location, "it is a mark for an address in memory, which no file may carry")
    parts = [part for part in location.split("/") if part != "."]
    if ".." in parts:
        raise _refused(location, "it leaves the model's folder; wanted a path inside it")
    if not parts or "" in parts:
        raise _refused(location, "it holds an empty name; wanted a file name")
    return parts


def _refused(location: str, reason: str) -> LoadFailed:
    return LoadFailed(f"the model's data file {location[:200]!r} is refused: {reason}")


def _kind(mode: int) -> str:
    for is_kind, words in (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a fifo"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_kind(mode):
            return words
    return "a device"


class _Layers:
    """One pass of expat over an IR; finds the end of the last constant in the weights file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._weights_end = 0
        self._root = ""

    def weights_end(self, file: Any) -> int:
        """Return the least size of `.bin` in bytes. Raises LoadFailed for XML that is not an IR."""
        parser = expat.ParserCreate()
        # An IR declares nothing. Refusing the declaration refuses external entities and entity bombs with it.
        parser.StartDoctypeDeclHandler = self._declaration
        parser.StartElementHandler = self._element
        try:
            parser.ParseFile(file)
        except expat.ExpatError as error:
            raise LoadFailed(f"{self._name} is not an OpenVINO IR: {error}") from error
        if self._root != "net":
            raise LoadFailed(f"{self._name} is not an OpenVINO IR: its first element is {self._root!r}, wanted 'net'")
        return self._weights_end

    def _declaration(self, *_: object) -> None:
        raise LoadFailed(f"{self._name} declares a document type, which could name other files; an IR has none")

    def _element(self, name: str, attributes: dict[str, str]) -> None:
        self._root = self._root or name
        # Only constants carry both an offset and a size in bytes of the weights file.
        if name == "data" and "offset" in attributes and "size" in attributes:
            offset, size = attributes["offset"], attributes["size"]
            if not all(text.isascii() and text.isdigit() and len(text) <= 19 for text in (offset, size)):
                raise LoadFailed(f"{self._name} has a constant at offset {offset[:40]!r} of {size[:40]!r} bytes")
            self._weights_end = max(self._weights_end, int(offset) + int(size))
