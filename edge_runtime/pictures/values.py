"""Answers of pictures as values: out of a row of a host's array, to JSON and back, and as lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from edge_runtime.answers import AnswerLayout, AnswerRow, Box, Keypoints, ObjectMask, PictureRead, label_of
from edge_runtime.tensors import Array

_Masked = tuple[int, float, tuple[float, float, float, float], tuple[int, int], tuple[int, ...]]

SHOWN_BOXES = 6
"""Of one picture among others; alone, all are shown."""


# ---- how a picture was read -----------------------------------------------------------------------------------------


def read_size(row: AnswerRow) -> PictureRead:
    """Read [2]: width and height."""
    width, height = row.array.tolist()
    fit, color = getattr(row.input, "fit", None), getattr(row.input, "color", "rgb")
    return PictureRead(width, height, fit or "stretch", color)


def size_to_json(read: PictureRead) -> dict[str, Any]:
    """Return width, height, fit and colours."""
    return {"width": read.width, "height": read.height, "fit": read.fit, "color": read.color}


def size_from_json(fields: Mapping[str, Any]) -> PictureRead:
    """Return how the picture was read. Raises TypeError: it is not such a map."""
    return PictureRead(**fields)


# ---- boxes ----------------------------------------------------------------------------------------------------------

Things = Sequence[Box] | Sequence[ObjectMask] | Sequence[Keypoints]
"""Things found, each with label, index, score and box, best first."""


def read_boxes(row: AnswerRow) -> tuple[Box, ...]:
    """Read [most, 6 or 14]: index, score, sides, and corners of turned ones; index -1 where there are no more."""
    return tuple(
        Box(*_thing(row, number), _points(number[6:], 2) or None) for number in row.array.tolist() if number[0] >= 0
    )


def boxes_to_json(boxes: Sequence[Box]) -> list[dict[str, Any]]:
    """Return a list of label, index, score and box, and corners of turned ones."""
    return [
        {**_thing_to_json(each), **({} if each.corners is None else {"corners": _points_to_json(each.corners)})}
        for each in boxes
    ]


def boxes_from_json(fields: Sequence[Mapping[str, Any]]) -> tuple[Box, ...]:
    """Return the boxes. Raises KeyError, TypeError: it is not such a list."""
    return tuple(
        Box(**{**_thing_from_json(each), **({"corners": _tuples(each["corners"])} if "corners" in each else {})})
        for each in fields
    )


def box_lines(boxes: Things, _: Sequence[str]) -> list[str]:
    """Return a line for each box."""
    return _lines(boxes, lambda each: f"  turned {_angle(each.corners):.0f}°" if getattr(each, "corners", None) else "")


def short_boxes(boxes: Things) -> list[str]:
    """Return the first things, and the number of the others."""
    shown = [f"{each.label} {each.score:.2f}" for each in boxes[:SHOWN_BOXES]]
    more = len(boxes) - len(shown)
    return [*shown, *([f"and {more} more"] if more else [])] or ["nothing found"]


# ---- a mask of classes ----------------------------------------------------------------------------------------------


def mask_lines(mask: Array, labels: Sequence[str]) -> list[str]:
    """Return the share of each class."""
    mask = np.asarray(mask)
    found = []
    for index, count in zip(*np.unique(mask, return_counts=True), strict=True):
        name = labels[index] if index < len(labels) else f"class {index}"
        found.append(f"{name}  {count / mask.size:.1%} of {mask.shape[1]} x {mask.shape[0]}")
    return found


def short_mask(mask: Array) -> list[str]:
    """Return the number of classes."""
    return [f"mask of {len(np.unique(mask))} classes"]


# ---- a mask of each thing -------------------------------------------------------------------------------------------


def read_masks(row: AnswerRow) -> tuple[ObjectMask, ...]:
    """Read the JSON of `MasksOutput`: a list of index, score, box, size and runs. Raises MsgspecError: it is not that.

    The runs stay as they are: most answers go on as JSON.
    """
    value: Any = row.array
    things = msgspec.json.decode(bytes(value.item() if hasattr(value, "item") else value), type=list[_Masked])
    return tuple(
        ObjectMask(label_of(index, row.labels), index, score, box, size, counts)
        for index, score, box, size, counts in things
    )


def masks_to_json(masks: Sequence[ObjectMask]) -> list[dict[str, Any]]:
    """Return a list of label, index, score, box, and mask as COCO's uncompressed runs: size, counts."""
    return [{**_thing_to_json(each), "mask": {"size": [*each.size], "counts": [*each.counts]}} for each in masks]


def masks_from_json(fields: Sequence[Mapping[str, Any]]) -> tuple[ObjectMask, ...]:
    """Return the masks. Raises KeyError, TypeError, ValueError: it is not such a list."""
    found = []
    for each in fields:
        (height, width), counts = each["mask"]["size"], tuple(map(int, each["mask"]["counts"]))
        box = tuple(each["box"])
        found.append(ObjectMask(each["label"], each["index"], each["score"], box, (height, width), counts))
    return tuple(found)


def object_mask_lines(masks: Sequence[ObjectMask], _: Sequence[str]) -> list[str]:
    """Return a line for each thing, with the pixels of its mask."""
    return _lines(masks, lambda each: f"  {each.pixels:,} pixels of {each.size[1]} x {each.size[0]}")


def runs_of(mask: Array) -> list[int]:
    """Return the lengths of runs of a mask, column by column: first of zeros, then of ones, and so on.

    As COCO has them (pycocotools, `_mask.frPyObjects` of uncompressed RLE).
    """
    line = np.asarray(mask).T.reshape(-1) != 0
    ends = np.flatnonzero(line[1:] != line[:-1]) + 1
    lengths = np.diff(np.concatenate([[0], ends, [line.size]])).tolist()
    return [0, *lengths] if line.size and line[0] else lengths


# ---- points ---------------------------------------------------------------------------------------------------------


def read_keypoints(row: AnswerRow) -> tuple[Keypoints, ...]:
    """Read [most, 6 + points * 3]: index, score, sides, then x, y and score (NaN: none) of each point."""
    found = []
    for number in row.array.tolist():
        if number[0] >= 0:
            points = tuple(each if math.isfinite(each[2]) else each[:2] for each in _points(number[6:], 3))
            found.append(Keypoints(*_thing(row, number), points))
    return tuple(found)


def keypoints_to_json(people: Sequence[Keypoints]) -> list[dict[str, Any]]:
    """Return a list of label, index, score, box, and points: x, y, and score where the model gives one."""
    return [{**_thing_to_json(each), "points": _points_to_json(each.points)} for each in people]


def keypoints_from_json(fields: Sequence[Mapping[str, Any]]) -> tuple[Keypoints, ...]:
    """Return the things with their points. Raises KeyError, TypeError: it is not such a list."""
    return tuple(Keypoints(**{**_thing_from_json(each), "points": _tuples(each["points"])}) for each in fields)


def keypoint_lines(people: Sequence[Keypoints], _: Sequence[str]) -> list[str]:
    """Return a line for each thing, and one with its points."""
    lines = []
    for line, each in zip(_lines(people, lambda _: ""), people, strict=False):
        lines.append(line)
        lines.append("  " + " ".join(f"{point[0]:.0f},{point[1]:.0f}" for point in each.points))
    return lines or ["nothing found"]


# ---- private --------------------------------------------------------------------------------------------------------


def _thing(row: AnswerRow, number: Sequence[float]) -> tuple[str, int, float, tuple[float, float, float, float]]:
    index, score, left, top, right, bottom = number[:6]
    return label_of(int(index), row.labels), int(index), float(score), (left, top, right, bottom)


def _thing_to_json(each: Box | ObjectMask | Keypoints) -> dict[str, Any]:
    return {
        "label": each.label,
        "index": each.index,
        "score": round(each.score, 6),
        "box": [round(side, 2) for side in each.box],
    }


def _thing_from_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "box": tuple(fields["box"])}


def _points(numbers: Sequence[float], length: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(numbers[start : start + length]) for start in range(0, len(numbers), length))


def _points_to_json(points: Sequence[Sequence[float]]) -> list[list[float]]:
    """Places of two decimals; a score of six."""
    return [[*(round(each, 2) for each in point[:2]), *(round(each, 6) for each in point[2:])] for point in points]


def _tuples(points: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(each) for each in points)


def _lines(things: Things, more: Callable[[Any], str]) -> list[str]:
    width = max((len(each.label) for each in things), default=0)
    return [
        f"{each.label.ljust(width)}  {each.score:.4f}  [{', '.join(f'{side:.1f}' for side in each.box)}]{more(each)}"
        for each in things
    ] or ["nothing found"]


def _angle(corners: Sequence[Sequence[float]]) -> float:
    """Degrees of the longer side from the horizontal, clockwise, 0 to 180."""
    (x, y), (across, over), (far, below) = corners[:3]
    sides = (across - x, over - y), (far - across, below - over)
    right, down = max(sides, key=lambda side: math.hypot(*side))
    return math.degrees(math.atan2(down, right)) % 180


PICTURE = AnswerLayout("picture", "", read=read_size, to_json=size_to_json, from_json=size_from_json)
"""Of the output PICTURE_SIZE, which `picture_input` gives."""

BOXES = AnswerLayout(
    "boxes",
    "edge_runtime.pictures.answer_makers:BoxesOutput",
    read=read_boxes,
    to_json=boxes_to_json,
    from_json=boxes_from_json,
    lines=box_lines,
    short=short_boxes,
    has_classes=True,
)
MASK = AnswerLayout(
    "mask",
    "edge_runtime.pictures.answer_makers:MaskOutput",
    read=lambda row: row.array,
    to_json=lambda mask: mask.tolist(),
    from_json=lambda told: np.asarray(told, np.uint8),
    dtype=np.uint8,
    lines=mask_lines,
    short=short_mask,
    has_classes=True,
)
MASKS = AnswerLayout(
    "masks",
    "edge_runtime.pictures.answer_makers:MasksOutput",
    read=read_masks,
    to_json=masks_to_json,
    from_json=masks_from_json,
    lines=object_mask_lines,
    short=short_boxes,
    has_classes=True,
)
KEYPOINTS = AnswerLayout(
    "keypoints",
    "edge_runtime.pictures.answer_makers:KeypointsOutput",
    read=read_keypoints,
    to_json=keypoints_to_json,
    from_json=keypoints_from_json,
    lines=keypoint_lines,
    short=short_boxes,
    has_classes=True,
)
