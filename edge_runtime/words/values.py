"""Answers that need no picture as values: out of a row of a host's array, to JSON and back, and as lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from edge_runtime.answers import AnswerLayout, AnswerRow, ClassScore, Number, Tag, label_of
from edge_runtime.tensors import Array

_Spanned = tuple[str, int, float, int, int, str | None]

SHOWN_TAGS = 6
"""In one line."""


# ---- classes --------------------------------------------------------------------------------------------------------


def read_classes(row: AnswerRow) -> tuple[ClassScore, ...]:
    """Read [top, 2]: index and score, best first; index -1 where there are no more."""
    return tuple(
        ClassScore(label_of(int(index), row.labels), int(index), float(score))
        for index, score in row.array.tolist()
        if index >= 0
    )


def classes_to_json(classes: Sequence[ClassScore]) -> list[dict[str, Any]]:
    """Return a list of label, index and score."""
    return [{"label": each.label, "index": each.index, "score": round(each.score, 6)} for each in classes]


def classes_from_json(fields: Sequence[Mapping[str, Any]]) -> tuple[ClassScore, ...]:
    """Return the classes. Raises TypeError: it is not such a list."""
    return tuple(ClassScore(**each) for each in fields)


def class_lines(classes: Sequence[ClassScore], _: Sequence[str]) -> list[str]:
    """Return a line for each class."""
    width = max((len(each.label) for each in classes), default=0)
    return [f"{each.label.ljust(width)}  {each.score:.4f}" for each in classes] or ["no class"]


def short_classes(classes: Sequence[ClassScore]) -> list[str]:
    """Return the best class."""
    return [f"{each.label} {each.score:.2f}" for each in classes[:1]] or ["no class"]


# ---- number ---------------------------------------------------------------------------------------------------------


def read_number(row: AnswerRow) -> Number:
    """Read one number: FP32 as the shortest decimal that is this number, others exactly."""
    number: Any = row.array
    value = float(str(number)) if isinstance(number, np.float16 | np.float32) else number.item()
    unit = (row.output.unit if row.output is not None else None) or ""
    return Number(value if math.isfinite(value) else None, unit)


def number_to_json(number: Number) -> dict[str, Any]:
    """Return value, and unit where there is one."""
    return {"value": number.value, **({"unit": number.unit} if number.unit else {})}


def number_from_json(fields: Mapping[str, Any]) -> Number:
    """Return the number. Raises TypeError: it is not such a map."""
    return Number(**fields)


def number_text(number: Number) -> str:
    """Return the number with its unit; % without a space."""
    value = "not a number" if number.value is None else f"{number.value:.7g}" if _is_float(number) else number.value
    return f"{value}{'' if number.unit in ('', '%') else ' '}{number.unit}"


def _is_float(number: Number) -> bool:
    return isinstance(number.value, float)


# ---- text -----------------------------------------------------------------------------------------------------------


def read_text(row: AnswerRow) -> str:
    """Read UTF-8."""
    value: Any = row.array
    return bytes(value.item() if hasattr(value, "item") else value).decode("utf-8", "replace")


# ---- embedding ------------------------------------------------------------------------------------------------------


def array_to_json(array: Array) -> Any:
    """Return nested lists of numbers."""
    return array.tolist()


def embedding_lines(vector: Array, _: Sequence[str]) -> list[str]:
    """Return its length and its first and last numbers."""
    vector = np.asarray(vector)
    return [f"{vector.size} numbers: {np.array2string(vector, precision=4, threshold=8, edgeitems=3)}"]


def short_embedding(vector: Array) -> list[str]:
    """Return its length."""
    return [f"embedding of {np.asarray(vector).size} numbers"]


# ---- tags -----------------------------------------------------------------------------------------------------------


def read_tags(row: AnswerRow) -> tuple[Tag, ...]:
    """Read the JSON of `TagsOutput`: a list of label, index, score, start, end, and text where it is known, else null.

    Raises MsgspecError: it is not that.
    """
    value: Any = row.array
    tags = msgspec.json.decode(bytes(value.item() if hasattr(value, "item") else value), type=list[_Spanned])
    return tuple(Tag(*each) for each in tags)


def tags_to_json(tags: Sequence[Tag]) -> list[dict[str, Any]]:
    """Return a list of label, index, score, start and end, and text where it is known."""
    return [
        {
            "label": each.label,
            "index": each.index,
            "score": round(each.score, 6),
            "start": each.start,
            "end": each.end,
            **({} if each.text is None else {"text": each.text}),
        }
        for each in tags
    ]


def tags_from_json(fields: Sequence[Mapping[str, Any]]) -> tuple[Tag, ...]:
    """Return the tags. Raises TypeError: it is not such a list."""
    return tuple(Tag(**each) for each in fields)


def tag_lines(tags: Sequence[Tag], _: Sequence[str]) -> list[str]:
    """Return a line for each tag: label, score, where it is, and its text."""
    width = max((len(each.label) for each in tags), default=0)
    return [
        f"{each.label.ljust(width)}  {each.score:.4f}  {each.start}..{each.end}"
        + ("" if each.text is None else f"  {each.text}")
        for each in tags
    ] or ["no tag"]


def short_tags(tags: Sequence[Tag]) -> list[str]:
    """Return the first tags, and the number of the others."""
    shown = [f"{each.label} {each.start if each.text is None else each.text}" for each in tags[:SHOWN_TAGS]]
    more = len(tags) - len(shown)
    return [*shown, *([f"and {more} more"] if more else [])] or ["no tag"]


CLASSES = AnswerLayout(
    "classes",
    "edge_runtime.words.answer_makers:ClassesOutput",
    read=read_classes,
    to_json=classes_to_json,
    from_json=classes_from_json,
    lines=class_lines,
    short=short_classes,
    has_classes=True,
)
NUMBER = AnswerLayout(
    "number",
    "edge_runtime.words.answer_makers:NumberOutput",
    read=read_number,
    to_json=number_to_json,
    from_json=number_from_json,
    lines=lambda number, _: [number_text(number)],
    short=lambda number: [number_text(number)],
)
TEXT = AnswerLayout(
    "text",
    "edge_runtime.words.answer_makers:TextOutput",
    read=read_text,
    lines=lambda text, _: [text],
    short=lambda text: [text],
    needs_labels=True,
)
EMBEDDING = AnswerLayout(
    "embedding",
    "edge_runtime.words.answer_makers:EmbeddingOutput",
    read=lambda row: row.array,
    to_json=array_to_json,
    from_json=lambda told: np.asarray(told, np.float32),
    dtype=np.float32,
    lines=embedding_lines,
    short=short_embedding,
)
TAGS = AnswerLayout(
    "tags",
    "edge_runtime.words.answer_makers:TagsOutput",
    read=read_tags,
    to_json=tags_to_json,
    from_json=tags_from_json,
    lines=tag_lines,
    short=short_tags,
    has_classes=True,
    needs_labels=True,
)
