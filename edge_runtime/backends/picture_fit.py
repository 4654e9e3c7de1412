"""How a picture of any size comes to lie in a model's: sizes, places, and the way back for boxes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_runtime.steps import Fit


@dataclass(frozen=True, slots=True)
class Placed:
    """A picture scaled to `width` x `height`, whose pixel (0, 0) comes to lie at (left, top) of the model's picture.

    left and top are negative where it is cropped. x of the model's picture is (x - left) * source_width / width.
    """

    source_width: int
    source_height: int
    width: int
    height: int
    left: int
    top: int

    def turned(self) -> Placed:
        """The same with lines as columns."""
        return Placed(self.source_height, self.source_width, self.height, self.width, self.top, self.left)

    def to_source(self, boxes: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Boxes of the model's picture, [n, 4], in the pixels of the source, and inside it."""
        corner = np.array((self.left, self.top) * 2, np.float64)
        scale = np.array((self.source_width / self.width, self.source_height / self.height) * 2, np.float64)
        sides = (self.source_width, self.source_height) * 2
        return np.clip((boxes - corner) * scale, 0, sides).astype(np.float32)


def place(fit: Fit, source: tuple[int, int], wanted: tuple[int, int], shorter_side: int | None = None) -> Placed:
    """Place a picture. source, wanted: width and height."""
    (width, height), (wide, high) = source, wanted
    if fit == "stretch":
        return Placed(width, height, wide, high, 0, 0)
    if fit == "letterbox":
        scale = min(wide / width, high / height)
        new_width, new_height = max(round(width * scale), 1), max(round(height * scale), 1)
        # As Ultralytics rounds: the spare pixel of an odd rest lies right and below.
        return Placed(
            width,
            height,
            new_width,
            new_height,
            round((wide - new_width) / 2 - 0.1),
            round((high - new_height) / 2 - 0.1),
        )
    if shorter_side is None:
        scale = max(wide / width, high / height)
        new_width, new_height = max(round(width * scale), wide), max(round(height * scale), high)
    elif width <= height:  # as torchvision truncates the longer side
        new_width, new_height = shorter_side, int(shorter_side * height / width)
    else:
        new_width, new_height = int(shorter_side * width / height), shorter_side
    return Placed(
        width, height, new_width, new_height, -round((new_width - wide) / 2.0), -round((new_height - high) / 2.0)
    )
