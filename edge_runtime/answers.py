"""Answers that a person understands: classes and boxes with labels, as callers get them.

A host gives each as an array, by the `AnswerLayout` of its kind, which a capability declares: it says who makes the
array, how a row of it becomes the value of an `Answer`, and that value's JSON and lines. PICTURE_SIZE stands beside
them, INT64 [rows, 2] (width, height), or SENT_LABELS. A layout is imported where an answer of its kind is met first.
Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime import plugins
from edge_runtime.steps import InputSteps, ModelSteps, OutputSteps

MOST_PIXELS = 1 << 26
"""Of a mask that a reply holds: as many as of a picture that is read."""

if TYPE_CHECKING:  # a verb's help reads settings, and no numbers
    from edge_runtime.tensors import Array

PICTURE_SIZE = "picture_size"
"""The output beside the answers of pictures."""

SENT_LABELS = "sent_labels"
"""The output beside the answers of texts that came with labels to choose from, BYTES [rows, labels]."""

TOKEN_COUNTS = "token_counts"  # noqa: S105 (of texts)
"""The output beside the answers of texts, INT64 [rows]: tokens of each that the model ran. Given where it is named."""

WINDOW_TIMES = "window_times"
"""The output beside the answers of windows, FP64 [rows, windows, 2]: when each begins and ends, in seconds."""

BESIDE = {PICTURE_SIZE: "picture", SENT_LABELS: "labels", WINDOW_TIMES: "windows", TOKEN_COUNTS: "tokens"}
"""Outputs that say how a row was read, which an `InputReader` gives beside the answers, and the kind of each."""


class AnswerRow(NamedTuple):
    """One row of an answer's array, and what is declared of it. labels: of its classes, all of them.

    output: its table; None for one of `BESIDE`. input: the table of what was sent in place of a tensor, where one is.
    parts: of a kind with a `count`, the answers of each part.
    """

    array: Array
    labels: Sequence[str] = ()
    output: OutputSteps | None = None
    input: InputSteps | None = None
    parts: Sequence[Answer] = ()


def as_it_is(value: Any) -> Any:
    """Return a value that is its own JSON."""
    return value


def no_lines(_value: Any, _labels: Sequence[str]) -> list[str]:
    """Return no lines: the value stands in a heading."""
    return []


def no_words(_value: Any) -> list[str]:
    """Return no words: the value stands in a heading."""
    return []


class AnswerLayout(Struct, frozen=True):
    """A kind of answer: its array in the host, its value in an `Answer`, and that value as JSON and as text.

    name: of the kind, and of its field in JSON. maker: "module:class" of an `AnswerMaker` (hosts/steps_instance.py),
    made in the host; raises LoadFailed where the output cannot be such an answer; "" for a kind of `BESIDE`. Whether a
    picture was sent, or a tensor, is nothing to it. read: a row of the array -> the value. to_json, from_json: the
    value -> its JSON, and back; the latter raises KeyError, TypeError, ValueError. dtype: of a value that is an array,
    which goes as a tensor beside the JSON where there is room for one. lines: (value, labels) -> lines for a person.
    short: value -> parts of one line. has_classes: its indices are of classes, whose labels a model's file may name.
    needs_labels: its maker wants the text of labels, and not their number alone. count: of a kind of `BESIDE`, where a
    row has several answers: how many a row of its array says; the other outputs are then [rows, parts, …].
    """

    name: str
    maker: str
    read: Callable[[AnswerRow], Any]
    to_json: Callable[[Any], Any] = as_it_is
    from_json: Callable[[Any], Any] = as_it_is
    dtype: Any = None
    lines: Callable[[Any, Sequence[str]], list[str]] = no_lines
    short: Callable[[Any], list[str]] = no_words
    has_classes: bool = False
    needs_labels: bool = False
    count: Callable[[Array], int] | None = None

    @property
    def callables(self) -> tuple[str, ...]:
        """The class that it names."""
        return (self.maker,) if self.maker else ()


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
    """One thing found. box: left, top, right, bottom in the pixels of the picture as it was sent.

    corners: of a turned box, in order, of which `box` is the hull; x and y each.
    """

    label: str
    index: int
    score: float
    box: tuple[float, float, float, float]
    corners: tuple[tuple[float, ...], ...] | None = None


class ObjectMask(Struct, frozen=True):
    """One thing found, and its pixels. box: as of `Box`.

    size: height and width of the model's own grid, as of a `mask`. counts: lengths of runs of its pixels, column by
    column: first of those without the thing, then with it, and so on (COCO's uncompressed RLE).
    """

    label: str
    index: int
    score: float
    box: tuple[float, float, float, float]
    size: tuple[int, int]
    counts: tuple[int, ...]

    @property
    def pixels(self) -> int:
        """How many there are of the thing."""
        return sum(self.counts[1::2])

    @property
    def mask(self) -> Array:
        """UINT8 [height, width], 1 where the thing is. Raises ValueError: the runs are not of this size."""
        height, width = self.size
        if min(height, width, *self.counts, 0) < 0 or not sum(self.counts) == height * width <= MOST_PIXELS:
            raise ValueError(f"runs of {sum(self.counts)} pixels are not a mask of {height} x {width}")
        import numpy as np

        line = np.repeat(np.arange(len(self.counts), dtype=np.uint8) & 1, self.counts)
        return np.ascontiguousarray(line.reshape(width, height).T)


class Keypoints(Struct, frozen=True):
    """One thing found, and its points. box: as of `Box`. points: x, y, and a score where the model gives one."""

    label: str
    index: int
    score: float
    box: tuple[float, float, float, float]
    points: tuple[tuple[float, ...], ...]


class Number(Struct, frozen=True):
    """One number; None: it is not finite. unit: as declared, or "" ."""

    value: float | int | None
    unit: str = ""


class Tag(Struct, frozen=True):
    """A label and where it counts. start, end: characters of the text where it is known, else tokens.

    text: from start to end; None where it is not known.
    """

    label: str
    index: int
    score: float
    start: int
    end: int
    text: str | None = None


class Answer(Struct, frozen=True):
    """The words of a model for one picture (or row). Of `classes` … `keypoints` those that its outputs declare.

    The others are None. classes, boxes, masks, keypoints: best first; tags: in order. mask: UINT8 [height, width].
    embedding: FP32 [length]. more: other kinds, by name.
    """

    picture: PictureRead | None = None
    classes: tuple[ClassScore, ...] | None = None
    boxes: tuple[Box, ...] | None = None
    mask: Any = None
    embedding: Any = None
    text: str | None = None
    number: Number | None = None
    tags: tuple[Tag, ...] | None = None
    masks: tuple[ObjectMask, ...] | None = None
    keypoints: tuple[Keypoints, ...] | None = None
    more: Mapping[str, Any] = {}

    def values(self) -> dict[str, Any]:
        """Return the values that are said, by kind, in the order of the fields."""
        found = {name: getattr(self, name) for name in _FIELDS}
        return {name: value for name, value in {**found, **self.more}.items() if value is not None}

    def _repr_html_(self) -> str:
        """The answer as a notebook shows it: what was found in its place, and every value in words.

        There is no `_repr_png_`: an answer does not hold the picture that it is of, and notebooks prefer HTML.
        """
        return f"{_drawn(self)}<pre>{_as_html(_in_words(self))}</pre>"


_FIELDS = Answer.__struct_fields__[:-1]


@cache
def layout_of(kind: str) -> AnswerLayout:
    """Return the declaration of a kind of answer. Raises KeyError: nothing declares it."""
    layout: AnswerLayout = plugins.declared("answers", kind)
    return layout


def answer_kinds() -> tuple[str, ...]:
    """Return the kinds that an output can declare. Imports nothing."""
    return tuple(name for name in plugins.names("answers") if name not in BESIDE.values())


def kind_of(output: OutputSteps) -> str:
    """The kind of answer of an output."""
    return output.answer or ("boxes" if output.layout is not None else "classes")


def steps_of_host(steps: ModelSteps) -> ModelSteps:
    """Return the steps as a host needs them, in short: the wanted labels, and all where an answer needs their text.

    The others are empty: a host only counts them.
    """
    needed = {
        name: labels
        if layout_of(kind_of(steps.outputs[name])).needs_labels
        else tuple(label if label in steps.outputs[name].wanted else "" for label in labels)
        for name, labels in steps.labels.items()
    }
    return replace(steps, labels=needed)


def answers_of(steps: ModelSteps, outputs: Mapping[str, Array]) -> list[Answer]:
    """Make answers of what a host gave, by name; one a row.

    An answer says no more than how a picture was read where no output is declared. Empty where nothing is known. A
    pipeline's outputs may have fewer rows than others: a step that was skipped says nothing.
    """
    declared = {name: steps.outputs[name] for name in outputs if name in steps.outputs}
    beside = [name for name in outputs if name in BESIDE and name not in declared and steps.inputs]
    sent = next(iter(steps.inputs.values()), None)
    parted = parted_by(beside)
    if parted:
        return _of_parts(steps, {name: outputs[name] for name in declared}, parted, outputs[parted])
    rows = [outputs[name].shape[0] for name in declared or beside]
    found: list[Answer] = []
    for row in range(max(rows, default=0)):
        values: dict[str, Any] = {}
        for name in (*beside, *declared):
            kind = BESIDE[name] if name not in declared else kind_of(declared[name])
            if row < outputs[name].shape[0] and kind not in values:
                labels = values.get(BESIDE[SENT_LABELS], steps.labels.get(name, ()))
                one = AnswerRow(outputs[name][row], labels, declared.get(name), sent)
                values[kind] = layout_of(kind).read(one)
        found.append(_answer(values))
    return found


def parted_by(names: Iterable[str]) -> str:
    """Of these outputs, the one that says how many answers a row has; "": each row has one."""
    return next((name for name in names if name in BESIDE and layout_of(BESIDE[name]).count is not None), "")


def _of_parts(steps: ModelSteps, outputs: Mapping[str, Array], name: str, told: Array) -> list[Answer]:
    """The answers of rows that have several. outputs: [rows, parts, …]. name, told: of the output that counts them."""
    layout = layout_of(BESIDE[name])
    assert layout.count is not None
    found = []
    for row, array in enumerate(told):
        count = layout.count(array)
        parts = answers_of(steps, {each: output[row][:count] for each, output in outputs.items()})
        sent = next(iter(steps.inputs.values()), None)
        found.append(_answer({BESIDE[name]: layout.read(AnswerRow(array, input=sent, parts=parts))}))
    return found


def array_outputs(steps: ModelSteps, names: Iterable[str]) -> dict[str, str]:
    """Of kinds whose value is an array, the first of these outputs that gives it."""
    found: dict[str, str] = {}
    for name in names:
        if name in steps.outputs and layout_of(kind := kind_of(steps.outputs[name])).dtype is not None:
            found.setdefault(kind, name)
    return found


def answer_fields(
    answers: Sequence[Answer], *, as_list: bool, named: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON of answers: of one as it is, of several (or `as_list`) under `answers`.

    named: of kinds whose value is an array, the outputs that go beside as tensors: their names stand for their numbers.
    """
    if len(answers) == 1 and not as_list:
        return _fields(answers[0], named or {})
    return {"answers": [_fields(each, named or {}) for each in answers]}


def answers_from_fields(fields: Mapping[str, Any], outputs: Mapping[str, Array] | None = None) -> list[Answer]:
    """Answers out of their JSON. outputs: the tensors beside it.

    Fields that nothing here declares are left out. Raises IndexError, KeyError, TypeError, ValueError for what is none.
    """
    listed = fields.get("answers", [fields])
    return [_from_fields(each, row, outputs or {}) for row, each in enumerate(listed)]


def _as_html(text: str) -> str:
    from html import escape  # no daemon shows an answer so

    return escape(text)


def _in_words(answer: Answer) -> str:
    """The values of an answer as lines of text, by kind."""
    lines: list[str] = []
    for kind, value in answer.values().items():
        layout = layout_of(kind)
        said = layout.lines(value, ()) or layout.short(value)
        lines += [f"{kind}:", *(f"  {line}" for line in said)] if said else [f"{kind}: {layout.to_json(value)}"]
    return "\n".join(lines)


def _drawn(answer: Answer) -> str:
    """The boxes and points of an answer as a picture in SVG, of the size of the picture that was sent; "" for none."""
    found: list[Box | ObjectMask | Keypoints] = [
        *(answer.boxes or ()), *(answer.masks or ()), *(answer.keypoints or ())
    ]  # fmt: skip
    if answer.picture is None or not found:
        return ""
    width, height = answer.picture.width, answer.picture.height
    size = max(width, height) / 40
    parts = []
    for number, each in enumerate(found):
        colour = f"hsl({number * 137 % 360} 70% 45%)"  # neighbours differ: 137 degrees is the golden angle
        left, top, right, bottom = each.box
        corners = getattr(each, "corners", None) or ((left, top), (right, top), (right, bottom), (left, bottom))
        outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        parts.append(f'<polygon points="{outline}" fill="none" stroke="{colour}" stroke-width="{size / 8:.2f}"/>')
        points = each.points if isinstance(each, Keypoints) else ()
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size / 5:.2f}" fill="{colour}"/>' for x, y, *_ in points]
        said = _as_html(f"{each.label} {each.score:.2f}")
        at = f'x="{left:.1f}" y="{max(top - size / 5, size):.1f}"'
        parts.append(f'<text {at} font-size="{size:.1f}" fill="{colour}">{said}</text>')
    return (
        f'<svg viewBox="0 0 {width} {height}" width="480" style="border:1px solid #888" role="img">'
        f"{''.join(parts)}</svg>"
    )


def label_of(index: int, labels: Sequence[str]) -> str:
    """Return the label of a class: its index where there is none."""
    return labels[index] if 0 <= index < len(labels) else str(index)


def _answer(values: Mapping[str, Any]) -> Answer:
    more = {name: value for name, value in values.items() if name not in _FIELDS}
    return Answer(**{name: value for name, value in values.items() if name in _FIELDS}, more=more)


def _fields(answer: Answer, named: Mapping[str, str]) -> dict[str, Any]:
    return {
        kind: named[kind] if kind in named else layout_of(kind).to_json(value)
        for kind, value in answer.values().items()
    }


def _from_fields(fields: Mapping[str, Any], row: int, outputs: Mapping[str, Array]) -> Answer:
    values: dict[str, Any] = {}
    kinds = plugins.names("answers")
    for kind, told in fields.items():
        if kind not in kinds:
            continue
        layout = layout_of(kind)
        is_beside = layout.dtype is not None and isinstance(told, str)
        values[kind] = outputs[told][row] if is_beside else layout.from_json(told)
    return _answer(values)
