"""One execution context of an engine with its stream and buffers, and runs of it.

Owns: where tensors lie, the shapes that are set, and the graph of the shapes that are run again and again. Thread: one
caller at a time; any thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime.backends.tensorrt_cuda import Buffer, Cuda
from edge_runtime.errors import BackendError, LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC
from edge_runtime.tensors import DATATYPES, Array

Shape = tuple[int, ...]

SAME_RUNS = 3
"""Runs of the same shapes after which it is measured whether a graph is quicker."""

KNOWN_RUNS = 16
"""Runs of the same shapes after which a graph that is known to be quicker is recorded again: batches that change size
with each run would otherwise record more than they run."""

MEASURED_RUNS = 3
"""Of each kind; the quickest counts."""

LONGEST_RUN_S = 0.002
"""A graph saves the launches of kernels, some microseconds each: a longer run hardly gains, and is not measured."""

GRAPH_GAIN = 1.05
"""How much quicker a graph has to be; less is noise."""


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """One input or output of an engine. datatype: the engine's own, on the wire's terms; shape: -1 where it is open.

    most_bytes: what it takes at the largest shapes of the profile.
    """

    name: str
    datatype: str
    shape: Shape
    most_bytes: int


class Execution:
    """See the file. Every method raises RunFailed; the constructor LoadFailed too."""

    def __init__(
        self, cuda: Cuda, engine: Any, inputs: Sequence[EngineTensor], outputs: Sequence[EngineTensor], *, graphs: bool
    ) -> None:
        self._cuda = cuda
        self._inputs = inputs
        self._outputs = outputs
        self._may_record = graphs
        cuda.use()
        self._context = engine.create_execution_context()
        if self._context is None:
            raise LoadFailed("TensorRT cannot make an execution context; is the GPU's memory full?")
        self._stream = cuda.new_stream()
        self._buffers: dict[str, Buffer] = {}
        self._shapes: tuple[Shape, ...] = ()
        self._output_shapes: list[Shape] = []
        self._same_runs = 0
        self._last_run_s = math.inf
        self._graph: Any = None
        self._gains: dict[tuple[Shape, ...], bool] = {}
        self._is_closed = False
        try:
            for tensor in (*inputs, *outputs):
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
        """Where the inputs of the next run are to be written."""
        for tensor, shape in zip(self._inputs, shapes, strict=True):
            nbytes = _nbytes(tensor, shape)
            if nbytes > self._buffers[tensor.name].host.nbytes:
                raise RunFailed(
                    f"input {tensor.name!r} at {shape} is {nbytes} bytes, more than the engine was built for"
                )
        return [self.view(tensor, shape) for tensor, shape in zip(self._inputs, shapes, strict=True)]

    def run(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Run on what `input_views` of the same shapes hold; returns the outputs' shapes, to be read with `view`."""
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
            self._order()
        self._cuda.wait(self._stream)
        self._last_run_s = time.perf_counter() - started
        return self._output_shapes

    def close(self) -> None:
        """Give back the context, the stream and the graph; buffers go when nobody holds a view of them. Idempotent."""
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

    def _order(self) -> None:
        """Order one run on the stream: copies in, the engine, copies out."""
        for tensor, shape in zip(self._inputs, self._shapes, strict=True):
            self._cuda.copy_in(self._buffers[tensor.name], _nbytes(tensor, shape), self._stream)
        if not self._context.execute_async_v3(self._stream):
            raise RunFailed("TensorRT could not start the engine")
        for tensor, shape in zip(self._outputs, self._output_shapes, strict=True):
            self._cuda.copy_out(self._buffers[tensor.name], _nbytes(tensor, shape), self._stream)

    def _consider_graph(self) -> None:
        """Record a graph where shapes stay the same and it is, or may be, quicker."""
        if not self._may_record or self._graph is not None or self._last_run_s > LONGEST_RUN_S:
            return
        known = self._gains.get(self._shapes)
        if known is None and self._same_runs >= SAME_RUNS:
            self._measure_graph()
        elif known and self._same_runs >= KNOWN_RUNS:
            self._graph = self._record()

    def _record(self) -> Any:
        """A graph of one run, None where it cannot be recorded."""
        try:
            return self._cuda.record(self._stream, self._order)
        except (RunFailed, RuntimeError):
            # Some engines wait for the GPU in the middle; those are run as they are from now on.
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
            self._order()
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

    context: any of the engine; its shapes are changed. most: the largest shape of inputs that are not fixed.
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
