"""The steps of one pipeline: who answers each of them now, how it is asked, and what its runs cost.

Owns: what is kept of the steps between requests. `chain.py` has the requests that are under way. Thread: any; what is
resolved is replaced whole, and a mean that two threads change at once loses one of many.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from edge_runtime.backends.base import HandsOver
from edge_runtime.errors import EdgeRuntimeError, NotReady
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.pipelines import INPUT, Pipeline, Place, Step, readers, tensors_wanted
from edge_runtime.scheduling.request import Request
from edge_runtime.serving.model_table import ModelTable
from edge_runtime.serving.request_plan import OWN_PARAMETER, OWN_TOKEN, RequestPlan
from edge_runtime.serving.servable import Servable
from edge_runtime.tensors import Array

KEPT_WAYS = 256
"""Of all steps together, one for each step and shapes; all are dropped when there are more."""

SELDOM_ROWS = 0.05
"""A conditional step that runs more seldom is in no forecast."""

ROWS_SMOOTHING = 0.1
"""Weight of a new run in the mean of what a mapped or conditional step asks for: about the last twenty count."""


@dataclass(slots=True)
class StepNode:
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
        """Rows that it asks of its model for a request of so many."""
        if self.rows is not None:
            return math.ceil(self.rows - SELDOM_ROWS)
        return rows if servable.batches else 1


@dataclass(slots=True)
class StepWay:
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


@dataclass(slots=True)
class _Resolved:
    """Who answers each step now: valid for one generation of the model table. None: nobody does.

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
        """Who answers each step now. One that nobody answers costs nothing in forecasts; asking it says why."""
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
        """How long each step's runs take for a request of so many rows, by name."""
        found: dict[str, float] = {}
        for node, servable in zip(self.nodes, self.servables(), strict=True):
            if servable is not None and (asked := node.rows_asked(servable, rows)):
                found[node.step.name] = servable.scheduled.work_s(asked)
        return found

    def work_s(self, rows: int) -> list[float]:
        """What each step's runs cost, batched with others' requests, in seconds of one core."""
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
        key = node.index, tuple(array.shape for array in inputs.values()), urgency, whole.plan.is_own
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
        if whole.plan.is_own:
            parameters |= {OWN_PARAMETER: OWN_TOKEN}
        header = RequestHeader(
            # A Python step is no model: asked again after its end, it is not found, rather than the whole pipeline.
            model=servable.model if step.model is not None else f"{servable.model}.{step.name}",
            version=step.version,
            inputs=tuple(TensorHeader(name, datatypes[name], array.shape) for name, array in inputs.items()),
            outputs=node.wanted,
            timeout_ms=math.inf,  # `longest_s` says it: a default of the model's own is for its own callers
            priority=whole.priority,
            level=whole.header.asked_level,
            parameters=parameters,
        )
        return header, RequestPlan(servable, header) if step.name in self._own else None

    def _datatype(self, step: Step, place: Place) -> str:
        """The datatype of a step's input, as whoever made it says."""
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
