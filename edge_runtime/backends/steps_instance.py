"""A loaded model asked with pictures, and answering as a person wants it: its declared steps, run in its host.

Owns: pictures to tensors, and outputs to the arrays of answers.py. Thread: any runner of the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_runtime.answers import PICTURE_SIZE
from edge_runtime.backends.answer_steps import AnswerSteps
from edge_runtime.backends.base import Instance
from edge_runtime.backends.picture_fit import Placed, place
from edge_runtime.backends.pictures import check_installed, open_picture, pixels
from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.steps import Form, Given, InputSteps, ModelSteps
from edge_runtime.tensors import DATATYPES, Array, Tensors


@dataclass(frozen=True, slots=True)
class PictureTensor:
    """A model's input that takes a picture: where channels and sides are in its shape."""

    spec: TensorSpec
    steps: InputSteps
    width: int
    height: int
    channels: int
    is_channels_first: bool


def make_forms(instance: Instance, steps: ModelSteps, threads: int) -> list[StepsInstance]:
    """The forms in which a model with these steps can be asked, beside its own. Raises LoadFailed: they do not fit."""
    del threads
    picture = _picture_tensor(instance.spec, steps)
    answers = AnswerSteps(instance, steps, (picture.height, picture.width) if picture is not None else None)
    given: list[Given] = ["tensor"]
    if picture is not None:
        check_installed()
        given += ["frames"] if picture.steps.source != "picture" else ["picture", "frames"]
    forms = [Form(each, answers) for each in given for answers in (True, False)]
    return [StepsInstance(instance, picture, answers, form) for form in forms if form != Form("tensor", answers=False)]


class StepsInstance:
    """One form of a model. spec: what goes in and out in this form."""

    def __init__(self, instance: Instance, picture: PictureTensor | None, answers: AnswerSteps, form: Form) -> None:
        self.form = form
        self._instance = instance
        self._picture = picture if form.given != "tensor" else None
        inputs = tuple(
            _given_spec(spec, form.given) if self._picture is not None and spec is self._picture.spec else spec
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
        """Run once. Raises RunFailed: a picture cannot be read, or the model failed."""
        tensors = dict(inputs)
        places: list[Placed] = []
        if self._picture is not None:
            name = self._picture.spec.name
            rows = [self._row(each) for each in inputs[name]]
            if not rows:
                raise RunFailed("there is no picture")
            tensors[name] = np.stack([row for row, _ in rows])
            places = [placed for _, placed in rows]
        if self._answers is None:
            return self._instance.run(tensors)
        results = dict(zip(self._answers.needs, self._instance.run(tensors, self._answers.needs), strict=True))
        answers = self._answers.make(results, tensors, places)
        if self._picture is not None:
            answers.append(np.array([(each.source_width, each.source_height) for each in places], np.int64))
        return answers

    def _row(self, given: Array) -> tuple[Array, Placed]:
        """One picture as one row of the model's input."""
        from PIL import Image

        tensor = self._picture
        assert tensor is not None
        target = tensor.width, tensor.height
        if self.form.given == "picture":
            picture, source = open_picture(bytes(given))
        else:
            picture = Image.fromarray(given[:, :, 0] if given.shape[2] == 1 else given)
            source = picture.size
        steps = tensor.steps
        placed = place(steps.fit, source, target, steps.shorter_side)
        scaled = pixels(picture, steps.color)
        if picture.size != (placed.width, placed.height):
            kind = getattr(Image.Resampling, steps.filter.upper())
            base = picture.convert("L" if steps.color == "gray" else "RGB")
            scaled = pixels(base.resize((placed.width, placed.height), kind), steps.color)
        if steps.color == "bgr":
            scaled = scaled[:, :, ::-1]
        canvas = np.empty((tensor.height, tensor.width, tensor.channels), np.uint8)
        canvas[...] = np.array(steps.fill, np.uint8)
        left, top = max(placed.left, 0), max(placed.top, 0)
        cut = scaled[max(-placed.top, 0) :, max(-placed.left, 0) :][: tensor.height - top, : tensor.width - left]
        canvas[top : top + cut.shape[0], left : left + cut.shape[1]] = cut
        row = _normalised(canvas, steps, tensor.spec.datatype)
        return np.ascontiguousarray(row.transpose(2, 0, 1) if tensor.is_channels_first else row), placed


def _normalised(canvas: Array, steps: InputSteps, datatype: str) -> Array:
    dtype = DATATYPES[datatype].dtype
    if steps.range is None and not steps.mean and not steps.scale:
        return canvas.astype(dtype, copy=False)
    values = canvas.astype(np.float32)
    match steps.range:
        case "0..1":
            values /= np.float32(255)
        case "-1..1":
            values = values / np.float32(127.5) - np.float32(1)
        case "0..255":
            pass
        case None:
            values = (values - np.array(steps.mean or 0, np.float32)) * np.array(steps.scale or 1, np.float32)
    return values.astype(dtype, copy=False)


def _given_spec(spec: TensorSpec, given: Given) -> TensorSpec:
    if given == "picture":
        return TensorSpec(spec.name, "BYTES", (DYNAMIC,))
    return TensorSpec(spec.name, "UINT8", (DYNAMIC, DYNAMIC, DYNAMIC, DYNAMIC))


def _picture_tensor(spec: ModelSpec, steps: ModelSteps) -> PictureTensor | None:
    """The input that takes pictures. Raises LoadFailed: there is none of that name, or its shape is no picture's."""
    if not steps.inputs:
        return None
    if len(steps.inputs) > 1:
        raise LoadFailed(f"steps are declared for {', '.join(steps.inputs)}; wanted one input that takes a picture")
    ((name, declared),) = steps.inputs.items()
    found = next((each for each in spec.inputs if each.name == name), None)
    if found is None:
        there = ", ".join(each.name for each in spec.inputs)
        raise LoadFailed(f"[input.{name}]: the model has no such input; it has {there}")
    shape = found.shape
    channels = (1,) if declared.color == "gray" else (3,)
    if len(shape) == 4 and shape[1] in channels:
        is_first, count, sides = True, shape[1], shape[2:]
    elif len(shape) == 4 and shape[3] in channels:
        is_first, count, sides = False, shape[3], shape[1:3]
    else:
        raise LoadFailed(
            f"[input.{name}]: its shape is {list(shape)}; wanted [rows, {channels[0]}, height, width] or "
            f'[rows, height, width, {channels[0]}] for color = "{declared.color}"'
        )
    height, width = sides
    if DYNAMIC in sides:
        if declared.size is None:
            raise LoadFailed(f"[input.{name}]: the model leaves height or width open; say size = [height, width]")
        height, width = declared.size
    elif declared.size is not None and declared.size != (height, width):
        raise LoadFailed(f"[input.{name}]: size is {list(declared.size)}, and the model takes {[height, width]}")
    if found.datatype not in ("FP32", "FP16", "UINT8", "INT8"):
        raise LoadFailed(f"[input.{name}]: it takes {found.datatype}; wanted FP32, FP16, UINT8 or INT8")
    is_said = declared.range is not None or declared.mean or declared.scale
    if found.datatype[0] == "F" and not is_said:
        raise LoadFailed(
            f'[input.{name}]: say what its numbers mean: range = "0..1" (or "-1..1", "0..255"), or mean and scale'
        )
    return PictureTensor(found, declared, width, height, count, is_first)
