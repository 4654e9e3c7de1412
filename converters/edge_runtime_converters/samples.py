"""Inputs to calibrate and compare with: read from .npz, .npy and .json files and pictures, or made up.

Owns: how files become runs, and the bounds on them. Arrays are read with pickling off.
"""

from __future__ import annotations

import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from edge_runtime.backends.model_files import open_artifact
from edge_runtime.client.input_files import INPUT_SUFFIXES, PICTURE_SUFFIXES, tensor_from_file
from edge_runtime.errors import ConversionFailed, LoadFailed, TensorMismatch
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.tensors import DATATYPES, Array

MAX_BYTES = 4_000_000_000
MAX_FILES = 10_000
"""Bounds of DATA: about 6 600 pictures of 224x224, more than any quantiser reads."""

MADE_UP_ROWS = 64
RUN_ROWS = 16
"""Rows of one run of a comparison, where axis 0 is open: enough to be quick, little memory."""

MAX_LABEL_BYTES = 64 << 20

_SEED = 7
_SUFFIXES = (".npz", *INPUT_SUFFIXES)

_UNREADABLE = (
    OSError, ValueError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip
"""Errors of numpy and zipfile for files that are damaged, encrypted or packed in an unknown way."""

Run = Mapping[str, Array]
T = TypeVar("T")


def read_runs(path: Path, spec: ModelSpec, run_rows: int, *, most_pictures: int = MAX_FILES) -> list[Run]:
    """Real inputs, as runs of at most `run_rows` rows, or of the model's fixed axis 0.

    path: an .npz (an array for each input, axis 0 counts samples), for a model of one input an .npy, a .json or a
    picture as well, or a folder of such files, sorted by name. A sample may come without its batch axis.
    most_pictures: how many are read of a folder with more, evenly over all. Raises ConversionFailed.
    """
    files = _files(path)
    if all(map(_is_picture, files)):
        files = list(spread(files, most_pictures))
    runs: list[Run] = []
    nbytes = 0
    for file in files:
        arrays = _fitted(_arrays(file, spec), spec, file)
        nbytes += sum(array.nbytes for array in arrays.values())
        if nbytes > MAX_BYTES:
            raise ConversionFailed(f"{path}: unpacks to more than {MAX_BYTES} bytes. A few hundred rows do")
        runs += _cut(arrays, spec, run_rows, file)
    if not runs:
        raise ConversionFailed(f"{path}: holds no sample; wanted {', '.join(_SUFFIXES)}")
    return runs


def holds_pictures(path: Path) -> bool:
    """Whether some of the data are pictures, which `client.input_files` turns into numbers."""
    return any(map(_is_picture, _files(path)))


def read_labels(path: Path, rows: int) -> Array:
    """Whole numbers, one for each row of the data: of an .npy, or of a text, one a line. Raises ConversionFailed."""
    array = _load_npy(path) if path.suffix == ".npy" else _label_lines(path)
    if array.dtype.kind not in "iu" or array.size != rows or array.squeeze().ndim > 1:
        got = f"{array.dtype} {list(array.shape)}"
        raise ConversionFailed(f"{path}: got {got}; wanted {rows} whole numbers, one for each row of the data")
    return array.reshape(rows)


def made_up_runs(spec: ModelSpec, shapes: Mapping[str, TensorSpec], *, is_tabular: bool) -> list[Run]:
    """Inputs of a fixed seed, MADE_UP_ROWS rows: normal floats, whole numbers 0 and 1.

    is_tabular: floats of many magnitudes, because a column's own is unknown and trees cut anywhere. Raises
    ConversionFailed: a dimension is open and not in `shapes`.
    """
    _check_said(spec, shapes)
    random = np.random.default_rng(_SEED)
    rows = 1 if any(not tensor.has_dynamic_axis_0 for tensor in spec.inputs) else RUN_ROWS
    return [
        {tensor.name: _made_up(tensor, shapes.get(tensor.name), rows, random, is_tabular) for tensor in spec.inputs}
        for _ in range(max(1, MADE_UP_ROWS // rows) if rows > 1 else RUN_ROWS)
    ]


def check_shapes(shapes: Mapping[str, TensorSpec], spec: ModelSpec) -> None:
    """Raise ConversionFailed for a given shape of an unknown input, or one that does not fit its input."""
    inputs = {tensor.name: tensor for tensor in spec.inputs}
    for name, said in shapes.items():
        tensor = inputs.get(name)
        if tensor is None:
            raise ConversionFailed(f"--shapes says {name!r}; the model takes {', '.join(inputs) or 'nothing'}")
        is_right = len(said.shape) == len(tensor.shape) and all(
            DYNAMIC in (ours, theirs) or ours == theirs for ours, theirs in zip(tensor.shape, said.shape, strict=True)
        )
        if not is_right:
            raise ConversionFailed(f"--shapes says {name} is {list(said.shape)}; the model wants {list(tensor.shape)}")


def check_finite(runs: Sequence[Run], path: Path) -> None:
    """Raise ConversionFailed where an input holds NaN or infinity, which no int8 range covers."""
    for run in runs:
        for name, array in run.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ConversionFailed(f"{path}: {name!r} holds values that are infinite or no number; leave those out")


def rows_of(run: Run) -> int:
    """Rows of one run; 1 where an input has no axes."""
    first = next(iter(run.values()))
    return first.shape[0] if first.ndim else 1


def spread(runs: Sequence[T], count: int) -> Iterator[T]:
    """At most `count` of the runs, evenly over all, because data may be sorted by class."""
    if len(runs) <= count:
        yield from runs
        return
    for place in range(count):
        yield runs[place * len(runs) // count]


# ---- private --------------------------------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    try:
        found = sorted(filter(_is_sample, path.iterdir())) if path.is_dir() else [path]
        total = sum(each.stat().st_size for each in found)
    except OSError as error:
        raise ConversionFailed(f"{path}: {error.strerror}; wanted a folder of inputs, or one file") from error
    if len(found) > MAX_FILES or total > MAX_BYTES:
        got = f"{len(found)} files, {total} bytes"
        raise ConversionFailed(f"{path}: {got}; wanted at most {MAX_FILES} and {MAX_BYTES}. A few hundred rows do")
    return found


def _is_sample(file: Path) -> bool:
    return file.suffix.lower() in _SUFFIXES and not file.name.startswith(".")


def _is_picture(file: Path) -> bool:
    return file.suffix.lower() in PICTURE_SUFFIXES


def _label_lines(path: Path) -> Array:
    try:
        with _open(path) as content:
            lines = content.read(MAX_LABEL_BYTES).decode().splitlines()
        return np.array([int(line.rpartition(",")[2]) for line in lines if line.strip()], np.int64)
    except (*_UNREADABLE, OverflowError) as error:
        raise ConversionFailed(
            f"{path}: no list of labels: {_short(error)}; wanted an .npy of whole numbers, or text with one a line"
        ) from error


def _check_said(spec: ModelSpec, shapes: Mapping[str, TensorSpec]) -> None:
    """Raise ConversionFailed that names all open dimensions at once, because each attempt reads the model again."""
    wanted = [tensor for tensor in spec.inputs if DYNAMIC in tensor.shape[1:] and not _is_said(tensor, shapes)]
    if not wanted:
        return
    names = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in wanted)
    said = " ".join(f"--shapes {each.name}={','.join(_example(each))}" for each in wanted)
    raise ConversionFailed(f"open inside: {names}; give --data, or say sizes to make inputs up in, for example {said}")


def _example(tensor: TensorSpec) -> Iterator[str]:
    for place, length in enumerate(tensor.shape):
        yield "128" if place and length == DYNAMIC else str(length)


def _is_said(tensor: TensorSpec, shapes: Mapping[str, TensorSpec]) -> bool:
    said = shapes.get(tensor.name)
    return said is not None and len(said.shape) == len(tensor.shape) and DYNAMIC not in said.shape[1:]


def _arrays(file: Path, spec: ModelSpec) -> dict[str, Array]:
    if not _is_sample(file):
        raise ConversionFailed(f"{file}: wanted one of {', '.join(_SUFFIXES)}, or a folder of them")
    if file.suffix.lower() != ".npz":
        if len(spec.inputs) != 1:
            wanted = ", ".join(tensor.name for tensor in spec.inputs)
            raise ConversionFailed(
                f"{file}: is one array, the model has {len(spec.inputs)} inputs; wanted an .npz with {wanted}"
            )
        (only,) = spec.inputs
        return {only.name: _load_npy(file) if file.suffix.lower() == ".npy" else _load_other(file, only)}
    try:
        with _open(file) as content, zipfile.ZipFile(content) as archive:
            members = archive.infolist()
            declared = sum(member.file_size for member in members)
            if declared > MAX_BYTES:
                raise ConversionFailed(f"{file}: unpacks to {declared} bytes; wanted at most {MAX_BYTES}")
            return {member.filename.removesuffix(".npy"): _member(archive, member) for member in members}
    except _UNREADABLE as error:
        raise ConversionFailed(f"{file}: no .npz of numbers: {_short(error)}") from error


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    with archive.open(member) as content:
        array: Array = np.lib.format.read_array(content, allow_pickle=False)
        if content.read(1):  # the checksum is checked only at the end
            raise ValueError(f"{member.filename} goes on after its array")
    return array


def _load_other(file: Path, spec: TensorSpec) -> Array:
    try:
        with _open(file) as content:
            return tensor_from_file(content, str(file), spec)
    except TensorMismatch as error:
        told = error.message if str(file) in error.message else f"{file}: {error.message}"
        raise ConversionFailed(told) from error


def _load_npy(file: Path) -> Array:
    try:
        with _open(file) as content:
            array: Array = np.lib.format.read_array(content, allow_pickle=False)
    except _UNREADABLE as error:
        raise ConversionFailed(f"{file}: no .npy of numbers: {_short(error)}") from error
    return array


def _open(file: Path) -> IO[bytes]:
    """Open a regular file only: a pipe would block, and a device has no end. Raises ConversionFailed."""
    try:
        return os.fdopen(open_artifact(file)[0], "rb")
    except LoadFailed as error:
        raise ConversionFailed(error.message) from error


def _short(error: BaseException) -> str:
    """The beginning of a message: numpy quotes an unreadable header whole."""
    return str(error)[:200] or type(error).__name__


def _fitted(arrays: Mapping[str, Array], spec: ModelSpec, file: Path) -> dict[str, Array]:
    wanted = {tensor.name: tensor for tensor in spec.inputs}
    missing = [name for name in wanted if name not in arrays]
    if missing and len(wanted) == len(arrays) == 1:  # one input and one array cannot be mixed up
        arrays, missing = {missing[0]: next(iter(arrays.values()))}, []
    if missing:
        raise ConversionFailed(f"{file}: holds {', '.join(arrays) or 'nothing'}; wanted {', '.join(wanted)}")
    try:
        return {name: _typed(arrays[name], tensor) for name, tensor in wanted.items()}
    except ConversionFailed as error:
        raise ConversionFailed(f"{file}: {error.message}") from error


def _typed(array: Array, spec: TensorSpec) -> Array:
    wanted = DATATYPES[spec.datatype].dtype
    if array.dtype != wanted:
        if not np.can_cast(array.dtype, wanted, "same_kind"):
            raise ConversionFailed(f"{spec.name!r} is {array.dtype}; wanted {spec.datatype}")
        array = array.astype(wanted)
    if array.ndim == len(spec.shape) - 1:
        array = array[None]
    inner = TensorSpec(spec.name, spec.datatype, (DYNAMIC, *spec.shape[1:])) if spec.shape else spec
    if not inner.fits(array.shape):
        raise ConversionFailed(f"{spec.name!r} is {list(array.shape)}; wanted {list(spec.shape)}")
    return array


def _cut(arrays: Mapping[str, Array], spec: ModelSpec, run_rows: int, file: Path) -> Iterator[Run]:
    counts = {len(array) for array in arrays.values() if array.ndim}
    if len(counts) > 1:
        raise ConversionFailed(f"{file}: arrays of {sorted(counts)} samples; wanted as many of each input")
    total = counts.pop() if counts else 1
    fixed = [tensor.shape[0] for tensor in spec.inputs if tensor.shape and not tensor.has_dynamic_axis_0]
    size = fixed[0] if fixed else run_rows
    if fixed and total % size:
        raise ConversionFailed(f"{file}: {total} samples; the model takes {size} at a time, so wanted a multiple")
    for start in range(0, total, size):
        yield {name: array[start : start + size] if array.ndim else array for name, array in arrays.items()}


def _made_up(
    spec: TensorSpec, said: TensorSpec | None, rows: int, random: np.random.Generator, is_tabular: bool
) -> Array:
    shape = [rows if place == 0 and length == DYNAMIC else length for place, length in enumerate(spec.shape)]
    if said is not None and len(said.shape) == len(shape):
        shape = [theirs if ours == DYNAMIC else ours for ours, theirs in zip(shape, said.shape, strict=True)]
    if math.prod(shape) * 8 > MAX_BYTES:
        raise ConversionFailed(f"input {spec.name!r} is {shape}, which is more than {MAX_BYTES} bytes")
    kind = DATATYPES[spec.datatype].dtype
    if kind.kind == "f":
        values = random.standard_normal(shape)
        if is_tabular:
            values *= 10 ** random.uniform(-1, 2, (*shape[:1], *(1 for _ in shape[1:])))
        return values.astype(kind)
    if kind.kind in "iub" and spec.datatype != "BF16":
        return random.integers(0, 2, shape).astype(kind)
    raise ConversionFailed(f"input {spec.name!r} is {spec.datatype}, which cannot be made up; give --data")
