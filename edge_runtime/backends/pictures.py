"""Pictures and raw frames as arrays of pixels: uint8 [height, width, 3], RGB, or [height, width] where gray.

Owns: the bounds of what is decoded. Pillow decodes: its wheels are 7 MB for x86-64 and arm64, it knows all four
formats, and it lets other threads run meanwhile. It is imported in hosts only.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MAX_PIXELS = 64 << 20
"""Of one picture: 64 million pixels take 200 MB; a larger one is refused by its head, before it is decoded."""


def check_installed() -> None:
    """Import Pillow. Raises LoadFailed with what to do."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise LoadFailed("steps of pictures need Pillow: pip install 'edge-runtime[pictures]'") from error


def open_picture(data: bytes, wanted: tuple[int, int] | None = None) -> tuple[Image.Image, tuple[int, int]]:
    """Decode a picture; also its own width and height. wanted: width and height that the decoder may stop at.

    Raises RunFailed: it is no picture of FORMATS, is cut, or has more than MAX_PIXELS.
    """
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > MAX_PIXELS:
            raise RunFailed(f"the picture has {width} x {height} pixels; at most {MAX_PIXELS} are decoded")
        if wanted is not None:
            picture.draft("RGB", wanted)
        picture.load()
        return picture, (width, height)
    except RunFailed:
        raise
    except Exception as error:  # noqa: BLE001 (Pillow raises many kinds, some of them surprises)
        kind = "" if type(error).__name__ == "UnidentifiedImageError" else f" ({type(error).__name__}: {error})"
        raise RunFailed(
            f"no picture can be read from these {len(data)} bytes{kind}; wanted {', '.join(FORMATS)}"
        ) from None


def pixels(picture: Image.Image, color: str) -> Array:
    """The pixels of a picture: [height, width, 3], or [height, width, 1] where gray. Transparency is dropped."""
    wanted = "L" if color == "gray" else "RGB"
    if picture.mode != wanted:
        picture = picture.convert(wanted)
    array = np.asarray(picture)
    return array[:, :, None] if array.ndim == 2 else array
