"""Pictures and raw frames: bytes that a caller sent, decoded and scaled, as arrays of pixels.

Owns: what is decoded, its bounds, and what each kind of picture means (palettes, alpha, 16 bits, orientation). Pillow
decodes: its wheels are 7 MB for x86-64 and arm64, it knows all formats, and it lets other threads run meanwhile. It is
imported in hosts only.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

import numpy as np

from edge_runtime.backends.picture_fit import Placed
from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.steps import FRAME_CHANNELS, Filter, PictureSource
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
"""Of several frames or pages the first is taken."""

MAX_PIXELS = 64 << 20
"""Of one picture: 64 million pixels take 270 MB; a larger one is refused by its head, before it is decoded."""

_OTHERS = (
    (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"<svg", "SVG"), (b"<?xml", "SVG or other XML"), (b"%PDF", "PDF"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"), (b"\xff\x0a", "JPEG XL"), (b"\0\0\0\x0cJXL ", "JPEG XL"),
)  # fmt: skip

_ORIENTATION = 0x0112
"""EXIF's tag. Source: CIPA DC-008, 4.6.5."""

_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip


def check_installed() -> None:
    """Import Pillow, and all that the first picture needs. Raises LoadFailed with what to do."""
    try:
        from PIL import (  # noqa: F401
            BmpImagePlugin,
            GifImagePlugin,
            JpegImagePlugin,
            MpoImagePlugin,
            PngImagePlugin,
            WebPImagePlugin,
        )
    except ImportError as error:
        raise LoadFailed(f"steps of pictures need Pillow ({error}): pip install 'edge-runtime[pictures]'") from error


def open_picture(data: bytes) -> Image.Image:
    """Decode a picture, upright as its EXIF orientation says, in mode RGB, or L where it is gray.

    Alpha is dropped, as are the low 8 of 16 bits. Raises RunFailed: it is no picture of FORMATS, is cut, or has more
    than MAX_PIXELS.
    """
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > MAX_PIXELS:
            raise RunFailed(f"the picture has {width} x {height} pixels; at most {MAX_PIXELS} are decoded")
        picture.load()
        return _upright(_plain(picture))
    except RunFailed:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RunFailed(f"the picture has too many pixels; at most {MAX_PIXELS} are decoded") from None
    except MemoryError:
        raise RunFailed(f"there is not enough memory to decode this picture of {len(data)} bytes") from None
    except Exception as error:  # noqa: BLE001 (Pillow raises many kinds, some of them surprises)
        raise RunFailed(_why_not(data, error)) from None


def frame_picture(frame: Array, source: PictureSource) -> Image.Image:
    """A raw frame as a picture, in mode RGB, or L where it is gray.

    frame: UINT8; "nv12" [height * 3 / 2, width], "yuyv" [height, width, 2], "gray" [height, width, 1], else that or RGB
    [height, width, 3]. Raises RunFailed: it is empty, or these are no lengths of such a frame.
    """
    from PIL import Image

    if 0 in frame.shape:
        raise RunFailed(f"the frame is empty: its shape is {list(frame.shape)}")
    if source not in ("nv12", "yuyv"):
        if frame.shape[2] not in FRAME_CHANNELS:
            raise RunFailed(f"the frame has {frame.shape[2]} channels; wanted 3 (RGB) or 1 (gray)")
        return Image.fromarray(frame[:, :, 0] if frame.shape[2] == 1 else frame)
    height, width = frame.shape[:2]
    if source == "yuyv":
        if width % 2:
            raise RunFailed(f"a yuyv frame is of even width; got {width}")
        luma, blue, red = frame[:, :, 0], frame[:, 0::2, 1], frame[:, 1::2, 1]
    else:
        if height % 3 or width % 2:
            raise RunFailed(
                f"an nv12 frame has height * 3 / 2 lines of even width; got {height} lines of {width} bytes"
            )
        height = height // 3 * 2
        colours = frame[height:].reshape(height // 2, width // 2, 2)
        luma, blue, red = frame[:height], colours[:, :, 0], colours[:, :, 1]
    # BT.601 of limited range, as V4L2's cameras and OpenCV have it; Pillow's YCbCr is of full range.
    planes = [Image.fromarray(np.ascontiguousarray(plane)) for plane in (luma, blue, red)]
    full = [planes[0].point([round((level - 16) * 255 / 219) for level in range(256)])]
    for plane in planes[1:]:
        wide = plane.point([round((level - 128) * 255 / 224 + 128) for level in range(256)])
        full.append(wide.resize((width, height), Image.Resampling.NEAREST))
    return Image.merge("YCbCr", full).convert("RGB")


def scaled(picture: Image.Image, placed: Placed, target: tuple[int, int], kind: Filter, mode: str) -> Image.Image:
    """The part of a picture that the model sees, scaled as `placed` says. target: the model's width and height.

    Only that part is computed: a picture of extreme shape, cropped, costs no more than another. mode: RGB or L.
    """
    from PIL import Image

    if picture.mode != mode:
        picture = picture.convert(mode)
    left, top = max(-placed.left, 0), max(-placed.top, 0)
    width, height = min(placed.width - left, target[0]), min(placed.height - top, target[1])
    if picture.size == (placed.width, placed.height):
        if (width, height) == picture.size:
            return picture
        return picture.crop((left, top, left + width, top + height))
    across, down = picture.width / placed.width, picture.height / placed.height
    if kind == "linear" and max(across, down) > 1:
        shift = (across, 0, left * across, 0, down, top * down)
        return picture.transform((width, height), Image.Transform.AFFINE, shift, Image.Resampling.BILINEAR)
    box = (
        left * across,
        top * down,
        min((left + width) * across, picture.width),
        min((top + height) * down, picture.height),
    )
    return picture.resize((width, height), _filters()[kind], box)


def lines(picture: Image.Image, first: int, last: int) -> Array:
    """Pixels of some lines: [lines, width, 3], or [lines, width, 1] where gray."""
    if (first, last) != (0, picture.height):
        picture = picture.crop((0, first, picture.width, last))
    array = np.asarray(picture)
    return array[:, :, None] if array.ndim == 2 else array


def _filters() -> dict[Filter, Image.Resampling]:
    from PIL.Image import Resampling

    # Without shrinking, antialiasing changes nothing.
    return {
        "nearest": Resampling.NEAREST,
        "linear": Resampling.BILINEAR,
        "bilinear": Resampling.BILINEAR,
        "bicubic": Resampling.BICUBIC,
        "lanczos": Resampling.LANCZOS,
    }


def _plain(picture: Image.Image) -> Image.Image:
    """A decoded picture in mode RGB or L."""
    from PIL import Image

    mode = picture.mode
    if mode in ("RGB", "L"):
        return picture
    if mode.startswith("I"):  # 16 bits of gray, which Pillow's own conversion cuts at 255
        plain = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    elif mode == "P" and "transparency" in picture.info:
        plain = picture.convert("RGBA").convert("RGB")
    else:
        plain = picture.convert("L" if mode in ("1", "LA", "La") else "RGB")
    if "exif" in picture.info:
        plain.info["exif"] = picture.info["exif"]
    return plain


def _upright(picture: Image.Image) -> Image.Image:
    """A picture as its EXIF says that it is looked at; what cannot be read says nothing."""
    from PIL import Image

    if "exif" not in picture.info:
        return picture
    turn = None
    with contextlib.suppress(Exception):
        turn = _TURNS.get(picture.getexif().get(_ORIENTATION, 1))
    return picture if turn is None else picture.transpose(Image.Transpose[turn])


def _why_not(data: bytes, error: Exception) -> str:
    wanted = f"wanted {', '.join(FORMATS)}"
    head = data[:16].lstrip()
    for start, name in _OTHERS:
        if head.startswith(start) or data.startswith(start):
            return f"pictures of the kind {name} are not read; {wanted}"
    if data[4:8] == b"ftyp":
        return f"pictures of the kind {data[8:12].decode('ascii', 'replace').strip()} (HEIF) are not read; {wanted}"
    kind = "" if type(error).__name__ == "UnidentifiedImageError" else f" ({type(error).__name__}: {error})"
    return f"no picture can be read from these {len(data)} bytes{kind}; {wanted}"
