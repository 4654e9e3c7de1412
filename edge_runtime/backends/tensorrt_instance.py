"""One engine as an Instance, and its bound form.

Owns: the engine, and what the model declares against what the engine takes. Imports no library: it is handed in by
tensorrt_backend.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_runtime.backends.row_buffers import RowLayout, row_layout
from edge_runtime.backends.tensorrt_execution import EngineTensor, Execution
from edge_runtime.errors import RunFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.tensors import DATATYPES, Array, Tensors

_ERRORS = (RuntimeError, ValueError, TypeError, MemoryError)
"""What pybind makes of TensorRT's exceptions."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What the backend hands over. inputs and outputs: the engine's own, in the order of `spec`.

    execution: makes a context with a stream and buffers of its own. keep: what must outlive the engine.
    """

    spec: ModelSpec
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    execution: Callable[[], Execution]
    device: str
    precision: str
    memory_bytes: int
    keep: tuple[Any, ...]


class TensorRtInstance:
    """An engine with one context on one stream; several instances overlap, one runs one request at a time."""

    backend = "tensorrt"
    concurrency = 1

    def __init__(self, loaded: LoadedEngine) -> None:
        self.spec = loaded.spec
        self.device = loaded.device
        self.precision = loaded.precision
        self.memory_bytes = loaded.memory_bytes
        self._loaded: LoadedEngine | None = loaded
        self._execution = loaded.execution()
        self._positions = {tensor.name: index for index, tensor in enumerate(loaded.spec.outputs)}
        self._bounds: weakref.WeakSet[TensorRtBound] = weakref.WeakSet()

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """See Instance.run. Arrays are copied into pinned memory, and out of it."""
        loaded = self._loaded
        if loaded is None:
            raise RunFailed("the instance is closed")
        given = [inputs[tensor.name] for tensor in loaded.inputs]
        shapes = [array.shape for array in given]
        try:
            for view, array in zip(self._execution.input_views(shapes), given, strict=True):
                _copy_in(view, array)
            found = self._execution.run(shapes)
        except _ERRORS as error:
            raise RunFailed(f"TensorRT: {' '.join(str(error).split())[:600]}") from error
        wanted = range(len(found)) if outputs is None else [self._positions[name] for name in outputs]
        return [self._copy_out(loaded, index, found[index]) for index in wanted]

    def bind(self, max_rows: int) -> TensorRtBound | None:
        """See Instance.bind. None where the engine's types are not the model's: those are converted on the way."""
        loaded = self._loaded
        if loaded is None or any(
            mine.datatype != theirs.datatype
            for mine, theirs in zip(
                (*loaded.inputs, *loaded.outputs), (*loaded.spec.inputs, *loaded.spec.outputs), strict=True
            )
        ):
            return None
        layout = row_layout(loaded.spec, self.run)
        rows = layout.rows_allowed(min(max_rows, loaded.spec.max_rows or max_rows)) if layout is not None else 0
        if layout is None or rows == 0:
            return None
        bound = TensorRtBound(loaded.execution(), loaded.inputs, loaded.outputs, rows, layout)
        self._bounds.add(bound)
        return bound

    def close(self) -> None:
        """See Instance.close. What was bound is closed with it; its buffers stay until their owner lets go."""
        for bound in list(self._bounds):
            bound.close()
        self._execution.close()
        self._loaded = None

    def _copy_out(self, loaded: LoadedEngine, index: int, shape: tuple[int, ...]) -> Array:
        declared: TensorSpec = loaded.spec.outputs[index]
        view = self._execution.view(loaded.outputs[index], shape)
        return np.array(view, dtype=DATATYPES[declared.datatype].dtype, order="C")


class TensorRtBound:
    """See Bound. The buffers are the pinned memory that the GPU reads and writes."""

    def __init__(
        self,
        execution: Execution,
        inputs: Sequence[EngineTensor],
        outputs: Sequence[EngineTensor],
        rows: int,
        layout: RowLayout,
    ) -> None:
        self.max_rows = rows
        self._execution = execution
        self._inner = layout.inputs
        self._is_fixed = layout.fixed_rows is not None
        self.inputs: Sequence[Array] = [
            execution.view(tensor, (rows, *shape)) for tensor, shape in zip(inputs, layout.inputs, strict=True)
        ]
        self.outputs: Sequence[Array] = [
            execution.view(tensor, (rows, *shape)) for tensor, shape in zip(outputs, layout.outputs, strict=True)
        ]
        for array in self.inputs:
            array.fill(0)

    def run(self, rows: int) -> None:
        """See Bound.run."""
        if not 1 <= rows <= self.max_rows or (self._is_fixed and rows != self.max_rows):
            raise RunFailed(f"got {rows} rows, wanted {self.max_rows if self._is_fixed else f'1 to {self.max_rows}'}")
        try:
            self._execution.run([(rows, *shape) for shape in self._inner])
        except _ERRORS as error:
            raise RunFailed(f"TensorRT: {' '.join(str(error).split())[:600]}") from error

    def close(self) -> None:
        """Let go of the engine; a run afterwards raises RunFailed."""
        self._execution.close()


def _copy_in(view: Array, array: Array) -> None:
    """Raises RunFailed: TensorRT 8 takes 32 of an INT64's bits, and this value has more."""
    if view.dtype == array.dtype:
        view[...] = array
        return
    np.copyto(view, array, casting="unsafe")
    if not np.array_equal(view, array):
        raise RunFailed(f"a value does not fit {view.dtype}, which is all that this version of TensorRT takes")
