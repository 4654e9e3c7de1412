"""Pictures as tensors, where Pillow is installed: scaled to the model's size, in its layout.

Layouts known: [N, C, H, W], [N, H, W, C], [N, H, W] and [N, pixels], with or without N; C is 1 (grey) or 3 (RGB).
Floats are pixels / 255; integers are pixels. A model that wants other scaling gets its data as .npy.
"""

from __future__ import annotations

import math
from importlib import import_module
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
"""What wrong scaling does to answers is seen in no error, so whoever judges or calibrates by pictures is told."""

MAX_PIXELS = 64 << 20
"""A few kB of PNG can unpack to gigabytes; this is twice what the largest cameras of today take."""


def picture(content: IO[bytes], name: str, spec: TensorSpec) -> Array:
    """One picture as one row of the model's input; `name` is for messages.

    Raises TensorMismatch when the layout is not known, or it is no picture, or one of more than MAX_PIXELS.
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
        raise TensorMismatch(f"{name} is no picture that Pillow can read: {error}") from None
    if layout == "flat":
        side = math.isqrt(width)
        size = image.size if image.size[0] * image.size[1] == width else (side, side)
    else:
        size = (width if width != DYNAMIC else image.size[0], height if height != DYNAMIC else image.size[1])
    pixels: Array = np.asarray(image.resize(size), np.uint8)
    dtype = datatype(spec.datatype).dtype
    scaled: Array = (pixels / np.float32(255)).astype(dtype) if dtype.kind == "f" else pixels.astype(dtype)
    return _laid_out(scaled, layout, spec)


def _layout(spec: TensorSpec, name: str) -> tuple[int, int, int, str]:
    """Channels, height, width and the layout's name."""
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
