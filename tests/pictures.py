"""Pictures made by a fixed recipe, with what photographs have: slopes, edges, fine texture, and noise."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def photo(width: int = 640, height: int = 480, seed: int = 0) -> np.ndarray:
    """UINT8 [height, width, 3], RGB."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    slope = np.stack([x / width, y / height, (x + y) / (width + height)], axis=2) * 160
    texture = (np.sin(x / 3) * np.sin(y / 5))[:, :, None] * [18, 25, 12]
    picture = slope + texture + random.normal(0, 6, (height, width, 3))
    for _ in range(24):  # things with edges
        left, top = random.integers(0, width), random.integers(0, height)
        things = (
            slice(top, top + random.integers(4, height // 3 + 5)),
            slice(left, left + random.integers(4, width // 3 + 5)),
        )
        picture[things] = 0.4 * picture[things] + random.integers(0, 200, 3)
    disc = (x - width * 0.6) ** 2 + (y - height * 0.4) ** 2 < (height / 5) ** 2
    picture[disc] = picture[disc] * 0.3 + [150, 40, 90]
    return np.clip(picture, 0, 255).astype(np.uint8)


def with_scans(jpeg: bytes, count: int) -> bytes:
    """A progressive JPEG with its last scan again and again, until it has that many. Source: ITU-T T.81, B.1.1."""
    scans, at = [], 2
    while jpeg[at + 1] != 0xD9:
        if jpeg[at + 1] == 0xDA:
            scans.append(at)
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        while jpeg[at] != 0xFF or jpeg[at + 1] == 0 or 0xD0 <= jpeg[at + 1] <= 0xD7:
            at += 1
    return jpeg[:at] + jpeg[scans[-1] : at] * (count - len(scans)) + jpeg[at:]


def encoded(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    (Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels).save(file, kind, **options)
    return file.getvalue()
