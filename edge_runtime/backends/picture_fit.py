"""How a picture of any size comes to lie in a model's: sizes, places, and the way back for boxes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

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

    def to_source(self, x: float, y: float) -> tuple[float, float]:
        """A point of the model's picture, in the pixels of the source, and inside it."""
        back_x = (x - self.left) * self.source_width / self.width
        back_y = (y - self.top) * self.source_height / self.height
        return min(max(back_x, 0.0), float(self.source_width)), min(max(back_y, 0.0), float(self.source_height))


def place(fit: Fit, source: tuple[int, int], target: tuple[int, int], shorter_side: int | None = None) -> Placed:
    """Place a picture. source, target: width and height."""
    (width, height), (wide, high) = source, target
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
