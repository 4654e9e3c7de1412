"""The runs a version makes before it is ready: allocate, find out whether axis 0 is rows, take first times.

Owns: made-up inputs and the batch probe. Thread: the loader's. Few runs, because ready waits for them; the curve is
measured afterwards, when idle (calibration.py).
"""

from __future__ import annotations

import math
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_runtime.backends.base import Bound, Instance
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import BackendError, LoadFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.steps import Form, Given, ModelSteps
from edge_runtime.tensors import DATATYPES, Array

GUESSED_LENGTHS = (1, 32, 224)
"""Lengths tried for dynamic inner axes that `[warmup] shapes` does not give: a scalar, a sequence, an image."""

PICTURE_SIZE = 480, 640
"""Height and width of the made-up picture: what most cameras send."""

TOLERANCE = {"f32": (1e-3, 1e-4), "f16": (2e-2, 2e-2), "bf16": (5e-2, 5e-2)}
"""Relative and absolute difference allowed between rows run together and alone, by precision: kernels choose other
summation orders by batch size; measured on MobileNetV2 and ResNet-18 the fp32 difference is below 1e-5."""


@dataclass(frozen=True, slots=True)
class FirstRuns:
    """Results of the first runs.

    times: run seconds by rows, empty when no warm-up input could be made. length: of dynamic inner axes in these runs.
    """

    batches: bool
    times: Mapping[int, float]
    length: int = 1


def warm_up(instance: Instance, settings: ModelSettings) -> FirstRuns:
    """Run a version for the first time.

    Raises LoadFailed when a model of wholly known shape cannot run: it never could. Where inner axes are dynamic and no
    guess fits, the model is served without a warm-up.
    """
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
    batches, times[2] = _probe_batch(instance, length, settings)
    return FirstRuns(settings.batch if settings.batch is not None else batches, times, length)


def time_steps(
    forms: Mapping[Form, Instance], steps: ModelSteps, settings: ModelSettings, first: FirstRuns
) -> dict[Given, dict[int, float]]:
    """Run seconds by rows, of each way to ask a model with declared steps: of the first runs, and what steps add.

    Nothing of the first picture is new to the host after that. Empty where no other input of the model could be made.
    Raises LoadFailed: the steps do not fit what the model does.
    """
    asked = [form for form in forms if form.answers and form.given != "tensor"] or [
        form for form in forms if form.answers
    ]
    times: dict[Given, dict[int, float]] = {}
    for form in asked:
        instance = forms[form]
        inputs = make_inputs(instance.spec, 1, first.length, settings.warmup.shapes)
        for name, made in _made_up_pictures(instance.spec, form, steps).items():
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
        times[form.given] = {rows: model_s + added_s * rows for rows, model_s in known.items()}
    return times


def _made_up_pictures(spec: ModelSpec, form: Form, steps: ModelSteps) -> dict[str, Array]:
    """What is sent in this form in place of the inputs that steps declare: a picture as large as cameras send."""
    height, width = PICTURE_SIZE
    made: dict[str, Array] = {}
    for tensor in spec.inputs:
        if tensor.name not in steps.inputs or form.given == "tensor":
            continue
        rows = max(tensor.shape[0], 1)
        if form.given == "picture":
            made[tensor.name] = np.full((rows,), _png(width, height), object)
            continue
        # nv12 has half as many lines again.
        inner = (height if len(tensor.shape) == 4 else height * 3 // 2, width, *tensor.shape[3:])
        made[tensor.name] = np.zeros((rows, *(side if side != DYNAMIC else 3 for side in inner)), np.uint8)
    return made


def _png(width: int, height: int) -> bytes:
    """A black picture, RGB. Source: the PNG specification, 5 and 11.2."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = zlib.compress(bytes((1 + 3 * width) * height), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


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
    """
    return {
        tensor.name: _made_up(tensor, _shape(tensor, rows, length, shapes.get(tensor.name))) for tensor in spec.inputs
    }


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
            instance.run(make_inputs(spec, 1, length, shapes))
        except BackendError as failed:
            error = failed
        else:
            return length
    if is_known and error is not None:
        raise LoadFailed(f"the first run failed: {error.message}")
    return None


def _probe_batch(instance: Instance, length: int, settings: ModelSettings) -> tuple[bool, float]:
    """Whether two different rows run together equal the same rows run alone; and how long the run together took."""
    spec, shapes = instance.spec, settings.warmup.shapes
    together = make_inputs(spec, 2, length, shapes)
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
