"""One engine, loaded: an Instance, its bound form, and the execution of runs with memory, shapes and graphs.

Owns: the engine, its execution contexts and buffers, and the difference between the declared and the engine's tensors.
Imports no library: backend.py passes it in.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_runtime.backends.row_buffers import RowLayout, row_layout
from edge_runtime.backends.tensorrt import BACKEND
from edge_runtime.backends.tensorrt.cuda import Buffer, Cuda
from edge_runtime.errors import BackendError, LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.tensors import DATATYPES, Array, Tensors

Shape = tuple[int, ...]

SAME_RUNS = 3
"""Runs of the same shapes before graph and plain runs are timed against each other."""

KNOWN_RUNS = 16
"""Runs of the same shapes before a quicker graph is recorded again: batches that change size with each run would
otherwise record more than they run."""

MEASURED_RUNS = 3
"""Timed runs of each kind; the quickest counts."""

LONGEST_RUN_S = 0.002
"""A graph saves the launches of kernels, some microseconds each: a longer run hardly gains, and is not measured."""

GRAPH_GAIN = 1.05
"""The least gain of a graph; less is noise."""


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """One input or output of an engine. datatype: the engine's own, by its wire name; shape: -1 where it is open.

    most_bytes: its size at the largest shapes of the profile.
    """

    name: str
    datatype: str
    shape: Shape
    most_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine from the backend. inputs and outputs: the engine's own, in the order of `spec`.

    engine: TensorRT's object. graphs: whether repeated runs may be recorded. keep: objects that outlive the engine.
    """

    cuda: Cuda
    engine: Any
    spec: ModelSpec
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    device: str
    precision: str
    memory_bytes: int
    graphs: bool = False
    keep: tuple[Any, ...] = ()


class Execution:
    """An execution context with its stream and buffers: where tensors lie, set shapes, a graph of repeated shapes.

    Every method raises RunFailed; the constructor LoadFailed too. Thread: one caller at a time; any thread.
    """

    def __init__(self, loaded_engine: LoadedEngine) -> None:
        self._cuda = loaded_engine.cuda
        self._inputs = loaded_engine.inputs
        self._outputs = loaded_engine.outputs
        self._may_record = loaded_engine.graphs
        self._cuda.use()
        engine = loaded_engine.engine
        self._context = engine.create_execution_context()
        if self._context is None:
            raise LoadFailed("TensorRT cannot make an execution context; is the GPU's memory full?")
        self._stream = self._cuda.new_stream()
        self._buffers: dict[str, Buffer] = {}
        self._shapes: tuple[Shape, ...] = ()
        self._output_shapes: list[Shape] = []
        self._same_runs = 0
        self._last_run_s = math.inf
        self._graph: Any = None
        self._gains: dict[tuple[Shape, ...], bool] = {}
        self._is_closed = False
        try:
            for tensor in (*self._inputs, *self._outputs):
                self._place(tensor, tensor.most_bytes)
        except BackendError:
            self.close()
            raise

    def view(self, tensor: EngineTensor, shape: Shape) -> Array:
        """The host's side of a tensor, at a shape; C-contiguous."""
        dtype = DATATYPES[tensor.datatype].dtype
        nbytes = math.prod(shape) * dtype.itemsize
        view: Array = self._buffers[tensor.name].host[:nbytes].view(dtype).reshape(shape)
        return view

    def input_views(self, shapes: Sequence[Shape]) -> list[Array]:
        """The arrays to write the next run's inputs to."""
        for tensor, shape in zip(self._inputs, shapes, strict=True):
            nbytes = _nbytes(tensor, shape)
            if nbytes > self._buffers[tensor.name].host.nbytes:
                raise RunFailed(
                    f"input {tensor.name!r} at {shape} is {nbytes} bytes, more than the engine was built for"
                )
        return [self.view(tensor, shape) for tensor, shape in zip(self._inputs, shapes, strict=True)]

    def run(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Run on the arrays of `input_views` with the same shapes; returns the outputs' shapes, to read with `view`."""
        if self._is_closed:
            raise RunFailed("the instance is closed")
        self._cuda.use()
        wanted = tuple(shapes)
        if wanted != self._shapes:
            self._set_shapes(wanted)
        self._same_runs += 1
        self._consider_graph()
        started = time.perf_counter()
        if self._graph is not None:
            self._cuda.launch(self._graph, self._stream)
        else:
            self._enqueue()
        self._cuda.wait(self._stream)
        self._last_run_s = time.perf_counter() - started
        return self._output_shapes

    def close(self) -> None:
        """Free the context, the stream and the graph; a buffer is freed with its last view. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._drop_graph()
        self._context = None
        self._cuda.end_stream(self._stream)
        self._buffers.clear()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _place(self, tensor: EngineTensor, nbytes: int) -> None:
        buffer = self._cuda.new_buffer(nbytes)
        self._buffers[tensor.name] = buffer
        if not self._context.set_tensor_address(tensor.name, buffer.device):
            raise LoadFailed(f"TensorRT does not take an address for {tensor.name!r}")

    def _set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        self._drop_graph()
        self._shapes, self._same_runs = (), 0
        for tensor, shape in zip(self._inputs, shapes, strict=True):
            if not self._context.set_input_shape(tensor.name, shape):
                raise RunFailed(f"the engine was not built for input {tensor.name!r} of shape {shape}")
        found = [tuple(self._context.get_tensor_shape(tensor.name)) for tensor in self._outputs]
        for tensor, shape in zip(self._outputs, found, strict=True):
            if DYNAMIC in shape:
                raise RunFailed(
                    f"output {tensor.name!r} has as many rows as its data has; TensorRT runs no such model here"
                )
            if _nbytes(tensor, shape) > self._buffers[tensor.name].host.nbytes:
                self._place(tensor, _nbytes(tensor, shape))
        self._shapes, self._output_shapes = shapes, found

    def _enqueue(self) -> None:
        """Enqueue one run on the stream: copies in, the engine, copies out."""
        for tensor, shape in zip(self._inputs, self._shapes, strict=True):
            self._cuda.copy_in(self._buffers[tensor.name], _nbytes(tensor, shape), self._stream)
        if not self._context.execute_async_v3(self._stream):
            raise RunFailed("TensorRT could not start the engine")
        for tensor, shape in zip(self._outputs, self._output_shapes, strict=True):
            self._cuda.copy_out(self._buffers[tensor.name], _nbytes(tensor, shape), self._stream)

    def _consider_graph(self) -> None:
        """Record a graph where shapes repeat and it is, or may be, quicker."""
        if not self._may_record or self._graph is not None or self._last_run_s > LONGEST_RUN_S:
            return
        known = self._gains.get(self._shapes)
        if known is None and self._same_runs >= SAME_RUNS:
            self._measure_graph()
        elif known and self._same_runs >= KNOWN_RUNS:
            self._graph = self._record()

    def _record(self) -> Any:
        """Record one run as a graph; None where that fails."""
        try:
            return self._cuda.record(self._stream, self._enqueue)
        except (RunFailed, RuntimeError):
            # Some engines wait for the GPU in the middle; from now on those run without a graph.
            self._may_record = False
            return None

    def _measure_graph(self) -> None:
        graph = self._record()
        if graph is None:
            return
        plain_s, graph_s = math.inf, math.inf
        for _ in range(MEASURED_RUNS):
            plain_s = min(plain_s, self._timed(None))
            graph_s = min(graph_s, self._timed(graph))
        self._gains[self._shapes] = graph_s * GRAPH_GAIN < plain_s
        if self._gains[self._shapes]:
            self._graph = graph
        else:
            self._cuda.end_graph(graph)

    def _timed(self, graph: Any) -> float:
        started = time.perf_counter()
        if graph is None:
            self._enqueue()
        else:
            self._cuda.launch(graph, self._stream)
        self._cuda.wait(self._stream)
        return time.perf_counter() - started

    def _drop_graph(self) -> None:
        if self._graph is not None:
            self._cuda.end_graph(self._graph)
            self._graph = None


def engine_tensors(
    module: Any, engine: Any, context: Any, most: Mapping[str, Shape]
) -> tuple[list[EngineTensor], list[EngineTensor]]:
    """Inputs and outputs of an engine, with their sizes at the largest shapes. Raises LoadFailed.

    context: any of the engine; its shapes change. most: the largest shape of inputs that are not fixed.
    """
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == module.TensorIOMode.INPUT]
    for name in names:
        if engine.get_tensor_location(name) != module.TensorLocation.DEVICE:
            raise LoadFailed(
                f"tensor {name!r} tells the engine a shape rather than data; TensorRT runs no such model here"
            )
    for name in inputs:
        context.set_input_shape(name, most.get(name, tuple(engine.get_tensor_shape(name))))
    return (
        [_described(module, engine, context, name) for name in inputs],
        [_described(module, engine, context, name) for name in names if name not in inputs],
    )


def _described(module: Any, engine: Any, context: Any, name: str) -> EngineTensor:
    datatype = _datatypes(module).get(engine.get_tensor_dtype(name))
    if datatype is None:
        raise LoadFailed(f"tensor {name!r} is {engine.get_tensor_dtype(name)}, which cannot be sent")
    largest = tuple(context.get_tensor_shape(name))
    nbytes = 0 if DYNAMIC in largest else math.prod(largest) * DATATYPES[datatype].dtype.itemsize
    return EngineTensor(name, datatype, tuple(engine.get_tensor_shape(name)), nbytes)


def _datatypes(module: Any) -> dict[Any, str]:
    known = {
        "FLOAT": "FP32", "HALF": "FP16", "BF16": "BF16", "INT8": "INT8", "INT32": "INT32", "INT64": "INT64",
        "BOOL": "BOOL", "UINT8": "UINT8",
    }  # fmt: skip
    return {getattr(module.DataType, word): name for word, name in known.items() if hasattr(module.DataType, word)}


def _nbytes(tensor: EngineTensor, shape: Shape) -> int:
    return math.prod(shape) * DATATYPES[tensor.datatype].dtype.itemsize


_ERRORS = (RuntimeError, ValueError, TypeError, MemoryError)
"""TensorRT's exceptions, as pybind raises them."""


class TensorRtInstance:
    """An engine with one context on one stream; several instances overlap, one runs one request at a time."""

    backend = BACKEND.name
    concurrency = 1

    def __init__(self, loaded_engine: LoadedEngine) -> None:
        self.spec = loaded_engine.spec
        self.device = loaded_engine.device
        self.precision = loaded_engine.precision
        self.memory_bytes = loaded_engine.memory_bytes
        self._loaded: LoadedEngine | None = loaded_engine
        self._execution = Execution(loaded_engine)
        self._positions = {tensor.name: index for index, tensor in enumerate(loaded_engine.spec.outputs)}
        self._bounds: weakref.WeakSet[TensorRtBound] = weakref.WeakSet()

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run, with arrays copied into pinned memory and out of it. Raises RunFailed."""
        loaded_engine = self._loaded
        if loaded_engine is None:
            raise RunFailed("the instance is closed")
        given = [inputs[tensor.name] for tensor in loaded_engine.inputs]
        shapes = [array.shape for array in given]
        try:
            for view, array in zip(self._execution.input_views(shapes), given, strict=True):
                _copy_in(view, array)
            found = self._execution.run(shapes)
        except _ERRORS as error:
            raise RunFailed(f"TensorRT: {' '.join(str(error).split())[:600]}") from error
        wanted = range(len(found)) if outputs is None else [self._positions[name] for name in outputs]
        return [self._copy_out(loaded_engine, index, found[index]) for index in wanted]

    def bind(self, max_rows: int) -> TensorRtBound | None:
        """Bind buffers; None where the engine's types differ from the model's, which `run` converts."""
        loaded_engine = self._loaded
        if loaded_engine is None or any(
            mine.datatype != theirs.datatype
            for mine, theirs in zip(
                (*loaded_engine.inputs, *loaded_engine.outputs),
                (*loaded_engine.spec.inputs, *loaded_engine.spec.outputs),
                strict=True,
            )
        ):
            return None
        layout = row_layout(loaded_engine.spec, self.run)
        rows = layout.rows_allowed(min(max_rows, loaded_engine.spec.max_rows or max_rows)) if layout is not None else 0
        if layout is None or rows == 0:
            return None
        bound = TensorRtBound(loaded_engine, rows, layout)
        self._bounds.add(bound)
        return bound

    def close(self) -> None:
        """Close, with all that is bound; bound buffers live until their owner drops them."""
        for bound in list(self._bounds):
            bound.close()
        self._execution.close()
        self._loaded = None

    def _copy_out(self, loaded_engine: LoadedEngine, index: int, shape: tuple[int, ...]) -> Array:
        declared: TensorSpec = loaded_engine.spec.outputs[index]
        view = self._execution.view(loaded_engine.outputs[index], shape)
        return np.array(view, dtype=DATATYPES[declared.datatype].dtype, order="C")


class TensorRtBound:
    """A bound form whose buffers are the pinned memory that the GPU reads and writes."""

    def __init__(self, loaded_engine: LoadedEngine, rows: int, layout: RowLayout) -> None:
        self.max_rows = rows
        self._execution = Execution(loaded_engine)
        self._inner = layout.inputs
        self._is_fixed = layout.fixed_rows is not None
        self.inputs = self._views(loaded_engine.inputs, layout.inputs)
        self.outputs = self._views(loaded_engine.outputs, layout.outputs)
        for array in self.inputs:
            array.fill(0)

    def run(self, rows: int) -> None:
        """Run the first rows of the buffers. Raises RunFailed."""
        if not 1 <= rows <= self.max_rows or (self._is_fixed and rows != self.max_rows):
            raise RunFailed(f"got {rows} rows, wanted {self.max_rows if self._is_fixed else f'1 to {self.max_rows}'}")
        try:
            self._execution.run([(rows, *shape) for shape in self._inner])
        except _ERRORS as error:
            raise RunFailed(f"TensorRT: {' '.join(str(error).split())[:600]}") from error

    def close(self) -> None:
        """Drop the engine; a later run raises RunFailed."""
        self._execution.close()

    def _views(self, tensors: Sequence[EngineTensor], shapes: Sequence[Shape]) -> Sequence[Array]:
        return [
            self._execution.view(tensor, (self.max_rows, *shape)) for tensor, shape in zip(tensors, shapes, strict=True)
        ]


def _copy_in(view: Array, array: Array) -> None:
    """Copy an input. Raises RunFailed: TensorRT 8 takes 32 bits of an INT64, and this value has more."""
    if view.dtype == array.dtype:
        view[...] = array
        return
    np.copyto(view, array, casting="unsafe")
    if not np.array_equal(view, array):
        raise RunFailed(f"a value does not fit {view.dtype}, which is all that this version of TensorRT takes")
