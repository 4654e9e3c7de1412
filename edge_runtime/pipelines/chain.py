"""One request through a pipeline: which of its steps runs next, what it is given, and how the whole ends.

Owns: the requests of a pipeline that are under way, from the first step to the one reply; and when one that waits
begins. Each step is an ordinary `Request` through `Infer.submit`, with the whole's sender, priority and deadline: its
model's queue, batches and hosts are everybody's. The queue of requests that wait before their first step is the
dispatcher's, with its bounds, turns and expiry.

Thread: any. A step's reply comes on a worker, the timer, or, of an inline model, on the thread that asked; it stores
the outputs and asks what can be asked next, and never waits. Invariant: no call of `_go_on` or `_begin_waiting` lies
within another of the same chain, however many steps run inline: the outer one goes on with what the inner one found.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct, field

from edge_runtime.clock import Clock
from edge_runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    DeadlineUnmeetable,
    Draining,
    EdgeRuntimeError,
    QueueFull,
    Unsupported,
    shortened,
)
from edge_runtime.model_spec import ModelSpec
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import AskedModel, Servable
from edge_runtime.pipelines.chain_steps import (
    ChainSteps,
    Pieces,
    StepNode,
    join_pieces,
    make_pieces,
    no_rows,
    tensor_bytes,
)
from edge_runtime.pipelines.definition import INPUT, Pipeline, Place, critical_path, pipeline_fields
from edge_runtime.request import policy
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.infer import Infer
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.policy import ADMISSION_MARGIN, ChainFlow, ChainLoad
from edge_runtime.request.request import CallbackReply, Request, deadline_exceeded, failure_of
from edge_runtime.request.scheduled_model import DEVIATIONS, Layout, ScheduledModel
from edge_runtime.telemetry.metrics import Metrics, ModelMetrics
from edge_runtime.tensors import Array

log = logging.getLogger(__name__)

ASKED_AT_ONCE = 32
"""Requests of one map that wait for their model at the same time: enough for its batches, and not its whole queue."""

SMOOTHING, MOST_SLOWNESS = 0.05, 4.0
"""Of how much slower chains are than their runs: the weight of a new one (the last forty count), and a bound."""


class _StepRun(Struct, eq=False):
    """A step whose time has come: its requests, and their answers as they come.

    requests: those that are not answered yet. following: the index of the next one to ask.
    """

    node: StepNode
    pieces: Pieces | None = None
    parts: list[Mapping[str, Array]] = field(default_factory=list)
    requests: dict[int, Request] = field(default_factory=dict)
    following: int = 0
    open_count: int = 0
    run_s: float = 0.0
    longest_s: float = 0.0


class _Slowness:
    """How much longer chains take than their runs say: batches that are not full, the way from step to step.

    mean: 1 or more. most: what most chains stay under, as LatencyModel reckons it.
    """

    def __init__(self) -> None:
        self.mean = 1.0
        self._deviation = 0.0

    @property
    def most(self) -> float:
        return self.mean + DEVIATIONS * self._deviation

    def observe(self, ratio: float) -> None:
        """Learn from one chain."""
        off = max(min(ratio, MOST_SLOWNESS), 1.0) - self.mean
        self.mean += SMOOTHING * off
        self._deviation += SMOOTHING * (abs(off) - self._deviation)

    def relax(self) -> None:
        """Hope for the best again: no run would correct a forecast that refuses everything."""
        self.mean += SMOOTHING * (1.0 - self.mean)
        self._deviation *= 1.0 - SMOOTHING


class _Running:
    """One request under way. Changed under its lock; `todo` is gone through by one thread at a time.

    values: tensors that a step or the answer has still to read, and by how many. needs: of each step, how many others
    are still to be done. path_s: the runs on the longest way to each step's end. promised_s: of each step, its work
    that was not asked for; work_s: of each step, until it is done. forecast_s: of the whole, when it began.
    """

    __slots__ = (
        "began_s", "done", "forecast_s", "is_going_on", "is_over", "lock", "nbytes", "needs", "path_s", "plan",
        "promised_s", "reads", "request", "step_runs", "todo", "values", "work_s",
    )  # fmt: skip

    def __init__(self, request: Request, nodes: Sequence[StepNode], work_s: list[float]) -> None:
        self.request = request
        self.plan: RequestPlan = request.plan
        self.lock = threading.Lock()
        self.values: dict[Place, Array] = {}
        self.reads: dict[Place, int] = {}
        self.needs = [len(node.needs) for node in nodes]
        self.path_s = [0.0] * len(nodes)
        self.work_s = work_s
        self.promised_s = list(work_s)
        self.todo: deque[_StepRun] = deque()
        self.step_runs: dict[int, _StepRun] = {}
        self.done = 0
        self.began_s = self.forecast_s = 0.0
        self.nbytes = request.nbytes
        self.is_going_on = False
        self.is_over = False

    def has_ended(self) -> bool:
        """Whether it was answered meanwhile."""
        return self.is_over


def chain_model(name: str, *, max_queue_rows: int, max_queue_bytes: int, metrics: ModelMetrics) -> ScheduledModel:
    """Make a pipeline's queue of requests that wait before their first step. The bounds hold for these."""
    layout = Layout(None, concurrency=0)
    return ScheduledModel(name, layout, max_queue_rows=max_queue_rows, max_queue_bytes=max_queue_bytes, metrics=metrics)


class Chain:
    """Runs the requests of one pipeline. `Dispatcher.close_model` drains it, `end_all` ends what is left."""

    def __init__(
        self,
        pipeline: Pipeline,
        spec: ModelSpec,
        *,
        scheduled: ScheduledModel,
        infer: Infer,
        table: ModelTable,
        dispatcher: Dispatcher,
        clock: Clock,
        metrics: Metrics,
        python_steps: Mapping[str, Servable] | None = None,
    ) -> None:
        """scheduled: as `chain_model` makes it. python_steps: by step, servables that belong to this pipeline alone.

        metrics: the daemon's.
        """
        self.pipeline = pipeline
        asked = (AskedModel(step.model, step.version) for step in pipeline.steps if step.model is not None)
        self._asks = tuple(dict.fromkeys(asked))
        self._spec = spec
        self._scheduled = scheduled
        self._infer = infer
        self._dispatcher = dispatcher
        self._clock = clock
        self._metrics = metrics
        self._python_steps = list((python_steps or {}).values())
        self._steps = ChainSteps(pipeline, spec, table, dict(python_steps or {}))
        self._step_metrics = [scheduled.metrics.step(step.name) for step in pipeline.steps]
        self._outputs = [pipeline.outputs[each.name] for each in spec.outputs]
        self._lock = threading.Lock()
        # Under the lock: what is under way, with the sums that `may_begin_chain` reads.
        self._running: dict[Request, _Running] = {}
        self._rows = self._nbytes = 0
        self._work_s = 0.0
        self._slowness = _Slowness()
        self._begins = False
        self._begins_again = False

    @property
    def asks(self) -> Sequence[AskedModel]:
        """Return whom its steps ask."""
        return self._asks

    def fields(self) -> dict[str, Any]:
        """Return the pipeline as metadata has it."""
        return {"pipeline": pipeline_fields(self.pipeline)}

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return no numbers of its own: its steps' are their models'."""
        return {}

    def submit(self, request: Request) -> None:
        """Begin a request, or have it wait before its first step.

        Raises Draining, QueueFull, DeadlineUnmeetable: the whole cannot make its deadline, and nothing has run.
        """
        forecast_s = self._check_deadline(request) if request.timeout_s != math.inf else 0.0
        with self._lock:
            may_begin = not self._scheduled.queue.rows and self._may_begin(self._flow(request.rows), request)
            if may_begin:
                self._dispatcher.begin_chain(self._scheduled)
                running = self._count(request)
        if may_begin:
            self._begin(running, forecast_s)
        else:
            self._dispatcher.queue_chain(self._scheduled, request)
            self._begin_waiting()  # what was under way may have ended meanwhile

    def cancel(self, request: Request) -> bool:
        """Refuse a request as cancelled, and take back those of its steps that wait; False: it was answered already."""
        if self._dispatcher.cancel(self._scheduled, request):
            return True
        running = self._running.get(request)
        return running is not None and self._end(running, Cancelled("cancelled by its caller"))

    def drop(self, sender: Hashable) -> int:
        """End what is under way of a sender that is gone; how many."""
        with self._lock:
            found = [each for each in self._running.values() if each.request.sender == sender]
        return sum(self._end(each, Cancelled("its sender is gone")) for each in found)

    def end_all(self) -> None:
        """Refuse what is under way, and what waits for its Python steps: the pipeline is closed, and had its time."""
        with self._lock:
            found = list(self._running.values())
        for running in found:
            self._end(running, Draining("stopped before this request was answered; send it again later"))
        for servable in self._python_steps:
            self._dispatcher.close_model(servable.scheduled, 0.0)

    def seed(self, rows: Sequence[int]) -> None:
        """Begin the pipeline's curve by those of its steps, for requests of these rows. Once, at load."""
        for each in rows:
            path_s = critical_path(self.pipeline, self._steps.runs_s(each)).seconds
            if path_s:
                self._scheduled.layout.run_times.observe(each, path_s)

    # ---- before the first step ---------------------------------------------------------------------------------------

    def _check_deadline(self, request: Request) -> float:
        """Return the forecast of the whole, as the runs alone say. Raises DeadlineUnmeetable: it is too late."""
        by_runs_s = self._forecast_s(request)
        forecast_s = by_runs_s * self._slowness.most
        if policy.is_meetable(0.0, forecast_s, request.timeout_s, request.nbytes, is_step=request.is_step):
            return by_runs_s
        if self._dispatcher.is_idle() and not self._dispatcher.is_slowed:
            # No run would correct this forecast: as in `Dispatcher.admit`.
            self._slowness.relax()
            self._steps.relax()
        raise DeadlineUnmeetable(
            f"forecast {forecast_s * 1e3:.1f} ms for all steps, timeout {request.timeout_s * 1e3:.1f} ms",
            retry_after_ms=max(forecast_s - request.timeout_s * ADMISSION_MARGIN, 0.0) * 1e3,
        )

    def _forecast_s(self, request: Request, *, is_first: bool = False) -> float:
        """Seconds until a request that comes now is answered. is_first: it begins, before all that wait."""
        queued = self._steps.queued()
        models = [servable.scheduled for _, servable in queued]
        rows, load, waits_s = self._dispatcher.chain_load(self._scheduled, models, request)
        waiting_s = sum(self._steps.work_s(rows)) if rows and not is_first else 0.0
        earliest_s = {node.step.name: wait_s for (node, _), wait_s in zip(queued, waits_s, strict=True)}
        path_s = critical_path(self.pipeline, self._steps.runs_s(request.rows), earliest_s).seconds
        return policy.forecast_chain_s(ChainLoad(load.promised_s, waiting_s), path_s, self._dispatcher.cores)

    def _flow(self, rows: int) -> ChainFlow:
        """Return the requests under way. rows: of one request, as many requests of a step that does not batch."""
        full = self._steps.rows_at_once(rows, self._dispatcher.cores)
        work_s = self._work_s * self._slowness.mean
        return ChainFlow(self._rows, full, work_s, self._nbytes, self._scheduled.max_queue_bytes)

    def _may_begin(self, flow: ChainFlow, request: Request) -> bool:
        return policy.may_begin_chain(flow, request.timeout_s, self._dispatcher.cores)

    def _begin_waiting(self) -> None:
        """Begin what waits, as far as it may. Returns at once where a call of it is on, which then looks again."""
        with self._lock:
            self._begins_again = True
            if self._begins:
                return
            self._begins = True
        while True:
            with self._lock:
                self._begins_again = False
                may_begin = partial(self._may_begin, self._flow(1))
                request, expired = self._dispatcher.next_chain(self._scheduled, may_begin)
                if request is None and not expired and not self._begins_again:
                    self._begins = False
                    return
                running = self._count(request) if request is not None else None
            now_s = self._clock.monotonic_s()
            for each in expired:
                each.refuse(deadline_exceeded(each.arrived_s, each.timeout_s, now_s))
            if running is None or request is None:
                continue
            forecast_s = self._forecast_s(request, is_first=True) if request.deadline_s != math.inf else 0.0
            if now_s + forecast_s * self._slowness.most > request.deadline_s:
                # Before it costs a run: what was forecast at its admission took longer.
                self._end(running, deadline_exceeded(request.arrived_s, request.timeout_s, now_s))
                continue
            self._begin(running, forecast_s)

    def _count(self, request: Request) -> _Running:
        """Count a request as under way. Under the lock."""
        work_s = self._steps.work_s(request.rows)
        running = _Running(request, self._steps.nodes, work_s)
        self._running[request] = running
        self._rows += request.rows
        self._nbytes += running.nbytes
        self._work_s += sum(work_s)
        return running

    def _begin(self, running: _Running, forecast_s: float) -> None:
        """Ask the steps that need nothing but the inputs. Never raises. forecast_s: until its end; 0: not made."""
        request = running.request
        running.began_s, running.forecast_s = self._clock.monotonic_s(), forecast_s
        self._dispatcher.promise(sum(running.promised_s))
        # Memory that its client may change meanwhile is read once.
        copies = running.plan.copies_shared
        for spec, array in zip(self._spec.inputs, request.inputs, strict=True):
            place = Place(INPUT, spec.name)
            if place in self._steps.reads:
                running.values[place] = array.copy() if copies else array
        running.reads = dict(self._steps.reads)
        running.todo.extend(_StepRun(node) for node in self._steps.nodes if not node.needs)
        self._go_on(running)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _go_on(self, running: _Running) -> None:
        """Ask what can be asked now. Returns at once where another call does it, which then goes on. Never raises."""
        while True:
            with running.lock:
                if running.is_going_on or running.is_over:
                    return
                if not running.todo:
                    if running.done < len(self._steps.nodes):
                        return
                    running.is_going_on = True  # until its end: nobody else completes it
                    break
                running.is_going_on = True
                step_run = running.todo.popleft()
            try:
                self._ask(running, step_run)
            except Exception as error:  # noqa: BLE001 (its client's answer; failure_of logs it)
                what = f"step {step_run.node.step.name} of pipeline {self._scheduled.name} could not be asked"
                self._fail(running, step_run.node, failure_of(error, what))
            with running.lock:
                running.is_going_on = False
        self._complete(running)

    def _ask(self, running: _Running, step_run: _StepRun) -> None:
        """Submit the requests of a step, or the next ones of a map; a step that is not to run is done at once."""
        pieces = step_run.pieces or self._prepare(running, step_run)
        if pieces is None:
            return
        while True:
            with running.lock:
                if running.is_over or step_run.following >= len(pieces) or len(step_run.requests) >= ASKED_AT_ONCE:
                    return
                index = step_run.following
                step_run.following += 1
            self._submit(running, step_run, index, pieces[index])
            if len(pieces) == 1:
                return

    def _prepare(self, running: _Running, step_run: _StepRun) -> Pieces | None:
        """Cut the step's inputs into requests. None: it is not to run, and is done."""
        node, step = step_run.node, step_run.node.step
        servable = self._steps.servable(node)
        values = running.values
        pieces: Pieces | None = None
        if step.when is None or step.when.holds(values[step.when.place]):
            pieces = make_pieces(step, values, servable.max_rows if servable.batches else 1)
            is_empty = any(array.ndim and not len(array) for array in pieces.inputs.values())
            if not len(pieces) or (is_empty and step.python is None):
                pieces = None
            elif len(pieces) > 1 and servable.sequences is not None:
                raise Unsupported(
                    f"it asks model '{servable.model}', which keeps state, {len(pieces)} times for one request; a "
                    "sequence goes on once for each: take map out, or send one row"
                )
        node.observe_rows((pieces.items or running.request.rows) if pieces is not None else 0)
        if pieces is not None:
            step_run.pieces = pieces
            step_run.open_count = len(pieces)
            step_run.parts = [{}] * step_run.open_count
        with running.lock:
            promised_s, running.promised_s[node.index] = running.promised_s[node.index], 0.0
            running.step_runs[node.index] = step_run
        self._dispatcher.promise(-promised_s)
        if pieces is None:
            specs = {spec.name: spec for spec in self._steps.specs(node)}
            self._step_done(running, step_run, {name: no_rows(specs[name]) for name in node.wanted})
        return pieces

    def _submit(self, running: _Running, step_run: _StepRun, index: int, inputs: Mapping[str, Array]) -> None:
        whole, now_s = running.request, self._clock.monotonic_s()
        if now_s >= whole.deadline_s:
            raise deadline_exceeded(whole.arrived_s, whole.timeout_s, now_s)
        way = self._steps.way(step_run.node, whole, inputs)
        arrays = list(inputs.values())
        reply = CallbackReply(partial(self._step_ended, running, step_run, index))
        request = Request(
            way.header, arrays, tensor_bytes(arrays), reply, whole.sender, now_s, self._metrics, whole.origin.of_step
        )
        request.longest_s = whole.deadline_s - now_s
        request.sequence = whole.sequence
        if whole.trace is not None:
            whole.trace.begin_step(request, step_run.node.step.name)
        with running.lock:
            if running.is_over:
                return
            step_run.requests[index] = request
        plan = self._infer.submit(request, way.plan)
        way.keep(plan)
        if plan is not None and running.has_ended():  # it ended while this was on its way into a queue
            plan.servable.cancel(request)

    def _step_ended(
        self, running: _Running, step_run: _StepRun, index: int, request: Request | EdgeRuntimeError
    ) -> None:
        """Keep the outputs of one request, and go on; end the whole where it was refused. Thread: whichever ends it."""
        if isinstance(request, EdgeRuntimeError):
            with running.lock:
                step_run.requests.pop(index, None)
            self._fail(running, step_run.node, request)
            return
        plan: RequestPlan = request.plan
        names = (plan.servable.spec.outputs[each].name for each in plan.outputs)
        part = dict(zip(names, plan.select(request.outputs), strict=True))
        with running.lock:
            if running.is_over:
                return
            was_full = len(step_run.requests) >= ASKED_AT_ONCE
            step_run.requests.pop(index, None)
            step_run.parts[index] = part
            step_run.open_count -= 1
            step_run.longest_s = max(step_run.longest_s, request.run_s)
            step_run.run_s += request.run_s
            if was_full:
                running.todo.append(step_run)
            is_done = not step_run.open_count
        self._step_metrics[step_run.node.index].answered(request.queue_s, request.run_s)
        if is_done:
            try:
                self._step_done(running, step_run, join_pieces(step_run.parts))
            except EdgeRuntimeError as error:
                self._fail(running, step_run.node, error)
                return
        self._go_on(running)

    def _step_done(self, running: _Running, step_run: _StepRun, outputs: Mapping[str, Array]) -> None:
        """Hand a step's outputs to those that read them, and drop those without further readers."""
        node, step = step_run.node, step_run.node.step
        nbytes = tensor_bytes(outputs.values())
        with running.lock:
            if running.is_over:
                return
            running.step_runs.pop(node.index, None)
            before_s = max([running.path_s[need] for need in node.needs], default=0.0)
            # The requests of a map run side by side, as far as there are cores.
            running.path_s[node.index] = before_s + max(step_run.longest_s, step_run.run_s / self._dispatcher.cores)
            for name, array in outputs.items():
                if (place := Place(step.name, name)) in running.reads:
                    running.values[place] = array
            for place in node.reads:
                running.reads[place] -= 1
                if not running.reads[place]:
                    nbytes -= tensor_bytes((running.values.pop(place),))
            running.done += 1
            running.nbytes += nbytes
            work_s, running.work_s[node.index] = running.work_s[node.index], 0.0
            for follower in node.followers:
                running.needs[follower] -= 1
                if not running.needs[follower]:
                    running.todo.append(_StepRun(self._steps.nodes[follower]))
        with self._lock:
            self._nbytes += nbytes
            self._work_s -= work_s

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _fail(self, running: _Running, node: StepNode, error: EdgeRuntimeError) -> None:
        """End the whole with a step's error, under the step's name."""
        if isinstance(error, DeadlineUnmeetable) and running.done:
            # Admitted, and too late after all: work was done on it.
            failed: EdgeRuntimeError = DeadlineExceeded(error.message)
        else:
            failed = copy.copy(error)
        failed.message = shortened(f"step {node.step.name}: {error.message}")
        failed.args = (failed.message,)
        self._end(running, failed)

    def _complete(self, running: _Running) -> None:
        request, now_s = running.request, self._clock.monotonic_s()
        if now_s > request.deadline_s:
            self._end(running, deadline_exceeded(request.arrived_s, request.timeout_s, now_s))
            return
        request.outputs = [running.values[place] for place in self._outputs]
        request.run_s = max(running.path_s)
        request.queue_s = max(now_s - request.arrived_s - request.run_s, 0.0)
        request.batch_rows = request.rows
        self._end(running, None)

    def _end(self, running: _Running, error: EdgeRuntimeError | None) -> bool:
        """Answer the whole once, cancel what its steps still ask for, and begin what waits; False: it was answered."""
        request = running.request
        with running.lock:
            if running.is_over:
                return False
            running.is_over = True
            left = [each for step_run in running.step_runs.values() for each in step_run.requests.values()]
            promised_s, work_s = sum(running.promised_s), sum(running.work_s)
            running.step_runs.clear()
            running.todo.clear()
            running.values = {}
        for each in left:
            if each.plan is not None:
                each.plan.servable.cancel(each)
        with self._lock:
            del self._running[request]
            self._rows -= request.rows
            self._nbytes -= running.nbytes
            self._work_s = self._work_s - work_s if self._running else 0.0
            learns = not self._dispatcher.is_slowed  # else the times are those of steps that were held back
            if error is None and learns:
                self._scheduled.layout.run_times.observe(request.rows, request.run_s)
        if not learns:
            self._dispatcher.teach_apart(self._scheduled)
        if learns and running.forecast_s and (error is None or isinstance(error, DeadlineExceeded)):
            self._slowness.observe((self._clock.monotonic_s() - running.began_s) / running.forecast_s)
        if error is None:
            request.error = None
            request.plan.metrics.run(request.rows, request.run_s)
            request.complete()
        elif isinstance(error, QueueFull | DeadlineUnmeetable) and not running.done and not request.is_step:
            self._dispatcher.refuse(request, error)
        else:
            request.refuse(error)
        self._dispatcher.end_chain(self._scheduled, promised_s)
        self._begin_waiting()
        return True
