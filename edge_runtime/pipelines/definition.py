"""Pipelines as values: what `pipeline.toml` says, resolved into steps, places and their order. Pure; level 0.

Owns: the keys of the file, the words of places and conditions, and everything that follows from a pipeline alone: its
order, its cycle where it has one, who needs what, its critical path. Never looks at a model: whether datatypes and
shapes fit is decided at load (pipelines/loading.py). Triton's ensembles become the same `Pipeline`.

Rules of a run that follow from these values, wherever they are run:

- A step runs once everything it reads is there. Independent steps run side by side.
- A step whose `when` does not hold is skipped: each of its outputs has zero rows (axis 0 is 0).
- A model step that would be given zero rows is not asked: its outputs have zero rows too. A Python step is called with
  what there is, empty arrays included.
- `map` runs a step for each item of an earlier tensor, along axis 0, and joins the answers along axis 0. Boxes as an
  answer has them, [1, most, 4 or 6], are items along axis 1, without those of index -1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Meta, Struct, field
from msgspec import field as key

from edge_runtime.errors import ConfigError
from edge_runtime.model_spec import TensorSpec
from edge_runtime.tensors import Array
from edge_runtime.typed_toml import build, parse_toml

INPUT = "input"
"""The step of places that name the pipeline's own inputs."""

MAX_STEPS = 128
"""More is a mistake in the file; each step costs a request."""

STEP_NAME_RULE = "1 to 64 letters, digits, '_' or '-', and not 'input'"

Comparison = Literal["==", "!=", "<=", ">=", "<", ">"]
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16",
    "BYTES",
]  # fmt: skip
Shape = tuple[Annotated[int, Meta(ge=-1, le=2**31)], ...]


# ---- the file -------------------------------------------------------------------------------------------------------


class TensorTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that the file describes: an input of the pipeline, or an output of a Python step."""

    datatype: Datatype
    """Its datatype."""

    shape: Shape
    """Its whole shape, -1 where a dimension is open."""


class CropTable(Struct, frozen=True, forbid_unknown_fields=True):
    """What a mapped step cuts out for each item."""

    picture: str
    """Place of the picture: UINT8 `[1, height, width, 1 or 3]`, or one encoded picture, BYTES `[1]`."""

    box: str
    """Place of the boxes: `[n, 4]`, left, top, right and bottom in the picture's pixels, or boxes of an answer."""


class StepTable(Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[step]]` of `pipeline.toml`."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    """What places call it."""

    model: str | None = None
    """The served model that it asks."""

    python: str | None = None
    """In place of `model`: a function, as `"steps.py:join"`."""

    version: Annotated[int, Meta(ge=1)] | None = None
    """Of the model. When absent: the one that is served without a version."""

    inputs: dict[str, str] = key(default_factory=dict)
    """By input of the model (or parameter of the function): `"input.NAME"` or `"STEP.NAME"`."""

    raw: bool | None = None
    """As the parameter of a request, where the model declares answers: `true`, its own tensors come out; `false`, its
    answers (boxes, classes). When absent: answers where it is given pictures."""

    when: str | None = None
    """The step is skipped unless this holds for an element of a tensor: `"detect.count > 0"`; a bare place: not 0."""

    map: str | tuple[str, ...] | None = None
    """The step runs for each item of these tensors; inputs of other places are given whole. With `crop`, when absent:
    its boxes."""

    crop: CropTable | None = None
    """The input that reads the boxes is given the part of the picture in each."""

    outputs: dict[str, TensorTable] = key(default_factory=dict)
    """Of a Python step: what its function returns."""


class PipelineTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole `pipeline.toml`."""

    step: tuple[StepTable, ...]
    """Every step, in any order."""

    output: dict[str, str]
    """By the name that callers see: the place that it comes from."""

    input: dict[str, TensorTable] = key(default_factory=dict)
    """Inputs of the pipeline; needed where no model says the datatype and shape (a Python step reads it)."""


# ---- resolved -------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A tensor of a step by the model's own name, or of the pipeline's inputs where `step` is INPUT."""

    step: str
    tensor: str

    def __str__(self) -> str:
        return f"{self.step}.{self.tensor}"


class Condition(NamedTuple):
    """A comparison of a small tensor with a constant. value: a number; text for BYTES."""

    place: Place
    operator: Comparison
    value: float | str

    def __str__(self) -> str:
        return f"{self.place} {self.operator} {self.value!r}"

    def holds(self, array: Array) -> bool:
        """Whether any element of the tensor compares so; no element: False. Text compares as UTF-8."""
        value = self.value.encode() if isinstance(self.value, str) else self.value
        if array.dtype == object:
            elements = [each.encode() if isinstance(each, str) else each for each in array.reshape(-1).tolist()]
            if not isinstance(value, bytes):
                # A bare place: text is "not zero" where it is not empty.
                return self.operator == "!=" and any(elements)
            return any(_COMPARE[self.operator](each, value) for each in elements)
        return not isinstance(value, bytes) and bool(np.any(_COMPARE[self.operator](array, value)))


class Crop(NamedTuple):
    """picture: what is cut. box: the boxes, one an item."""

    picture: Place
    box: Place


class Step(Struct, frozen=True):
    """One step: exactly one of `model` and `python` (a function of `steps.py`) is set. version: None for the default.

    inputs: by the model's own input. raw: as the parameter of a request, None where it has none. map: empty where the
    step is not mapped; the inputs that read these places are given one item each. crop: its box is among `map`.
    outputs: of a Python step.
    """

    name: str
    model: str | None = None
    python: str | None = None
    version: int | None = None
    inputs: Mapping[str, Place] = field(default_factory=dict)
    raw: bool | None = None
    when: Condition | None = None
    map: tuple[Place, ...] = ()
    crop: Crop | None = None
    outputs: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[Place, ...]:
        """Every place that must be there before the step runs, each once."""
        places = [*self.inputs.values(), *self.map, *(self.crop or ())]
        if self.when is not None:
            places.append(self.when.place)
        return tuple(dict.fromkeys(places))

    @property
    def needs(self) -> tuple[str, ...]:
        """The steps that must be done before; INPUT is none of them."""
        return tuple(dict.fromkeys(place.step for place in self.reads if place.step != INPUT))


class Pipeline(Struct, frozen=True):
    """A whole pipeline, as `make_pipeline` checks it: free of cycles, its steps in an order in which they can run.

    levels: the same names by the longest way to them; steps of one level need nothing of each other. outputs: by the
    callers' name. inputs: those that are described, by name; others are as the steps that read them say.
    max_batch_rows: of a Triton ensemble that names one.
    """

    steps: tuple[Step, ...]
    levels: tuple[tuple[str, ...], ...]
    outputs: Mapping[str, Place]
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    max_batch_rows: int | None = None

    def step(self, name: str) -> Step:
        """Return a step by its name. Raises KeyError."""
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)

    @property
    def models(self) -> tuple[str, ...]:
        """The models that it asks, each once, in the order of their steps."""
        return tuple(dict.fromkeys(step.model for step in self.steps if step.model is not None))

    @property
    def input_names(self) -> tuple[str, ...]:
        """The pipeline's inputs: the described ones, then others in the order in which steps read them."""
        read = (place.tensor for step in self.steps for place in step.reads if place.step == INPUT)
        given = (place.tensor for place in self.outputs.values() if place.step == INPUT)
        return tuple(dict.fromkeys((*self.inputs, *read, *given)))


class CriticalPath(NamedTuple):
    """The way through a pipeline that takes longest. seconds: until its last step is done."""

    seconds: float
    steps: tuple[str, ...]


# ---- from text to values --------------------------------------------------------------------------------------------


def read_pipeline(text: str, source: str) -> Pipeline:
    """Read `pipeline.toml`. source: its path, for messages. Raises ConfigError with every fault."""
    table = build(PipelineTable, parse_toml(text, source), source)
    faults: list[str] = []
    steps = [_step_of(each, f"step {each.name!r}", faults) for each in table.step]
    outputs = {
        name: place
        for name, text_ in table.output.items()
        if (place := _place(text_, f"output.{name}", faults)) is not None
    }
    inputs = {name: TensorSpec(name, each.datatype, each.shape) for name, each in table.input.items()}
    if faults:
        raise ConfigError("\n".join(f"{source}: {fault}" for fault in faults))
    return make_pipeline([each for each in steps if each is not None], outputs, inputs, source=source)


def make_pipeline(
    steps: Sequence[Step],
    outputs: Mapping[str, Place],
    inputs: Mapping[str, TensorSpec] | None = None,
    *,
    max_batch_rows: int | None = None,
    source: str = "pipeline.toml",
) -> Pipeline:
    """Put steps into order. Raises ConfigError: names twice, places of no step, no output, too many steps, a cycle."""
    faults = list(_faults_of(steps, outputs, inputs or {}))
    levels: tuple[tuple[str, ...], ...] = ()
    if not faults:
        levels, cycle = _levels(steps)
        if cycle:
            faults.append(f"the steps form a circle: {' → '.join((*cycle, cycle[0]))}; each needs the one after it")
    if faults:
        raise ConfigError("\n".join(f"{source}: {fault}" for fault in faults))
    by_name = {step.name: step for step in steps}
    ordered = tuple(by_name[name] for level in levels for name in level)
    return Pipeline(ordered, levels, dict(outputs), dict(inputs or {}), max_batch_rows)


def read_place(text: str) -> Place:
    """Read `STEP.TENSOR`; the tensor's name may have dots. Raises ValueError in words."""
    step, dot, tensor = text.strip().partition(".")
    if not dot or not tensor or not (step == INPUT or _STEP_NAME.fullmatch(step)):
        raise ValueError(f'got {text[:80]!r}, wanted "input.NAME" or "STEP.NAME"')
    return Place(step, tensor)


def read_condition(text: str) -> Condition:
    """Read `PLACE`, which is `PLACE != 0`, or `PLACE OPERATOR VALUE`. Raises ValueError in words."""
    found = _CONDITION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f'got {text[:80]!r}, wanted "STEP.NAME" or "STEP.NAME > 0" (==, !=, <, <=, >, >=)')
    place = read_place(found["place"])
    if found["operator"] is None:
        return Condition(place, "!=", 0)
    operator: Comparison = found["operator"]  # type: ignore[assignment]  # the pattern has no other
    word = found["value"]
    if word in _TRUTHS:
        return Condition(place, operator, _TRUTHS[word])
    if word[0] == word[-1] and word[0] in "'\"" and len(word) > 1:
        return Condition(place, operator, word[1:-1])
    if _NUMBER.fullmatch(word) is None:
        raise ValueError(f"got {word[:80]!r} to compare with, wanted a number, true, false or 'text'")
    return Condition(place, operator, float(word) if set(word) & set(".eE") else int(word))


def pipeline_fields(pipeline: Pipeline) -> dict[str, Any]:
    """Describe a pipeline as metadata has it: the keys of `pipeline.toml`, its steps in their order, and the levels."""
    steps: list[dict[str, Any]] = []
    for step in pipeline.steps:
        fields: dict[str, Any] = {
            "name": step.name,
            "model": step.model,
            "python": step.python,
            "version": step.version,
            "inputs": {name: str(place) for name, place in step.inputs.items()},
            "raw": step.raw,
            "when": str(step.when) if step.when is not None else None,
            "map": [str(place) for place in step.map] or None,
            "crop": {"picture": str(step.crop.picture), "box": str(step.crop.box)} if step.crop is not None else None,
        }
        steps.append({key: value for key, value in fields.items() if value is not None})
    outputs = {name: str(place) for name, place in pipeline.outputs.items()}
    return {"steps": steps, "levels": [list(level) for level in pipeline.levels], "outputs": outputs}


# ---- what follows from a pipeline -----------------------------------------------------------------------------------


def readers(pipeline: Pipeline) -> dict[str, tuple[str, ...]]:
    """By step, and INPUT: the steps that read something of it, in the pipeline's order."""
    found: dict[str, list[str]] = {INPUT: [], **{step.name: [] for step in pipeline.steps}}
    for step in pipeline.steps:
        for name in dict.fromkeys(place.step for place in step.reads):
            found[name].append(step.name)
    return {name: tuple(names) for name, names in found.items()}


def tensors_wanted(pipeline: Pipeline) -> dict[str, tuple[str, ...]]:
    """By step: its tensors that another step or the answer reads; all that a request to its model need ask for."""
    found: dict[str, dict[str, None]] = {step.name: {} for step in pipeline.steps}
    for place in (*(place for step in pipeline.steps for place in step.reads), *pipeline.outputs.values()):
        if place.step != INPUT:
            found[place.step][place.tensor] = None
    return {name: tuple(tensors) for name, tensors in found.items()}


def may_be_skipped(pipeline: Pipeline) -> frozenset[str]:
    """The steps whose outputs may have zero rows: by a condition, by an empty map, or as a model that reads of one."""
    found: set[str] = set()
    for step in pipeline.steps:
        given = step.python is None and any(need in found for need in step.needs)
        if step.when is not None or step.map or given:
            found.add(step.name)
    return frozenset(found)


def critical_path(
    pipeline: Pipeline, run_s: Mapping[str, float], earliest_s: Mapping[str, float] | None = None
) -> CriticalPath:
    """Find the longest way. run_s: how long each step takes; absent: 0. earliest_s: when it could begin by itself.

    A step begins once all it needs is done, and not before its own earliest instant (its model's queue).
    """
    ends: dict[str, float] = {}
    ways: dict[str, str | None] = {}
    for step in pipeline.steps:
        begins, way = (earliest_s or {}).get(step.name, 0.0), None
        for need in step.needs:
            if ends[need] >= begins:
                begins, way = ends[need], need
        ends[step.name] = begins + run_s.get(step.name, 0.0)
        ways[step.name] = way
    last = max(ends, key=ends.__getitem__)
    path: list[str] = []
    at: str | None = last
    while at is not None:
        path.append(at)
        at = ways[at]
    return CriticalPath(ends[last], tuple(reversed(path)))


# ---- private --------------------------------------------------------------------------------------------------------

_STEP_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FUNCTION = re.compile(r"steps\.py:(?P<name>[A-Za-z_][A-Za-z0-9_]{0,63})")
_CONDITION = re.compile(
    r"(?P<place>[^\s<>=!]{1,256})(?:\s*(?P<operator>==|!=|<=|>=|<|>)\s*(?P<value>[^\s<>=!'\"]{1,64}|'[^']*'|\"[^\"]*\"))?"
)
_NUMBER = re.compile(r"[+-]?(?:\d{1,18}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
_TRUTHS = {"true": 1, "false": 0}

_COMPARE = {
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
}


def _step_of(table: StepTable, at: str, faults: list[str]) -> Step | None:
    """Resolve one table; what is wrong goes to `faults`."""
    before = len(faults)
    if (table.model is None) == (table.python is None):
        faults.append(f"{at}: wanted exactly one of model and python")
    python = _function_of(table, at, faults)
    if not table.inputs:
        faults.append(f'{at}: inputs is missing; wanted inputs = {{NAME = "input.NAME"}}')
    inputs = {name: _place(text, f"{at}: inputs.{name}", faults) for name, text in table.inputs.items()}
    mapped = (table.map,) if isinstance(table.map, str) else table.map or ()
    places = [_place(text, f"{at}: map", faults) for text in mapped]
    crop = _crop_of(table.crop, at, faults)
    if crop is not None and not mapped:
        places = [crop.box]
    when = None
    if table.when is not None:
        try:
            when = read_condition(table.when)
        except ValueError as error:
            faults.append(f"{at}: when: {error}")
    if len(faults) > before:
        return None
    resolved = {name: place for name, place in inputs.items() if place is not None}
    over = tuple(place for place in places if place is not None)
    faults.extend(f"{at}: {fault}" for fault in _map_faults(resolved, over, crop))
    outputs = {name: TensorSpec(name, each.datatype, each.shape) for name, each in table.outputs.items()}
    return Step(table.name, table.model, python, table.version, resolved, table.raw, when, over, crop, outputs)


def _function_of(table: StepTable, at: str, faults: list[str]) -> str | None:
    if table.python is None:
        if table.outputs:
            faults.append(f"{at}: outputs is for Python steps; a model has its own")
        return None
    if not table.outputs:
        faults.append(f"{at}: a Python step says its outputs: outputs = {{NAME = {{datatype, shape}}}}")
    for name in ("version", "raw", "map", "crop"):
        if getattr(table, name) is not None:
            faults.append(f"{at}: {name} is for steps with a model; a Python step sees whole tensors")
    found = _FUNCTION.fullmatch(table.python)
    if found is None:
        faults.append(f'{at}: python: got {table.python[:80]!r}, wanted "steps.py:FUNCTION"')
        return None
    return found["name"]


def _place(text: str, at: str, faults: list[str]) -> Place | None:
    try:
        return read_place(text)
    except ValueError as error:
        faults.append(f"{at}: {error}")
        return None


def _crop_of(table: CropTable | None, at: str, faults: list[str]) -> Crop | None:
    if table is None:
        return None
    picture = _place(table.picture, f"{at}: crop.picture", faults)
    box = _place(table.box, f"{at}: crop.box", faults)
    return Crop(picture, box) if picture is not None and box is not None else None


def _map_faults(inputs: Mapping[str, Place], over: tuple[Place, ...], crop: Crop | None) -> Iterable[str]:
    if over and not any(place in over for place in inputs.values()):
        yield f"map: no input reads {' or '.join(map(str, over))}, so every item would be answered alike"
    if crop is not None:
        if crop.box not in over:
            yield f"crop.box is {crop.box}, which is not among map; the step runs once for each box"
        taking = [name for name, place in inputs.items() if place == crop.box]
        if len(taking) != 1:
            yield f"crop: wanted one input that reads {crop.box} and is given the pictures, got {len(taking)}"


def _faults_of(steps: Sequence[Step], outputs: Mapping[str, Place], inputs: Mapping[str, TensorSpec]) -> Iterable[str]:
    names = [step.name for step in steps]
    if not steps:
        yield "step: has none; wanted one or more"
    if len(steps) > MAX_STEPS:
        yield f"step: got {len(steps)}, at most {MAX_STEPS} are run"
        return
    if not outputs:
        yield 'output: has none; wanted [output] with NAME = "STEP.NAME"'
    for name in dict.fromkeys(names):
        if _STEP_NAME.fullmatch(name) is None or name == INPUT:
            yield f"step {name!r}: wanted a name of {STEP_NAME_RULE}"
        if names.count(name) > 1:
            yield f"step {name!r}: {names.count(name)} steps have this name"
    for step in steps:
        for place in step.reads:
            yield from (f"step {step.name!r}: {fault}" for fault in _unknown(place, steps))
    for name, place in outputs.items():
        yield from (f"output.{name}: {fault}" for fault in _unknown(place, steps))
    read = {place for step in steps for place in step.reads} | set(outputs.values())
    for name in inputs:
        if Place(INPUT, name) not in read:
            yield f"input.{name}: no step reads it"


def _unknown(place: Place, steps: Sequence[Step]) -> Iterable[str]:
    if place.step == INPUT:
        return
    for step in steps:
        if step.name == place.step:
            if step.python is not None and place.tensor not in step.outputs:
                yield f"{place}: step {step.name!r} has no output {place.tensor!r}; it has {', '.join(step.outputs)}"
            return
    yield f"{place}: there is no step {place.step!r}; wanted input, {', '.join(step.name for step in steps)}"


def _levels(steps: Sequence[Step]) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The levels in the order of the file, and a circle where there is one."""
    left = {step.name: step.needs for step in steps}
    levels: list[tuple[str, ...]] = []
    while left:
        free = tuple(name for name, needs in left.items() if not any(need in left for need in needs))
        if not free:
            return (), _circle(left)
        levels.append(free)
        for name in free:
            del left[name]
    return tuple(levels), ()


def _circle(left: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """A circle among steps each of which needs another of them."""
    path: list[str] = [next(iter(left))]
    while True:
        following = next(need for need in left[path[-1]] if need in left)
        if following in path:
            return tuple(path[path.index(following) :])
        path.append(following)
