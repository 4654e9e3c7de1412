"""Answers that a person understands: classes and boxes with labels, as callers get them. Values only.

A host gives them as arrays: `classes` FP32 [rows, top, 2] (index, score); `boxes` FP32 [rows, most, 6] (index, score,
x1, y1, x2, y2 in the picture's pixels), best first, and index -1 where there are no more; `mask` UINT8 [rows, height,
width]; `embedding` FP32 [rows, length]; `text` BYTES [rows]; and PICTURE_SIZE, INT64 [rows, 2] (width, height).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from edge_runtime.steps import AnswerKind, ModelSteps, OutputSteps
from edge_runtime.tensors import Array

PICTURE_SIZE = "picture_size"
"""The output beside the answers of pictures."""


class AnswerLayout(Struct, frozen=True):
    """A kind of answer that a capability makes of a model's output.

    maker: "module:class" of an `AnswerMaker` (hosts/steps_instance.py), made in the host; raises LoadFailed where the
    output cannot be such an answer. Whether a picture was sent, or a tensor, is nothing to it.
    """

    name: AnswerKind
    maker: str


_ARRAYS = {"mask": np.uint8, "embedding": np.float32}
"""Kinds of answers that are arrays."""


class PictureRead(Struct, frozen=True):
    """How a picture was read: its own size in pixels, how it was fitted to the model's, and the order of colours."""

    width: int
    height: int
    fit: str
    color: str


class ClassScore(Struct, frozen=True):
    """One class. label: its index as text where there are no labels."""

    label: str
    index: int
    score: float


class Box(Struct, frozen=True):
    """One thing found. box: left, top, right, bottom in the pixels of the picture as it was sent."""

    label: str
    index: int
    score: float
    box: tuple[float, float, float, float]


class Answer(Struct, frozen=True):
    """The words of a model for one picture (or row). Of `classes` … `text` those that its outputs declare, else None.

    classes and boxes: best first. mask: UINT8 [height, width]. embedding: FP32 [length].
    """

    picture: PictureRead | None = None
    classes: tuple[ClassScore, ...] | None = None
    boxes: tuple[Box, ...] | None = None
    mask: Any = None
    embedding: Any = None
    text: str | None = None


def kind_of(output: OutputSteps) -> AnswerKind:
    """The kind of answer of an output."""
    return output.answer or ("boxes" if output.layout is not None else "classes")


def answers_of(steps: ModelSteps, outputs: Mapping[str, Array]) -> list[Answer]:
    """Make answers of what a host gave, by name; one a row.

    An answer says no more than how a picture was read where no output is declared. Empty where nothing is known. A
    pipeline's outputs may have fewer rows than others: a step that was skipped says nothing.
    """
    declared = [(name, steps.outputs[name]) for name in outputs if name in steps.outputs]
    sizes = outputs.get(PICTURE_SIZE)
    rows = [outputs[name].shape[0] for name, _ in declared] or ([] if sizes is None else [sizes.shape[0]])
    read = next(iter(steps.inputs.values()), None)
    found: list[Answer] = []
    for row in range(max(rows, default=0)):
        values: dict[str, Any] = {}
        if sizes is not None and read is not None and row < sizes.shape[0]:
            values["picture"] = PictureRead(
                int(sizes[row][0]),
                int(sizes[row][1]),
                getattr(read, "fit", None) or "stretch",
                getattr(read, "color", "rgb"),
            )
        for name, output in declared:
            kind = kind_of(output)
            if row < outputs[name].shape[0]:
                values.setdefault(kind, _read(kind, outputs[name][row], steps.labels.get(name, ())))
        found.append(Answer(**values))
    return found


def array_outputs(steps: ModelSteps, names: Iterable[str]) -> dict[str, str]:
    """Of `mask` and `embedding`, the first of these outputs that gives it."""
    found: dict[str, str] = {}
    for name in names:
        if name in steps.outputs and (kind := kind_of(steps.outputs[name])) in _ARRAYS:
            found.setdefault(kind, name)
    return found


def answer_fields(
    answers: Sequence[Answer], *, as_list: bool, named: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON of answers: of one as it is, of several (or `as_list`) under `answers`.

    named: of `mask` and `embedding`, the outputs that go beside as tensors: their names stand for their numbers.
    """
    if len(answers) == 1 and not as_list:
        return _fields(answers[0], named or {})
    return {"answers": [_fields(each, named or {}) for each in answers]}


def answers_from_fields(fields: Mapping[str, Any], outputs: Mapping[str, Array] | None = None) -> list[Answer]:
    """Answers out of their JSON. outputs: the tensors beside it.

    Raises IndexError, KeyError, TypeError, ValueError for what is none.
    """
    listed = fields.get("answers", [fields])
    return [_from_fields(each, row, outputs or {}) for row, each in enumerate(listed)]


def _read(kind: AnswerKind, row: Array, labels: Sequence[str]) -> Any:
    match kind:
        case "classes":
            return tuple(
                ClassScore(_label(int(index), labels), int(index), float(score))
                for index, score in row.tolist()
                if index >= 0
            )
        case "boxes":
            return tuple(
                Box(_label(int(index), labels), int(index), float(score), tuple(box))
                for index, score, *box in row.tolist()
                if index >= 0
            )
        case "text":
            value = row.item() if hasattr(row, "item") else row
            return bytes(value).decode("utf-8", "replace")
        case _:
            return row


def _label(index: int, labels: Sequence[str]) -> str:
    return labels[index] if index < len(labels) else str(index)


def _fields(answer: Answer, named: Mapping[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if answer.picture is not None:
        read = answer.picture
        fields["picture"] = {"width": read.width, "height": read.height, "fit": read.fit, "color": read.color}
    if answer.classes is not None:
        fields["classes"] = [
            {"label": each.label, "index": each.index, "score": round(each.score, 6)} for each in answer.classes
        ]
    if answer.boxes is not None:
        fields["boxes"] = [
            {
                "label": each.label,
                "index": each.index,
                "score": round(each.score, 6),
                "box": [round(side, 2) for side in each.box],
            }
            for each in answer.boxes
        ]
    for kind in _ARRAYS:
        array = getattr(answer, kind)
        if array is not None:
            fields[kind] = named[kind] if kind in named else array.tolist()
    if answer.text is not None:
        fields["text"] = answer.text
    return fields


def _from_fields(fields: Mapping[str, Any], row: int, outputs: Mapping[str, Array]) -> Answer:
    values: dict[str, Any] = {"text": fields["text"]} if "text" in fields else {}
    for kind, dtype in _ARRAYS.items():
        if kind in fields:
            told = fields[kind]
            values[kind] = outputs[told][row] if isinstance(told, str) else np.asarray(told, dtype)
    if "picture" in fields:
        values["picture"] = PictureRead(**fields["picture"])
    if "classes" in fields:
        values["classes"] = tuple(ClassScore(**each) for each in fields["classes"])
    if "boxes" in fields:
        values["boxes"] = tuple(Box(**{**each, "box": tuple(each["box"])}) for each in fields["boxes"])
    return Answer(**values)
