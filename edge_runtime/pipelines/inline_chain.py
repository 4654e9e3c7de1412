"""A pipeline whose steps all run inline, as one bound run: bursts of its requests take the lean path.

Owns: the buffers between the steps. Each run uses the steps' own bound buffers, under their locks, so a step that is
swapped is noticed at once. A pipeline with conditions, maps, Python steps or a queue before any step is run by
`chain.py` alone, and so is this one while a step is shared by a canary, mirrored, or was replaced by one that does not
fit. Thread: under the inline lock of the pipeline's servable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from edge_runtime.backends.base import Bound
from edge_runtime.clock import Clock
from edge_runtime.errors import Draining, EdgeRuntimeError
from edge_runtime.model_spec import ModelSpec
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import Servable
from edge_runtime.models.warmup import time_bound
from edge_runtime.pipelines.definition import INPUT, Pipeline, Place, Step, tensors_wanted
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.tensors import DATATYPES, Array

SWAPS = 8
"""Steps that are swapped during one run before it is given up: more is a bug."""


class _Copy(NamedTuple):
    """Rows that are copied, and to where."""

    source: Array
    destination: Array


class _BoundStep(Struct, frozen=True):
    """A step with its model's bound buffers. fill: before its run; keep: after it."""

    name: str
    servable: Servable
    bound: Bound
    fill: Sequence[_Copy]
    keep: Sequence[_Copy]


class _Moved(Exception):
    """A step was swapped out between look-up and use."""


class InlineChain:
    """Bound buffers of a whole pipeline, as `backends.base.Bound`. is_counted: whether runs are requests'."""

    def __init__(
        self,
        pipeline: Pipeline,
        spec: ModelSpec,
        *,
        table: ModelTable,
        clock: Clock,
        metrics: ModelMetrics,
        max_rows: int,
    ) -> None:
        """spec: of the pipeline; every inner shape is fixed. metrics: the pipeline's. Raises Draining, see `run`."""
        self.max_rows = max_rows
        self.is_counted = False
        self._pipeline = pipeline
        self._table = table
        self._clock = clock
        self._metrics = metrics
        self._wanted = tensors_wanted(pipeline)
        self._arrays: dict[Place, Array] = {
            Place(INPUT, each.name): np.zeros((max_rows, *each.shape[1:]), DATATYPES[each.datatype].dtype)
            for each in spec.inputs
        }
        self._generation, self._steps = table.generation, self._bind()
        self.inputs: Sequence[Array] = [self._arrays[Place(INPUT, each.name)] for each in spec.inputs]
        self.outputs: Sequence[Array] = [self._arrays[pipeline.outputs[each.name]] for each in spec.outputs]

    def run(self, rows: int) -> None:
        """Run the first rows through all steps.

        Raises RunFailed; Draining: a step was replaced by one that cannot run here, and the requests are to be
        submitted one by one.
        """
        for _ in range(SWAPS):
            if self._table.generation != self._generation:
                self._generation, self._steps = self._table.generation, self._bind()
            try:
                self._run(rows)
            except _Moved:
                self._generation = -1
                continue
            return
        raise Draining("a step is being replaced again and again")

    def _run(self, rows: int) -> None:
        now = self._clock.monotonic_s
        began_s = now()
        for step in self._steps:
            servable = step.servable
            with servable.inline_lock:
                if not servable.is_open:
                    raise _Moved
                for source, destination in step.fill:
                    destination[:rows] = source[:rows]
                step.bound.run(rows)
                for source, destination in step.keep:
                    destination[:rows] = source[:rows]
            ended_s = now()
            if self.is_counted:
                # Buffers do not know how many requests their rows are of: most have one. Who reads a step's counts, as
                # Triton's perf_analyzer does, looks for requests.
                servable.metrics.answered_batch(rows, rows, 0.0, ended_s - began_s)
                self._metrics.step(step.name).answered(0.0, ended_s - began_s)
            began_s = ended_s

    def _bind(self) -> list[_BoundStep]:
        return [self._bind_step(step) for step in self._pipeline.steps]

    def _bind_step(self, step: Step) -> _BoundStep:
        """Find a step's model, and what is copied around its run. Raises Draining: it cannot run here."""
        servable = _inline_servable(self._table, step)
        if servable is None or servable.inline is None or servable.inline.max_rows < self.max_rows:
            raise Draining(f"step {step.name} does not run inline")
        bound, spec = servable.inline.bound, servable.spec
        inputs = dict(zip((each.name for each in spec.inputs), bound.inputs, strict=True))
        outputs = dict(zip((each.name for each in spec.outputs), bound.outputs, strict=True))
        fill = [_Copy(self._arrays[place], inputs[name]) for name, place in step.inputs.items()]
        if inputs.keys() != step.inputs.keys() or not all(
            copy.source.shape[1:] == copy.destination.shape[1:] and copy.source.dtype == copy.destination.dtype
            for copy in fill
        ):
            raise Draining(f"step {step.name} has other inputs now")
        keep: list[_Copy] = []
        for name in self._wanted[step.name]:
            made = outputs.get(name)
            if made is None:
                raise Draining(f"step {step.name} has no output {name} now")
            array = self._arrays.setdefault(
                Place(step.name, name), np.zeros((self.max_rows, *made.shape[1:]), made.dtype)
            )
            if array.shape[1:] != made.shape[1:] or array.dtype != made.dtype:
                raise Draining(f"step {step.name} has another output {name} now")
            keep.append(_Copy(made, array))
        return _BoundStep(step.name, servable, bound, fill, keep)


def bind_inline_chain(
    pipeline: Pipeline,
    spec: ModelSpec,
    *,
    table: ModelTable,
    clock: Clock,
    metrics: ModelMetrics,
    max_rows: int,
    limit_s: float,
) -> InlineChain | None:
    """Bind a pipeline to run inline, with as many rows as all its steps take and run in `limit_s`; None: it cannot.

    Thread: the loader's; it runs the steps' models to measure them.
    """
    plain = not any(each.when or each.map or each.crop or each.python or each.raw is False for each in pipeline.steps)
    if not plain or not all(each.has_fixed_inner_shape and each.datatype != "BYTES" for each in spec.inputs):
        return None
    rows = max_rows
    for step in pipeline.steps:
        servable = _inline_servable(table, step)
        if servable is None or servable.inline is None:
            return None
        rows = min(rows, servable.inline.max_rows)
    try:
        bound = InlineChain(pipeline, spec, table=table, clock=clock, metrics=metrics, max_rows=rows)
        while rows and time_bound(bound, rows) > limit_s:
            rows //= 2
    except (EdgeRuntimeError, KeyError):  # a step is swapped now, or an output is an input: chain.py runs it
        return None
    bound.max_rows, bound.is_counted = rows, True
    return bound if rows else None


def _inline_servable(table: ModelTable, step: Step) -> Servable | None:
    """A step's model where bursts of its requests run inline now, without a look at each; else None."""
    if step.model is None or (step.version is None and table.split_of(step.model) is not None):
        return None
    try:
        servable = table.resolve(step.model, step.version)
    except EdgeRuntimeError:
        return None
    return servable if servable.inline is not None and servable.mirror is None else None
