"""Scanned handwritten digits: the file they ship in, and how one looks in a terminal.

1 797 images of 8x8 pixels, 0 (paper) to 16 (ink), from 13 writers: the test part of "Optical Recognition of Handwritten
Digits" by E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49,
CC BY 4.0. Taken unchanged from scikit-learn's copy (`sklearn.datasets.load_digits`), in its order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

DIGITS_FILE = Path(__file__).with_name("digits.npz")
HELD_OUT_ROWS = 450
"""The last quarter of the file is held out. The images of one writer stand near each other in it (59 % of all images
have the one most like them within 150 places; chance would be 16 %), so this holds out writers rather than images: what
a device meets in the field. A shuffled split would look better than that."""

Pixels = npt.NDArray[np.uint8]
_SHADES = " .:-=+*#%@"


@dataclass(frozen=True, slots=True)
class Digits:
    """Images and what they show. Shapes: images [n, 64] uint8, 0 to 16, row by row; labels [n] uint8, 0 to 9."""

    images: Pixels
    labels: Pixels


def load_training(path: Path = DIGITS_FILE) -> Digits:
    """The images to train on. Raises OSError when the file is absent, ValueError when it is damaged."""
    every = _load(path)
    return Digits(every.images[:-HELD_OUT_ROWS], every.labels[:-HELD_OUT_ROWS])


def load_held_out(path: Path = DIGITS_FILE) -> Digits:
    """The images that no training has seen. Raises as `load_training`."""
    every = _load(path)
    return Digits(every.images[-HELD_OUT_ROWS:], every.labels[-HELD_OUT_ROWS:])


def as_text(image: Pixels) -> list[str]:
    """One image as 8 lines of 16 characters, darker where there is more ink. Shape: [64]."""
    shades = image.reshape(8, 8).astype(int) * (len(_SHADES) - 1) // 16
    return ["".join(_SHADES[shade] * 2 for shade in row) for row in shades]


def _load(path: Path) -> Digits:
    with np.load(path, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    if images.ndim != 2 or images.shape[1] != 64 or labels.shape != images.shape[:1]:
        raise ValueError(f"{path}: got images {images.shape}, labels {labels.shape}; wanted [n, 64] and [n]")
    return Digits(images, labels)
