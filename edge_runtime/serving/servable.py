"""One version able to answer: its instance, its queue or its inline buffers, and its counters.

Owns: the instance from ready to close. Knows no wire and no folder. `submit` may be called from any thread; inline runs
are serialised by a lock of their own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Literal, Protocol

import numpy as np

from edge_runtime.backends.base import Bound, Instance
from edge_runtime.clock import Clock
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import DeadlineExceeded, Draining, EdgeRuntimeError, RunFailed
from edge_runtime.model_spec import ModelSpec
from edge_runtime.scheduling.dispatcher import Dispatcher, ScheduledModel
from edge_runtime.scheduling.queue import Answer, Pending
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.tensors import DATATYPES, Array, element_count

Mode = Literal["inline", "workers"]


@dataclass(frozen=True, slots=True)
class Layouts:
    """The instances of one version: `narrow` under load; `wide` (more threads a run) for an idle machine, or None."""

    narrow: Instance
    wide: Instance | None = None

    def close(self) -> None:
        """Give all memory back."""
        self.narrow.close()
        if self.wide is not None:
            self.wide.close()


class Follower(Protocol):
    """Hears of every request that a servable admits."""

    def follow(self, request: Pending) -> None:
        """A request is about to be admitted; its `settle` may be put inside another. Thread: any; must not block."""
        ...


class InlineBuffers:
    """The bound buffers of an inline model as bytes, so that a batch is one join in and one unpack a tensor out.

    Thread: under the servable's inline lock.
    """

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
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
        self._bound.run(rows)

    def run(self, parts: Sequence[Sequence[bytes]], rows: int) -> None:
        """Run on several inputs: `parts` holds each request's inputs in the model's order."""
        for target, column in zip(self._inputs, zip(*parts, strict=True), strict=True):
            joined = b"".join(column)
            target[: len(joined)] = joined
        self._bound.run(rows)

    def unpack(self, outputs: Sequence[tuple[int, Struct]], rows: int) -> Sequence[tuple[bytes, ...]]:
        """The outputs wanted, cut into requests: for each its index and a Struct that holds one request's share."""
        columns = [
            row.iter_unpack(self._outputs[index][: rows * self.output_row_bytes[index]]) for index, row in outputs
        ]
        if len(columns) == 1:
            return list(columns[0])
        return [tuple(part for (part,) in parts) for parts in zip(*columns, strict=True)]


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
    ) -> None:
        """warm_length: what its dynamic inner axes were given in its first runs; None where none could be made."""
        self.model = model
        self.number = number
        self.settings = settings
        self.layouts = layouts
        self.spec: ModelSpec = layouts.narrow.spec
        self.batches = batches
        self.mode: Mode = mode
        self.max_rows = max_rows
        self.warm_length = warm_length
        self.inline = inline
        self.scheduled = scheduled
        self.metrics = metrics
        self.inline_lock = threading.Lock()
        self.is_open = True
        self.follower: Follower | None = None
        self.used_s = clock.monotonic_s()
        self._dispatcher = dispatcher
        self._clock = clock

    @property
    def memory_bytes(self) -> int:
        """Memory that this version holds."""
        wide = self.layouts.wide
        return self.layouts.narrow.memory_bytes + (wide.memory_bytes if wide is not None else 0)

    def submit(self, request: Pending) -> None:
        """Admit a checked request, or refuse it at once; an inline model answers before this returns.

        Raises Refused (Draining means: this version was replaced, resolve the model again). Once this returns,
        `request.settle` is or will be called exactly once. Thread: any.
        """
        self.used_s = request.arrived_s
        if self.follower is not None:
            self.follower.follow(request)
        self.submit_unseen(request)

    def submit_unseen(self, request: Pending) -> None:
        """As `submit`, for a request that nobody made: the model does not look used, and no follower hears of it."""
        if self.mode == "inline":
            self._run_here(request)
        else:
            self._dispatcher.admit(self.scheduled, request)

    def cancel(self, request: Pending) -> bool:
        """Take a waiting request back; False when it is too late."""
        return self.mode == "workers" and self._dispatcher.cancel(self.scheduled, request)

    def close(self, timeout_s: float) -> bool:
        """Stop admitting, answer what was admitted, give the memory back; True when nothing had to be refused."""
        with self.inline_lock:
            self.is_open = False
        drained = self._dispatcher.close_model(self.scheduled, timeout_s)
        self.layouts.close()
        return drained

    def _run_here(self, request: Pending) -> None:
        """Run one request alone on the calling thread: an inline model off the lean path (JSON, in process)."""
        with self.inline_lock:
            if not self.is_open:
                raise Draining(f"model {self.model} version {self.number} was replaced")
            started_s = self._clock.monotonic_s()
            run_s = self.scheduled.layout.run_times.predict_s(request.rows)
            if started_s + run_s > request.deadline_s:
                outcome: Answer | EdgeRuntimeError = DeadlineExceeded("the deadline passed before the run")
            else:
                outcome = self._outcome(request, started_s)
        request.settle(request, outcome)

    def _outcome(self, request: Pending, started_s: float) -> Answer | EdgeRuntimeError:
        try:
            outputs = self.scheduled.layout.run(request.inputs)
        except EdgeRuntimeError as error:
            return error
        except Exception as error:  # noqa: BLE001 (a library's failure is this request's answer, not ours to die of)
            return RunFailed(f"{type(error).__name__}: {error}")
        finished_s = self._clock.monotonic_s()
        if finished_s > request.deadline_s:
            return DeadlineExceeded("the run ended after the deadline")
        self.metrics.run(request.rows, finished_s - started_s)
        return Answer(outputs, started_s - request.arrived_s, finished_s - started_s, request.rows)


def run_in_order(instance: Instance, *, batches: bool = False) -> Callable[[Sequence[Array]], list[Array]]:
    """An instance's run as the dispatcher wants it: arrays in the model's order, no names.

    batches: rows do not influence each other, so that more of them than the instance takes are run in pieces.
    """
    names = [spec.name for spec in instance.spec.inputs]
    run = instance.run

    def run_arrays(arrays: Sequence[Array]) -> list[Array]:
        return run(dict(zip(names, arrays, strict=True)))

    most = instance.spec.max_rows
    if most is None or not batches:
        return run_arrays

    def run_in_pieces(arrays: Sequence[Array]) -> list[Array]:
        rows = arrays[0].shape[0]
        if rows <= most:
            return run_arrays(arrays)
        pieces = [run_arrays([array[start : start + most] for array in arrays]) for start in range(0, rows, most)]
        return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]

    return run_in_pieces


def row_bytes(spec: ModelSpec) -> int:
    """Bytes of one row over all inputs; 0 where a row has no fixed size."""
    if not all(tensor.has_fixed_inner_shape for tensor in spec.inputs):
        return 0
    return sum(element_count(tensor.shape[1:]) * DATATYPES[tensor.datatype].itemsize for tensor in spec.inputs)


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view("u1").data


def _row_bytes(array: Array) -> int:
    return math.prod(array.shape[1:]) * array.itemsize
