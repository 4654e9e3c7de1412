"""One compiled OpenVINO model as an Instance, and its bound form.

Owns: infer requests and the tensors set on them. Imports no library: it is handed in by openvino_backend.py.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_runtime.backends.row_buffers import row_buffers, row_layout
from edge_runtime.errors import RunFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.tensors import Array, Tensors

_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, MemoryError)
"""What pybind makes of OpenVINO's exceptions."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the backend hands over: the library, the compiled model, and what was read back from it.

    loses_errors: whether `infer` must not be used, because it would swallow exceptions (a host with one core).
    """

    library: Any
    loses_errors: bool
    model: Any
    spec: ModelSpec
    device: str
    precision: str
    concurrency: int
    memory_bytes: int


class OpenVinoInstance:
    """A compiled model with an infer request for each caller; it runs without the GIL."""

    backend = "openvino"

    def __init__(self, compiled: Compiled) -> None:
        self.spec = compiled.spec
        self.device = compiled.device
        self.precision = compiled.precision
        self.concurrency = compiled.concurrency
        self.memory_bytes = compiled.memory_bytes
        self._compiled: Compiled | None = compiled
        self._positions = {tensor.name: index for index, tensor in enumerate(compiled.spec.outputs)}
        self._requests = deque(compiled.model.create_infer_request() for _ in range(compiled.concurrency))
        self._results, self._execute = _calls(compiled)
        self._bounds: weakref.WeakSet[OpenVinoBound] = weakref.WeakSet()

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """See Instance.run. A contiguous array is read where it lies, read-only ones too."""
        compiled = self._compiled
        if compiled is None:
            raise RunFailed("the instance is closed")
        try:
            request = self._requests.pop()
        except IndexError:  # more callers than promised: slower, still right
            request = compiled.model.create_infer_request()
        try:
            for index, tensor in enumerate(self.spec.inputs):
                request.set_input_tensor(index, _to_tensor(compiled.library, tensor, inputs[tensor.name]))
            results = self._results(request)
        except _ERRORS as error:
            raise _run_failed(error) from error
        finally:
            self._requests.append(request)
        positions = range(len(results)) if outputs is None else [self._positions[name] for name in outputs]
        return [
            results[index].view(np.uint16) if self.spec.outputs[index].datatype == "BF16" else results[index]
            for index in positions
        ]

    def bind(self, max_rows: int) -> OpenVinoBound | None:
        """See Instance.bind."""
        compiled = self._compiled
        if compiled is None:
            return None
        layout = row_layout(self.spec, self.run)
        rows = layout.rows_allowed(max_rows) if layout is not None else 0
        if layout is None or rows == 0:
            return None
        inputs = row_buffers(self.spec.inputs, layout.inputs, rows)
        outputs = row_buffers(self.spec.outputs, layout.outputs, rows)
        if inputs is None or outputs is None:
            return None
        bound = OpenVinoBound(compiled, self._execute, inputs, outputs)
        self._bounds.add(bound)
        return bound

    def close(self) -> None:
        """See Instance.close. What was bound is closed with it; its buffers stay until their owner lets go."""
        for bound in list(self._bounds):
            bound.close()
        self._compiled = None
        self._requests.clear()


class OpenVinoBound:
    """See Bound. One infer request; tensors over the buffers are made for each number of rows when first used."""

    def __init__(
        self, compiled: Compiled, execute: Callable[[Any], object], inputs: list[Array], outputs: list[Array]
    ) -> None:
        self.inputs: Sequence[Array] = inputs
        self.outputs: Sequence[Array] = outputs
        self.max_rows: int = inputs[0].shape[0]
        self._compiled: Compiled | None = compiled
        self._fixed = compiled.spec.inputs[0].shape[0] >= 0
        self._request = compiled.model.create_infer_request()
        self._execute = execute
        self._tensors: dict[int, tuple[list[Any], list[Any]]] = {}
        self._rows_set: int | None = None

    def run(self, rows: int) -> None:
        """See Bound.run."""
        try:
            if rows != self._rows_set:
                self._set_rows(rows)
            self._execute(self._request)
            if self._has_other_rows(rows):
                raise RunFailed(f"the model gave other rows than the {rows} it got, so its axis 0 is no batch")
        except _ERRORS as error:
            self._rows_set = None
            raise _run_failed(error) from error

    def close(self) -> None:
        """Let go of the request; a run afterwards raises RunFailed."""
        self._compiled = None
        self._request = None
        self._rows_set = None
        self._tensors.clear()

    def _set_rows(self, rows: int) -> None:
        compiled = self._compiled
        if compiled is None:
            raise RunFailed("the instance is closed")
        if not 1 <= rows <= self.max_rows or (self._fixed and rows != self.max_rows):
            raise RunFailed(f"got {rows} rows, wanted {self.max_rows if self._fixed else f'1 to {self.max_rows}'}")
        tensors = self._tensors.get(rows)
        if tensors is None:
            spec, library = compiled.spec, compiled.library
            tensors = (
                [_to_tensor(library, t, a[:rows]) for t, a in zip(spec.inputs, self.inputs, strict=True)],
                [_to_tensor(library, t, a[:rows]) for t, a in zip(spec.outputs, self.outputs, strict=True)],
            )
            self._tensors[rows] = tensors
        for index, tensor in enumerate(tensors[0]):
            self._request.set_input_tensor(index, tensor)
        for index, tensor in enumerate(tensors[1]):
            self._request.set_output_tensor(index, tensor)
        self._rows_set = rows

    def _has_other_rows(self, rows: int) -> bool:
        """Whether the model made an output smaller than its buffer, which OpenVINO allows silently."""
        if all(tensor.shape[0] == rows for tensor in self._tensors[rows][1]):
            return False
        del self._tensors[rows]
        self._rows_set = None
        return True


def _calls(compiled: Compiled) -> tuple[Callable[[Any], list[Array]], Callable[[Any], object]]:
    """Two ways to run a request whose tensors are set: with copies of the results, and without looking at them.

    `infer` under the library's wrapper takes 7 us for a tiny model (26 through the wrapper, which copies inputs);
    start_async and wait, which hand over to a pool and back, 65. For large models there is no difference.
    """
    infer = _native_infer(compiled.library)
    count = len(compiled.spec.outputs)
    if infer is None or compiled.loses_errors:
        return lambda request: _run_and_copy(request, count), _run_and_wait
    return (
        lambda request: list(infer(request, {}, False, False).values()),
        lambda request: infer(request, {}, True, True),  # shares its results: views of our own buffers
    )


def _native_infer(library: Any) -> Any:
    """`infer(request, {}, share_outputs, decode_strings)` of the C++ class; None where this version has none."""
    for base in library.InferRequest.__mro__[1:]:
        if base.__module__.endswith("_pyopenvino") and hasattr(base, "infer"):
            return base.infer
    return None


def _run_and_wait(request: Any) -> None:
    request.start_async()
    request.wait()


def _run_and_copy(request: Any, count: int) -> list[Array]:
    _run_and_wait(request)
    return [np.array(request.get_output_tensor(index).data) for index in range(count)]


def _to_tensor(library: Any, tensor: TensorSpec, array: Array) -> Any:
    """A tensor over the array's own memory; a strided one is copied."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if not array.flags.writeable:
        array = np.asarray(_Writeable(array))
    if tensor.datatype == "BF16":
        return library.Tensor(array.view(np.uint16), array.shape, library.Type.bf16)
    return library.Tensor(array, shared_memory=True)


class _Writeable:
    """The same memory called writeable: OpenVINO insists, though it never writes to an input."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
        self._keep = array


def _run_failed(error: Exception) -> RunFailed:
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith("Exception from")]
    return RunFailed(f"OpenVINO: {' '.join(told or lines)[:600]}")
