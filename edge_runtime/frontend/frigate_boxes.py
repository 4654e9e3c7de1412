"""What a detector's model found, as Frigate's plugin reads it: FP32 [20, 6], by the kind of model that it names.

Rows are [class, score, ymin, xmin, ymax, xmax], sides as shares of the picture, best first; rows of zeros pad. Scores,
their least, and the overlap at which boxes are one are Frigate's own (`frigate/util/model.py`, detectors/plugins), so
that a detector finds here what it would find without us; but overlap is measured on the boxes themselves. Pure.
Thread: any; a worker's, as it ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import RunFailed
from edge_runtime.tensors import Array

Floats = npt.NDArray[np.floating[Any]]
Numbers = npt.NDArray[Any]
Outputs = Sequence[tuple[str, Floats]]
"""Names and arrays, in the model's order."""

Found = tuple[Numbers, Floats, Floats]
"""Classes [n], scores [n], and boxes [n, 4] as xmin, ymin, xmax, ymax in shares of the picture."""

ROWS = 20
"""Of a reply: the plugin takes this shape and no other."""

LEAST_SCORE = 0.4
"""Frigate reads no row after the first that is below it, and computes none itself."""

OVERLAP = 0.4
"""Intersection over union from which the better box of two stands for both, whatever their classes."""

CANDIDATES = 4096
"""The best boxes that are compared. A model that finds more finds everything everywhere."""

ANCHORS = (
    ((12, 16), (19, 36), (40, 28)),
    ((36, 75), (76, 55), (72, 146)),
    ((142, 110), (192, 243), (459, 401)),
)
STRIDES = (8, 16, 32)
"""Anchors and strides of the three outputs of YOLOv4 and v7, which `yologeneric` means too."""


def detections(model_type: str, outputs: Sequence[tuple[str, Array]], width: int, height: int) -> Floats:
    """Read a model's outputs. Returns FP32 [20, 6].

    outputs: names and arrays in the model's order, of one picture. width, height: of the model's input, in pixels.
    Raises RunFailed: they are not what this kind of model gives.
    """
    read = READERS.get(model_type)
    if read is None:
        raise RunFailed(f"model_type: got {model_type[:40]!r}, wanted one of {', '.join(READERS)}")
    try:
        with np.errstate(all="ignore"):  # a model may give anything; rows that are no numbers are left out below
            classes, scores, boxes = read(
                [(name, array.astype(np.float32, copy=False)) for name, array in outputs], width, height
            )
            return _table(classes, scores, boxes)
    except (ValueError, IndexError, KeyError) as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs[:8])
        raise RunFailed(
            f"these are no outputs of a model of type {model_type}: {shapes} ({error}); "
            "set model_type in Frigate to what the model is"
        ) from None


def _table(classes: Numbers, scores: Floats, boxes: Floats) -> Floats:
    """The best rows. boxes: [n, 4] as xmin, ymin, xmax, ymax, shares of the picture."""
    if not classes.shape == scores.shape == boxes.shape[:1]:
        raise ValueError(f"{classes.shape} classes, {scores.shape} scores, {boxes.shape} boxes")
    boxes = np.clip(boxes, 0.0, 1.0)
    is_whole = (scores > LEAST_SCORE) & np.isfinite(scores) & np.isfinite(boxes).all(axis=1)
    chosen = np.flatnonzero(is_whole)
    chosen = chosen[np.argsort(-scores[chosen], kind="stable")][:CANDIDATES]
    chosen = chosen[_apart(boxes[chosen])]
    table = np.zeros((ROWS, 6), np.float32)
    count = len(chosen)
    table[:count, 0], table[:count, 1] = classes[chosen], scores[chosen]
    table[:count, 2:] = boxes[chosen][:, [1, 0, 3, 2]]
    return table


def _apart(boxes: Floats) -> list[int]:
    """Which boxes stand, best first, at most ROWS: those that overlap no better one."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    left = np.arange(len(boxes))
    kept: list[int] = []
    while len(left) and len(kept) < ROWS:
        best, left = left[0], left[1:]
        kept.append(int(best))
        sides = np.minimum(boxes[left, 2:], boxes[best, 2:]) - np.maximum(boxes[left, :2], boxes[best, :2])
        shared = np.maximum(sides[:, 0], 0) * np.maximum(sides[:, 1], 0)
        left = left[shared <= OVERLAP * (areas[left] + areas[best] - shared)]
    return kept


def _yolo_generic(outputs: Outputs, width: int, height: int) -> Found:
    """One output, [1, 4 + classes, n] or [1, n, 4 + classes] (YOLOv8 to v12), or three of YOLOv4 and v7."""
    if len(outputs) > 1:
        return _yolo_in_three(outputs, width, height)
    (one,) = _plain(outputs, 2)
    if one.shape[0] > one.shape[1]:
        one = one.T
    scores = one[4:].max(axis=0)
    chosen = np.flatnonzero(scores > LEAST_SCORE)
    return one[4:, chosen].argmax(axis=0), scores[chosen], _centred(one[:4, chosen].T, width, height)


def _yolo_in_three(outputs: Outputs, width: int, height: int) -> Found:
    found: list[Found] = []
    for (_, output), anchors, stride in zip(outputs, ANCHORS, STRIDES, strict=True):
        _, channels, rows, columns = output.shape
        cells = output[0].reshape(len(anchors), channels // len(anchors), rows, columns)
        scores = cells[:, 5:].max(axis=1) * cells[:, 4]
        anchor, row, column = np.nonzero(scores > LEAST_SCORE)
        chosen = cells[anchor, :, row, column]
        middles = (chosen[:, :2] * 2 - 0.5 + np.stack([column, row], 1)) * stride
        sides = (chosen[:, 2:4] * 2) ** 2 * np.array(anchors, np.float32)[anchor]
        boxes = _centred(np.concatenate([middles, sides], 1), width, height)
        found.append((chosen[:, 5:].argmax(axis=1), scores[anchor, row, column], boxes))
    classes, scores, boxes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return classes, scores, boxes


def _yolox(outputs: Outputs, width: int, height: int) -> Found:
    """[1, n, 5 + classes], relative to the cells of three grids."""
    (cells,) = _plain(outputs, 2)
    grids, strides = [], []
    for stride in STRIDES:
        across, down = np.meshgrid(np.arange(width // stride), np.arange(height // stride))
        grids.append(np.stack([across, down], 2).reshape(-1, 2))
        strides.append(np.full((len(grids[-1]), 1), stride))
    grid, stride_of = np.concatenate(grids), np.concatenate(strides)
    if len(grid) != len(cells):
        raise ValueError(f"{len(cells)} cells, wanted {len(grid)} for {width} x {height}")
    classes = cells[:, 5:].argmax(axis=1)
    scores = cells[np.arange(len(cells)), 5 + classes] * cells[:, 4]
    chosen = np.flatnonzero(scores > LEAST_SCORE)
    middles = (cells[chosen, :2] + grid[chosen]) * stride_of[chosen]
    sides = np.exp(cells[chosen, 2:4]) * stride_of[chosen]
    return classes[chosen], scores[chosen], _centred(np.concatenate([middles, sides], 1), width, height)


def _yolonas(outputs: Outputs, width: int, height: int) -> Found:
    """[n, 7] in the flat form: picture, xmin, ymin, xmax, ymax in pixels, score, class; class -1 ends the list."""
    (rows,) = _plain(outputs, 2)
    (ends,) = np.nonzero(rows[:, 6] < 0)
    rows = rows[: ends[0]] if len(ends) else rows
    return rows[:, 6], rows[:, 5], rows[:, 1:5] / (width, height, width, height)


def _ssd(outputs: Outputs, width: int, height: int) -> Found:  # noqa: ARG001 (shares already)
    """OpenVINO's [1, 1, n, 7], or TensorFlow's boxes [1, n, 4], classes, scores and count, in any order."""
    if len(outputs) == 1:
        (rows,) = _plain(outputs, 2)
        return rows[:, 1], rows[:, 2], rows[:, 3:7]
    (boxes,) = (array.reshape(-1, 4) for _, array in outputs if array.ndim == 3 and array.shape[2] == 4)
    others = {name: array.reshape(-1) for name, array in outputs if array.size == len(boxes)}
    scores = next((array for name, array in others.items() if "score" in name.lower()), None)
    classes = next((array for name, array in others.items() if "class" in name.lower()), None)
    if scores is None or classes is None:  # TFLite's post-processing: boxes, classes, scores, count
        classes, scores = list(others.values())[:2]
    return classes, scores, boxes[:, [1, 0, 3, 2]]


def _dfine(outputs: Outputs, width: int, height: int) -> Found:
    """Labels [1, n], boxes [1, n, 4] in the pixels of `orig_target_sizes`, scores [1, n]; by name, else in order."""
    named = dict(outputs)
    order = ("labels", "boxes", "scores")
    labels, boxes, scores = (
        [named[name] for name in order] if set(order) <= set(named) else [array for _, array in outputs]
    )
    # As given, height and width: the model multiplies x by the first and y by the second.
    return labels.reshape(-1), scores.reshape(-1), boxes.reshape(-1, 4) / (height, width, height, width)


def _rfdetr(outputs: Outputs, width: int, height: int) -> Found:  # noqa: ARG001 (shares already)
    """Boxes [1, n, 4] as middle and sides, and logits [1, n, 1 + classes], of which the first is no class."""
    boxes, logits = _plain(outputs[:2], 2)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = (shares / shares.sum(axis=1, keepdims=True))[:, 1:]
    return shares.argmax(axis=1), shares.max(axis=1), _centred(boxes, 1, 1)


READERS: Mapping[str, Callable[[Outputs, int, int], Found]] = {
    "ssd": _ssd,
    "yolox": _yolox,
    "yolonas": _yolonas,
    "yologeneric": _yolo_generic,
    "yolo-generic": _yolo_generic,
    "dfine": _dfine,
    "rfdetr": _rfdetr,
}
"""By `model_type`. The plugin sends the name of Frigate's enum (`yologeneric`), others its value (`yolo-generic`)."""


def _plain(outputs: Outputs, axes: int) -> list[Floats]:
    """Arrays without leading axes of length 1, down to so many axes."""
    plain: list[Floats] = []
    for _, array in outputs:
        while array.ndim > axes and array.shape[0] == 1:
            array = array[0]  # noqa: PLW2901
        if array.ndim != axes:
            raise ValueError(f"{array.ndim} axes, wanted {axes}")
        plain.append(array)
    return plain


def _centred(boxes: Floats, width: float, height: float) -> Floats:
    """[n, 4] as middle x, middle y, width, height in pixels -> sides as shares."""
    middles, halves = boxes[:, :2], boxes[:, 2:4] / 2
    sides: Floats = np.concatenate([middles - halves, middles + halves], 1) / (width, height, width, height)
    return sides
