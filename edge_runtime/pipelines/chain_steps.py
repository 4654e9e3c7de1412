"""The steps of one pipeline: who answers each of them now, what it is given, and what its runs cost.

Owns: what is kept of the steps between requests; how tensors become the requests of a step (items of a map, crops),
and their answers one tensor again. `chain.py` has the requests that are under way. Thread: any; what is resolved is
replaced whole, and of two threads that change a mean at once one may lose its change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeGuard

import numpy as np
from msgspec import Struct, field

from edge_runtime.backends.base import HandsOver
from edge_runtime.errors import EdgeRuntimeError, NotReady, RunFailed
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import Servable
from edge_runtime.pipelines.definition import INPUT, Pipeline, Place, Step, readers, tensors_wanted
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import Request
from edge_runtime.tensors import DATATYPES, Array

KEPT_WAYS = 256
"""Of all steps together, one for each step and shapes; all are dropped when there are more."""

SELDOM_ROWS = 0.05
"""A conditional step that runs more seldom is in no forecast."""

ROWS_SMOOTHING = 0.1
"""Weight of a new run in the mean of what a mapped or conditional step asks for: about the last twenty count."""

MOST_ITEMS = 16_384
"""Items of one map: more is not a list of things found, and their answers would fill the memory."""

BOX_COLUMNS, ANSWER_COLUMNS = 4, (6, 14)
"""Columns of a box, and of a box in an answer: index, score, left, top, right, bottom, and corners of a turned one."""


class StepNode(Struct):
    """A step, and what is known of it.

    needs: steps that must be done before. reads: what it is given. followers: steps that need it. wanted: tensors that
    others read. rows: mean of those that it asks for, where that is found out by its run; None: as many as the
    pipeline's request has.
    """

    index: int
    step: Step
    needs: tuple[int, ...]
    reads: tuple[Place, ...]
    followers: tuple[int, ...]
    wanted: tuple[str, ...]
    rows: float | None = None

    def observe_rows(self, rows: int) -> None:
        """Learn from one request what the step asks for."""
        if self.rows is not None:
            self.rows += ROWS_SMOOTHING * (rows - self.rows)

    def rows_asked(self, servable: Servable, rows: int) -> int:
        """Rows that it asks of its model for a request of `rows`."""
        if self.rows is not None:
            return math.ceil(self.rows - SELDOM_ROWS)
        return rows if servable.batches else 1


class StepWay(Struct):
    """How a step is asked with inputs of certain shapes, until the model table changes.

    plan: once `Infer.submit` has made it, so that the next request of these shapes is not checked. servables: of all
    steps, as resolved.
    """

    node: StepNode
    header: RequestHeader
    plan: RequestPlan | None
    servables: list[Servable | None]

    def keep(self, plan: RequestPlan | None) -> None:
        """Keep the plan that was made, and who answers the step by it."""
        if plan is not self.plan:
            self.plan = plan
            if plan is not None:
                self.servables[self.node.index] = plan.servable


class _Resolved(Struct):
    """The servable of each step now: valid for one generation of the model table. None: there is none.

    ways: by step, shapes and urgency.
    """

    generation: int
    servables: list[Servable | None]
    ways: dict[Hashable, StepWay] = field(default_factory=dict)


class ChainSteps:
    """The steps, in the pipeline's order."""

    def __init__(
        self, pipeline: Pipeline, spec: ModelSpec, table: ModelTable, python_steps: Mapping[str, Servable]
    ) -> None:
        """spec: of the pipeline. python_steps: by step, servables that belong to this pipeline alone."""
        self.nodes = _nodes_of(pipeline)
        # How many steps read each tensor; one more for the answer.
        reads = Counter(place for step in pipeline.steps for place in step.reads)
        self.reads: dict[Place, int] = dict(reads + Counter(dict.fromkeys(pipeline.outputs.values(), 1)))
        self._spec = spec
        self._table = table
        self._own = python_steps
        self._index = {node.step.name: node.index for node in self.nodes}
        self._resolved = _Resolved(-1, [])

    # ---- who answers -------------------------------------------------------------------------------------------------

    def servables(self) -> Sequence[Servable | None]:
        """Return the servable of each step now. A step without one costs nothing in forecasts; asking it says why."""
        return self._resolve().servables

    def servable(self, node: StepNode) -> Servable:
        """Who answers a step. Raises NotReady."""
        found = self._resolve().servables[node.index]
        if found is not None:
            return found
        step = node.step
        if step.model is None:
            raise NotReady(f"{step.python} is not loaded")
        return self._table.resolve(step.model, step.version)

    def specs(self, node: StepNode) -> Sequence[TensorSpec]:
        """The outputs of a step as its answers have them. Raises NotReady."""
        servable = self.servable(node)
        for each in (servable, *servable.forms.values()):
            if {spec.name for spec in each.spec.outputs}.issuperset(node.wanted):
                return each.spec.outputs
        return servable.spec.outputs

    def queued(self) -> list[tuple[StepNode, Servable]]:
        """The steps whose requests wait in a model's queue."""
        return [
            (node, servable)
            for node, servable in zip(self.nodes, self.servables(), strict=True)
            if _is_queued(servable)
        ]

    def _resolve(self) -> _Resolved:
        resolved, generation = self._resolved, self._table.generation
        if resolved.generation != generation:
            resolved = self._resolved = _Resolved(generation, [self._find(node.step) for node in self.nodes])
            for node, servable in zip(self.nodes, resolved.servables, strict=True):
                if servable is not None and node.followers and isinstance(servable.layouts.narrow, HandsOver):
                    servable.layouts.narrow.hands_over = True
        return resolved

    def _find(self, step: Step) -> Servable | None:
        own = self._own.get(step.name)
        if own is not None or step.model is None:
            return own
        try:
            return self._table.resolve(step.model, step.version)
        except EdgeRuntimeError:
            return None

    # ---- what runs cost ----------------------------------------------------------------------------------------------

    def runs_s(self, rows: int) -> dict[str, float]:
        """How long each step's runs take for a request of `rows`, by name."""
        found: dict[str, float] = {}
        for node, servable in zip(self.nodes, self.servables(), strict=True):
            if servable is not None and (asked := node.rows_asked(servable, rows)):
                found[node.step.name] = servable.scheduled.work_s(asked)
        return found

    def work_s(self, rows: int) -> list[float]:
        """Return the cost of each step's runs, batched with others' requests, in seconds of one core."""
        found: list[float] = []
        for node, servable in zip(self.nodes, self.servables(), strict=True):
            if servable is None:
                found.append(0.0)
                continue
            layout, asked = servable.scheduled.layout, node.rows_asked(servable, rows)
            batch = max(asked, servable.scheduled.limits.max_rows)
            found.append(layout.run_times.mean_s(batch) * asked / batch * layout.threads if asked else 0.0)
        return found

    def rows_at_once(self, rows: int, cores: int) -> int:
        """Rows with which every queued step has one batch at work and one that waits.

        rows: of one request, which says how many of a step that does not batch are meant.
        """
        full = 0
        for _, servable in self.queued():
            scheduled = servable.scheduled
            at_once = max(min(scheduled.layout.concurrency, cores // scheduled.layout.threads), 1)
            full += 2 * at_once * (scheduled.limits.max_rows if servable.batches else rows)
        return full

    def relax(self) -> None:
        """Hope for the best again of every run: none would correct a forecast that refuses everything."""
        for servable in self.servables():
            if servable is not None:
                servable.scheduled.layout.run_times.relax()

    # ---- how each is asked -------------------------------------------------------------------------------------------

    def way(self, node: StepNode, whole: Request, inputs: Mapping[str, Array]) -> StepWay:
        """Return how a step of a request is asked with inputs of these shapes. Raises NotReady."""
        resolved = self._resolve()
        urgency = whole.priority, whole.header.asked_level
        key = node.index, tuple(array.shape for array in inputs.values()), urgency, whole.origin
        way = resolved.ways.get(key)
        if way is None:
            if len(resolved.ways) >= KEPT_WAYS:
                resolved.ways.clear()
            header, plan = self._make_header(node, whole, inputs)
            way = resolved.ways[key] = StepWay(node, header, plan, resolved.servables)
        return way

    def _make_header(
        self, node: StepNode, whole: Request, inputs: Mapping[str, Array]
    ) -> tuple[RequestHeader, RequestPlan | None]:
        """Make a header; with its plan, where the step is the pipeline's own."""
        step = node.step
        servable = self.servable(node)
        datatypes = {name: self._datatype(step, place) for name, place in step.inputs.items()}
        parameters: dict[str, object] = {} if step.raw is None else {"raw": step.raw}
        header = RequestHeader(
            # A Python step is not a model: asked again after its end, it is not found, rather than the whole pipeline.
            model=servable.model if step.model is not None else f"{servable.model}.{step.name}",
            version=step.version,
            inputs=tuple(TensorHeader(name, datatypes[name], array.shape) for name, array in inputs.items()),
            outputs=node.wanted,
            timeout_ms=math.inf,  # `longest_s` says it: a default of the model's own is for its own callers
            priority=whole.priority,
            level=whole.header.asked_level,
            parameters=parameters,
        )
        is_own = step.name in self._own
        return header, RequestPlan(servable, header, origin=whole.origin.of_step) if is_own else None

    def _datatype(self, step: Step, place: Place) -> str:
        """The datatype of a step's input, as the place that it comes from says."""
        if step.crop is not None and place == step.crop.box:
            return "UINT8"
        specs = self._spec.inputs if place.step == INPUT else self.specs(self.nodes[self._index[place.step]])
        return next((spec.datatype for spec in specs if spec.name == place.tensor), "")


def _nodes_of(pipeline: Pipeline) -> list[StepNode]:
    index = {step.name: number for number, step in enumerate(pipeline.steps)}
    following, wanted = readers(pipeline), tensors_wanted(pipeline)
    return [
        StepNode(
            number,
            step,
            tuple(index[name] for name in step.needs),
            step.reads,
            tuple(index[name] for name in following[step.name]),
            wanted[step.name],
            1.0 if step.when is not None or step.map else None,
        )
        for number, step in enumerate(pipeline.steps)
    ]


def _is_queued(servable: Servable | None) -> TypeGuard[Servable]:
    return servable is not None and servable.mode != "inline"


# ---- what a step is given --------------------------------------------------------------------------------------------


class Pieces(Struct, frozen=True):
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
    if array.ndim == 3 and array.shape[0] == 1 and array.shape[2] in {BOX_COLUMNS, *ANSWER_COLUMNS}:
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
    """Return the output of a step that was not run: zero rows, open dimensions 0."""
    shape = (0, *(0 if length == DYNAMIC else length for length in spec.shape[1:]))
    return np.zeros(shape, DATATYPES[spec.datatype].dtype)


def tensor_bytes(arrays: Iterable[Array]) -> int:
    """Bytes of arrays, those of text included."""
    return sum([sum(map(len, each.flat)) if each.dtype == object else each.nbytes for each in arrays])


def _pixels(boxes: Array, place: Place) -> Array:
    """Left, top, right and bottom of boxes [n, 4, 6 or 14]; of a turned one those of its hull."""
    if boxes.ndim != 2 or boxes.shape[1] not in {BOX_COLUMNS, *ANSWER_COLUMNS}:
        raise RunFailed(f"crop: {place} is {list(boxes.shape)}; wanted boxes [n, 4], or those of an answer")
    sides = boxes if boxes.shape[1] == BOX_COLUMNS else boxes[:, 2 : 2 + BOX_COLUMNS]
    pixels: Array = np.nan_to_num(sides.astype(np.float64), posinf=1e9, neginf=-1e9)
    return pixels
