"""Pictures and raw frames: bytes that a caller sent, as arrays of pixels.

Owns: what is decoded, its bounds, and what each kind of picture means (palettes, alpha, 16 bits, orientation). Pillow
decodes: its wheels are 7 MB for x86-64 and arm64, it knows all formats, and it lets other threads run meanwhile. It is
imported in hosts only.
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from typing import TYPE_CHECKING

import numpy as np

from edge_runtime.errors import LoadFailed, UnreadablePicture
from edge_runtime.extras import install_advice
from edge_runtime.messages import other_picture
from edge_runtime.pictures.picture_steps import FRAME_CHANNELS, Color, PictureSource
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
"""Of several frames or pages the first is taken."""

MAX_PIXELS = 64 << 20
"""Of one picture: 64 million pixels take 450 MB while they are decoded; a larger one is refused by its head."""

MAX_SIDE = 1 << 16
"""Pixels of a side, as in a JPEG: scaling holds the weights of each."""

MAX_SCANS = 500
"""Of one JPEG. A scan of nothing takes 14 bytes, and the decoder a walk over all pixels. libjpeg-turbo advises a limit,
and its own fuzzers stop at 500 (doc/Two Issues with the JPEG Standard, fuzz/decompress.cc); encoders write 1 to 12."""

MAX_SCANNED_PIXELS = 16 * MAX_PIXELS
"""In all scans of one JPEG: 500 of 2 million pixels, 16 of the largest picture. They take 1.4 s of a Xeon, as that."""

MAX_SEGMENTS = 10_000
"""Of one JPEG with many scans. A profile of colours takes 50, and a scan has a table or two."""

DECODE_S = 1.0
DECODE_S_PER_PIXEL = 200e-9
"""Time of a core that decoding one picture may take. A Xeon takes 6 ns a pixel of a JPEG, 19 of a progressive one and
55 of a PNG; a machine of a quarter of its speed stays below. The largest one stays below PICTURE_LIMIT_S of a run."""

_SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")
"""A marker that libjpeg goes on after by its length, or EOI: what lies in between and is none of these, it skips."""

_SOS, _EOI = 0xDA, 0xD9

_ORIENTATION = 0x0112
"""EXIF's tag. Source: CIPA DC-008, 4.6.5."""

_TURNS = {
    2: (1, -1, False), 3: (-1, -1, False), 4: (-1, 1, False),
    5: (1, 1, True), 6: (-1, 1, True), 7: (-1, -1, True), 8: (1, -1, True),
}  # fmt: skip
"""By orientation: steps through lines and columns, and whether columns then are lines."""

_STRIP = 64
"""Lines that are taken out of Pillow at once: 0.25 ms for 640x480, and 1.0 ms where it hands out all in one piece."""


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
        raise LoadFailed(f"steps of pictures need Pillow ({error}); {install_advice('pictures')}") from error


def open_picture(data: bytes, color: Color) -> Array:
    """Decode a picture, upright as its EXIF orientation says: UINT8 [height, width, 3], RGB, or 1 for "gray".

    Alpha is dropped, as are the low 8 of 16 bits. Raises UnreadablePicture: it is not a picture of FORMATS, is cut, is
    over MAX_SIDE, or takes more memory than the host has; and as `bounded_picture`.
    """
    from PIL import Image

    try:
        picture = bounded_picture(data, FORMATS)
        _check_sides(*picture.size)
        picture.load()
        return _turned(_pixels(_plain(picture), color), _orientation(picture))
    except UnreadablePicture:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnreadablePicture(f"the picture has too many pixels; at most {MAX_PIXELS} are decoded") from None
    except MemoryError:
        raise UnreadablePicture(f"there is not enough memory to decode this picture of {len(data)} bytes") from None
    except Exception as error:  # noqa: BLE001 (Pillow raises many kinds, some of them surprises)
        raise UnreadablePicture(_why_not(data, error)) from None


def small_picture(data: bytes, side: int, most_pixels: int) -> Array:
    """Decode a picture as `open_picture` does, and scale it down where a side is longer: UINT8 [height, width, 3], RGB.

    most_pixels: of the picture as it comes. Raises UnreadablePicture: it has more; and as `open_picture`.
    """
    from PIL import Image

    width, height = _size(data)
    if width * height > most_pixels:
        raise UnreadablePicture(f"the picture has {width} x {height} pixels; at most {most_pixels} are read here")
    pixels = open_picture(data, "rgb")
    height, width = pixels.shape[:2]
    if max(height, width) > side:
        scale = side / max(height, width)
        sides = max(round(width * scale), 1), max(round(height * scale), 1)
        pixels = np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize(sides, Image.Resampling.BICUBIC))
    return np.ascontiguousarray(pixels)


def _size(data: bytes) -> tuple[int, int]:
    """The width and height that a picture's head tells; (0, 0) where `open_picture` says what is wrong with it."""
    try:
        return bounded_picture(data, FORMATS).size
    except Exception:  # noqa: BLE001 (as there)
        return 0, 0


def bounded_picture(data: bytes, formats: tuple[str, ...] | None = None) -> Image.Image:
    """Open a picture, with bounds on what it takes to decode it, which Pillow does when it is first used.

    formats: of Pillow's, None for all. Raises UnreadablePicture: it has more pixels or scans than are decoded; then or
    while it is decoded: it takes longer than any picture of its size. Raises what Pillow does.
    """
    from PIL import Image

    file = _TimedBytes(data)
    picture = Image.open(file, formats=formats)
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise UnreadablePicture(f"the picture has {width} x {height} pixels; at most {MAX_PIXELS} are decoded")
    if data.startswith(b"\xff\xd8"):
        _check_scans(data, width, height)
    if picture.format != "BMP":  # copied, else its runs are read by Pillow's Python: 2 us each
        file.left_s += width * height * DECODE_S_PER_PIXEL
    return picture


class _TimedBytes(io.BytesIO):
    """A picture's bytes, read by one thread, which are no more read when it spent `left_s` on them.

    Pillow reads them by and by: each chunk, segment, comment and run, and what its decoders get in parts of 64 KiB.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.left_s = DECODE_S
        self._began_s = time.thread_time()

    def read(self, size: int | None = -1, /) -> bytes:
        """Read. Raises UnreadablePicture: the time is over."""
        if time.thread_time() - self._began_s > self.left_s:
            raise UnreadablePicture(
                f"decoding this picture of {len(self.getbuffer())} bytes took {self.left_s:.1f} s, longer than any of "
                "its size does; save it again as a plain JPEG or PNG"
            )
        return super().read(size)


def _check_scans(data: bytes, width: int, height: int) -> None:
    """Raise UnreadablePicture for a JPEG whose scans go over its pixels too often. Source: ITU-T T.81, B.1.1."""
    most = min(MAX_SCANS, MAX_SCANNED_PIXELS // max(width * height, 1))
    if data.count(b"\xff\xda") <= most:  # more than there are scans: what is beside the picture may have them too
        return
    scans = segments = at = 0
    while (found := _SEGMENT.search(data, at)) is not None and data[found.start() + 1] != _EOI:
        scans += data[found.start() + 1] == _SOS
        segments += 1
        if scans > most or segments > MAX_SEGMENTS:
            raise UnreadablePicture(
                f"this JPEG of {width} x {height} pixels has over {scans - 1} scans in {segments} segments; at most "
                f"{most} scans of so many pixels are decoded. Save it with fewer: an ordinary one has 1, or 10"
            )
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")


def frame_pixels(frame: Array, source: PictureSource, color: Color) -> Array:
    """A raw frame as `open_picture` has a picture.

    frame: UINT8; "nv12" [height * 3 / 2, width], "yuyv" [height, width, 2], "gray" [height, width, 1], else that or RGB
    [height, width, 3]. Raises UnreadablePicture: it is empty, or it has other lengths, or sides over MAX_SIDE.
    """
    from PIL import Image

    if 0 in frame.shape:
        raise UnreadablePicture(f"the frame is empty: its shape is {list(frame.shape)}")
    _check_sides(frame.shape[1], frame.shape[0])
    if source in ("nv12", "yuyv"):
        return _pixels(_of_yuv(frame, source), color)
    channels = frame.shape[2]
    if channels not in FRAME_CHANNELS:
        raise UnreadablePicture(f"the frame has {channels} channels; wanted 3 (RGB) or 1 (gray)")
    if channels == (1 if color == "gray" else 3):
        return frame
    return _pixels(Image.fromarray(frame[:, :, 0] if channels == 1 else frame), color)


def _check_sides(width: int, height: int) -> None:
    if max(width, height) > MAX_SIDE:
        raise UnreadablePicture(f"the picture is {width} x {height}; at most {MAX_SIDE} pixels a side are scaled")


def _of_yuv(frame: Array, source: PictureSource) -> Image.Image:
    from PIL import Image

    height, width = frame.shape[:2]
    if source == "yuyv":
        if width % 2:
            raise UnreadablePicture(f"a yuyv frame is of even width; got {width}")
        luma, blue, red = frame[:, :, 0], frame[:, 0::2, 1], frame[:, 1::2, 1]
    else:
        if height % 3 or width % 2:
            raise UnreadablePicture(
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


def _pixels(picture: Image.Image, color: Color) -> Array:
    mode = "L" if color == "gray" else "RGB"
    if picture.mode != mode:
        picture = picture.convert(mode)
    pixels = np.empty((picture.height, picture.width, len(mode)), np.uint8)
    for first in range(0, picture.height, _STRIP):
        last = min(first + _STRIP, picture.height)
        strip = np.asarray(picture.crop((0, first, picture.width, last)))
        pixels[first:last] = strip if strip.ndim == 3 else strip[:, :, None]
    return pixels


def _plain(picture: Image.Image) -> Image.Image:
    """A decoded picture in mode RGB or L."""
    from PIL import Image

    mode = picture.mode
    if mode in ("RGB", "L"):
        return picture
    if mode.startswith("I"):  # 16 bits of gray, which Pillow's own conversion cuts at 255
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if mode == "P" and "transparency" in picture.info:
        return picture.convert("RGBA").convert("RGB")
    return picture.convert("L" if mode in ("1", "LA", "La") else "RGB")


def _orientation(picture: Image.Image) -> int:
    """EXIF's, 1 to 8; what cannot be read says nothing."""
    with contextlib.suppress(Exception):
        if "exif" in picture.info:
            return int(picture.getexif().get(_ORIENTATION, 1))
    return 1


def _turned(pixels: Array, orientation: int) -> Array:
    """A view of pixels as they are looked at."""
    down, across, is_turned = _TURNS.get(orientation, (1, 1, False))
    seen = pixels[::down, ::across]
    return seen.transpose(1, 0, 2) if is_turned else seen


def _why_not(data: bytes, error: Exception) -> str:
    wanted = f"wanted {', '.join(FORMATS)}"
    if name := other_picture(data):
        return f"pictures of the kind {name} are not read; {wanted}"
    kind = "" if type(error).__name__ == "UnidentifiedImageError" else f" ({type(error).__name__}: {error})"
    return f"no picture can be read from these {len(data)} bytes{kind}; {wanted}"
