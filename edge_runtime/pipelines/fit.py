"""Whether the steps of a pipeline fit together, and what goes in and out of the whole. Pure.

Owns: datatypes, shapes and rows along the steps' places; every mismatch in words. A step's model is given as its
servable, whose specs were read at load. Called before a pipeline answers, and before a new version of a step's model
does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from msgspec import Struct, field
from msgspec.structs import replace

from edge_runtime.answers import kind_of
from edge_runtime.backends.base import DECODE_PICTURE, StepFunction
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.models.servable import Servable
from edge_runtime.pipelines.definition import (
    INPUT,
    Pipeline,
    Place,
    Step,
    make_pipeline,
    may_be_skipped,
    tensors_wanted,
)
from edge_runtime.steps import InputSteps, ModelSteps, OutputSteps, table_kind
from edge_runtime.tensors import element_count

MOST_COMPARED = 4096
"""Elements of a tensor that a condition looks at: it is compared on the thread that goes on with the request."""

BOX_COLUMNS = (4, 6, 14)
"""Left, top, right, bottom; behind index and score, as in an answer; and before the corners of a turned one."""

_UNSAID = 1
"""Stands for an open dimension where a form is chosen by a shape."""


class Fit(Struct, frozen=True):
    """The inputs and outputs of a pipeline. faults: why its steps do not fit together; the rest means nothing then.

    pipeline: with a step for each encoded picture that is cropped. batches: a request of n rows is n rows to each step.
    functions: of its Python steps, in the pipeline's order. labels: by output, those of the step that it comes from.
    steps: what its models declare of what goes in and out.
    """

    pipeline: Pipeline
    spec: ModelSpec
    batches: bool
    max_rows: int
    functions: tuple[StepFunction, ...]
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    steps: ModelSteps | None = None
    faults: tuple[str, ...] = ()


def fit_pipeline(pipeline: Pipeline, servables: Mapping[str, Servable], most_rows: int) -> Fit:
    """Follow the tensors from step to step. servables: of each step with a model, by the step's name.

    most_rows: of a request, where no step says less.
    """
    fitting = _Fitting(pipeline, servables)
    fitting.follow()
    cropped = tuple(place.tensor for place in fitting.encoded if place.step == INPUT)
    if fitting.encoded and not fitting.faults:
        pipeline = _with_decoding(pipeline, fitting.encoded)
        fitting = _Fitting(pipeline, servables)
        fitting.follow()
    inputs = tuple(fitting.input(name) for name in pipeline.input_names)
    outputs = tuple(fitting.output(name, place) for name, place in pipeline.outputs.items())
    spec = ModelSpec(inputs, outputs)
    batches = fitting.batches(spec)
    limits = [each.max_rows for each in servables.values()] if batches else [1]
    max_rows = min([*limits, most_rows])
    if pipeline.max_batch_rows is not None:
        batches = pipeline.max_batch_rows > 0
        max_rows = max(pipeline.max_batch_rows, 1)
        fitting.check_batches(pipeline.max_batch_rows)
    labels = {
        name: servables[place.step].labels_of(place.tensor)
        for name, place in pipeline.outputs.items()
        if place.step in servables
    }
    faults = tuple(dict.fromkeys(fitting.faults))
    steps = None if faults else fitting.steps(cropped)
    return Fit(pipeline, spec, batches, max_rows, tuple(fitting.functions), labels, steps, faults)


# ---- private --------------------------------------------------------------------------------------------------------


class _Fitting:
    """One pipeline while it is followed. known: what each place holds, as far as it was found out.

    encoded: pictures that are cropped, and come as JPEG and the like.
    """

    def __init__(self, pipeline: Pipeline, servables: Mapping[str, Servable]) -> None:
        self.faults: list[str] = []
        self.functions: list[StepFunction] = []
        self.encoded: dict[Place, Step] = {}
        self._pipeline = pipeline
        self._servables = servables
        self._wanted = tensors_wanted(pipeline)
        self._skipped = may_be_skipped(pipeline)
        self._known = {Place(INPUT, name): spec for name, spec in pipeline.inputs.items()}
        self._forms: dict[str, Servable] = {}

    # ---- steps

    def follow(self) -> None:
        """Follow every step."""
        for step in self._pipeline.steps:
            if step.model is None:
                self.follow_function(step)
            else:
                self.follow_model(step, self._servables[step.name])

    def follow_function(self, step: Step) -> None:
        """A Python step says its outputs; its inputs are whatever is there."""
        given: list[TensorSpec] = []
        for name, place in step.inputs.items():
            spec = self._known.get(place)
            if spec is None and place.step == INPUT:
                self._fault(step, f"nobody says what {place} is: add [input.{place.tensor}] with datatype and shape")
            elif spec is not None:
                given.append(TensorSpec(name, spec.datatype, spec.shape))
        outputs = tuple(step.outputs.values())
        self._check_when(step)
        self._keep(step, outputs)
        self.functions.append(StepFunction(step.python or "", ModelSpec(tuple(given), outputs)))

    def follow_model(self, step: Step, servable: Servable) -> None:
        """A step's model takes what its places hold, in the form that they ask for."""
        handed = {name: self._handed(step, name, place) for name, place in step.inputs.items()}
        form = self._forms[step.name] = _form_of(step, servable, handed)
        wanted = {spec.name: spec for spec in form.spec.inputs}
        for name, spec in wanted.items():
            if name not in handed and not spec.is_optional:
                self._fault(step, f"input {name!r} of model {step.model!r} is not given; it takes {_names(wanted)}")
        for name, place in step.inputs.items():
            if name not in wanted:
                self._fault(step, f"model {step.model!r} has no input {name!r}; it takes {_names(wanted)}")
                continue
            given = handed[name]
            if given is None:
                self._take_input(step, place, wanted[name])
            elif not _goes_into(given, wanted[name]):
                self._fault(step, self._mismatch(step, name, given, wanted[name]))
        self._check_when(step)
        self._check_crop(step)
        self._keep(step, form.spec.outputs)

    def _handed(self, step: Step, name: str, place: Place) -> TensorSpec | None:
        """Return the spec of an input of the step's request; None where it is a pipeline's input without a spec."""
        spec = self._known.get(place)
        if step.crop is not None and place == step.crop.box:
            picture = self._known.get(step.crop.picture)
            channels = picture.shape[-1] if picture is not None and len(picture.shape) == 4 else DYNAMIC
            return TensorSpec(name, "UINT8", (DYNAMIC, DYNAMIC, DYNAMIC, channels))
        if spec is None or place not in step.map:
            return spec
        if _is_boxes(spec):
            return TensorSpec(name, spec.datatype, (DYNAMIC, spec.shape[-1]))
        return TensorSpec(name, spec.datatype, (DYNAMIC, *spec.shape[1:]))

    def _take_input(self, step: Step, place: Place, wanted: TensorSpec) -> None:
        """An input of the pipeline is as the first step takes it that reads it."""
        shape = (DYNAMIC, *wanted.shape[1:]) if place in step.map else wanted.shape
        self._known[place] = TensorSpec(place.tensor, wanted.datatype, shape)

    def _keep(self, step: Step, outputs: Sequence[TensorSpec]) -> None:
        """Note what a step gives, and what is read of it that it does not give."""
        for spec in outputs:
            shape = spec.shape
            if step.map or step.name in self._skipped:
                if not shape and spec.name in self._wanted[step.name]:
                    self._fault(step, f"output {spec.name!r} has no rows, so it cannot be of none or many items")
                shape = (DYNAMIC, *shape[1:])
            self._known[Place(step.name, spec.name)] = TensorSpec(spec.name, spec.datatype, shape)
        there = {spec.name for spec in outputs}
        for name in self._wanted[step.name]:
            if name not in there:
                whose = f"model {step.model!r}" if step.model is not None else step.python
                self._fault(step, f"{whose} has no output {name!r}; it gives {_names(there)}")

    # ---- declared with its models

    def steps(self, cropped: Sequence[str]) -> ModelSteps | None:
        """Return the steps' declarations for the pipeline's own inputs and outputs: pictures in, answers out.

        The first output of each kind is an answer, as of a model. Outputs of one answer have the same rows, or none:
        those of a request, else those of one `map`; others stay tensors. cropped: inputs of encoded pictures.
        """
        inputs: dict[str, InputSteps] = {name: table_kind({"from": "picture"})() for name in cropped}
        for step in self._pipeline.steps:
            form = self._forms.get(step.name)
            if form is None or form.steps is None or form.form.kind in ("tensor", "frames"):
                continue
            for name, place in step.inputs.items():
                if place.step == INPUT and place not in step.map and name in form.steps.inputs:
                    inputs[place.tensor] = form.steps.inputs[name]
        told = {
            name: (place, declared)
            for name, place in self._pipeline.outputs.items()
            if (declared := self._declared(place)) is not None
        }
        rows_of = self._rows_of()
        counted = {name: rows_of[place.step] for name, (place, _) in told.items()}
        rows = min(counted.values(), key=len, default=())
        outputs: dict[str, str] = {}
        for name, (_, declared) in told.items():
            if counted[name] == rows:
                outputs.setdefault(kind_of(declared), name)
        if not inputs and not outputs:
            return None
        labels: dict[str, tuple[str, ...]] = {}
        for name in outputs.values():
            place, _ = told[name]
            of_step = self._forms[place.step].steps
            if of_step is not None and place.tensor in of_step.labels:
                labels[name] = of_step.labels[place.tensor]
        return ModelSteps(inputs, {name: told[name][1] for name in outputs.values()}, labels, has_items=bool(rows))

    def _declared(self, place: Place) -> OutputSteps | None:
        """Return the declaration of a step's model for an output that is its answer; None where it is a tensor."""
        form = self._forms.get(place.step)
        if form is None or form.steps is None or not form.form.answers:
            return None
        return form.steps.outputs.get(place.tensor)

    def _rows_of(self) -> dict[str, tuple[str, ...]]:
        """By step, what the rows of its outputs are: () for those of the request, else whose items they are."""
        found: dict[str, tuple[str, ...]] = {INPUT: ()}
        for step in self._pipeline.steps:  # in their order: what a step reads is found
            form = self._forms.get(step.name)
            if step.map:
                found[step.name] = tuple(map(str, step.map))
            elif form is None or not (form.batches or form.form.answers):
                found[step.name] = (step.name,)  # a row of it may be anything
            else:
                found[step.name] = max((found[place.step] for place in step.inputs.values()), key=len, default=())
        return found

    # ---- conditions and crops

    def _check_when(self, step: Step) -> None:
        spec = self._known.get(step.when.place) if step.when is not None else None
        if step.when is None or spec is None:
            return
        inner = [length for length in spec.shape[1:] if length != DYNAMIC]
        if element_count(inner) > MOST_COMPARED:
            self._fault(step, f"when: {step.when.place} is {_text(spec)}; wanted {MOST_COMPARED} numbers a row at most")
        if isinstance(step.when.value, str) != (spec.datatype == "BYTES") and str(step.when.value) != "0":
            self._fault(step, f"when: {step.when.place} is {spec.datatype}, and cannot be {step.when.value!r}")

    def _check_crop(self, step: Step) -> None:
        if step.crop is None:
            return
        picture, box = self._known.get(step.crop.picture), self._known.get(step.crop.box)
        if picture is not None and picture.datatype == "BYTES":
            self.encoded.setdefault(step.crop.picture, step)
        if picture is not None and not _is_picture(picture):
            self._fault(
                step,
                f"crop: {step.crop.picture} is {_text(picture)}; wanted UINT8 [1,height,width,1 or 3], or an encoded "
                "picture, BYTES [1]",
            )
        if box is not None and not (_is_boxes(box) or _is_list_of_boxes(box)):
            self._fault(step, f"crop: {step.crop.box} is {_text(box)}; wanted boxes [n,4], or those of an answer")

    # ---- the whole

    def input(self, name: str) -> TensorSpec:
        """Return the spec of the input of this name."""
        spec = self._known.get(Place(INPUT, name))
        if spec is None:
            self.faults.append(f"nobody says what input.{name} is: add [input.{name}] with datatype and shape")
            return TensorSpec(name, "FP32", ())
        return TensorSpec(name, spec.datatype, spec.shape, spec.quantisation)

    def output(self, name: str, place: Place) -> TensorSpec:
        """Return the spec of the output of this name. Its step has reported a place that nothing gives."""
        spec = self._known.get(place)
        return TensorSpec(name, spec.datatype, spec.shape) if spec is not None else TensorSpec(name, "FP32", ())

    def batches(self, spec: ModelSpec) -> bool:
        """Whether rows in are rows everywhere."""
        steps = self._pipeline.steps
        if any(step.map or step.when is not None for step in steps) or not spec.may_batch:
            return False
        of_functions = [tensor for each in self.functions for tensor in (*each.spec.inputs, *each.spec.outputs)]
        return all(each.has_dynamic_axis_0 for each in of_functions) and all(
            each.batches for each in self._servables.values()
        )

    def check_batches(self, rows: int) -> None:
        """An ensemble says how many rows it takes: each step's model that batches must take as many."""
        for step in self._pipeline.steps:
            servable = self._servables.get(step.name)
            if servable is not None and servable.batches and servable.max_rows < rows:
                self.faults.append(
                    f"ensemble allows maximum batch size {rows}, but it contains model {step.model} which only "
                    f"allows maximum batch size to be {servable.max_rows}"
                )

    def _mismatch(self, step: Step, name: str, handed: TensorSpec, wanted: TensorSpec) -> str:
        place = step.inputs[name]
        said = f"input {name!r} of model {step.model!r} is {_text(wanted)}; "
        if step.crop is not None and place == step.crop.box:
            advice = "" if wanted.datatype == "UINT8" else f": declare how it reads pictures, [input.{name}]"
            return f"{said}it is given the cropped pictures, {_text(handed)}{advice}"
        each = "each item of " if place in step.map else ""
        return f"{said}{each}{place} is {_text(handed)}"

    def _fault(self, step: Step, words: str) -> None:
        self.faults.append(f"step {step.name!r}: {words}")


def _with_decoding(pipeline: Pipeline, encoded: Mapping[Place, Step]) -> Pipeline:
    """Decode, in the host of Python steps, each encoded picture that is cropped: never in the daemon.

    encoded: with the first step that crops it, whose condition holds for decoding, too.
    """
    taken = {step.name for step in pipeline.steps}
    steps = list(pipeline.steps)
    decoded: dict[Place, Place] = {}
    for place, step in encoded.items():
        name = next(each for number in count(1) if (each := f"decode_{number}") not in taken)
        taken.add(name)
        is_alone = sum(each.crop is not None and each.crop.picture == place for each in pipeline.steps) == 1
        frame = TensorSpec("frame", "UINT8", (1, DYNAMIC, DYNAMIC, 3))
        steps.append(
            Step(
                name,
                python=DECODE_PICTURE,
                inputs={"picture": place},
                when=step.when if is_alone else None,
                outputs={"frame": frame},
            )
        )
        decoded[place] = Place(name, "frame")
    cropping = [
        replace(step, crop=step.crop._replace(picture=decoded[step.crop.picture]))
        if step.crop is not None and step.crop.picture in decoded
        else step
        for step in steps
    ]
    return make_pipeline(cropping, pipeline.outputs, pipeline.inputs, max_batch_rows=pipeline.max_batch_rows)


def _form_of(step: Step, servable: Servable, handed: Mapping[str, TensorSpec | None]) -> Servable:
    """Who answers the step's requests: by what it is given, else by what is declared with the model."""
    tensors: list[TensorHeader] = []
    for name, spec in handed.items():
        declared = servable.steps.inputs.get(name) if servable.steps is not None else None
        if spec is not None:
            shape = tuple(_UNSAID if length == DYNAMIC else length for length in spec.shape)
            tensors.append(TensorHeader(name, spec.datatype, shape))
        elif declared is not None:
            forms = [each for form, each in servable.forms.items() if form.kind != "tensor"]
            sent = [tensor for each in forms for tensor in each.spec.inputs if tensor.name == name]
            tensors += [TensorHeader(name, tensor.datatype, (_UNSAID,)) for tensor in sent[:1]]
    parameters = {} if step.raw is None else {"raw": step.raw}
    return servable.form_for(RequestHeader(model=servable.model, inputs=tuple(tensors), parameters=parameters))


def _goes_into(given: TensorSpec, wanted: TensorSpec) -> bool:
    """Whether a tensor may fit: what is open is found out by each request."""
    is_bits = {given.datatype, wanted.datatype} == {"BF16", "UINT16"}
    return (
        (given.datatype == wanted.datatype or is_bits)
        and len(given.shape) == len(wanted.shape)
        and all(DYNAMIC in {a, b} or a == b for a, b in zip(given.shape, wanted.shape, strict=True))
    )


def _is_boxes(spec: TensorSpec) -> bool:
    """Whether it is the boxes of one row of an answer, [1, most, 4, 6 or 14]."""
    return len(spec.shape) == 3 and spec.shape[0] in {1, DYNAMIC} and spec.shape[2] in BOX_COLUMNS


def _is_list_of_boxes(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and spec.shape[1] in (*BOX_COLUMNS, DYNAMIC) and spec.datatype not in {"BYTES", "BOOL"}


def _is_picture(spec: TensorSpec) -> bool:
    if spec.datatype == "BYTES":
        return len(spec.shape) == 1 and spec.shape[0] in {1, DYNAMIC}
    is_frame = spec.datatype == "UINT8" and len(spec.shape) == 4
    return is_frame and spec.shape[0] in {1, DYNAMIC} and spec.shape[3] in {1, 3, DYNAMIC}


def _text(spec: TensorSpec) -> str:
    return f"{spec.datatype} [{','.join(map(str, spec.shape))}]"


def _names(names: Mapping[str, object] | set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
