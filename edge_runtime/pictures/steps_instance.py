"""A loaded model asked with pictures, and answering as a person wants it: its declared steps, run in its host.

Owns: the forms in which a model can be asked, and its outputs as the arrays that answers.py describes: classes, boxes,
masks, text. What cannot be an answer is refused at load. No row's answer depends on another row. Tensors of pictures
are input.py's. Thread: any runner of the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edge_runtime.answers import PICTURE_SIZE, kind_of
from edge_runtime.backends.base import Instance
from edge_runtime.errors import EdgeRuntimeError, LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.pictures.box_layouts import BoxReader, Size
from edge_runtime.pictures.fit import Placed
from edge_runtime.pictures.input import PictureInput, picture_input
from edge_runtime.steps import Form, InputKind, InputSteps, ModelSteps, OutputSteps
from edge_runtime.tensors import DATATYPES, Array, Tensors, bf16_to_fp32

Floats = npt.NDArray[np.float32]

FLOATS = ("FP32", "FP16", "BF16", "FP64")
INTEGERS = ("BOOL", "UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "UINT64", "INT64")

DEFAULT_THRESHOLD = OutputSteps().threshold
"""Classes are left out only above it: a model's best guess is an answer, however unsure."""

MASK_CLASSES = 256
"""A mask is UINT8."""

BLANKS = ("<blank>", "[blank]", "<pad>", "[PAD]", "")
"""Labels that CTC's blank has in files of alphabets."""

_CHANNELS = (1, 3)

_UNKNOWN_SIDE = 224
"""Of a picture that the model takes in any size, for the runs that show whether scores are probabilities."""

_PROBABLE = 1.0 + 1e-3
"""Probabilities of FP16 and BF16 may be that far above 1."""


def make_forms(instance: Instance, steps: ModelSteps, threads: int) -> list[StepsInstance]:
    """The forms in which a model with these steps can be asked, beside its own. Raises LoadFailed: they do not fit."""
    picture = picture_input(instance.spec, steps, threads, instance.concurrency)
    answers = AnswerSteps(instance, steps, picture.sides if picture is not None else None)
    given: list[InputKind] = ["tensor"]
    if picture is not None:
        given += picture.kinds
    forms = [Form(each, answers) for each in given for answers in (True, False)]
    return [StepsInstance(instance, picture, answers, form) for form in forms if form != Form("tensor", answers=False)]


class StepsInstance:
    """One form of a model. spec: what goes in and out in this form."""

    def __init__(self, instance: Instance, picture: PictureInput | None, answers: AnswerSteps, form: Form) -> None:
        self.form = form
        self._instance = instance
        self._picture = picture if form.kind != "tensor" else None
        inputs = tuple(
            spec if self._picture is None or spec.name != self._picture.name else self._picture.sent_spec(form.kind)
            for spec in instance.spec.inputs
        )
        self._answers = answers if form.answers else None
        outputs = instance.spec.outputs
        if self._answers is not None:
            outputs = self._answers.specs
            if self._picture is not None:
                outputs += (TensorSpec(PICTURE_SIZE, "INT64", (DYNAMIC, 2)),)
        self.spec = ModelSpec(inputs, outputs, instance.spec.max_rows)

    def run(self, inputs: Tensors) -> list[Array]:
        """Run once. Raises UnreadablePicture, which is the caller's fault; RunFailed: the model failed."""
        tensors = dict(inputs)
        places: list[Placed] = []
        if self._picture is not None:
            name = self._picture.name
            tensors[name], places = self._picture.rows(self.form.kind, inputs[name])
        if self._answers is None:
            return self._instance.run(tensors)
        results = dict(zip(self._answers.needs, self._instance.run(tensors, self._answers.needs), strict=True))
        answers = self._answers.make(results, tensors, places)
        if self._picture is not None:
            answers.append(np.array([(each.source_width, each.source_height) for each in places], np.int64))
        return answers


class AnswerSteps:
    """The answers of one model. needs: the outputs they are made of. specs: what comes out, one an answer.

    Thread: any number of runs at the same time; nothing changes after the constructor.
    """

    def __init__(self, instance: Instance, steps: ModelSteps, sides: tuple[int, int] | None) -> None:
        """Find out what outputs mean; a few runs show whether scores are probabilities where nothing declares it.

        sides: height and width of a declared picture. Raises LoadFailed: a table names an output that is not there, or
        does not fit its shape.
        """
        spec = instance.spec
        for name in steps.outputs:
            if all(each.name != name for each in spec.outputs):
                there = ", ".join(each.name for each in spec.outputs)
                raise LoadFailed(f"[output.{name}]: the model has no such output; it has {there}")
        self._picture = _picture_input(spec, steps)
        self._answers = [
            _make_answer(each, steps.outputs.get(each.name), spec, steps.labels.get(each.name, ()), self._picture)
            for each in spec.outputs
            if each.name in steps.outputs or not steps.outputs
        ]
        self.needs = list(dict.fromkeys(name for each in self._answers for name in each.needs))
        self.specs = tuple(each.spec for each in self._answers)
        self._datatypes = {each.name: each.datatype for each in spec.outputs}
        unsure = [each for each in self._answers if isinstance(each, _Scored) and each.is_logits is None]
        if unsure:
            _decide(unsure, instance, steps, sides)

    def make(self, results: Mapping[str, Array], inputs: Tensors, places: Sequence[Placed]) -> list[Array]:
        """The answers of one run, in the order of `specs`.

        results: by name, all that `needs` names. inputs: what the model was given. places: where each row's picture
        lies in it; empty where the model was given its own tensor, so that boxes are in the model's own pixels.
        Raises RunFailed: an output has not a row for each row of the input.
        """
        rows = len(places) or next((len(each) for each in inputs.values() if each.ndim), 1)
        numbers = {name: _numbers(array, self._datatypes[name]) for name, array in results.items()}
        size = _size_of(inputs[self._picture.name].shape) if self._picture is not None else (0, 0)
        with np.errstate(all="ignore"):
            return [each.make(numbers, rows, size, places) for each in self._answers]


class _Bare:
    """An output without steps, as it is."""

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.needs: tuple[str, ...] = (spec.name,)

    def make(self, results: Mapping[str, Array], rows: int, size: Size, places: Sequence[Placed]) -> Array:
        """The output of all rows, in the form of `spec`."""
        del rows, size, places
        return results[self.spec.name]


class _Scored(_Bare):
    """Scores that may be logits. is_logits: None until it is known."""

    def __init__(self, spec: TensorSpec, output: OutputSteps) -> None:
        super().__init__(spec)
        self.is_logits = output.softmax


class _Classes(_Scored):
    def __init__(self, spec: TensorSpec, output: OutputSteps, labels: Sequence[str]) -> None:
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


class _Boxes(_Bare):
    def __init__(
        self, output: OutputSteps, name: str, model: ModelSpec, labels: Sequence[str], size: Size | None
    ) -> None:
        super().__init__(TensorSpec(name, "FP32", (DYNAMIC, output.most, 6)))
        self._reader = BoxReader(name, output, model, labels, size)
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


class _Mask(_Scored):
    def __init__(self, spec: TensorSpec, output: OutputSteps, labels: Sequence[str]) -> None:
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
        super().__init__(TensorSpec(spec.name, "UINT8", (DYNAMIC, *sides)), output)
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


class _Embedding(_Bare):
    def __init__(self, spec: TensorSpec) -> None:
        _check_floats(spec, "embedding")
        super().__init__(TensorSpec(spec.name, "FP32", (DYNAMIC, _row_length(spec))))

    def make(self, results: Mapping[str, Array], rows: int, size: Size, places: Sequence[Placed]) -> Array:
        """FP32 [rows, length], each of length 1; zeros stay zeros, and NaN stays NaN."""
        del size, places
        vectors = _rows_of(results, self.spec.name, rows)
        lengths: Floats = np.linalg.norm(vectors, axis=1, keepdims=True).astype(np.float32)
        units: Floats = vectors / np.maximum(lengths, np.float32(1e-12))
        return units


class _Text(_Bare):
    def __init__(self, spec: TensorSpec, labels: Sequence[str]) -> None:
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


def _make_answer(
    spec: TensorSpec, output: OutputSteps | None, model: ModelSpec, labels: Sequence[str], picture: TensorSpec | None
) -> _Bare:
    """How one output becomes an answer. Raises LoadFailed: it cannot become the declared one."""
    if output is None:
        return _Bare(spec)
    if not spec.shape:
        raise LoadFailed(f"[output.{spec.name}]: it has no axes; wanted one of rows in front")
    match kind_of(output):
        case "classes":
            return _Classes(spec, output, labels)
        case "boxes":
            return _Boxes(output, spec.name, model, labels, _size_of(picture.shape) if picture is not None else None)
        case "mask":
            return _Mask(spec, output, labels)
        case "embedding":
            return _Embedding(spec)
        case "text":
            return _Text(spec, labels)


# ---- are scores probabilities ---------------------------------------------------------------------------------------


def _decide(unsure: Sequence[_Scored], instance: Instance, steps: ModelSteps, sides: tuple[int, int] | None) -> None:
    """Run the model on noise: scores are logits where one is not a probability. Raises LoadFailed: it cannot run."""
    names = [each.spec.name for each in unsure]
    datatypes = {spec.name: spec.datatype for spec in instance.spec.outputs}
    for each in unsure:
        each.is_logits = False
    random = np.random.default_rng(0)
    for level in (0.0, 0.5, 1.0, 1.0):
        inputs = {spec.name: _noise(spec, steps, level, random, sides) for spec in instance.spec.inputs}
        try:
            results = instance.run(inputs, names)
        except EdgeRuntimeError as error:
            raise LoadFailed(
                f"whether [output.{names[0]}] has probabilities cannot be tried ({error.message}); say softmax = true, "
                f"or false where the model has it inside"
            ) from error
        for scored, array in zip(unsure, results, strict=True):
            numbers = _numbers(array, datatypes[scored.spec.name])
            numbers = numbers[np.isfinite(numbers)]
            if numbers.size and (numbers.min() < 0 or numbers.max() > _PROBABLE):
                scored.is_logits = True


def _noise(
    spec: TensorSpec, steps: ModelSteps, level: float, random: np.random.Generator, sides: tuple[int, int] | None
) -> Array:
    """One row of noise as strong as `level`: of what a declared picture can become, else of normal floats.

    Other integers are zeros, which any index may be.
    """
    shape = [1 if length == DYNAMIC else length for length in spec.shape]
    declared = steps.inputs.get(spec.name)
    if _is_picture(spec):
        first = 2 if spec.shape[1] in _CHANNELS else 1
        for axis, side in zip((first, first + 1), sides or (_UNKNOWN_SIDE,) * 2, strict=True):
            shape[axis] = side if spec.shape[axis] == DYNAMIC else spec.shape[axis]
    if spec.datatype == "BYTES":
        return np.full(shape, b"", object)
    if spec.datatype == "BF16":
        return np.zeros(shape, np.uint16)
    dtype = DATATYPES[spec.datatype].dtype
    if declared is not None:
        pixels = random.uniform(0, 255 * level, shape)
        return _as_declared(pixels, declared).astype(dtype)
    return (random.normal(size=shape) * level).astype(dtype) if spec.datatype in FLOATS else np.zeros(shape, dtype)


def _as_declared(pixels: npt.NDArray[np.float64], steps: InputSteps) -> npt.NDArray[np.float64]:
    """Pixels of 0 to 255 in the range that the model gets; channels as their average."""
    match steps.range:
        case "0..1":
            return pixels / 255
        case "-1..1":
            return pixels / 127.5 - 1
        case _:
            return (pixels - float(np.mean(steps.mean or 0))) * float(np.mean(steps.scale or 1))


# ---- shapes ---------------------------------------------------------------------------------------------------------


def _picture_input(spec: ModelSpec, steps: ModelSteps) -> TensorSpec | None:
    """The input that takes pictures: the declared one, else the first that has a picture's axes."""
    able = [
        each for each in spec.inputs if len(each.shape) == 4 and (each.shape[1] in (1, 3) or each.shape[3] in (1, 3))
    ]
    declared = [each for each in able if each.name in steps.inputs]
    return next(iter(declared or able), None)


def _is_picture(spec: TensorSpec) -> bool:
    return len(spec.shape) == 4 and (spec.shape[1] in _CHANNELS or spec.shape[3] in _CHANNELS)


def _size_of(shape: Sequence[int]) -> Size:
    """Width and height of a picture's tensor."""
    if shape[1] in _CHANNELS:
        return shape[3], shape[2]
    return shape[2], shape[1]


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


def _numbers(array: Array, datatype: str) -> Array:
    return bf16_to_fp32(array) if datatype == "BF16" and array.dtype == np.uint16 else array  # type: ignore[arg-type]


def _rows_of(results: Mapping[str, Array], name: str, rows: int) -> Floats:
    """FP32 [rows, n] of an output of any rank."""
    return _checked_rows(results, name, rows).reshape(rows, -1).astype(np.float32, copy=False)


def _checked_rows(results: Mapping[str, Array], name: str, rows: int) -> Array:
    array = results[name]
    if not array.ndim or len(array) != rows:
        raise RunFailed(f"output {name} has the shape {list(array.shape)} for {rows} rows; wanted as many along axis 0")
    return array
