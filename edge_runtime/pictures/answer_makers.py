"""Outputs as answers of pictures, in the host: boxes, masks and points, as the arrays that pictures/values.py reads.

Owns: what each kind asks of an output, and the arithmetic. hosts/steps_instance.py makes them by the table of answers,
each with the output, its steps, its labels, the model's tensors, and the size of its picture where it takes one.
Thread: any runner of the host.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edge_runtime.errors import LoadFailed
from edge_runtime.hosts.steps_instance import DeclaredOutput, PlainOutput, RunRows, Size
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.pictures.box_layouts import TURNED, BoxReader
from edge_runtime.pictures.fit import Placed
from edge_runtime.pictures.values import runs_of
from edge_runtime.steps import OutputSteps
from edge_runtime.tensors import Array
from edge_runtime.words.answer_makers import INTEGERS, ScoredOutput, check_labels, checked_rows

Floats = npt.NDArray[np.float32]

MASK_CLASSES = 256
"""A mask is UINT8."""


class BoxesOutput(PlainOutput):
    """Boxes, by the layout of the family that writes them so."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: the outputs do not fit the layout."""
        name, output = declared.spec.name, declared.steps
        self._is_turned = output.layout in TURNED
        super().__init__(TensorSpec(name, "FP32", (DYNAMIC, output.most, 14 if self._is_turned else 6)))
        self._reader = BoxReader(name, output, declared.model, declared.labels, declared.size)
        self.needs = self._reader.needs

    def make(self, results: Mapping[str, Array], rows: RunRows) -> Array:
        """FP32 [rows, most, 6]: class, score, left, top, right, bottom, best first; -1 and zeros behind the last.

        Of turned boxes [rows, most, 14]: these sides are of the hull, then x and y of each corner.
        """
        boxes = _no_boxes(rows.count, self.spec)
        numbers = {name: results[name].astype(np.float32, copy=False) for name in self.needs}
        for row in range(rows.count):
            found = self._reader.read(numbers, row, rows.count, rows.size)
            place = rows.places[row] if rows.places else None
            found = _turned_in_source(found, place) if self._is_turned else _in_source(found, place)
            boxes[row, : len(found)] = found
        return boxes


class KeypointsOutput(PlainOutput):
    """Boxes, and the points of each: Ultralytics' pose."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: the output does not fit the layout, or its points are not known."""
        name, output = declared.spec.name, _with_layout(declared)
        if output.keypoints is None:
            raise LoadFailed(
                f"[output.{name}]: say how many points a thing has, and how many numbers a point: keypoints = [17, 3]"
            )
        self._shape = output.keypoints
        count, length = self._shape
        super().__init__(TensorSpec(name, "FP32", (DYNAMIC, output.most, 6 + count * 3)))
        self._reader = BoxReader(name, output, declared.model, declared.labels, declared.size, count * length)
        self.needs = self._reader.needs

    def make(self, results: Mapping[str, Array], rows: RunRows) -> Array:
        """FP32 [rows, most, 6 + points * 3]: as of boxes, then x, y and score of each point; NaN: it has no score."""
        boxes = _no_boxes(rows.count, self.spec)
        numbers = {name: results[name].astype(np.float32, copy=False) for name in self.needs}
        count, length = self._shape
        for row in range(rows.count):
            found = self._reader.read(numbers, row, rows.count, rows.size)
            points = np.full((len(found), count, 3), np.nan, np.float32)
            points[:, :, :length] = found[:, 6:].reshape(-1, count, length)
            if rows.places:
                place = rows.places[row]
                sides = (place.source_width, place.source_height)
                points[:, :, :2] = np.clip(place.points_to_source(points[:, :, :2]), 0, sides)
            found = np.concatenate([found[:, :6], points.reshape(len(found), count * 3)], axis=1)
            found = _in_source(found, rows.places[row] if rows.places else None)
            boxes[row, : len(found)] = found
        return boxes


class MasksOutput(PlainOutput):
    """Boxes, and the pixels of each: Ultralytics' segment, whose masks are sums of prototypes."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: the outputs do not fit the layout."""
        name, output = declared.spec.name, _with_layout(declared)
        super().__init__(TensorSpec(name, "BYTES", (DYNAMIC,)))
        prototypes = _find_prototypes(declared)
        self._prototypes = prototypes.name
        self._axis = _channel_axis(declared, prototypes)
        self._reader = BoxReader(
            name, output, declared.model, declared.labels, declared.size, prototypes.shape[self._axis]
        )
        self.needs = (*self._reader.needs, prototypes.name)
        if declared.size is None:
            raise LoadFailed(f"[output.{name}]: masks need the size of the picture, and no input of the model is one")

    def make(self, results: Mapping[str, Array], rows: RunRows) -> Array:
        """BYTES [rows]: JSON, for each thing [class, score, box, size, runs] as `runs_of` has them, best first.

        The mask is of the prototypes' grid, 1 where their sum is above 0, inside of the box (Ultralytics
        `process_mask`). A thing without a pixel is left out.
        """
        numbers = {name: results[name].astype(np.float32, copy=False) for name in self._reader.needs}
        prototypes = checked_rows(results, self._prototypes, rows.count)
        answers: Array = np.empty(rows.count, object)
        for row in range(rows.count):
            found = self._reader.read(numbers, row, rows.count, rows.size)
            planes = np.moveaxis(prototypes[row], self._axis - 1, 0).astype(np.float32, copy=False)
            masks = [_mask_in_box(each[6:], planes, each[2:6], rows.size) for each in found]
            sides = _in_source(found[:, :6], rows.places[row] if rows.places else None, drops=False)
            answers[row] = msgspec.json.encode(
                [
                    (int(box[0]), float(box[1]), box[2:].tolist(), mask.shape, runs_of(mask))
                    for box, mask in zip(sides, masks, strict=True)
                    if mask.any() and _has_area(box[None])[0]
                ]
            )
        return answers


class MaskOutput(ScoredOutput):
    """A class for each pixel."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: these are not scores of pixels, or not of these labels."""
        spec, labels = declared.spec, declared.labels
        shape = spec.shape
        wanted = "[rows, classes, height, width], [rows, height, width, classes] or [rows, height, width]"
        if len(shape) not in (3, 4) or (len(shape) == 4 and shape[1] == shape[3] == DYNAMIC):
            raise LoadFailed(f"[output.{spec.name}]: its shape is {list(shape)}; wanted {wanted}")
        self._axis: int | None = None
        if len(shape) == 4:
            lengths = {axis: shape[axis] for axis in (1, 3) if shape[axis] != DYNAMIC}
            by_labels = [axis for axis, length in lengths.items() if length == len(labels)]
            self._axis = by_labels[0] if by_labels else min(lengths, key=lambda axis: (lengths[axis], axis))
            classes = shape[self._axis]
            if classes > MASK_CLASSES:
                raise LoadFailed(f"[output.{spec.name}]: it has {classes} classes; a mask has at most {MASK_CLASSES}")
            if labels and classes != 1:
                check_labels(spec, labels, classes)
        sides = [length for axis, length in enumerate(shape) if axis not in (0, self._axis)]
        super().__init__(TensorSpec(spec.name, "UINT8", (DYNAMIC, *sides)), declared.steps)
        self._is_index = spec.datatype in INTEGERS
        if self._is_index or (self._axis is not None and shape[self._axis] != 1):
            self.is_logits = False  # the best class is the same either way

    def make(self, results: Mapping[str, Array], rows: RunRows) -> Array:
        """UINT8 [rows, height, width], of the model's own grid: the best class, or 1 where one class is likely.

        A pixel with a score that is not a number is 0.
        """
        array = checked_rows(results, self.spec.name, rows.count)
        if self._axis is not None and array.shape[self._axis] != 1:
            numbers = array.astype(np.float32, copy=False)
            best = numbers.argmax(axis=self._axis)
            return np.where(np.isnan(numbers).any(axis=self._axis), 0, best).astype(np.uint8)
        plane = array if self._axis is None else array.squeeze(self._axis)
        if self._is_index:
            return plane.astype(np.uint8)
        return (plane.astype(np.float32, copy=False) > (0.0 if self.is_logits else 0.5)).astype(np.uint8)


# ---- things in the picture as it was sent ----------------------------------------------------------------------------


def _no_boxes(rows: int, spec: TensorSpec) -> Floats:
    boxes = np.zeros((rows, *spec.shape[1:]), np.float32)
    boxes[:, :, 0] = -1
    return boxes


def _has_area(found: Floats) -> npt.NDArray[np.bool_]:
    """Which of [n, 6 or more] have a box with an area."""
    return (found[:, 4] > found[:, 2]) & (found[:, 5] > found[:, 3])


def _in_source(found: Floats, place: Placed | None, *, drops: bool = True) -> Floats:
    """Things whose boxes are in the pixels of the picture as it was sent, without those of no area."""
    if place is not None:
        found[:, 2:6] = place.to_source(found[:, 2:6])
    return found[_has_area(found)] if drops else found


def _turned_in_source(found: Floats, place: Placed | None) -> Floats:
    """Turned boxes [n, 7] of class, score, middle, sides and angle as [n, 14]: hull and corners.

    Corners may lie outside of the picture, hulls do not. Source: Ultralytics `xywhr2xyxyxyxy`.
    """
    middles, half, angle = found[:, None, 2:4], found[:, 4:6] / 2, found[:, 6]
    cos, sin = np.cos(angle), np.sin(angle)
    across = np.stack([half[:, 0] * cos, half[:, 0] * sin], axis=1)[:, None]
    down = np.stack([-half[:, 1] * sin, half[:, 1] * cos], axis=1)[:, None]
    corners = np.concatenate(
        [middles + across + down, middles + across - down, middles - across - down, middles - across + down], axis=1
    )
    hulls = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
    if place is not None:
        corners, hulls = place.points_to_source(corners), place.to_source(hulls)
    turned = np.concatenate([found[:, :2], hulls, corners.reshape(-1, 8)], axis=1).astype(np.float32)
    return turned[_has_area(turned) & (half > 0).all(axis=1)]


# ---- prototypes -----------------------------------------------------------------------------------------------------


def _with_layout(declared: DeclaredOutput) -> OutputSteps:
    """The table with its layout: only one family writes such an output."""
    output = declared.steps
    if output.layout not in (None, "yolov8", "yolov11"):
        raise LoadFailed(
            f'[output.{declared.spec.name}]: layout = "{output.layout}" has neither masks nor points; wanted "yolov8"'
        )
    return replace(output, layout="yolov8")


def _find_prototypes(declared: DeclaredOutput) -> TensorSpec:
    """The output with the prototypes of masks. Raises LoadFailed."""
    name, said = declared.spec.name, declared.steps.prototypes
    able = [
        each
        for each in declared.model.outputs
        if len(each.shape) == 4 and DYNAMIC not in each.shape[1:] and said in (None, each.name)
    ]
    if len(able) != 1:
        there = ", ".join(f"{each.name} {list(each.shape)}" for each in declared.model.outputs if each.name != name)
        raise LoadFailed(
            f"[output.{name}]: masks are made of prototypes, [rows, n, height, width] or [rows, height, width, n]; say "
            f'prototypes = "…": the model has {there or "no other output"}'
        )
    return able[0]


def _channel_axis(declared: DeclaredOutput, prototypes: TensorSpec) -> int:
    """The axis of the prototypes: the one that labels leave for them in the boxes, else the shorter."""
    lengths = {length - 4 - len(declared.labels) for length in declared.spec.shape[1:]}
    fitting = [axis for axis in (1, 3) if declared.labels and prototypes.shape[axis] in lengths]
    return fitting[0] if len(fitting) == 1 else min((1, 3), key=lambda axis: prototypes.shape[axis])


def _mask_in_box(coefficients: Floats, prototypes: Floats, box: Floats, size: Size) -> npt.NDArray[np.uint8]:
    """One mask, UINT8 [height, width]. prototypes: [n, height, width]. box: in the pixels of the model's picture."""
    _, height, width = prototypes.shape
    ratio = np.array((width / size[0], height / size[1]) * 2)
    left, top, right, bottom = np.clip(np.ceil(box * ratio), 0, (width, height) * 2).astype(int)
    mask = np.zeros((height, width), np.uint8)
    inside = prototypes[:, top:bottom, left:right]
    mask[top:bottom, left:right] = np.tensordot(coefficients, inside, 1) > 0
    return mask
