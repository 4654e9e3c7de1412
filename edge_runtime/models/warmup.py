"""The runs a version makes before it is ready: allocate, find out whether axis 0 is rows, take first times.

Owns: made-up inputs and the batch probe. Thread: the loader's. Few runs, because ready waits for them; the curve is
measured afterwards, when idle (calibration.py).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from edge_runtime import plugins
from edge_runtime.backends.base import Bound, Instance
from edge_runtime.config.settings import ModelSettings, Warmup
from edge_runtime.durable import open_within
from edge_runtime.errors import BackendError, CalledTooSoon, EdgeRuntimeError, LoadFailed, RequestError
from edge_runtime.model_spec import DYNAMIC, ByRequest, ModelSpec, TensorSpec
from edge_runtime.steps import Form, InputKind, ModelSteps
from edge_runtime.tensors import DATATYPES, Array, array_from_wire, as_tensors, element_count, values_to_bits

if TYPE_CHECKING:
    from edge_runtime.models.folder import DeclaredSample, SampleInput

MAX_SAMPLE_BYTES = 64 << 20
"""Of a warm-up's sample, on disk and in memory, as of a release's golden tensors."""

MADE_UP_BYTES = 256 << 20
"""Most bytes that are made up for one run: five open axes of 224 would be 10 GB, and making them takes thrice that."""

TEXT_BYTES = 64
"""About the bytes that an element of text takes in memory."""

TWO_WAYS_OUT = (
    'a model that cannot run on made-up inputs gets real ones with [warmup] inputs = "sample.npz", '
    "or is ready without a run with [warmup] runs = 0"
)

NOT_WARMED_UP = (
    "it was not warmed up, because it calls other models, and its requests run alone: batch = true in model.toml has "
    "them run together, batch = false leaves this note out"
)

GUESSED_LENGTHS = (1, 32, 224)
"""Lengths tried for dynamic inner axes that `[warmup] shapes` does not give: a scalar, a sequence, an image."""

TOLERANCE = {"f32": (1e-3, 1e-4), "f16": (2e-2, 2e-2), "bf16": (5e-2, 5e-2)}
"""Relative and absolute difference allowed between rows run together and alone, by precision: kernels choose other
summation orders by batch size; measured on MobileNetV2 and ResNet-18 the fp32 difference is below 1e-5."""


class FirstRuns(Struct, frozen=True):
    """Results of the first runs.

    times: run seconds by rows, empty when there were none. length: of dynamic inner axes in these runs. sample: their
    inputs, where they were not made up. note: for a person, may be empty.
    """

    batches: bool
    times: Mapping[int, float]
    length: int = 1
    sample: Mapping[str, Array] | None = None
    note: str = ""

    def inputs(self, spec: ModelSpec, rows: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
        """Inputs for another run of this many rows: made up, or the sample's rows again and again."""
        if self.sample is None:
            return make_inputs(spec, rows, self.length, shapes)
        if not self.batches:
            return dict(self.sample)
        return {name: array[np.arange(rows) % array.shape[0]] for name, array in self.sample.items()}


def warm_up(instance: Instance, settings: ModelSettings, sample: Mapping[str, Array] | None = None) -> FirstRuns:
    """Run a version for the first time.

    sample: inputs to run on, None for made-up ones. Raises LoadFailed when it cannot run on the sample, or a model of
    wholly known shape not at all: it never could. Where inner axes are dynamic and no guess fits, where `runs` is 0,
    or where its runs call other models, the model is served without a warm-up.
    """
    by_request = instance.spec.by_request
    if by_request is not None:
        return _runs_by_request(instance, settings, by_request, sample)
    unknown = FirstRuns(batches=bool(settings.batch) and instance.spec.may_batch, times={})
    if settings.warmup.runs == 0:
        return unknown
    try:
        return _first_runs(instance, settings) if sample is None else _sample_runs(instance, settings, sample)
    except CalledTooSoon:
        # What it calls may not be loaded yet, and whether it is must not decide how this model is served.
        return unknown if settings.batch is not None else replace(unknown, note=NOT_WARMED_UP)


def _runs_by_request(
    instance: Instance, settings: ModelSettings, by_request: ByRequest, sample: Mapping[str, Array] | None
) -> FirstRuns:
    """Run on a sample, or on made-up inputs where settings ask for a warm-up: they may be nothing that it can read.

    Whether its axis 0 is rows is its own to say. Raises LoadFailed: it cannot run on them.
    """
    given: list[Mapping[str, Array]] = []
    if sample is not None:
        given = [sample]
    elif settings.warmup != Warmup():
        rows = [each for each in settings.warmup.rows if each <= max(by_request.max_rows, 1)]
        given = [make_inputs(instance.spec, each, 1, settings.warmup.shapes) for each in rows]
    try:
        for inputs in given * settings.warmup.runs:
            instance.run(inputs)
    except CalledTooSoon:
        pass
    except BackendError as error:
        raise LoadFailed(f"the first run failed: {error.message}; {TWO_WAYS_OUT}") from error
    return FirstRuns(by_request.max_rows > 0, times={})


def read_sample(name: str, spec: ModelSpec, folders: Sequence[Path], within: Sequence[str] = ()) -> dict[str, Array]:
    """Read the inputs of a warm-up from the first of these folders that has them. Raises LoadFailed.

    within: where the file must lie, as of a version.
    """
    said = f"warmup.inputs = {name!r}"
    if Path(name).name != name or Path(name).suffix not in (".npz", ".json"):
        raise LoadFailed(f"{said}: wanted the name of an .npz or .json beside model.toml or in the version's folder")
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        raise LoadFailed(f"{said}: no such file in {' nor in '.join(map(str, folders))}")
    try:
        with open_within(path, within) as file:
            if os.fstat(file.fileno()).st_size > MAX_SAMPLE_BYTES:
                raise LoadFailed(f"{path}: a sample has over {MAX_SAMPLE_BYTES} bytes")
            found = json.loads(file.read()) if path.suffix == ".json" else _read_npz(path, file)
        if not isinstance(found, dict):
            raise LoadFailed(f'{path}: wanted an object of lists by input name, {{"x": [[1, 2]]}}')
        return {tensor.name: _sample_of(tensor, found) for tensor in _all_named(spec, found)}
    except EdgeRuntimeError as error:
        raise LoadFailed(f"{path}: {error.message}" if str(path) not in error.message else error.message) from error
    except (OSError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, RecursionError) as error:
        raise LoadFailed(f"{path}: no sample: {error}") from error


def declared_sample(
    sample: DeclaredSample, spec: ModelSpec, folder: Path, within: Sequence[str] = ()
) -> dict[str, Array]:
    """Make the inputs of a sample. folder: the model's. Raises LoadFailed."""
    _all_named(spec, {each.tensor.name: each for each in sample.inputs})
    return {each.tensor.name: _declared_input(sample, each, folder / sample.folder, within) for each in sample.inputs}


def _declared_input(sample: DeclaredSample, each: SampleInput, folder: Path, within: Sequence[str]) -> Array:
    """One input of a sample: a file, zeros, or noise; the same for each row, where the model batches."""
    tensor, rows = each.tensor, sample.rows
    if min(tensor.shape, default=1) < 1 or element_count(tensor.shape) * max(rows, 1) > MAX_SAMPLE_BYTES:
        raise LoadFailed(f"{sample.key}: input {tensor.name!r} of the shape {list(tensor.shape)} cannot be made")
    if each.is_zero:
        dtype = DATATYPES[tensor.datatype].dtype
        array: Array = np.full(tensor.shape, b"" if tensor.datatype == "BYTES" else 0, dtype)
    elif not each.file:
        array = _made_up(tensor, tensor.shape)
    elif Path(each.file).name != each.file:
        raise LoadFailed(f"{sample.key}: input_data_file {each.file!r}: wanted the name of a file in {folder}")
    else:
        array = _read_raw(tensor, folder / each.file, within)
    return np.repeat(array[np.newaxis], rows, axis=0) if rows else array


def _read_raw(tensor: TensorSpec, path: Path, within: Sequence[str]) -> Array:
    try:
        with open_within(path, within) as file:
            data = file.read(MAX_SAMPLE_BYTES + 1)
        if len(data) > MAX_SAMPLE_BYTES:
            raise LoadFailed(f"{path}: a sample has over {MAX_SAMPLE_BYTES} bytes")
        return array_from_wire(tensor.datatype, tensor.shape, data)
    except OSError as error:
        raise LoadFailed(f"{path}: {error.strerror}") from None
    except RequestError as error:
        raise LoadFailed(f"{path}: {error.message}") from None


def _read_npz(path: Path, opened: BinaryIO) -> dict[str, Array]:
    import zipfile

    if not zipfile.is_zipfile(opened):
        raise LoadFailed(f"{path}: no .npz; numpy.savez writes one")
    found: dict[str, Array] = {}
    nbytes = 0
    opened.seek(0)
    with np.load(opened, allow_pickle=False) as file:
        for name in file.files:
            nbytes += file.zip.getinfo(f"{name}.npy").file_size
            if nbytes > MAX_SAMPLE_BYTES:
                raise LoadFailed(f"{path}: a sample has over {MAX_SAMPLE_BYTES} bytes")
            found[name] = file[name]
    return found


def _all_named(spec: ModelSpec, found: Mapping[str, object]) -> Sequence[TensorSpec]:
    wanted = {tensor.name for tensor in spec.inputs}
    if set(found) != wanted:
        raise LoadFailed(f"a sample of {', '.join(sorted(found)) or 'nothing'}; wanted {', '.join(sorted(wanted))}")
    return spec.inputs


def _sample_of(tensor: TensorSpec, found: Mapping[str, object]) -> Array:
    """Return one input of a sample as the model takes it."""
    array = as_tensors({tensor.name: found[tensor.name]})[tensor.name]
    if tensor.datatype == "BYTES":
        if array.dtype == np.uint8:  # one picture
            one = np.empty((1,) * max(len(tensor.shape), 1), object)
            one[...] = array.tobytes()
            array = one.reshape(() if not tensor.shape else one.shape)
        if array.dtype != object:
            raise LoadFailed(f"{tensor.name!r} is {array.dtype}; wanted text, or the bytes of one element as uint8")
    else:
        array = values_to_bits(array)
        dtype = DATATYPES[tensor.datatype].dtype
        if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind") and array.dtype.kind not in "iu":
            raise LoadFailed(f"{tensor.name!r} is {array.dtype}; wanted {tensor.datatype}")
        array = array.astype(dtype)
    if not tensor.fits(array.shape):
        raise LoadFailed(f"{tensor.name!r} has the shape {list(array.shape)}; wanted {list(tensor.shape)}")
    return array


def _sample_runs(instance: Instance, settings: ModelSettings, sample: Mapping[str, Array]) -> FirstRuns:
    """Run on a sample. Its first two rows show whether rows can be run together; with one row, only `batch` does."""
    try:
        for _ in range(settings.warmup.runs):
            instance.run(sample)
        counts = {array.shape[0] for array in sample.values()} if instance.spec.may_batch else set()
        if len(counts) != 1 or counts == {0} or settings.batch is False:
            return FirstRuns(False, {1: time_run(instance, sample)}, sample=sample)
        rows = min(*counts, 2)
        first = {name: array[:rows] for name, array in sample.items()}
        times = {1: time_run(instance, {name: array[:1] for name, array in sample.items()})}
        batches = False
        if rows > 1:
            batches, times[2] = _probe_batch(instance, first)
    except CalledTooSoon:
        raise
    except BackendError as error:
        raise LoadFailed(f"the first run, on {settings.warmup.inputs}, failed: {error.message}") from error
    return FirstRuns(settings.batch if settings.batch is not None else batches, times, sample=sample)


def _first_runs(instance: Instance, settings: ModelSettings) -> FirstRuns:
    """Run on made-up inputs."""
    length = _runnable_length(instance, settings)
    if length is None:
        return FirstRuns(batches=bool(settings.batch), times={})
    rows = settings.warmup.rows if instance.spec.may_batch else (1,)
    for count in rows:
        for _ in range(settings.warmup.runs):
            instance.run(make_inputs(instance.spec, count, length, settings.warmup.shapes))
    times = {1: time_run(instance, make_inputs(instance.spec, 1, length, settings.warmup.shapes))}
    if settings.batch is False or not instance.spec.may_batch:
        return FirstRuns(False, times, length)
    try:
        together = make_inputs(instance.spec, 2, length, settings.warmup.shapes)
    except LoadFailed:  # too large to be made up: nothing is gained by running two of them together
        return FirstRuns(bool(settings.batch), times, length)
    batches, times[2] = _probe_batch(instance, together)
    return FirstRuns(settings.batch if settings.batch is not None else batches, times, length)


def time_steps(
    forms: Mapping[Form, Instance], steps: ModelSteps, settings: ModelSettings, first: FirstRuns
) -> dict[InputKind, dict[int, float]]:
    """Run seconds by rows, of each way to ask a model with declared steps: of the first runs, and those that steps add.

    Nothing of the first request is new to the host after that. Empty where no other input of the model could be made,
    or `runs` is 0.
    Raises LoadFailed: the steps do not fit the model.
    """
    asked = [form for form in forms if form.answers and form.kind != "tensor"] or [
        form for form in forms if form.answers
    ]
    times: dict[InputKind, dict[int, float]] = {}
    for form in asked if settings.warmup.runs else ():
        instance = forms[form]
        inputs = first.inputs(instance.spec, 1, settings.warmup.shapes)
        for name, made in made_up_rows(instance.spec, form, steps).items():
            inputs[name] = made
        try:
            instance.run(inputs)  # not timed: it allocates
            run_s = time_run(instance, inputs)
        except BackendError as failed:
            if first.times:
                raise LoadFailed(f"the first run with declared steps failed: {failed.message}") from None
            continue
        known = first.times or {1: run_s}
        added_s = max(run_s - known[1], 0.0)
        times[form.kind] = {rows: model_s + added_s * rows for rows, model_s in known.items()}
    return times


def made_up_rows(spec: ModelSpec, form: Form, steps: ModelSteps) -> dict[str, Array]:
    """Return the tensors to send in this form, of the inputs that declared steps read."""
    from edge_runtime.hosts.steps_instance import steps_declaration

    found: dict[str, Array] = {}
    for tensor in spec.inputs:
        table = steps.inputs.get(tensor.name)
        if table is not None and form.kind != "tensor":
            sample = steps_declaration(table.source).sample
            found[tensor.name] = (plugins.named(sample) if sample else table.made_up)(tensor, form.kind)
    return found


def time_run(instance: Instance, inputs: Mapping[str, Array]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    instance.run(inputs)
    return time.perf_counter() - started


def time_bound(bound: Bound, rows: int, runs: int = 3) -> float:
    """Seconds of the quickest of a few runs on bound buffers."""
    best = float("inf")
    for _ in range(runs):
        started = time.perf_counter()
        bound.run(rows)
        best = min(best, time.perf_counter() - started)
    return best


def make_inputs(spec: ModelSpec, rows: int, length: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """Made-up inputs: axis 0 `rows` where dynamic, `length` for other dynamic axes, `shapes` (inner) where given.

    Floats lie in [-1, 1) and no two rows are alike; integers and text are 0 and 1, which every vocabulary holds.
    Raises LoadFailed for more than MADE_UP_BYTES.
    """
    wanted = {tensor.name: _shape(tensor, rows, length, shapes.get(tensor.name)) for tensor in spec.inputs}
    nbytes = sum(
        math.prod(wanted[tensor.name]) * (DATATYPES[tensor.datatype].itemsize or TEXT_BYTES) for tensor in spec.inputs
    )
    if nbytes > MADE_UP_BYTES:
        raise LoadFailed(f"{nbytes:,} bytes of made-up inputs are over the bound, {MADE_UP_BYTES:,}")
    return {tensor.name: _made_up(tensor, wanted[tensor.name]) for tensor in spec.inputs}


def zero_inputs(spec: ModelSpec, length: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """One row as `make_inputs`, of zeros: nothing to compute and, until they are read, no memory. Text is "0"."""
    inputs: dict[str, Array] = {}
    for tensor in spec.inputs:
        shape = _shape(tensor, 1, length, shapes.get(tensor.name))
        is_text = tensor.datatype == "BYTES"
        dtype = DATATYPES[tensor.datatype].dtype
        inputs[tensor.name] = np.full(shape, b"0", object) if is_text else np.zeros(shape, dtype)
    return inputs


def _runnable_length(instance: Instance, settings: ModelSettings) -> int | None:
    spec, shapes = instance.spec, settings.warmup.shapes
    is_known = all(tensor.has_fixed_inner_shape or tensor.name in shapes for tensor in spec.inputs)
    error: BackendError | None = None
    for length in GUESSED_LENGTHS[:1] if is_known else GUESSED_LENGTHS:
        try:
            inputs = make_inputs(spec, 1, length, shapes)
        except LoadFailed:
            break  # the next length is larger, and a model that takes so much is served without a warm-up
        try:
            instance.run(inputs)
        except CalledTooSoon:
            raise
        except BackendError as failed:
            error = failed
        else:
            return length
    if is_known and error is not None:
        raise LoadFailed(f"the first run failed: {error.message}; {TWO_WAYS_OUT}")
    return None


def _probe_batch(instance: Instance, together: Mapping[str, Array]) -> tuple[bool, float]:
    """Whether two different rows run together equal the same rows run alone; and how long the run together took."""
    try:
        started = time.perf_counter()
        joined = instance.run(together)
        run_s = time.perf_counter() - started
        alone = [instance.run({name: array[row : row + 1] for name, array in together.items()}) for row in range(2)]
    except BackendError:
        return False, 0.0
    tolerance = TOLERANCE.get(instance.precision, TOLERANCE["bf16"])
    for index, output in enumerate(joined):
        if not output.shape or output.shape[0] != 2:
            return False, run_s
        if not all(_equal(output[row : row + 1], alone[row][index], tolerance) for row in range(2)):
            return False, run_s
    return True, run_s


def _equal(together: Array, alone: Array, tolerance: tuple[float, float]) -> bool:
    if together.shape != alone.shape:
        return False
    if together.dtype.kind != "f":
        return bool(np.array_equal(together, alone))
    relative, absolute = tolerance
    scale = float(np.max(np.abs(alone), initial=0.0, where=np.isfinite(alone)))
    return bool(np.allclose(together, alone, rtol=relative, atol=absolute * max(scale, 1e-6), equal_nan=True))


def _shape(tensor: TensorSpec, rows: int, length: int, inner: Sequence[int] | None) -> tuple[int, ...]:
    if inner is not None and len(inner) == len(tensor.shape) - 1:
        first = rows if tensor.shape[0] == DYNAMIC else tensor.shape[0]
        return (first, *inner)
    return tuple(size if size != DYNAMIC else (rows if axis == 0 else length) for axis, size in enumerate(tensor.shape))


def _made_up(tensor: TensorSpec, shape: tuple[int, ...]) -> Array:
    dtype = DATATYPES[tensor.datatype].dtype
    noise = _noise(math.prod(shape))
    if tensor.datatype == "BYTES":
        values: Array = np.where(noise > 0, b"1", b"0").astype(object)
    elif tensor.datatype == "BF16":
        values = (noise.view(np.uint32) >> 16).astype(np.uint16)
    else:
        values = noise.astype(dtype) if dtype.kind == "f" else (noise > 0).astype(dtype)
    return values.reshape(shape)  # last: arithmetic on an array without axes gives a number, which no library takes


def _noise(count: int) -> npt.NDArray[np.float32]:
    """Numbers in [-1, 1) without order: a multiplicative hash of their index (Knuth, TAOCP 3, 6.4).

    numpy.random would do, and costs a daemon that makes nothing else up 5 MB of memory.
    """
    hashed = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(2_654_435_761)
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(2_246_822_519)
    noise: npt.NDArray[np.float32] = (hashed >> np.uint32(8)).astype(np.float32)
    noise /= np.float32(1 << 23)
    noise -= np.float32(1)
    return noise
