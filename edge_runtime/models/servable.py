"""One version able to answer: its instances, its queue or its inline buffers, and its counters.

Owns: the instances from ready to close. Knows no wire and no folder. `submit` may be called from any thread; a lock
serialises inline runs.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr

from edge_runtime.backends.base import Bound, HostedInstance, HostStatus, Instance
from edge_runtime.clock import Clock
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import Draining, EdgeRuntimeError, RunTooLong
from edge_runtime.kept_state import SEQUENCE_STATE, STATE_FORM
from edge_runtime.messages import RAW, RequestHeader, TensorHeader
from edge_runtime.model_spec import ModelSpec
from edge_runtime.models.folder import FolderConfig
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.request import Request
from edge_runtime.request.scheduled_model import (
    BegunRun,
    Job,
    LatencyModel,
    Layout,
    Runner,
    RunResult,
    ScheduledModel,
)
from edge_runtime.request.worker import check_in_time, give_result, join, run_batch
from edge_runtime.steps import Form, InputKind, ModelSteps, Preset
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.tensors import DATATYPES, Array, element_count
from edge_runtime.wire.codec import typed

if TYPE_CHECKING:
    from edge_runtime.models.builds import Conversion

log = logging.getLogger(__name__)

Mode = Literal["inline", "workers", "pipeline"]

RUN_GRACE_S = 1.0
"""A run inside the daemon, whose requests have been refused, has this long to end before its memory is given up."""


class Shadow(Protocol):
    """Sees the requests of a version before they are admitted, while a candidate is tried beside it."""

    def follow(self, request: Request) -> None:
        """Hear how a request ends. Thread: any."""
        ...

    def close(self) -> None:
        """Hear no more. Thread: the loader's."""
        ...


class AskedModel(NamedTuple):
    """A model that a servable asks. version: None for the one that answers without a number."""

    model: str
    version: int | None


class ModelChain(Protocol):
    """Answers the requests of a servable by asking other models, as a pipeline's does, or its own host. Thread: any."""

    @property
    def asks(self) -> Sequence[AskedModel]:
        """Return whom its steps ask, each once, in the order of the steps."""
        ...

    def submit(self, request: Request) -> None:
        """Begin a request, or have it wait. Raises as `Servable.submit`."""
        ...

    def cancel(self, request: Request) -> bool:
        """Refuse a request as cancelled, with the requests of its steps; False: it was answered already."""
        ...

    def drop(self, sender: Hashable) -> int:
        """End the requests under way of a sender that is gone; how many."""
        ...

    def end_all(self) -> None:
        """Refuse the requests under way: their servable is closed, and had its time."""
        ...

    def fields(self) -> dict[str, Any]:
        """Describe it, by keys that metadata has beside those of every model."""
        ...

    def gauges(self) -> Mapping[str, Callable[[], float]]:
        """Return how numbers are read that its model's metrics have beside those of every model."""
        ...


class SequenceTable(Protocol):
    """The live sequences of a servable, and of its forms. Thread: any.

    on_over: called when the last has ended; must not wait.
    """

    on_over: Callable[[], None]

    def enter(self, request: Request) -> None:
        """Give a request its line and the row that its run needs. Raises SequenceLost, TensorMismatch, QueueFull."""
        ...

    def leave(self, request: Request) -> None:
        """Undo `enter`: the request was not admitted."""
        ...

    def has(self, sequence: int | str) -> bool:
        """Whether a sequence is live here."""
        ...

    def is_over(self) -> bool:
        """Whether every sequence has ended; those that are idle for too long end by that."""
        ...


class Layouts(Struct, frozen=True):
    """The instances of one version: `narrow` under load; `wide` (more threads a run) for an idle machine, or None.

    others: those of a pipeline beside its models, the host of its Python steps. hosted: of all these, those in hosts;
    found out once: to look whether an object has a protocol's members reads its host's status.
    """

    narrow: Instance
    wide: Instance | None = None
    others: tuple[Instance, ...] = ()
    hosted: tuple[HostedInstance, ...] = ()

    def __post_init__(self) -> None:
        instances: list[object] = [self.narrow, self.wide, *self.others]
        force_setattr(self, "hosted", tuple(each for each in instances if isinstance(each, HostedInstance)))

    def holds(self, instance: object) -> bool:
        """Whether an instance is one of these."""
        return any(each is instance for each in (self.narrow, self.wide, *self.others))

    def host(self) -> HostStatus | None:
        """Return the status of its instances' hosts, as one; None where they run inside the daemon."""
        found = [each.host for each in self.hosted]
        if not found:
            return None
        return HostStatus(
            found[0].pid,
            sum(each.restarts for each in found),
            sum(each.memory_bytes for each in found),
            next((each.last_end for each in found if each.last_end), ""),
            found[0].models,
        )

    def close(self) -> None:
        """Free all memory."""
        self.narrow.close()
        for each in (self.wide, *self.others):
            if each is not None:
                each.close()


class InlineBuffers:
    """The bound buffers of an inline model as bytes: a batch is one join per input and one unpack per output.

    Thread: under the servable's inline lock.
    """

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self._inputs = [_bytes_of(array) for array in bound.inputs]
        self._outputs = [_bytes_of(array) for array in bound.outputs]
        self.input_row_bytes = tuple(_row_bytes(array) for array in bound.inputs)
        self.output_row_bytes = tuple(_row_bytes(array) for array in bound.outputs)
        self.output_inner_shapes = tuple(array.shape[1:] for array in bound.outputs)
        self.max_rows = bound.max_rows

    def run_single(self, parts: Sequence[bytes], rows: int) -> None:
        """Run on the rows of a model's only input: each part a whole number of rows, `rows` their sum."""
        joined = b"".join(parts)
        self._inputs[0][: len(joined)] = joined
        self.bound.run(rows)

    def run(self, parts: Sequence[Sequence[bytes]], rows: int) -> None:
        """Run on several inputs: `parts` holds each request's inputs in the model's order."""
        for destination, column in zip(self._inputs, zip(*parts, strict=True), strict=True):
            joined = b"".join(column)
            destination[: len(joined)] = joined
        self.bound.run(rows)

    def unpack(self, outputs: Sequence[tuple[int, struct.Struct]], rows: int) -> Sequence[tuple[bytes, ...]]:
        """Cut the wanted outputs into requests. outputs: for each its index, and a Struct of one request's share."""
        columns = [
            row.iter_unpack(self._outputs[index][: rows * self.output_row_bytes[index]]) for index, row in outputs
        ]
        if len(columns) == 1:
            return list(columns[0])
        return [tuple(part for (part,) in parts) for parts in zip(*columns, strict=True)]


BARE = Form("tensor", answers=False)
"""Tensors in, tensors out."""


class About(Struct, frozen=True):
    """The facts of a version beside its runner.

    config: its settings of another server. labels: by output, which these name, of a pipeline also those that its steps
    have; those of declared steps are in `steps`. steps: those declared with the model. offered: the preset that its
    metadata holds, where no steps are. conversion: of its file at load, where no backend reads that. why: the choice of
    its backend, in a sentence; empty where there was none.
    """

    config: FolderConfig | None = None
    labels: Mapping[str, Sequence[str]] = {}
    steps: ModelSteps | None = None
    offered: Preset | None = None
    conversion: Conversion | None = None
    why: str = ""


class Servable:
    """One ready version. Built by loading.py, closed once by its owner after it left the live table."""

    def __init__(
        self,
        model: str,
        number: int,
        settings: ModelSettings,
        layouts: Layouts,
        *,
        batches: bool,
        mode: Mode,
        max_rows: int,
        inline: InlineBuffers | None,
        scheduled: ScheduledModel,
        dispatcher: Dispatcher,
        clock: Clock,
        metrics: ModelMetrics,
        warm_length: int | None = None,
        about: About | None = None,
        form: Form = BARE,
        chain: ModelChain | None = None,
        forms: Mapping[Form, Servable] | None = None,
        owned: tuple[Servable, ...] = (),
        sequences: SequenceTable | None = None,
    ) -> None:
        """warm_length: the length of dynamic inner axes in its warm-up; None where no input could be made.

        form: in which it is asked.
        forms: who answers requests that use steps: servables of their own queue, whose runs go to the same host.
        owned: the models that a pipeline brought with it, which are closed after it.
        chain: answers in its place; with `inline` buffers, too, bursts of its known headers run there.
        sequences: of a model that keeps state, shared with its forms.
        """
        self.model = model
        self.number = number
        self.settings = settings
        self.layouts = layouts
        self.spec: ModelSpec = layouts.narrow.spec
        self.about = about if about is not None else About()
        self.steps = self.about.steps
        self.form = form
        self.forms = forms or {}
        self.owned = owned
        self.batches = batches
        self.mode: Mode = mode
        self.max_rows = max_rows
        self.warm_length = warm_length
        self.inline = inline
        self.chain = chain
        self.sequences = sequences
        self.scheduled = scheduled
        self.metrics = metrics
        self.inline_lock = threading.Lock()
        self.is_open = True
        self.mirror: Shadow | None = None
        self.used_s = clock.monotonic_s()
        self._dispatcher = dispatcher
        self._clock = clock
        instance: object = layouts.narrow
        self._hosted = next((each for each in layouts.hosted if each is instance), None)

    @property
    def is_hosted(self) -> bool:
        """Whether its runs go to a host."""
        return self._hosted is not None

    @property
    def idle_s(self) -> float:
        """Time since its last request, or since it was loaded."""
        return self._clock.monotonic_s() - self.used_s

    @property
    def memory_bytes(self) -> int:
        """Memory that this version holds."""
        wide = self.layouts.wide
        return self.layouts.narrow.memory_bytes + (wide.memory_bytes if wide is not None else 0)

    @property
    def precision(self) -> str:
        """Of its floats, as read back after the load; "mixed" where models that a pipeline brought differ in it."""
        found = {part.precision for part in self.owned} or {self.layouts.narrow.precision}
        return found.pop() if len(found) == 1 else "mixed"

    def labels_of(self, output: str) -> Sequence[str]:
        """Return the labels of an output's classes, declared with its steps or by its config; empty: it has none."""
        return (self.steps.labels.get(output) if self.steps is not None else None) or self.about.labels.get(output, ())

    def form_for(self, header: RequestHeader) -> Servable:
        """Who answers a request: itself, or the form of the declared steps that its inputs and `raw` ask for.

        Raises DecodeFailed: `raw` is neither true nor false.
        """
        if self.sequences is not None and any(each.name == SEQUENCE_STATE for each in header.inputs):
            return self.forms.get(STATE_FORM, self)
        if not self.forms or self.steps is None:
            return self
        raw = typed(header.parameters or {}, RAW, bool, None)
        given: InputKind = "tensor"
        for tensor in header.inputs:
            if tensor.name in self.steps.inputs:
                given = self._kind_of(tensor, is_raw=raw is True) or given
        return self.forms.get(Form(given, answers=raw is False or (raw is None and given != "tensor")), self)

    def _kind_of(self, header: TensorHeader, *, is_raw: bool) -> InputKind | None:
        """The form that a tensor is sent in: one that it fits, else of its datatype; None: it is the model's own.

        A tensor that fits both, such as bytes of a small picture, is a form's, unless `is_raw`.
        """
        able = [
            each
            for form, each in self.forms.items()
            if form.kind != "tensor"
            and any(spec.name == header.name and spec.datatype == header.datatype for spec in each.spec.inputs)
        ]
        fitting = [each for each in able if _fits(each, header) and not each.why_unreadable(header)]
        if _fits(self, header) and (is_raw or not fitting):
            return None
        return next((each.form.kind for each in (*fitting, *able)), None)

    def why_unreadable(self, header: TensorHeader) -> str:
        """Return why the steps of this form cannot read a tensor that fits its spec; "" where they can."""
        declared = self.steps.inputs.get(header.name) if self.steps is not None else None
        return "" if declared is None else declared.why_unreadable(self.form.kind, header.shape)

    def submit(self, request: Request) -> None:
        """Admit a checked request, or refuse it at once; an inline model answers before this returns.

        Raises Refused (Draining means: this version was replaced, resolve the model again). Once this returns, the
        request is or will be completed or refused exactly once. Thread: any.
        """
        if not request.origin.is_check:
            self.used_s = request.arrived_s
            if self.mirror is not None and self.sequences is None:  # a copy has no state to continue
                try:
                    self.mirror.follow(request)
                except Exception:  # a release's trial must not fail the requests of its model
                    log.exception("the mirror of model %s failed", self.model)
        if self.chain is not None:
            self.chain.submit(request)
        elif self.mode == "inline":
            self._run_here(request)
        elif self.sequences is not None:
            self._submit_step(self.sequences, request)
        else:
            self._dispatcher.admit(self.scheduled, request)

    def room(self, nbytes: int) -> memoryview | None:
        """Memory for an input that has not come, which its host reads in place; None where there is none.

        Contents are left over from another request of this model.
        """
        room = self._hosted.room(nbytes) if self._hosted is not None else None
        return None if room is None else room.data

    def cancel(self, request: Request) -> bool:
        """Take a waiting request back, or a pipeline's with all its steps; False when it is too late."""
        if self.chain is not None:
            return self.chain.cancel(request)
        return self.mode == "workers" and self._dispatcher.cancel(self.scheduled, request)

    def close(self, timeout_s: float) -> bool:
        """Stop admitting, answer admitted requests, free the memory; True when no request had to be refused.

        A run that is still on then ends with its host; inside the daemon nothing can end it.
        """
        with self.inline_lock:
            self.is_open = False
        until_s, drained = self._clock.monotonic_s() + timeout_s, True
        for each in (self, *self.forms.values()):  # they share the time
            left_s = max(until_s - self._clock.monotonic_s(), 0.0)
            drained = self._dispatcher.close_model(each.scheduled, left_s) and drained
        if self.chain is not None:
            self.chain.end_all()
        instances = [each for each in (self.layouts.narrow, self.layouts.wide) if each is not None]
        is_hosted = all(isinstance(each, HostedInstance) for each in instances)
        if is_hosted or self._dispatcher.wait_for_runs(self.scheduled, RUN_GRACE_S):
            self.layouts.close()
        else:  # freed under a run, it would end the daemon
            log.error("a run of model %s does not end; its memory is lost until a restart", self.model)
        return drained

    def _submit_step(self, sequences: SequenceTable, request: Request) -> None:
        """Admit a request of a sequence. Raises as `submit`, and then the sequence is as if it had not come."""
        sequences.enter(request)
        try:
            self._dispatcher.admit(self.scheduled, request)
        except EdgeRuntimeError:
            sequences.leave(request)
            raise

    def _run_here(self, request: Request) -> None:
        """Run one request alone on the calling thread: an inline model off the lean path (JSON, in process)."""
        layout = self.scheduled.layout
        with self.inline_lock:
            if not self.is_open:
                raise Draining(f"model {self.model} version {self.number} was replaced")
            started_s = self._clock.monotonic_s()
            check_in_time(layout.run_times, request.rows, request.arrived_s, request.timeout_s, started_s)
            job = Job(self.scheduled, layout, [request], request.rows, started_s, started_s)
            give_result(job, run_batch(job), self._clock)
        request.complete()


def _fits(servable: Servable, given: TensorHeader) -> bool:
    return any(
        spec.name == given.name and spec.datatype == given.datatype and spec.fits(given.shape)
        for spec in servable.spec.inputs
    )


def layout_of(
    instance: Instance,
    *,
    batches: bool = False,
    threads: int = 1,
    concurrency: int = 1,
    run_times: LatencyModel,
    run_limit_s: float | None = None,
    warm_row_bytes: int = 0,
) -> Layout:
    """Return how the dispatcher runs an instance: where it has a host, with a limit, another after it, and runs ahead.

    run_limit_s: None for the curve's.
    """
    runner: Runner = instance if isinstance(instance, HostedInstance) else InsideRunner(instance)
    most = instance.spec.max_rows
    layout = Layout(
        runner if most is None or not batches else PieceRunner(runner, most), threads, concurrency, run_times
    )
    by_request = instance.spec.by_request
    if by_request is not None:
        from edge_runtime.hosts.instance import HostInstance
        from edge_runtime.request.runs import STREAM_LIMIT_S, RequestRuns

        if isinstance(instance, HostInstance):
            layout.by_request = RequestRuns(instance)
            if by_request.streams and run_limit_s is None:
                run_limit_s = STREAM_LIMIT_S
    if isinstance(instance, HostedInstance):
        layout.run_limit_s = run_limit_s
        layout.warm_row_bytes = warm_row_bytes
        layout.ahead = instance.ahead
        layout.begins = instance.begins
    return layout


class InsideRunner:
    """Runs requests on an instance inside the daemon, where nothing can end a run."""

    def __init__(self, instance: Instance) -> None:
        self._names = [spec.name for spec in instance.spec.inputs]
        self._instance = instance

    def run_parts(
        self,
        parts: Sequence[Sequence[Array]],
        limit_s: float,  # noqa: ARG002 (nothing can hold it)
        *,
        alone: bool,  # noqa: ARG002
    ) -> list[Array]:
        """Join the parts and run them."""
        return self._instance.run(dict(zip(self._names, join(parts), strict=True)))

    def begin(
        self, parts: Sequence[Sequence[Array]], limit_s: float, owner: Job, on_end: Callable[[RunResult], None]
    ) -> BegunRun:
        """Nothing begins here: a thread runs it."""
        raise NotImplementedError

    def restore(self) -> None:
        """Nothing ends: there is no host."""


class PieceRunner:
    """Runs more rows than an instance takes in pieces: rows do not influence each other."""

    def __init__(self, runner: Runner, most_rows: int) -> None:
        self._runner = runner
        self._most_rows = most_rows

    def run_parts(self, parts: Sequence[Sequence[Array]], limit_s: float, *, alone: bool) -> list[Array]:
        """Run, in as many pieces as there have to be."""
        run, most = self._runner.run_parts, self._most_rows
        if sum(inputs[0].shape[0] for inputs in parts) <= most:
            return run(parts, limit_s, alone=alone)
        arrays = join(parts)
        starts = range(0, arrays[0].shape[0], most)
        pieces = [run([[array[start : start + most] for array in arrays]], limit_s, alone=alone) for start in starts]
        return [np.concatenate(column) for column in zip(*pieces, strict=True)]

    def begin(
        self, parts: Sequence[Sequence[Array]], limit_s: float, owner: Job, on_end: Callable[[RunResult], None]
    ) -> BegunRun:
        """Begin the first piece; each further one begins when that before it has ended."""
        most = self._most_rows
        if sum(inputs[0].shape[0] for inputs in parts) <= most:
            return self._runner.begin(parts, limit_s, owner, on_end)
        arrays = join(parts)
        pieces = [[array[start : start + most] for array in arrays] for start in range(0, arrays[0].shape[0], most)]
        return _PieceRun(self._runner, pieces, limit_s, owner, on_end)

    def restore(self) -> None:
        """Wait until the host that ended is replaced. Raises LoadFailed."""
        self._runner.restore()


class _PieceRun:
    """A run in pieces that was begun: its limit is that of the piece under way. Thread: any."""

    # Invariant: the piece of the highest number, for one may end, and the next begin, before its `begin` has returned.
    _piece: BegunRun

    def __init__(
        self,
        runner: Runner,
        pieces: list[list[Array]],
        limit_s: float,
        owner: Job,
        on_end: Callable[[RunResult], None],
    ) -> None:
        """Begin the first. pieces: the inputs of each, in order. Raises as `Runner.begin`."""
        self._runner = runner
        self._left = pieces
        self._limit_s = limit_s
        self._owner = owner
        self._on_end = on_end
        self._done: list[list[Array]] = []
        self._lock = threading.Lock()
        self._number = -1
        self._is_given_up = False
        self._begin_next()

    def left_s(self) -> float:
        """How long the piece under way may go on."""
        return self._piece.left_s()

    def give_up(self) -> None:
        """End the piece under way for its limit, and wait for that; none begins after it."""
        with self._lock:
            self._is_given_up = True
            piece = self._piece
        piece.give_up()

    def _begin_next(self) -> None:
        number, inputs = len(self._done), self._left.pop(0)
        piece = self._runner.begin([inputs], self._limit_s, self._owner, self._end)
        with self._lock:
            if number > self._number:
                self._number, self._piece = number, piece
            is_too_late = self._is_given_up
        if is_too_late:
            piece.give_up()

    def _end(self, result: RunResult) -> None:
        if not isinstance(result, list):
            self._on_end(result)
            return
        self._done.append(result)
        if not self._left:
            self._on_end([np.concatenate(column) for column in zip(*self._done, strict=True)])
            return
        if self._is_given_up:
            self._on_end(RunTooLong(f"the run took longer than its limit, {self._limit_s:g} s, and was ended"))
            return
        try:
            self._begin_next()
        except EdgeRuntimeError as error:
            self._on_end(error)


def row_bytes(spec: ModelSpec) -> int:
    """Bytes of one row over all inputs; 0 where a row has no fixed size."""
    if not all(tensor.has_fixed_inner_shape for tensor in spec.inputs):
        return 0
    return sum(element_count(tensor.shape[1:]) * DATATYPES[tensor.datatype].itemsize for tensor in spec.inputs)


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view("u1").data


def _row_bytes(array: Array) -> int:
    return math.prod(array.shape[1:]) * array.itemsize
