"""Pictures and raw frames as rows of a model's input: fitted, normalised and laid out as `[input.NAME]` declares.

Owns: that a picture fits the model, and the arithmetic on pixels. It runs beside the model and not in its graph: numpy
takes 0.08 ms for 224² and 0.7 ms for 640² on one core of a Xeon, ONNX Runtime's best graph of the same 0.08 and
0.6 ms; and here it is the same for every backend. Thread: any runner of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from edge_runtime.answers import PICTURE_SIZE
from edge_runtime.errors import LoadFailed, UnreadablePicture
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.pictures.fit import Placed, place, scale_pixels
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.pictures.pictures import check_installed, frame_pixels, open_picture
from edge_runtime.steps import InputKind, ModelSteps
from edge_runtime.tensors import DATATYPES, Array

STRIP_NUMBERS = 1 << 16
"""Numbers that are computed at once: 256 KiB stay in the cache of one core."""


class PictureInput:
    """A model's input that takes pictures.

    name: the input's. kinds: the forms of pictures that it takes. sides: height and width of the model's picture.
    source_specs: the output with the sizes of pictures.
    """

    joins = None
    keeps = None

    def __init__(self, spec: TensorSpec, steps: PictureSteps, threads: int, runs: int) -> None:
        """threads: of one run. runs: at once. Raises LoadFailed: the input takes no picture, or steps do not fit it."""
        check_installed()
        self.name = spec.name
        self.fills = (spec.name,)
        self.kinds: tuple[InputKind, ...] = ("picture", "frames") if steps.source == "picture" else ("frames",)
        self._steps = steps
        self._channels = 1 if steps.color == "gray" else 3
        self._spec = spec
        self._is_channels_first, self._size = _layout(spec, steps)
        self.sides: tuple[int, int] | None = (self._size[1], self._size[0])
        self.source_specs: tuple[TensorSpec, ...] = (TensorSpec(PICTURE_SIZE, "INT64", (DYNAMIC, 2)),)
        self._numbers = _numbers(spec, steps)
        self._dtype = DATATYPES[spec.datatype].dtype
        self._threads = threads
        # Threads are started when a batch first needs them.
        self._pool = ThreadPoolExecutor((threads - 1) * runs, "host-pictures") if threads > 1 else None

    def sent_spec(self, kind: InputKind) -> TensorSpec:
        """Return the spec of the tensor sent in place of the input's own."""
        rows = self._spec.shape[0]
        if kind == "picture":
            return TensorSpec(self.name, "BYTES", (rows,))
        match self._steps.source:
            case "nv12":
                shape: tuple[int, ...] = (rows, DYNAMIC, DYNAMIC)
            case "yuyv":
                shape = (rows, DYNAMIC, DYNAMIC, 2)
            case "gray":
                shape = (rows, DYNAMIC, DYNAMIC, 1)
            case _:
                shape = (rows, DYNAMIC, DYNAMIC, DYNAMIC)  # FRAME_CHANNELS, as `why_unreadable` checks
        return TensorSpec(self.name, "UINT8", shape)

    def tensors(self, kind: InputKind, sent_array: Array) -> tuple[dict[str, Array], list[Placed]]:
        """As `rows`, with the tensor under its name."""
        tensor, places = self.rows(kind, sent_array)
        return {self.name: tensor}, places

    def rows(self, kind: InputKind, sent_array: Array) -> tuple[Array, list[Placed]]:
        """Pictures as the model's tensor, and where each lies in its row.

        sent_array: BYTES [rows], or frames as `sent_spec` says. Raises UnreadablePicture: one of them cannot be read.
        """
        count = len(sent_array)
        if count == 0:
            raise UnreadablePicture("there is no picture")
        width, height = self._size
        channels = self._channels
        shape = (channels, height, width) if self._is_channels_first else (height, width, channels)
        tensor: Array = np.empty((count, *shape), self._dtype)
        planes = tensor if self._is_channels_first else tensor.transpose(0, 3, 1, 2)

        def write(row: int) -> Placed:
            if kind == "picture":
                pixels = open_picture(bytes(sent_array[row]), self._steps.color)
            else:
                pixels = frame_pixels(sent_array[row], self._steps.source, self._steps.color)
            try:
                return self._write(pixels, planes[row])
            except MemoryError:
                sides = f"{pixels.shape[1]} x {pixels.shape[0]}"
                raise UnreadablePicture(f"there is not enough memory to scale this picture of {sides}") from None

        places = self._each(write, count)
        return tensor.reshape(count, -1) if len(self._spec.shape) == 2 else tensor, places

    def source_rows(self, places: Sequence[Placed]) -> list[Array]:
        """The size of each picture as it was sent, INT64 [rows, 2]."""
        return [np.array([(each.source_width, each.source_height) for each in places], np.int64)]

    def _each(self, write: Callable[[int], Placed], count: int) -> list[Placed]:
        """Write all rows, by no more threads than a run has."""
        workers = min(self._threads, count)
        if self._pool is None or workers == 1:
            return [write(row) for row in range(count)]

        def write_every(first: int) -> Sequence[Placed]:
            return [write(row) for row in range(first, count, workers)]

        others = [self._pool.submit(write_every, first) for first in range(1, workers)]
        try:
            parts = [write_every(0)]
        finally:
            for other in others:
                other.exception()  # none may write into a tensor that is given up
        parts += [other.result() for other in others]
        return [parts[row % workers][row // workers] for row in range(count)]

    def _write(self, pixels: Array, planes: Array) -> Placed:
        """Write one picture into its row. planes: [channels, height, width], of any strides."""
        steps = self._steps
        source = pixels.shape[1], pixels.shape[0]
        placed = place(steps.fit or "stretch", source, self._size, steps.shorter_side)
        left, top = max(-placed.left, 0), max(-placed.top, 0)
        if source == (placed.width, placed.height):
            levels = pixels[top:, left:][: self._size[1], : self._size[0]].transpose(2, 0, 1)
        else:
            levels = scale_pixels(pixels, placed, self._size, steps.filter or "bilinear")
        if steps.color == "bgr":
            levels = levels[::-1]
        left, top = max(placed.left, 0), max(placed.top, 0)
        inside = planes[:, top : top + levels.shape[1], left : left + levels.shape[2]]
        if inside.shape != planes.shape:
            planes[...] = self._numbers.fill
        self._numbers.write(levels, inside)
        return placed


class _Numbers:
    """The meaning of pixels: (pixel - mean) * scale, by channel.

    fill: of dtype, [channels, 1, 1].
    """

    def __init__(
        self, mean: Sequence[float], scale: Sequence[float], fill: Sequence[int], dtype: npt.DTypeLike
    ) -> None:
        exact = (np.arange(256.0)[None] - np.array(mean)[:, None]) * np.array(scale)[:, None]
        dtype = np.dtype(dtype)
        if dtype.kind != "f":
            limits = np.iinfo(dtype)
            exact = np.clip(np.rint(exact), limits.min, limits.max)
        self._table = exact.astype(dtype)
        self.fill = np.array([row[level] for row, level in zip(self._table, fill, strict=True)], dtype)[:, None, None]
        self._is_plain = bool((self._table == np.arange(256)).all())
        self._scale = np.array(scale, np.float32)[:, None, None] if dtype == np.float32 else None
        self._shift = (-np.array(mean) * np.array(scale)).astype(np.float32)[:, None, None]
        self._has_shift = bool(self._shift.any())

    def write(self, levels: Array, out: Array) -> None:
        """Write levels as numbers. levels: UINT8, or FP32 for those between; as out, [channels, height, width]."""
        if self._scale is not None:
            # In strips: what was multiplied is still in the core's cache when it is added to.
            step = max(STRIP_NUMBERS // (len(out) * out.shape[2]), 1)
            for first in range(0, out.shape[1], step):
                part = out[:, first : first + step]
                np.multiply(levels[:, first : first + step], self._scale, out=part)
                if self._has_shift:
                    np.add(part, self._shift, out=part)
            return
        if levels.dtype != np.uint8:
            levels = np.rint(levels).astype(np.uint8)
        if self._is_plain:
            out[...] = levels
            return
        for channel, table in enumerate(self._table):
            out[channel] = table[levels[channel]]


def picture_input(spec: ModelSpec, steps: ModelSteps, threads: int, runs: int) -> PictureInput | None:
    """The input that takes pictures; None: no steps declare one. Raises LoadFailed: they do not fit the model."""
    if not steps.inputs:
        return None
    if len(steps.inputs) > 1:
        raise LoadFailed(f"steps are declared for {', '.join(steps.inputs)}; wanted one input that takes a picture")
    ((name, declared),) = steps.inputs.items()
    found = next((each for each in spec.inputs if each.name == name), None)
    if found is None:
        there = ", ".join(each.name for each in spec.inputs)
        raise LoadFailed(f"[input.{name}]: the model has no such input; it has {there}")
    assert isinstance(declared, PictureSteps)
    return PictureInput(found, declared, threads, runs)


def _layout(spec: TensorSpec, steps: PictureSteps) -> tuple[bool, tuple[int, int]]:
    """Whether channels come before sides, and width and height. Raises LoadFailed."""
    shape = spec.shape
    channels = 1 if steps.color == "gray" else 3
    if len(shape) == 4 and shape[1] == channels:
        is_first, sides = True, shape[2:]
    elif len(shape) == 4 and shape[3] == channels:
        is_first, sides = False, shape[1:3]
    elif len(shape) == 2 and channels == 1 and steps.size is not None and shape[1] == steps.size[0] * steps.size[1]:
        is_first, sides = True, steps.size  # gray pixels in one line, row by row
    else:
        other = {1: 'color = "gray"', 3: 'color = "rgb" or "bgr"'}
        counts = [count for count in other if len(shape) == 4 and count in (shape[1], shape[3])]
        advice = f"; say {other[counts[0]]}" if counts else ""
        raise LoadFailed(
            f"[input.{spec.name}]: its shape is {list(shape)}; wanted [rows, {channels}, height, width] or "
            f'[rows, height, width, {channels}] for color = "{steps.color}"{advice}'
        )
    height, width = sides
    if DYNAMIC in sides:
        if steps.size is None:
            raise LoadFailed(f"[input.{spec.name}]: the model leaves height or width open; say size = [height, width]")
        if any(side not in (DYNAMIC, said) for side, said in zip(sides, steps.size, strict=True)):
            raise LoadFailed(f"[input.{spec.name}]: size is {list(steps.size)}, and the model takes {list(sides)}")
        height, width = steps.size
    elif steps.size not in (None, (height, width)):
        raise LoadFailed(f"[input.{spec.name}]: size is {list(steps.size)}, and the model takes {[height, width]}")
    if steps.shorter_side is not None and steps.shorter_side < min(height, width):
        raise LoadFailed(
            f"[input.{spec.name}]: shorter_side is {steps.shorter_side}, less than the model's {height} x {width}, so "
            "that the middle of a picture would not fill it"
        )
    return is_first, (width, height)


def _numbers(spec: TensorSpec, steps: PictureSteps) -> _Numbers:
    """The arithmetic that steps declare. Raises LoadFailed: they leave open what a float means, or do not fit."""
    name = spec.name
    if spec.datatype not in ("FP32", "FP16", "UINT8", "INT8"):
        raise LoadFailed(f"[input.{name}]: it takes {spec.datatype}; wanted FP32, FP16, UINT8 or INT8")
    if steps.range is None and not steps.mean and not steps.scale and spec.datatype != "UINT8":
        raise LoadFailed(
            f'[input.{name}]: say what its {spec.datatype} numbers mean: range = "0..1" (or "-1..1", "0..255"), or '
            "mean and scale"
        )
    if steps.range is not None and spec.datatype[0] != "F" and (spec.datatype, steps.range) != ("UINT8", "0..255"):
        raise LoadFailed(
            f'[input.{name}]: range = "{steps.range}" does not fit in {spec.datatype}; wanted mean and scale, by the '
            "model's quantisation"
        )
    channels = 1 if steps.color == "gray" else 3
    mean, scale, fill = list(steps.mean) or [0.0], list(steps.scale) or [1.0], list(steps.fill)
    match steps.range:
        case "0..1":
            scale = [1 / 255]
        case "-1..1":
            mean, scale = [127.5], [1 / 127.5]
        case _:
            pass
    for word, values in (("mean", mean), ("scale", scale), ("fill", fill)):
        if len(values) not in (1, channels):
            raise LoadFailed(
                f'[input.{name}]: {word} has {len(values)} numbers; wanted one for color = "{steps.color}"'
            )
    if steps.invert:  # (255 - pixel - mean) * scale
        mean, scale = [255 - each for each in mean], [-each for each in scale]
    mean, scale = [values * channels if len(values) == 1 else values for values in (mean, scale)]
    return _Numbers(mean, scale, fill * channels if len(fill) == 1 else fill, DATATYPES[spec.datatype].dtype)
