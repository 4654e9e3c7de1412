"""Outputs as answers, in the host: classes, boxes, masks, embeddings and text, as the arrays that answers.py describes.

Owns: what each kind asks of an output, and the arithmetic. hosts/steps_instance.py makes them by the table of answers,
each with the output, its steps, its labels, the model's tensors, and the size of its picture where it takes one.
Thread: any runner of the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.hosts.steps_instance import FLOATS, DeclaredOutput, PlainOutput, Size
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.pictures.box_layouts import BoxReader
from edge_runtime.pictures.fit import Placed
from edge_runtime.steps import OutputSteps
from edge_runtime.tensors import Array

Floats = npt.NDArray[np.float32]

INTEGERS = ("BOOL", "UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "UINT64", "INT64")

DEFAULT_THRESHOLD = OutputSteps().threshold
"""Classes are left out only above it: a model's best guess is an answer, however unsure."""

MASK_CLASSES = 256
"""A mask is UINT8."""

BLANKS = ("<blank>", "[blank]", "<pad>", "[PAD]", "")
"""Labels that CTC's blank has in files of alphabets."""


class _Scored(PlainOutput):
    """Scores that may be logits. is_logits: None until it is known."""

    def __init__(self, spec: TensorSpec, output: OutputSteps) -> None:
        super().__init__(spec)
        self.is_logits = output.softmax


class ClassesOutput(_Scored):
    """The best classes of a row of scores."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: these are not scores of classes, or not of these labels."""
        spec, output, labels = declared.spec, declared.steps, declared.labels
        _check_floats(spec, "classes")
        count = _row_length(spec)
        _check_labels(spec, labels, count)
        super().__init__(TensorSpec(spec.name, "FP32", (DYNAMIC, min(output.top_k, count), 2)), output)
        self._top = min(output.top_k, count)
        self._threshold = output.threshold if output.threshold > DEFAULT_THRESHOLD else -math.inf
        self._others = np.ones(count, np.bool_) if output.wanted else np.zeros(count, np.bool_)
        for label in output.wanted:
            if label not in labels:
                raise LoadFailed(f"[output.{spec.name}]: wanted has {label!r}, which is none of {len(labels)} labels")
            self._others[list(labels).index(label)] = False

    def make(self, results: Mapping[str, Array], rows: int, size: Size, places: Sequence[Placed]) -> Array:
        """FP32 [rows, top, 2]: index and score, best first; -1 and 0 in the rest.

        A score that is not a number is left out; one among a row's logits leaves no probability in it.
        """
        del size, places
        scores = _rows_of(results, self.spec.name, rows)
        if self.is_logits:
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores = scores / scores.sum(axis=1, keepdims=True)
        scores = np.where(np.isnan(scores) | self._others, np.float32(-np.inf), scores)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self._top]
        told = np.take_along_axis(scores, best, 1)
        is_told = told > self._threshold
        return np.stack([np.where(is_told, best, -1), np.where(is_told, told, 0)], axis=2).astype(np.float32)


class BoxesOutput(PlainOutput):
    """Boxes, by the layout of the family that writes them so."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: the outputs do not fit the layout."""
        name, output = declared.spec.name, declared.steps
        super().__init__(TensorSpec(name, "FP32", (DYNAMIC, output.most, 6)))
        self._reader = BoxReader(name, output, declared.model, declared.labels, declared.size)
        self.needs = self._reader.needs

    def make(self, results: Mapping[str, Array], rows: int, size: Size, places: Sequence[Placed]) -> Array:
        """FP32 [rows, most, 6]: class, score, left, top, right, bottom, best first; -1 and zeros behind the last."""
        boxes = np.zeros((rows, self.spec.shape[1], 6), np.float32)
        boxes[:, :, 0] = -1
        numbers = {name: results[name].astype(np.float32, copy=False) for name in self.needs}
        for row in range(rows):
            found = self._reader.read(numbers, row, rows, size)
            if places:
                found[:, 2:] = places[row].to_source(found[:, 2:])
            boxes[row, : len(found)] = found
        return boxes


class MaskOutput(_Scored):
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
                _check_labels(spec, labels, classes)
        sides = [length for axis, length in enumerate(shape) if axis not in (0, self._axis)]
        super().__init__(TensorSpec(spec.name, "UINT8", (DYNAMIC, *sides)), declared.steps)
        self._is_index = spec.datatype in INTEGERS
        if self._is_index or (self._axis is not None and shape[self._axis] != 1):
            self.is_logits = False  # the best class is the same either way

    def make(self, results: Mapping[str, Array], rows: int, size: Size, places: Sequence[Placed]) -> Array:
        """UINT8 [rows, height, width], of the model's own grid: the best class, or 1 where one class is likely.

        A pixel with a score that is not a number is 0.
        """
        del size, places
        array = _checked_rows(results, self.spec.name, rows)
        if self._axis is not None and array.shape[self._axis] != 1:
            numbers = array.astype(np.float32, copy=False)
            best = numbers.argmax(axis=self._axis)
            return np.where(np.isnan(numbers).any(axis=self._axis), 0, best).astype(np.uint8)
        plane = array if self._axis is None else array.squeeze(self._axis)
        if self._is_index:
            return plane.astype(np.uint8)
        return (plane.astype(np.float32, copy=False) > (0.0 if self.is_logits else 0.5)).astype(np.uint8)


class EmbeddingOutput(PlainOutput):
    """Vectors of length 1."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: it does not hold floats of a known number."""
        spec = declared.spec
        _check_floats(spec, "embedding")
        super().__init__(TensorSpec(spec.name, "FP32", (DYNAMIC, _row_length(spec))))

    def make(self, results: Mapping[str, Array], rows: int, size: Size, places: Sequence[Placed]) -> Array:
        """FP32 [rows, length], each of length 1; zeros stay zeros, and NaN stays NaN."""
        del size, places
        vectors = _rows_of(results, self.spec.name, rows)
        lengths: Floats = np.linalg.norm(vectors, axis=1, keepdims=True).astype(np.float32)
        units: Floats = vectors / np.maximum(lengths, np.float32(1e-12))
        return units


class TextOutput(PlainOutput):
    """Texts, as they are or of the best character of each step."""

    def __init__(self, declared: DeclaredOutput) -> None:
        """Raises LoadFailed: it is not text, nor are these scores of its characters."""
        spec, labels = declared.spec, declared.labels
        super().__init__(TensorSpec(spec.name, "BYTES", (DYNAMIC,)))
        self._letters: list[str] = []
        if spec.datatype == "BYTES":
            if len(spec.shape) not in (1, 2) or (len(spec.shape) == 2 and spec.shape[1] != 1):
                raise LoadFailed(
                    f"[output.{spec.name}]: its shape is {list(spec.shape)}; wanted one text a row: [rows]"
                )
            return
        wanted = "BYTES [rows], or scores of characters, FP32 [rows, steps, characters]"
        if spec.datatype not in FLOATS or len(spec.shape) != 3 or spec.shape[2] == DYNAMIC:
            raise LoadFailed(f"[output.{spec.name}]: it is {spec.datatype} {list(spec.shape)}; wanted {wanted}")
        count = spec.shape[2]
        self._letters = ["", *labels] if len(labels) == count - 1 else list(labels)
        blanks = [index for index, label in enumerate(self._letters) if label in BLANKS]
        if len(self._letters) != count or not blanks:
            raise LoadFailed(
                f"[output.{spec.name}]: there are {len(labels)} labels for {count} characters; wanted {count - 1}, "
                f"where the blank is the model's first, or {count} with a line <blank> in its place"
            )
        self._blank = blanks[0]

    def make(self, results: Mapping[str, Array], rows: int, size: Size, places: Sequence[Placed]) -> Array:
        """BYTES [rows], UTF-8: the model's own, or the best character of each step, repeats and blanks taken out."""
        del size, places
        array = _checked_rows(results, self.spec.name, rows)
        texts: Array = np.empty(rows, object)
        if not self._letters:
            texts[:] = [
                each.encode() if isinstance(each, str) else bytes(each) for each in array.reshape(rows).tolist()
            ]
            return texts
        best = array.argmax(axis=2)
        is_told = best != self._blank
        is_told[:, 1:] &= best[:, 1:] != best[:, :-1]
        for row in range(rows):
            texts[row] = "".join(self._letters[index] for index in best[row][is_told[row]]).encode()
        return texts


# ---- shapes ---------------------------------------------------------------------------------------------------------


def _row_length(spec: TensorSpec) -> int:
    """Numbers of one row. Raises LoadFailed: it is left open, or there are no rows."""
    if len(spec.shape) < 2 or not spec.has_fixed_inner_shape or 0 in spec.shape[1:]:
        raise LoadFailed(
            f"[output.{spec.name}]: its shape is {list(spec.shape)}; wanted [rows, n] with known lengths behind axis 0"
        )
    return math.prod(spec.shape[1:])


def _check_floats(spec: TensorSpec, kind: str) -> None:
    if spec.datatype not in FLOATS:
        raise LoadFailed(f'[output.{spec.name}]: it is {spec.datatype}; answer = "{kind}" wants {", ".join(FLOATS)}')


def _check_labels(spec: TensorSpec, labels: Sequence[str], classes: int) -> None:
    if labels and len(labels) != classes:
        raise LoadFailed(f"[output.{spec.name}]: there are {len(labels)} labels, and the model has {classes} classes")


def _rows_of(results: Mapping[str, Array], name: str, rows: int) -> Floats:
    """FP32 [rows, n] of an output of any rank."""
    return _checked_rows(results, name, rows).reshape(rows, -1).astype(np.float32, copy=False)


def _checked_rows(results: Mapping[str, Array], name: str, rows: int) -> Array:
    array = results[name]
    if not array.ndim or len(array) != rows:
        raise RunFailed(f"output {name} has the shape {list(array.shape)} for {rows} rows; wanted as many along axis 0")
    return array
