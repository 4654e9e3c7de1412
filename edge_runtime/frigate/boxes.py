"""The table of boxes that Frigate's plugin reads, FP32 [20, 6], from the outputs of each kind of model.

Rows are [class, score, ymin, xmin, ymax, xmax], sides as shares of the picture, best first; rows of zeros pad. What
Frigate does by itself with the outputs of each kind (`frigate/util/model.py` and its detectors) is done here the same,
so that a detector finds what it would find without us: the least score, which boxes are one, and which logits count.
Only overlap is measured on the boxes themselves, where Frigate takes corners for sides. Pure. Thread: any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.pictures.box_layouts import BoxReader, suppress
from edge_runtime.steps import BoxLayout, OutputSteps
from edge_runtime.tensors import Array

Floats = npt.NDArray[np.float32]
Outputs = Sequence[tuple[str, Floats]]
"""Names and arrays of one picture, in the model's order."""

ROWS = 20
"""Rows of a reply: the plugin takes this shape and no other."""

LEAST_SCORE = 0.4
"""Frigate reads no row after the first that is below it, and computes none itself."""

OVERLAP = 0.4
"""Intersection over union from which the better box of two stands for both, whatever their classes."""

NO_OVERLAP = 1.0
"""No box is another's: `_table` looks at that, across classes."""

MOST = 1000
"""Boxes that are compared, best first."""

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
        with np.errstate(all="ignore"):  # a model may give anything; rows that are not numbers are left out below
            floats = [(name, np.asarray(array, np.float32)) for name, array in outputs]
            return _table(read(floats, (width, height)), width, height, is_apart=model_type in _CHOSEN)
    except (ValueError, IndexError, LoadFailed) as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs[:8])
        raise RunFailed(
            f"these are not outputs of a model of type {model_type}: {shapes} ({error}); "
            "set model_type in Frigate to what the model is"
        ) from None


def _table(found: Floats, width: int, height: int, *, is_apart: bool) -> Floats:
    """The best rows. found: FP32 [n, 6]: class, score, left, top, right, bottom in pixels. is_apart: none overlap."""
    sides: Floats = np.array((width, height, width, height), np.float32)
    boxes: Floats = (found[:, 2:] / sides).clip(0.0, 1.0)
    chosen = np.flatnonzero((found[:, 1] > LEAST_SCORE) & np.isfinite(found).all(axis=1) & (found[:, 0] >= 0))
    chosen = chosen[np.argsort(-found[chosen, 1], kind="stable")]
    if not is_apart:
        chosen = chosen[suppress(boxes[chosen], np.zeros(len(chosen), np.intp), OVERLAP, ROWS)]
    chosen = chosen[:ROWS]
    table = np.zeros((ROWS, 6), np.float32)
    table[: len(chosen), :2] = found[chosen, :2]
    table[: len(chosen), 2:] = boxes[chosen][:, [1, 0, 3, 2]]
    return table


# ---- one reader a kind: FP32 [n, 6], as `_table` takes it -----------------------------------------------------------


def _by_layout(outputs: Outputs, size: tuple[int, int], layout: BoxLayout) -> Floats:
    """As a model with this layout declared is read. The boxes are the only output, or the one of [1, n, 4]."""
    shapes = tuple((name, array.shape) for name, array in outputs)
    return _reader(layout, shapes, size).read(dict(outputs), 0, 1, size)


@functools.lru_cache(maxsize=64)
def _reader(layout: BoxLayout, shapes: tuple[tuple[str, tuple[int, ...]], ...], size: tuple[int, int]) -> BoxReader:
    boxes = [name for name, shape in shapes if len(shapes) == 1 or (len(shape) == 3 and shape[2] == 4)]
    if len(boxes) != 1:
        raise LoadFailed(f"there are {len(boxes)} outputs of boxes; wanted 1")
    declared = OutputSteps(layout=layout, threshold=LEAST_SCORE, overlap=NO_OVERLAP, most=MOST)
    specs = tuple(TensorSpec(name, "FP32", shape) for name, shape in shapes)
    return BoxReader(boxes[0], declared, ModelSpec((), specs), (), size)


def _yolo(outputs: Outputs, size: tuple[int, int]) -> Floats:
    """YOLOv8 and later, boxes first or classes first; or three outputs, [1, 3 * (5 + classes), height, width]."""
    if len(outputs) == 1:
        return _by_layout(outputs, size, "yolov8")
    found: list[Floats] = []
    for (_, output), anchors, stride in zip(outputs, ANCHORS, STRIDES, strict=True):
        _, channels, height, width = output.shape
        cells = output[0].reshape(len(anchors), channels // len(anchors), height, width)
        scores = cells[:, 5:].max(axis=1) * cells[:, 4]
        anchor, row, column = np.nonzero(scores > LEAST_SCORE)
        chosen = cells[anchor, :, row, column]
        middles = (chosen[:, :2] * 2 - 0.5 + np.stack([column, row], 1)) * stride
        sides = (chosen[:, 2:4] * 2) ** 2 * np.array(anchors)[anchor]
        found.append(_rows(chosen[:, 5:].argmax(axis=1), scores[anchor, row, column], _corners(middles, sides)))
    return np.concatenate(found)


def _dfine(outputs: Outputs, size: tuple[int, int]) -> Floats:
    """Labels [1, n], boxes [1, n, 4] in the pixels of `orig_target_sizes`, scores [1, n]; by name, else in order."""
    named, order = dict(outputs), ("labels", "boxes", "scores")
    arrays = [named[name] for name in order] if set(order) <= set(named) else [array for _, array in outputs]
    labels, boxes, scores = arrays
    # It was given height and width, and multiplies x by the first and y by the second.
    width, height = size
    factors = np.array((width / height, height / width) * 2)
    return _rows(labels.reshape(-1), scores.reshape(-1), boxes.reshape(-1, 4) * factors)


def _rfdetr(outputs: Outputs, size: tuple[int, int]) -> Floats:
    """Boxes [1, n, 4] as shares, middle and sides, and logits [1, n, 1 + classes], the first of which is background."""
    (_, boxes), (_, logits) = outputs[:2]
    boxes, logits = boxes.reshape(-1, 4), logits.reshape(-1, logits.shape[-1])
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = (shares / shares.sum(axis=1, keepdims=True))[:, 1:]
    return _rows(shares.argmax(axis=1), shares.max(axis=1), _corners(boxes[:, :2] * size, boxes[:, 2:] * size))


def _rows(classes: npt.NDArray[Any], scores: npt.NDArray[Any], boxes: npt.NDArray[Any]) -> Floats:
    return np.concatenate([classes[:, None], scores[:, None], boxes], axis=1).astype(np.float32)


def _corners(middles: npt.NDArray[Any], sides: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([middles - sides / 2, middles + sides / 2], axis=1)


READERS: Mapping[str, Callable[[Outputs, tuple[int, int]], Floats]] = {
    "ssd": functools.partial(_by_layout, layout="ssd"),
    "yolox": functools.partial(_by_layout, layout="yolox"),
    "yolonas": functools.partial(_by_layout, layout="yolonas"),
    "yologeneric": _yolo,
    "yolo-generic": _yolo,
    "dfine": _dfine,
    "rfdetr": _rfdetr,
}
"""By `model_type`. The plugin sends the name of Frigate's enum (`yologeneric`), others its value (`yolo-generic`)."""

_CHOSEN = frozenset(("ssd", "yolonas"))
"""Kinds that choose among overlapping boxes themselves."""
