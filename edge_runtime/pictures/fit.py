"""How a picture of any size comes to lie in a model's: its place, its pixels scaled, and the way back for boxes. Pure.

Pixels are scaled as Pillow and OpenCV scale them, as products with matrices. Each axis is a matrix of weights, nearly
all of them zero around the diagonal, so it is multiplied in bands. On one core of a Xeon 640x480 become 224x224 numbers
in 0.65 ms, with Pillow's resize in 1.7 ms. Nothing is rounded on the way, so it differs from a library that rounds
after each axis by less than a level, and by up to 8 beside sharp edges where bicubic and lanczos overshoot, since
Pillow cuts that after each axis too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from edge_runtime.pictures.picture_steps import Filter, Fit
from edge_runtime.tensors import Array

Floats = npt.NDArray[np.float32]

BAND = 8
"""Lines of the result that one product makes: more waste zeros, fewer waste calls (measured: 4 to 16)."""

WIDE = 4
"""A picture so much wider than what it becomes is scaled across first: what lies between the axes stays in bounds."""

KEPT = 16
"""Sides whose weights are kept: two a camera."""

SUPPORT: dict[Filter, float] = {"nearest": 0.5, "linear": 1.0, "bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
"""Pixels that count, on each side of a place of the result. Source: Pillow's Resample.c."""


class Placed(Struct, frozen=True):
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

    def points_to_source(self, points: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Points of the model's picture, [..., 2], in the pixels of the source; they may lie outside of it."""
        scale = np.array((self.source_width / self.width, self.source_height / self.height), np.float64)
        return ((points - np.array((self.left, self.top), np.float64)) * scale).astype(np.float32)


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


class Band(NamedTuple):
    """Lines `at` to `until` of a result are `weights` times lines `first` to `last` of what is scaled."""

    at: int
    until: int
    first: int
    last: int
    weights: Floats


def scale_pixels(pixels: Array, placed: Placed, wanted: tuple[int, int], kind: Filter) -> Floats:
    """Scale what the model sees of a picture: FP32 [channels, height, width], in levels of 0 to 255.

    pixels: UINT8 [height, width, channels], of any strides. wanted: the model's width and height. Only that part is
    computed, so a picture of extreme shape, cropped, costs no more than another.
    """
    height, width, channels = pixels.shape
    left, top = max(-placed.left, 0), max(-placed.top, 0)
    seen_width, seen_height = min(placed.width - left, wanted[0]), min(placed.height - top, wanted[1])
    if width * seen_height > WIDE * height * seen_width:
        turned = scale_pixels(pixels.transpose(1, 0, 2), placed.turned(), wanted[::-1], kind)
        return np.swapaxes(turned, 1, 2)
    # Down first: its lines are as long as they come, and fewer are left for the other axis.
    down = _bands(kind, height, placed.height, top, seen_height)
    across = _bands(kind, width, placed.width, left, seen_width)
    lines = np.empty((seen_height, width * channels), np.float32)
    levels = np.empty((max(band.last - band.first for band in down), width, channels), np.float32)
    for band in down:
        part = levels[: band.last - band.first]
        part[...] = pixels[band.first : band.last]
        np.matmul(band.weights, part.reshape(len(part), -1), out=lines[band.at : band.until])
    planes = lines.reshape(seen_height, width, channels).transpose(2, 0, 1).reshape(-1, width)
    scaled = np.empty((channels * seen_height, seen_width), np.float32)
    for band in across:
        np.matmul(planes[:, band.first : band.last], band.weights.T, out=scaled[:, band.at : band.until])
    if kind in ("bicubic", "lanczos"):  # their weights are negative in part
        np.clip(scaled, 0, 255, out=scaled)
    return scaled.reshape(channels, seen_height, seen_width)


@lru_cache(KEPT)
def _bands(kind: Filter, source: int, result: int, start: int, count: int) -> Sequence[Band]:
    """The weights of one side of `source` pixels scaled to `result`, of which `count` from `start` on are wanted."""
    ratio = source / result
    # Antialiasing: where pixels become fewer, each place of the result takes in more of them.
    reach = ratio if ratio > 1 and kind not in ("nearest", "linear") else 1.0
    bands = []
    for at in range(0, count, BAND):
        until = min(at + BAND, count)
        centers = (np.arange(start + at, start + until) + 0.5) * ratio
        first = max(int(centers[0] - SUPPORT[kind] * reach), 0)
        last = min(int(centers[-1] + SUPPORT[kind] * reach) + 1, source)
        places = np.arange(first, last)
        if kind == "nearest":
            weights = (places == np.minimum(centers.astype(int), source - 1)[:, None]).astype(np.float64)
        else:
            weights = _weights(kind, np.abs(places + 0.5 - centers[:, None]) / reach)
        weights /= weights.sum(axis=1, keepdims=True)
        bands.append(Band(at, until, first, last, weights.astype(np.float32)))
    return bands


def _weights(kind: Filter, away: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The weight of pixels by how far they are. Source: Pillow's Resample.c; bicubic with a = -0.5."""
    if kind in ("linear", "bilinear"):
        return np.maximum(1 - away, 0)
    if kind == "bicubic":
        near = ((1.5 * away) - 2.5) * away * away + 1
        far = ((-0.5 * away + 2.5) * away - 4) * away + 2
        return np.where(away < 1, near, np.where(away < 2, far, 0))
    return np.where(away < 3, np.sinc(away) * np.sinc(away / 3), 0)
