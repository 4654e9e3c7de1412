"""A loaded model asked with pictures and the like, and answering as a person wants it: its declared steps, in its host.

Owns: the forms in which a model can be asked. Capabilities make the tensors of what is sent (`StepsDeclaration.reader`)
and the arrays that answers.py describes of its outputs (`AnswerLayout.maker`). What cannot be an answer is refused at
load. No row's answer depends on another row. Thread: any runner of the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from edge_runtime import plugins
from edge_runtime.answers import kind_of, layout_of, parted_by
from edge_runtime.backends.base import Instance
from edge_runtime.errors import EdgeRuntimeError, LoadFailed
from edge_runtime.kept_state import KeptStates
from edge_runtime.model_spec import DYNAMIC, ROW_INPUT, ModelSpec, TensorSpec
from edge_runtime.steps import Form, InputKind, InputSteps, ModelSteps, OutputSteps, StepsDeclaration, says_steps
from edge_runtime.tensors import DATATYPES, Array, Tensors, bf16_to_fp32

Floats = npt.NDArray[np.float32]

FLOATS = ("FP32", "FP16", "BF16", "FP64")

_CHANNELS = (1, 3)

_UNKNOWN_SIDE = 224
"""Of a picture that the model takes in any size, for the runs that show whether scores are probabilities."""

_PROBABLE = 1.0 + 1e-3
"""Probabilities of FP16 and BF16 may be that far above 1."""


Size = tuple[int, int]
"""Width and height."""


class ModelRun(NamedTuple):
    """Runs a model once, for the outputs that are wanted; None: all."""

    instance: Instance
    outputs: tuple[str, ...] | None

    def __call__(self, tensors: Tensors) -> list[Array]:
        """Return the outputs. Raises RunFailed."""
        return self.instance.run(tensors, self.outputs)


class OutputJoin(Protocol):
    """Joins the outputs of the parts of each row that was sent, such as the windows of a long text."""

    def spec(self, model: ModelSpec) -> ModelSpec:
        """Return the model with its outputs as they are once joined."""
        ...

    def run(self, run: ModelRun, tensors: Tensors, places: Sequence[Any]) -> list[Array]:
        """Run the model on all parts, at once or some at a time."""
        ...

    def join(
        self, results: Mapping[str, Array], tensors: Tensors, places: Sequence[Any]
    ) -> tuple[Mapping[str, Array], Tensors]:
        """Return outputs with a row for each that was sent, in the form of `spec`, and the inputs of the same rows.

        results: by name. tensors: the model's inputs. places: as of `InputReader.tensors`; empty for its own tensors.
        """
        ...

    def bare(self, outputs: Sequence[Array], places: Sequence[Any]) -> list[Array]:
        """Return the model's own outputs with a row for each that was sent, such as those of its first part."""
        ...

    def by_row_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `by_row`. Both are asked only where a source counts the answers of a row."""
        ...

    def by_row(self, outputs: Sequence[Array], places: Sequence[Any]) -> list[Array]:
        """Return answers of all parts as [rows, parts, …]."""
        ...


class TextRow(NamedTuple):
    """How one text was read. offsets: for each token, where it begins and ends in `text`, in characters.

    (0, 0) is a token that stands for no character: a special one, or padding.
    """

    text: str
    offsets: Sequence[tuple[int, int]]


class KeptInput(KeptStates, Protocol):
    """Keeps what a request of a sequence sent that no run had yet, for its next request: the rest of a sound.

    Of such a model it is the whole state of a sequence. Its `InputSteps.kept_bytes` is counted as the model's memory.
    """

    def continued(self, kind: InputKind, sent_array: Array, rows: Array) -> tuple[Mapping[str, Array], Sequence[Any]]:
        """Return what `InputReader.tensors` does. rows: the sequence of each, as bytes of `kept_state.row_type`.

        Raises the caller's fault, SequenceLost.
        """
        ...


class InputReader(Protocol):
    """Takes the place of some inputs of a model, and makes their tensors of something else, such as pictures.

    name: of the input that is sent in their place, which may be one of them. fills: their names. kinds: the forms that
    it is sent in. sides: height and width of the model's picture; None where it takes none. source_specs: the outputs
    beside the answers, which say how each row was read (answers.BESIDE has their names). joins: where the model may get
    several rows of one that was sent; None: each row is a row. keeps: where it keeps a part of what a request of a
    sequence sent; None: it reads each by itself.
    """

    name: str
    fills: tuple[str, ...]
    kinds: tuple[InputKind, ...]
    sides: tuple[int, int] | None
    source_specs: tuple[TensorSpec, ...]
    joins: OutputJoin | None
    keeps: KeptInput | None

    def sent_spec(self, kind: InputKind) -> TensorSpec:
        """Return the spec of the input that is sent in place of those that it fills."""
        ...

    def tensors(self, kind: InputKind, sent_array: Array) -> tuple[Mapping[str, Array], Sequence[Any]]:
        """Return the inputs that it fills, and how each row that was sent was read. Raises the caller's fault.

        How: one value a row for those who make the answers, such as where a picture lies in it, or a `TextRow`.
        """
        ...

    def source_rows(self, places: Sequence[Any]) -> list[Array]:
        """Return the outputs `source_specs`."""
        ...


class DeclaredOutput(NamedTuple):
    """An output that is to be an answer. labels: of its classes. size: of the model's picture; None without one."""

    spec: TensorSpec
    steps: OutputSteps
    labels: Sequence[str]
    model: ModelSpec
    size: Size | None


class RunRows(Struct, frozen=True):
    """The rows of one run, beside its results. inputs: of the model, by name.

    size: of the model's picture, (0, 0) without one. places: as of `InputReader.tensors`; empty where the model was
    given its own tensors.
    """

    count: int
    inputs: Tensors
    size: Size
    places: Sequence[Any]


class AnswerMaker(Protocol):
    """One output as an answer. spec: of the arrays that it makes. needs: the model's outputs that they are made of.

    is_logits: whether its scores are logits, and not probabilities; None: a few runs show it.
    """

    spec: TensorSpec
    needs: tuple[str, ...]
    is_logits: bool | None

    def make(self, results: Mapping[str, Array], rows: RunRows) -> Array:
        """Return the output of all rows, in the form of `spec`. Raises RunFailed: it does not fit its rows."""
        ...


def step_declarations() -> Iterator[StepsDeclaration]:
    """Yield the declaration of each capability that reads steps. Imports them."""
    for name in plugins.names("steps"):
        yield plugins.declared("steps", name)


def steps_declaration(source: str) -> StepsDeclaration:
    """Return the declaration of the capability that reads `source`. Raises LookupError: none does."""
    found = next((each for each in step_declarations() if source in each.sources), None)
    if found is None:
        raise LookupError(f"nothing reads inputs from {source!r}")
    return found


def why_undeclared(model: str, spec: ModelSpec, offered: str | None, *, is_pipeline: bool = False) -> str:
    """Return why a model takes its own tensors alone, with the lines to write, by the first capability that advises.

    offered: the preset that its metadata tells.
    """
    advise = plugins.named(next(each.advice for each in step_declarations() if each.advice))
    words: str = advise(model, spec, offered, is_pipeline=is_pipeline)
    return words


def declaration_of(tables: Collection[InputSteps], preset: str | None) -> StepsDeclaration:
    """Return the declaration for a model with these tables: by its inputs' source, else by its preset, else the first.

    Raises LoadFailed: one input is read by another capability than the next.
    """
    declared = list(step_declarations())
    found = [each for each in declared if any(says_steps(table) and table.source in each.sources for table in tables)]
    if len(found) > 1:
        raise LoadFailed(
            f"its tables [input.NAME] declare {' and '.join(each.name for each in found)}; wanted one kind of input"
        )
    return next(iter(found or [each for each in declared if preset in each.presets] or declared))


def make_forms(instance: Instance, steps: ModelSteps, threads: int) -> list[StepsInstance]:
    """The forms in which a model with these steps can be asked, beside its own. Raises LoadFailed: they do not fit."""
    reader = _reader(instance, steps, threads)
    joins = reader.joins if reader is not None else None
    spec = instance.spec if joins is None else joins.spec(instance.spec)
    answers = AnswerSteps(instance, steps, reader.sides if reader is not None else None, spec)
    given: list[InputKind] = ["tensor"]
    if reader is not None:
        given += reader.kinds
    forms = [Form(each, answers) for each in given for answers in (True, False)]
    return [StepsInstance(instance, reader, answers, form) for form in forms if form != Form("tensor", answers=False)]


def _reader(instance: Instance, steps: ModelSteps, threads: int) -> InputReader | None:
    """The reader that takes the place of inputs; None where no steps declare one. Raises LoadFailed."""
    declared = next(iter(steps.inputs.values()), None)
    if declared is None:
        return None
    make = plugins.named(steps_declaration(declared.source).reader)
    reader: InputReader | None = make(instance.spec, steps, threads, instance.concurrency)
    return reader


class StepsInstance:
    """One form of a model. spec: its inputs and outputs in this form."""

    def __init__(self, instance: Instance, reader: InputReader | None, answers: AnswerSteps, form: Form) -> None:
        self.form = form
        self._instance = instance
        self._reader = reader if form.kind != "tensor" else None
        self._joins = reader.joins if reader is not None else None
        sources = self._reader.source_specs if self._reader is not None else ()
        self._parts = self._joins if parted_by(each.name for each in sources) else None
        inputs = instance.spec.inputs
        if self._reader is not None:
            sent, fills = self._reader.sent_spec(form.kind), self._reader.fills
            # In the place of the first of them.
            inputs = tuple(dict.fromkeys(sent if spec.name in fills else spec for spec in inputs))
        self._answers = answers if form.answers else None
        outputs = instance.spec.outputs
        if self._answers is not None:
            outputs = self._answers.specs
        if self._parts is not None:
            outputs = self._parts.by_row_specs(outputs)
        if self._answers is not None:
            outputs += sources
        self.spec = ModelSpec(inputs, outputs, instance.spec.max_rows, sequences=instance.spec.sequences)

    @property
    def keeps(self) -> KeptInput | None:
        """Where a part of what requests of a sequence sent is kept."""
        return self._reader.keeps if self._reader is not None else None

    def run(self, inputs: Tensors) -> list[Array]:
        """Run once.

        Raises UnreadablePicture, UnreadableSeries, UnreadableText: the caller's fault; RunFailed: the model failed.
        """
        given = dict(inputs)
        places: Sequence[Any] = ()
        if self._reader is not None:
            sent = given.pop(self._reader.name)
            if self._reader.keeps is not None and ROW_INPUT in given:
                made, places = self._reader.keeps.continued(self.form.kind, sent, given.pop(ROW_INPUT))
            else:
                made, places = self._reader.tensors(self.form.kind, sent)
            given.update(made)
        tensors: Tensors = given
        run = ModelRun(self._instance, None if self._answers is None else tuple(self._answers.needs))
        outputs = run(tensors) if self._joins is None else self._joins.run(run, tensors, places)
        if self._answers is None:
            return outputs if self._joins is None else self._joins.bare(outputs, places)
        results: Mapping[str, Array] = dict(zip(self._answers.needs, outputs, strict=True))
        if self._joins is not None:
            results, tensors = self._joins.join(results, tensors, places)
        if self._parts is not None:
            answers = self._parts.by_row(self._answers.make(results, tensors, ()), places)
        else:
            answers = self._answers.make(results, tensors, places)
        return answers if self._reader is None else [*answers, *self._reader.source_rows(places)]


class AnswerSteps:
    """The answers of one model. needs: the outputs they are made of. specs: of the answers, one each.

    Thread: any number of runs at the same time; nothing changes after the constructor.
    """

    def __init__(
        self, instance: Instance, steps: ModelSteps, sides: tuple[int, int] | None, spec: ModelSpec | None = None
    ) -> None:
        """Find out the meaning of outputs; a few runs show whether scores are probabilities where nothing declares it.

        sides: height and width of a declared picture. spec: the model, where a reader joins its outputs; None: as it
        is. Raises LoadFailed: a table names an output that is not there, or does not fit its shape.
        """
        spec = spec or instance.spec
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
        unsure = [each for each in self._answers if each.is_logits is None]
        if unsure:
            _decide(unsure, instance, steps, sides)

    def make(self, results: Mapping[str, Array], inputs: Tensors, places: Sequence[Any]) -> list[Array]:
        """The answers of one run, in the order of `specs`.

        results: by name, all that `needs` names. inputs: the tensors that the model was given. places: where each row's
        picture lies in it; empty where the model was given its own tensor, so that boxes are in the model's own pixels.
        Raises RunFailed: an output has not a row for each row of the input.
        """
        rows = len(places) or next((len(each) for each in inputs.values() if each.ndim), 1)
        numbers = {name: _numbers(array, self._datatypes[name]) for name, array in results.items()}
        size = _size_of(inputs[self._picture.name].shape) if self._picture is not None else (0, 0)
        with np.errstate(all="ignore"):
            return [each.make(numbers, RunRows(rows, inputs, size, places)) for each in self._answers]


class PlainOutput:
    """An output without steps, as it is."""

    is_logits: bool | None = False

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.needs: tuple[str, ...] = (spec.name,)

    def make(self, results: Mapping[str, Array], rows: RunRows) -> Array:
        """The output of all rows, in the form of `spec`."""
        del rows
        return results[self.spec.name]


def _make_answer(
    spec: TensorSpec, output: OutputSteps | None, model: ModelSpec, labels: Sequence[str], picture: TensorSpec | None
) -> AnswerMaker:
    """How one output becomes an answer. Raises LoadFailed: it cannot become the declared one."""
    if output is None:
        return PlainOutput(spec)
    if not spec.shape:
        raise LoadFailed(f"[output.{spec.name}]: it has no axes; wanted one of rows in front")
    make = plugins.named(layout_of(kind_of(output)).maker)
    size = _size_of(picture.shape) if picture is not None else None
    made: AnswerMaker = make(DeclaredOutput(spec, output, labels, model, size))
    return made


# ---- are scores probabilities ---------------------------------------------------------------------------------------


def _decide(
    unsure: Sequence[AnswerMaker], instance: Instance, steps: ModelSteps, sides: tuple[int, int] | None
) -> None:
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
        return declared.noise(tuple(shape), level, random).astype(dtype)
    return (random.normal(size=shape) * level).astype(dtype) if spec.datatype in FLOATS else np.zeros(shape, dtype)


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


def _numbers(array: Array, datatype: str) -> Array:
    return bf16_to_fp32(array) if datatype == "BF16" and array.dtype == np.uint16 else array  # type: ignore[arg-type]
