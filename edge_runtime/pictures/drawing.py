"""Draws an answer into its picture: boxes with labels, points, masks as tints, the rest as lines. Needs Pillow."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.answers import Answer, Box, Keypoints, ObjectMask, PictureRead, answers_from_fields, layout_of
from edge_runtime.errors import ConfigError
from edge_runtime.extras import install_advice
from edge_runtime.pictures.fit import place
from edge_runtime.pictures.picture_steps import Fit
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from PIL import Image

Colour = tuple[int, int, int]

COLOURS = (
    (230, 57, 70), (29, 120, 220), (42, 157, 60), (244, 140, 6), (131, 56, 236), (0, 150, 160), (214, 40, 140),
    (120, 90, 40),
)  # fmt: skip
"""Of classes by their index, again from the first one; each is read on white, and white on it."""

TINT = 0.5
"""Of a mask's colour over the picture."""

SURE = 0.5
"""Points below this score are not drawn, as Ultralytics has it (`utils/plotting.py`, `Annotator.kpts`)."""

LIMBS = (
    (15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9), (8, 10), (1, 2),
    (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6),
)  # fmt: skip
"""Lines between the 17 points of a person, as COCO numbers them (keypoints of its annotations, `skeleton`)."""

PERSON_POINTS = 17

TEXT_SHARE = 32
"""A line of text is this part of the picture's shorter side, and 12 pixels at least."""

SAVED = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
"""Names of files that drawn copies are written to."""


class Shape(Struct, frozen=True):
    """A line of 2 points, or a polygon of more, with its name. points: as shares of the picture's width and height."""

    name: str
    points: tuple[tuple[float, float], ...]


class Overlay(Struct, frozen=True):
    """Words and lines of a picture beside its answer. notes: of each box, in order, written behind its label."""

    notes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()


BARE = Overlay()


class DrawTask(Struct, frozen=True):
    """The task of a child: draw the file `picture`, or a frame of this shape in it, to the file `drawn`.

    answer: as JSON. labels: of a mask's classes. most: pixels of the longer side of what is drawn; 0: as it is.
    """

    picture: str
    shape: tuple[int, ...]
    answer: dict[str, Any]
    labels: tuple[str, ...]
    drawn: str
    overlay: Overlay = BARE
    most: int = 0


def draw_in_child(task: DrawTask, _: ShowProgress) -> None:
    """Draw, in a child of the sandbox. Raises what Pillow raises."""
    data = Path(task.picture).read_bytes()
    (answer,) = answers_from_fields(task.answer)
    if answer.mask is not None:
        answer = replace(answer, mask=np.array(answer.mask, np.uint8))
    picture = np.frombuffer(data, np.uint8).reshape(task.shape) if task.shape else data
    draw(picture, answer, task.labels, Path(task.drawn), task.overlay, most=task.most)


@cache
def has_pillow() -> bool:
    """Whether Pillow was there when this was first asked, which is often; imports nothing."""
    return importlib.util.find_spec("PIL") is not None


def check_pillow(option: str) -> None:
    """Raise ConfigError where Pillow is missing; imports nothing."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError(f"{option} needs Pillow, which is not here; {install_advice('pictures')}")


def import_pillow() -> None:
    """Import all that drawing takes, some 0.2 s of a core, before there is a picture."""
    from PIL import Image, ImageDraw, ImageFont, ImageOps, JpegImagePlugin  # noqa: F401


def draw(
    picture: bytes | Array, answer: Answer, labels: Sequence[str], to: Path, overlay: Overlay = BARE, *, most: int = 0
) -> None:
    """Write a copy of a picture with its answer, upright as the answer's pixels are. labels: of a mask's classes.

    picture: encoded, or a frame UINT8 [height, width, channels]. most: as of DrawTask.
    """
    from PIL import Image, ImageOps

    if isinstance(picture, bytes):
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(picture))).convert("RGB")
    else:
        image = Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).convert("RGB")
    lines: list[tuple[str, Colour]] = []
    if answer.mask is not None:
        mask = mask_of_picture(answer.mask, answer.picture, image.size)
        there = [int(index) for index in np.unique(mask) if index]
        image = Image.fromarray(_tinted(np.asarray(image, np.float32), mask, there))
        lines += [(labels[index] if index < len(labels) else str(index), _colour(index)) for index in there]
    for thing in reversed(answer.masks or ()):
        mask = mask_of_picture(thing.mask, answer.picture, image.size)
        image = Image.fromarray(_tinted(np.asarray(image, np.float32), mask, [1], _colour(thing.index)))
    pen = _Pen(image)
    for number, shape in enumerate(overlay.shapes):
        pen.shape(shape, _colour(-1 - number))
    things: list[Box | ObjectMask | Keypoints] = [
        *(answer.boxes or ()),
        *(answer.masks or ()),
        *(answer.keypoints or ()),
    ]
    notes = dict(enumerate(overlay.notes))
    best_last = list(reversed(list(enumerate(things))))  # above the others
    for _, box in best_last:
        pen.outline(box, _colour(box.index))
    for number, box in best_last:
        top = max(box.box[1] - pen.size * 1.4, 0.0)
        note = f" {notes[number]}" if number in notes else ""
        pen.line(box.box[0], top, f"{box.label}{note} {box.score:.2f}", _colour(box.index))
    lines += [(f"{each.label} {each.score:.2f}", _colour(each.index)) for each in answer.classes or ()]
    if answer.number is not None:
        lines.append((", ".join(layout_of("number").short(answer.number)), _colour(0)))
    if answer.text is not None:
        lines.append((answer.text, _colour(0)))
    for number, (text, colour) in enumerate(lines):
        pen.line(pen.size * 0.4, pen.size * (0.4 + 1.5 * number), text, colour)
    if most:
        image.thumbnail((most, most))
    file = io.BytesIO()
    suffix = to.suffix.lower()
    image.save(file, {".jpg": "JPEG", ".jpeg": "JPEG"}.get(suffix, suffix[1:].upper()))
    to.write_bytes(file.getvalue())


def mask_of_picture(mask: Array, read: PictureRead | None, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """A mask of the model's grid as one of the picture's pixels, 0 where the model did not see it.

    mask: UINT8 [height, width]. size: the picture's width and height. Shapes: -> UINT8 [height, width] of these.
    """
    fit: Fit = "stretch"
    if read is not None and read.fit in ("crop", "letterbox"):
        fit = "crop" if read.fit == "crop" else "letterbox"
    high, wide = mask.shape
    placed = place(fit, size, (wide, high))
    across = (np.arange(size[0]) + 0.5) * placed.width / size[0] + placed.left
    down = (np.arange(size[1]) + 0.5) * placed.height / size[1] + placed.top
    columns, rows = np.floor(across).astype(int), np.floor(down).astype(int)
    found = mask[np.clip(rows, 0, high - 1)[:, None], np.clip(columns, 0, wide - 1)[None, :]]
    is_seen = ((rows >= 0) & (rows < high))[:, None] & ((columns >= 0) & (columns < wide))[None, :]
    return np.where(is_seen, found, 0).astype(np.uint8)


# ---- private --------------------------------------------------------------------------------------------------------


def _colour(index: int) -> Colour:
    return COLOURS[index % len(COLOURS)]


def _tinted(
    pixels: npt.NDArray[np.float32],
    mask: npt.NDArray[np.uint8],
    classes: Sequence[int],
    colour: Colour | None = None,
) -> npt.NDArray[np.uint8]:
    """Pixels with the classes of a mask in their colours, or all in one."""
    table = np.zeros((256, 3), np.float32)
    for index in classes:
        table[index] = colour or _colour(index)
    tinted = pixels * (1 - TINT) + table[mask] * TINT
    return np.where((mask > 0)[:, :, None], tinted, pixels).astype(np.uint8)


class _Pen:
    """Writes white lines of text on colours. size: of a line, in pixels."""

    def __init__(self, image: Image.Image) -> None:
        from PIL import ImageDraw, ImageFont

        self.size = max(min(image.size) // TEXT_SHARE, 12)
        self._image = image
        self._draw = ImageDraw.Draw(image)
        self._font = ImageFont.load_default(self.size)

    def outline(self, thing: Box | ObjectMask | Keypoints, colour: Colour) -> None:
        """The outline of a box, turned as it is, and its points."""
        width = max(self.size // 8, 2)
        if isinstance(thing, Box) and thing.corners is not None:
            self._draw.polygon([(point[0], point[1]) for point in thing.corners], outline=colour, width=width)
        else:
            self._draw.rectangle(thing.box, outline=colour, width=width)
        if isinstance(thing, Keypoints):
            self._points(thing, width, colour)

    def _points(self, thing: Keypoints, width: int, colour: Colour) -> None:
        sure = [(each[0], each[1]) if len(each) == 2 or each[2] >= SURE else None for each in thing.points]
        for one, other in LIMBS if len(sure) == PERSON_POINTS else ():
            if (begin := sure[one]) is not None and (end := sure[other]) is not None:
                self._draw.line((begin, end), colour, width)
        for x, y in filter(None, sure):
            self._draw.ellipse((x - width, y - width, x + width, y + width), fill=colour, outline=(255, 255, 255))

    def shape(self, shape: Shape, colour: Colour) -> None:
        """The sides of a polygon, or a line, and its name at its first point."""
        points = [(x * self._image.width, y * self._image.height) for x, y in shape.points]
        closed = points if len(points) == 2 else [*points, points[0]]
        self._draw.line(closed, fill=colour, width=max(self.size // 8, 2))
        (left, top), size = points[0], self.size * 1.4
        self.line(min(left, self._image.width - size), min(top, self._image.height - size), shape.name, colour)

    def line(self, left: float, top: float, text: str, colour: Colour) -> None:
        """One line of text from its corner on."""
        size = self.size
        width = self._draw.textlength(text, self._font)
        self._draw.rectangle((left, top, left + width + size * 0.5, top + size * 1.4), fill=colour)
        self._draw.text((left + size * 0.25, top + size * 0.1), text, (255, 255, 255), self._font)
