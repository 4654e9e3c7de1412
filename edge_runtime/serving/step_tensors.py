"""What a pipeline's step is given, and what its answers become: items of a map, crops, joined, or none. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge_runtime.errors import RunFailed
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.pipelines import Place, Step
from edge_runtime.tensors import DATATYPES, Array

MOST_ITEMS = 16_384
"""Items of one map: more is no list of things found, and their answers would fill the memory."""

BOX_COLUMNS, ANSWER_COLUMNS = 4, 6
"""Columns of a box, and of a box in an answer: index, score, left, top, right, bottom (answers.py)."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The requests that one step makes of its inputs, each made when it is asked for.

    inputs: by the model's input, whole. mapped: those of them that are cut, as items along axis 0. boxes: FP64 [n, 4]
    in pixels, of crops. at_once: items of one request. items: of all; None where the step is not mapped.
    """

    step: Step
    inputs: Mapping[str, Array]
    mapped: frozenset[str] = frozenset()
    boxes: Array | None = None
    picture: Array | None = None
    items: int | None = None
    at_once: int = 1

    def __len__(self) -> int:
        return 1 if self.items is None else -(-self.items // self.at_once)

    def __getitem__(self, index: int) -> dict[str, Array]:
        """The inputs of one request."""
        if self.items is None:
            return dict(self.inputs)
        start, end = index * self.at_once, min((index + 1) * self.at_once, self.items)
        found: dict[str, Array] = {}
        for name, array in self.inputs.items():
            if name not in self.mapped:
                found[name] = array
            elif (
                self.boxes is not None
                and self.picture is not None
                and self.step.crop is not None
                and (self.step.inputs[name] == self.step.crop.box)
            ):
                found[name] = cut_out(self.picture, self.boxes[index])
            else:
                found[name] = array[start:end]
        return found


def make_pieces(step: Step, values: Mapping[Place, Array], most_rows: int) -> Pieces:
    """Cut a step's inputs into requests. most_rows: items that one request to its model may have.

    Raises RunFailed: maps of different lengths, too many items, a picture or boxes that are none.
    """
    inputs = {name: values[place] for name, place in step.inputs.items()}
    if not step.map:
        return Pieces(step, inputs)
    lists = {place: items_of(values[place]) for place in step.map}
    counts = {str(place): len(each) for place, each in lists.items()}
    if len(set(counts.values())) > 1:
        raise RunFailed(f"map: {', '.join(f'{place} has {n} items' for place, n in counts.items())}; wanted as many")
    count = next(iter(counts.values()))
    if count > MOST_ITEMS:
        raise RunFailed(f"map: {next(iter(counts))} has {count} items, at most {MOST_ITEMS} are run")
    mapped = frozenset(name for name, place in step.inputs.items() if place in lists)
    inputs |= {name: lists[step.inputs[name]] for name in mapped}
    if step.crop is None:
        return Pieces(step, inputs, mapped, items=count, at_once=most_rows if len(mapped) == len(inputs) else 1)
    boxes = _pixels(lists[step.crop.box], step.crop.box)
    picture = values[step.crop.picture]
    if picture.dtype != np.uint8 or picture.ndim != 4 or picture.shape[0] != 1:
        shape = list(picture.shape)
        raise RunFailed(
            f"crop: {step.crop.picture} is {picture.dtype} {shape}; wanted UINT8 [1, height, width, 1 or 3]"
        )
    return Pieces(step, inputs, mapped, boxes, picture, count)


def items_of(array: Array) -> Array:
    """The items of a mapped tensor, along axis 0: its rows, or the boxes of an answer that are there."""
    if array.ndim == 3 and array.shape[0] == 1 and array.shape[2] in {BOX_COLUMNS, ANSWER_COLUMNS}:
        boxes: Array = array[0]
        return boxes if boxes.shape[1] == BOX_COLUMNS else boxes.compress(boxes[:, 0].astype(np.float64) >= 0, axis=0)
    if not array.ndim:
        raise RunFailed("map: got a number without rows; wanted a tensor of one row an item")
    return array


def cut_out(picture: Array, box: Array) -> Array:
    """Cut a box out of a picture [1, height, width, channels]: a view, of one pixel at least.

    What of the box lies outside the picture is left out.
    """
    _, height, width, _ = picture.shape
    left, top, right, bottom = box
    x, y = int(np.clip(left, 0, width - 1)), int(np.clip(top, 0, height - 1))
    x_end, y_end = int(np.clip(np.ceil(right), x + 1, width)), int(np.clip(np.ceil(bottom), y + 1, height))
    return picture[:, y:y_end, x:x_end]


def join_pieces(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Join the answers of a map along axis 0. Raises RunFailed: their inner shapes differ."""
    if len(parts) == 1:
        return dict(parts[0])
    joined: dict[str, Array] = {}
    for name in parts[0]:
        column = [part[name] for part in parts]
        try:
            joined[name] = np.concatenate(column)
        except ValueError:
            shapes = sorted({str(list(each.shape)) for each in column})
            raise RunFailed(f"map: answers {name!r} of shapes {', '.join(shapes)} cannot be joined") from None
    return joined


def no_rows(spec: TensorSpec) -> Array:
    """What stands for an output of a step that was not run: zero rows, open dimensions 0."""
    shape = (0, *(0 if length == DYNAMIC else length for length in spec.shape[1:]))
    return np.zeros(shape, DATATYPES[spec.datatype].dtype)


def tensor_bytes(arrays: Iterable[Array]) -> int:
    """Bytes of arrays, those of text included."""
    return sum([sum(map(len, each.flat)) if each.dtype == object else each.nbytes for each in arrays])


def _pixels(boxes: Array, place: Place) -> Array:
    """Left, top, right and bottom of boxes [n, 4 or 6]."""
    if boxes.ndim != 2 or boxes.shape[1] not in {BOX_COLUMNS, ANSWER_COLUMNS}:
        raise RunFailed(f"crop: {place} is {list(boxes.shape)}; wanted boxes [n, 4], or those of an answer")
    pixels: Array = np.nan_to_num(boxes[:, -BOX_COLUMNS:].astype(np.float64), posinf=1e9, neginf=-1e9)
    return pixels
