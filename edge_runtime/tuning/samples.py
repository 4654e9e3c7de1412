"""Inputs to compare ways on, and to calibrate with: from a person's files, or made up.

Owns: which files are read, how much of them, and which inputs judge. Trusts no file: any fault in one raises a
TensorMismatch that names it. Nothing is unpickled.
"""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from edge_runtime.client.input_files import (
    INPUT_SUFFIXES,
    PICTURE_NOTE,
    PICTURE_SUFFIXES,
    json_value,
    tensor_from_file,
    tensor_from_json,
)
from edge_runtime.client.pictures import SUFFIXES as DECLARED_SUFFIXES
from edge_runtime.errors import RequestError, RunFailed, TensorMismatch, UnreadablePicture
from edge_runtime.hosts.steps_instance import InputReader
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.warmup import make_inputs
from edge_runtime.pictures.input import PictureInput, picture_input
from edge_runtime.steps import ModelSteps
from edge_runtime.tensors import Array

MAX_INPUTS = 2048
"""Most inputs: 0.5 % of these are ten; more would take longer and say little more."""

MAX_BYTES = 256 << 20
"""Most bytes of all inputs: 446 pictures of 600 KB. This process and one child hold them."""

MAX_FILE_BYTES = 1 << 30

MADE_UP = 64

CALIBRATION_PART = 4
"""One input in this many calibrates and does not judge: a fit to an input says little about others."""

MAX_CALIBRATION = 256
"""The number in ONNX Runtime's and NNCF's own examples; more change nothing."""

MIN_TO_PART = 8

NO_STEPS = ModelSteps()

TEXT_SUFFIXES = (".txt", ".tsv")
"""Files of texts, one a line."""

MULTIPLE = (".npz",)
"""Files with one array for each input of the model."""

_UNREADABLE = (zipfile.BadZipFile, RuntimeError, EOFError, OSError, zlib.error, lzma.LZMAError)
"""Errors of zipfile for archives that are damaged, encrypted, or packed in an unknown way."""

Sample = Mapping[str, Array]
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs, one request each, with their labels where known. is_made_up: noise, not a person's files.

    sent: the same as callers send them, such as texts, where the model's host makes its inputs of that; else empty.
    """

    inputs: tuple[Sample, ...]
    labels: tuple[int, ...] | None = None
    is_made_up: bool = False
    sent: tuple[Sample, ...] = ()

    @property
    def load(self) -> tuple[Sample, ...]:
        """The requests that a load is made of, by turns: texts are of many lengths, tensors of one."""
        return self.sent[:MADE_UP] or self.inputs[:1]

    @property
    def judging(self) -> Samples:
        """The samples that ways are compared on."""
        if len(self.inputs) < MIN_TO_PART:
            return self
        places = [place for place in range(len(self.inputs)) if place % CALIBRATION_PART]
        labels = None if self.labels is None else tuple(self.labels[place] for place in places)
        return Samples(tuple(self.inputs[place] for place in places), labels, self.is_made_up)

    @property
    def calibrating(self) -> tuple[Sample, ...]:
        """The inputs that int8 models are calibrated with."""
        step = CALIBRATION_PART if len(self.inputs) >= MIN_TO_PART else 1
        return self.inputs[::step][:MAX_CALIBRATION]


def read_samples(path: Path, spec: ModelSpec, labels: Path | None, note: Note, steps: ModelSteps = NO_STEPS) -> Samples:
    """Inputs from a file, or from a folder's files in the order of their names; rows of a file are inputs each.

    labels: a file with one whole number for each, in that order. steps: how the model declares that pictures are read.
    Stops at MAX_INPUTS and MAX_BYTES, with a note. Raises TensorMismatch: a file that cannot be read or does not fit
    the model, or another number of labels; LoadFailed: the steps do not fit it, or Pillow is missing.
    """
    inputs: list[Sample] = []
    nbytes, is_cut = 0, False
    read = _Reading(spec, picture_input(spec, steps, 1, 1), note)
    for sample in _all_samples(path, read):
        nbytes += sum(array.nbytes for array in sample.values())
        if len(inputs) == MAX_INPUTS or (inputs and nbytes > MAX_BYTES):
            is_cut = True
            break
        inputs.append(sample)
    if not inputs:
        raise TensorMismatch(f"{path}: holds no inputs; wanted {', '.join((*INPUT_SUFFIXES, *MULTIPLE))}")
    if is_cut:
        note(f"{path}: the first {len(inputs)} inputs are used")
    said = None if labels is None else read_labels(labels)
    if said is not None and (len(said) < len(inputs) or (len(said) > len(inputs) and not is_cut)):
        raise TensorMismatch(f"{labels}: has {len(said)} labels for {len(inputs)} inputs; wanted one each, in order")
    return Samples(tuple(inputs), None if said is None else tuple(said[: len(inputs)]))


def read_texts(path: Path, reader: InputReader, labels: Path | None, note: Note) -> Samples | None:
    """Texts from a file, or from a folder's files, one a line; None where there is none. reader: of the model's texts.

    A line has tabs between the texts of a pair. labels: as of `read_samples`. Raises TensorMismatch.
    """
    files = [path] if path.is_file() else sorted(each for each in path.glob("*") if not each.name.startswith("."))
    files = [each for each in files if each.suffix.lower() in TEXT_SUFFIXES]
    lines = [(file, line) for file in files for line in _text_lines(file)]
    if len(lines) > MAX_INPUTS:
        lines = lines[:MAX_INPUTS]
        note(f"{path}: the first {len(lines)} inputs are used")
    if not lines:
        return None
    samples = sent_samples([(np.array([line], object), str(file)) for file, line in lines], reader)
    said = None if labels is None else read_labels(labels)[: len(lines)]
    if said is not None and len(said) < len(lines):
        raise TensorMismatch(f"{labels}: has {len(said)} labels for {len(lines)} inputs; wanted one each, in order")
    return replace(samples, labels=said)


def sent_samples(rows: Sequence[tuple[Array, str]], reader: InputReader, *, is_made_up: bool = False) -> Samples:
    """Inputs of what callers send, one row a request, each with the place that it is from.

    Raises TensorMismatch: one cannot be read.
    """
    inputs: list[Sample] = []
    sent: list[Sample] = []
    for row, place in rows:
        row = row[:, 0] if row.ndim > 1 and row.shape[1] == 1 else row  # noqa: PLW2901 (a line without tabs)
        kind = next((each for each in reader.kinds if reader.sent_spec(each).fits(row.shape)), None)
        if kind is None:
            wanted = " or ".join(str(list(reader.sent_spec(each).shape)) for each in reader.kinds)
            raise TensorMismatch(f"{place}: a line is {list(row.shape)}, and the model takes {wanted}")
        try:
            inputs.append(dict(reader.tensors(kind, row)[0]))
        except (RunFailed, RequestError) as error:
            raise TensorMismatch(f"{place}: {error.message}") from None
        sent.append({reader.name: row})
    return Samples(tuple(inputs), is_made_up=is_made_up, sent=tuple(sent))


def make_samples(spec: ModelSpec, length: int, shapes: Mapping[str, Sequence[int]], *, batches: bool) -> Samples:
    """Noise in the model's shapes, the same each time. batches: whether axis 0 is rows, so that inputs can differ."""
    row_bytes = max(sum(array.nbytes for array in make_inputs(spec, 1, length, shapes).values()), 1)
    count = min(MADE_UP, max(MAX_BYTES // row_bytes, 1)) if batches else 1
    together = make_inputs(spec, count, length, shapes)
    if not batches:
        return Samples((together,), is_made_up=True)
    rows = [{name: array[row : row + 1] for name, array in together.items()} for row in range(count)]
    return Samples(tuple(rows), is_made_up=True)


def read_labels(path: Path) -> tuple[int, ...]:
    """Read whole numbers from an .npy, or from a text: one a line, the last of its fields between commas.

    Raises TensorMismatch.
    """
    try:
        if path.suffix.lower() == ".npy":
            with _open(path) as file:
                array = np.load(file, allow_pickle=False)
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
                raise TensorMismatch(f"{path}: wanted one axis of whole numbers")
            return tuple(int(value) for value in array)
        with _open(path) as file:
            lines = file.read().decode().splitlines()
        return tuple(int(line.rpartition(",")[2]) for line in lines if line.strip())
    except (ValueError, EOFError, MemoryError) as error:
        raise TensorMismatch(
            f"{path}: is not a list of labels: {str(error)[:200]}; wanted a whole number a line"
        ) from None


# ---- private --------------------------------------------------------------------------------------------------------


def _text_lines(file: Path) -> list[list[bytes]]:
    with _open(file) as content:
        return [line.split(b"\t") for line in content.read().splitlines() if line.strip()]


class _Reading(NamedTuple):
    """A reading of files. pictures: the model's declared input for them, None where it declares none."""

    spec: ModelSpec
    pictures: PictureInput | None
    note: Note


def _all_samples(path: Path, reading: _Reading) -> Iterator[Sample]:
    spec = reading.spec
    for file in _files(path):
        try:
            sample = _read(file, reading)
        except TensorMismatch as error:
            # An error about an input of the model does not name the file.
            told = error.message if str(file) in error.message else f"{file}: {error.message}"
            raise TensorMismatch(told) from None
        yield from _rows(sample, spec, file)


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    known = {*INPUT_SUFFIXES, *MULTIPLE, *DECLARED_SUFFIXES}
    for file in sorted(path.iterdir()):
        if not file.name.startswith(".") and file.suffix.lower() in known:
            yield file


def _read(file: Path, reading: _Reading) -> Sample:
    spec, pictures, note = reading
    suffix = file.suffix.lower()
    with _open(file) as content:
        if pictures is not None and suffix in DECLARED_SUFFIXES and len(spec.inputs) == 1:
            return {pictures.name: _declared(content.read(), pictures, file)}
        if suffix in PICTURE_SUFFIXES:
            note(PICTURE_NOTE)
        if suffix in MULTIPLE:
            return _from_npz(content, file, spec, note)
        if len(spec.inputs) == 1:
            (only,) = spec.inputs
            return {only.name: _checked(tensor_from_file(content, str(file), only, note), only, file)}
        if suffix != ".json":
            names = ", ".join(tensor.name for tensor in spec.inputs)
            raise TensorMismatch(f"{file}: the model has the inputs {names}; give each file as .npz or .json with them")
        said = json_value(content.read(), str(file))
    if not isinstance(said, dict) or set(said) != {tensor.name for tensor in spec.inputs}:
        raise TensorMismatch(f'{file}: wanted {{"{spec.inputs[0].name}": …}} with each input of the model')
    return {each.name: _checked(tensor_from_json(said[each.name], each), each, file) for each in spec.inputs}


def _declared(data: bytes, pictures: PictureInput, file: Path) -> Array:
    """One picture as the model declares it. Raises TensorMismatch."""
    sent: Array = np.empty(1, object)
    sent[0] = data
    try:
        return pictures.rows("picture", sent)[0]
    except (RunFailed, UnreadablePicture) as error:
        raise TensorMismatch(f"{file}: {error.message}") from None


def _from_npz(content: IO[bytes], file: Path, spec: ModelSpec, note: Note) -> Sample:
    try:
        with zipfile.ZipFile(content) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            wanted = [tensor.name for tensor in spec.inputs]
            if set(entries) != set(wanted):
                there = ", ".join(sorted(entries)[:8]) or "nothing"
                raise TensorMismatch(f"{file}: holds {there}; wanted one array for each of {', '.join(wanted)}")
            if sum(entry.file_size for entry in entries.values()) > MAX_FILE_BYTES:
                raise TensorMismatch(f"{file}: unpacks to more than {MAX_FILE_BYTES} bytes")
            found: dict[str, Array] = {}
            for tensor in spec.inputs:
                with archive.open(entries[tensor.name]) as member:
                    array = tensor_from_file(member, f"{file}:{tensor.name}.npy", tensor, note)
                found[tensor.name] = _checked(array, tensor, file)
            return found
    except _UNREADABLE as error:
        raise TensorMismatch(f"{file} is not a .npz: {str(error)[:200]}") from None


def _open(file: Path) -> IO[bytes]:
    """A plain file of bounded size, open. Raises TensorMismatch."""
    if not file.is_file():
        got = "is not a plain file" if file.exists() else "is not there"
        raise TensorMismatch(f"{file}: {got}; name a folder of inputs, or one file")
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise TensorMismatch(f"{file}: is over {MAX_FILE_BYTES} bytes; use several files")
        return file.open("rb")
    except OSError as error:
        raise TensorMismatch(f"{file}: cannot be read: {error.strerror}") from None


def _checked(array: Array, tensor: TensorSpec, file: Path) -> Array:
    if tensor.datatype != "BYTES" and array.dtype.kind not in "biufc":
        raise TensorMismatch(f"{file}: is {array.dtype}; input {tensor.name!r} wants {tensor.datatype}")
    if not tensor.fits(array.shape):
        raise TensorMismatch(f"{file}: is {list(array.shape)}; input {tensor.name!r} wants {list(tensor.shape)}")
    return array


def _rows(sample: Sample, spec: ModelSpec, file: Path) -> Iterator[Sample]:
    """One sample a row, where every input has rows."""
    if not all(tensor.has_dynamic_axis_0 for tensor in spec.inputs):
        yield sample
        return
    counts = {len(array) for array in sample.values()}
    if len(counts) != 1 or 0 in counts:
        raise TensorMismatch(
            f"{file}: its inputs have {' and '.join(map(str, sorted(counts)))} rows; wanted as many each"
        )
    for row in islice(range(counts.pop()), MAX_INPUTS + 1):
        yield {name: array[row : row + 1] for name, array in sample.items()}
