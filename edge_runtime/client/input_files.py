"""Files as tensors of a model's datatype and shape: .npy, .json, pictures.

Owns: how content is read and fitted to a spec. Never converts or resizes silently where a value would be lost.
Opens no file and trusts none: bad content of any kind raises TensorMismatch. Thread: any.

Pictures need Pillow. They are scaled to the model's size, in its layout: [N, C, H, W], [N, H, W, C], [N, H, W] or
[N, pixels], with or without N; C is 1 (grey) or 3 (RGB). Floats are pixels / 255; integers are pixels. A model that
wants other scaling gets its data as .npy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import PurePath
from typing import IO, Any

import numpy as np

from edge_runtime.errors import TensorMismatch
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.tensors import Array, datatype

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".pgm")

PICTURE_NOTE = (
    "pictures are read at the model's size as pixels / 255 (whole numbers: pixels); a model that was trained on other "
    "numbers, as by a mean and a deviation, wants its inputs as .npy"
)
"""Wrong scaling raises no error, so every judgement or calibration by pictures prints this note."""

MAX_PIXELS = 64 << 20
"""A few kB of PNG can unpack to gigabytes; this is twice the picture of the largest cameras of today."""

INPUT_SUFFIXES = (".npy", ".json", *PICTURE_SUFFIXES)
"""Suffixes that name a format."""


def tensor_from_file(
    content: IO[bytes], name: str, spec: TensorSpec, note: Callable[[str], None] = lambda _: None
) -> Array:
    """Read one input's tensor. name: the file's, for its suffix and for messages.

    Adds a missing batch axis to a row, and gives flat data the model's shape. note: takes a line where numbers were
    converted (.npy). Raises TensorMismatch.
    """
    match PurePath(name).suffix.lower():
        case ".npy":
            return _from_npy(content, name, spec, note)
        case ".json":
            return tensor_from_json(json_value(content.read(), name), spec)
        case suffix if suffix in PICTURE_SUFFIXES:
            return picture(content, name, spec)
    raise TensorMismatch(f"{name} is none of {', '.join(INPUT_SUFFIXES)}")


def json_value(text: str | bytes, source: str) -> Any:
    """Parse a JSON text. Raises TensorMismatch naming its source."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TensorMismatch(f"{source}: not JSON: {str(error)[:200]}") from None


def tensor_from_json(value: Any, spec: TensorSpec) -> Array:
    """Convert JSON values to the model's datatype. Raises TensorMismatch where they do not fit."""
    kind = datatype(spec.datatype)
    try:
        if kind.name == "BYTES":
            return _with_rows(np.asarray(value, dtype=str).astype(object), spec)
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and kind.dtype.kind != "f"):
            kind_got = "text" if array.dtype.kind == "U" else str(array.dtype)
            raise TensorMismatch(f"input {spec.name!r}: {kind_got} values, the model wants {spec.datatype}")
        typed: Array = np.array(value, dtype=kind.dtype)
        return _with_rows(typed, spec)
    except (ValueError, OverflowError) as error:
        raise TensorMismatch(f"input {spec.name!r}: {error}") from None


def filled_shape(spec: TensorSpec, elements: int) -> tuple[int, ...] | None:
    """Return the spec's shape with its one open dimension filled in; None where it is ambiguous."""
    known = math.prod(length for length in spec.shape if length != DYNAMIC)
    open_ = spec.shape.count(DYNAMIC)
    if open_ > 1 or known == 0:
        return None
    return tuple(elements // known if length == DYNAMIC else length for length in spec.shape)


def picture(content: IO[bytes], name: str, spec: TensorSpec) -> Array:
    """Read one picture as one row of the model's input. name: for messages.

    Raises TensorMismatch for an unknown layout, an unreadable picture, or one of more than MAX_PIXELS.
    """
    try:
        images: Any = import_module("PIL.Image")
    except ImportError:
        raise TensorMismatch(
            f"{name}: reading pictures needs Pillow, which is not installed: pip install pillow, "
            "or give the pixels as .npy"
        ) from None
    channels, height, width, layout = _layout(spec, name)
    try:
        image = images.open(content)
        if image.size[0] * image.size[1] > MAX_PIXELS:
            raise TensorMismatch(f"{name}: {image.size[0]} x {image.size[1]} pixels; at most {MAX_PIXELS} are read")
        image = image.convert("L" if channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError, images.DecompressionBombError) as error:
        raise TensorMismatch(f"{name} is not a picture that Pillow can read: {error}") from None
    if layout == "flat":
        side = math.isqrt(width)
        size = image.size if image.size[0] * image.size[1] == width else (side, side)
    else:
        size = (width if width != DYNAMIC else image.size[0], height if height != DYNAMIC else image.size[1])
    pixels: Array = np.asarray(image.resize(size), np.uint8)
    dtype = datatype(spec.datatype).dtype
    scaled: Array = (pixels / np.float32(255)).astype(dtype) if dtype.kind == "f" else pixels.astype(dtype)
    return _laid_out(scaled, layout, spec)


# ---- private --------------------------------------------------------------------------------------------------------


def _from_npy(content: IO[bytes], name: str, spec: TensorSpec, note: Callable[[str], None]) -> Array:
    try:
        array: Array = np.load(content, allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise TensorMismatch(f"{name} is not a .npy file of numbers or text: {error}") from None
    if not isinstance(array, np.ndarray):
        raise TensorMismatch(f"{name} holds several arrays; save each into its own .npy file")
    wanted = datatype(spec.datatype).dtype
    if spec.datatype != "BYTES" and array.dtype != wanted and np.can_cast(array.dtype, wanted, "same_kind"):
        note(f"input {spec.name!r}: {array.dtype} read as {spec.datatype}")
        array = array.astype(wanted)
    return _with_rows(array, spec)


def _with_rows(array: Array, spec: TensorSpec) -> Array:
    """Add a missing batch axis to one row, and give flat data the model's shape."""
    if array.ndim == len(spec.shape) - 1 and spec.has_dynamic_axis_0:
        return array[None]
    if array.ndim == 1 and len(spec.shape) > 1:
        lengths = filled_shape(spec, array.size)
        if lengths is not None and math.prod(lengths) == array.size:
            return array.reshape(lengths)
    return array


def _layout(spec: TensorSpec, name: str) -> tuple[int, int, int, str]:
    """Return channels, height, width and the layout's name."""
    inner = spec.shape[1:] if spec.shape[:1] in ((DYNAMIC,), (1,)) else spec.shape
    match inner:
        case (1 | 3 as channels, height, width):
            return channels, height, width, "channels first"
        case (height, width, 1 | 3 as channels):
            return channels, height, width, "channels last"
        case (height, width):
            return 1, height, width, "grey"
        case (int(pixels),) if pixels > 0 and math.isqrt(pixels) ** 2 == pixels:
            return 1, DYNAMIC, pixels, "flat"
    raise TensorMismatch(
        f"{name}: a picture does not fit input {spec.name!r} of shape {list(spec.shape)}; wanted [N, 1 or 3, H, W], "
        "[N, H, W, 1 or 3], [N, H, W] or [N, pixels of a square]; give the pixels as .npy"
    )


def _laid_out(pixels: Array, layout: str, spec: TensorSpec) -> Array:
    if layout == "channels first":
        pixels = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
    elif layout == "channels last" and pixels.ndim == 2:
        pixels = pixels[:, :, None]
    elif layout == "flat":
        pixels = pixels.reshape(-1)
    return np.ascontiguousarray(pixels[None] if pixels.ndim < len(spec.shape) else pixels)
