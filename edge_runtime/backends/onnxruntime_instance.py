"""One ONNX Runtime session as an Instance, and its bound form.

Owns: the calls that run a session, at the least cost the library allows. Imports no library: the session and what it
needs are handed in by onnxruntime_backend.py.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_runtime.backends.row_buffers import row_buffers, row_layout
from edge_runtime.errors import RunFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.tensors import DATATYPES, Array, Tensors

_ONNX_BFLOAT16 = 16
"""TensorProto.DataType.BFLOAT16: numpy has no such dtype, so the library is told the number."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the backend hands over: the session, what was read back from it, and the library's own words.

    errors: every exception the library raises. value_of: (array, ONNX type number) -> a value of the library.
    """

    session: Any
    run_options: Any
    errors: tuple[type[Exception], ...]
    value_of: Any
    spec: ModelSpec
    device: str
    precision: str
    concurrency: int
    memory_bytes: int


class OnnxRuntimeInstance:
    """A session. `run` is safe from any number of threads; `concurrency` is what the provider can use."""

    backend = "onnxruntime"

    def __init__(self, loaded: Loaded) -> None:
        self.spec = loaded.spec
        self.device = loaded.device
        self.precision = loaded.precision
        self.concurrency = loaded.concurrency
        self.memory_bytes = loaded.memory_bytes
        self._loaded: Loaded | None = loaded
        self._errors = loaded.errors
        self._options = loaded.run_options
        self._run: Any = _native_run(loaded.session)
        self._all_outputs = [tensor.name for tensor in loaded.spec.outputs]
        self._text_inputs = {tensor.name for tensor in loaded.spec.inputs if tensor.datatype == "BYTES"}
        self._text_outputs = {tensor.name for tensor in loaded.spec.outputs if tensor.datatype == "BYTES"}
        self._has_bfloat16 = any(t.datatype == "BF16" for t in (*loaded.spec.inputs, *loaded.spec.outputs))
        self._bounds: weakref.WeakSet[OnnxRuntimeBound] = weakref.WeakSet()

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """See Instance.run. A contiguous array is read where it lies, read-only ones too."""
        names = self._all_outputs if outputs is None else list(outputs)
        try:
            if self._has_bfloat16:
                return self._run_bfloat16(inputs, names)
            if self._text_inputs:
                inputs = {name: _to_text(a) if name in self._text_inputs else a for name, a in inputs.items()}
            results: list[Array] = self._run(names, inputs, self._options)
        except self._errors as error:
            raise _run_failed(error) from error
        if self._text_outputs:
            return [_to_bytes(a) if n in self._text_outputs else a for n, a in zip(names, results, strict=True)]
        return results

    def bind(self, max_rows: int) -> OnnxRuntimeBound | None:
        """See Instance.bind. The caller has made sure that axis 0 is rows; a run that disagrees is RunFailed."""
        layout = row_layout(self.spec, self.run)
        rows = layout.rows_allowed(max_rows) if layout is not None else 0
        if layout is None or rows == 0 or self._loaded is None:
            return None
        inputs = row_buffers(self.spec.inputs, layout.inputs, rows)
        outputs = row_buffers(self.spec.outputs, layout.outputs, rows)
        if inputs is None or outputs is None:
            return None
        bound = OnnxRuntimeBound(self._loaded, inputs, outputs)
        self._bounds.add(bound)
        return bound

    def close(self) -> None:
        """See Instance.close. What was bound is closed with it; its buffers stay until their owner lets go."""
        for bound in list(self._bounds):
            bound.close()
        self._loaded = None
        self._run = _run_closed

    def _run_bfloat16(self, inputs: Tensors, names: list[str]) -> list[Array]:
        """The path for BF16, which the library's plain call cannot take: bind values, copy results out."""
        if self._loaded is None:
            raise RunFailed("the instance is closed")
        session, value_of = self._loaded.session, self._loaded.value_of
        binding = session.io_binding()
        for tensor in self.spec.inputs:
            array = np.ascontiguousarray(inputs[tensor.name])
            if tensor.datatype == "BF16":
                binding.bind_ortvalue_input(tensor.name, value_of(array.view(np.uint16), _ONNX_BFLOAT16))
            else:
                binding.bind_cpu_input(tensor.name, array)
        for name in names:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding, self._options)
        return [_copy_out(value) for value in binding.get_outputs()]


class OnnxRuntimeBound:
    """See Bound. A binding for each number of rows, made when first used (13 us each) and kept."""

    def __init__(self, loaded: Loaded, inputs: list[Array], outputs: list[Array]) -> None:
        self.inputs: Sequence[Array] = inputs
        self.outputs: Sequence[Array] = outputs
        self.max_rows: int = inputs[0].shape[0]
        self._loaded: Loaded | None = loaded
        self._options = loaded.run_options
        self._errors = loaded.errors
        self._fixed = loaded.spec.inputs[0].shape[0] >= 0
        self._run, self._handle = _native_run_bound(loaded.session)
        self._bindings: dict[int, Any] = {}
        # Invariant: bindings point into the buffers, so both live exactly as long as this object.
        self._keep: list[Any] = []

    def run(self, rows: int) -> None:
        """See Bound.run."""
        binding = self._bindings.get(rows)
        if binding is None:
            binding = self._prepare(rows)
        try:
            # A RunOptions that is made once saves the library making one in each call: 2.3 -> 1.7 us.
            self._run(binding, self._options)
        except self._errors as error:
            raise _run_failed(error) from error

    def close(self) -> None:
        """Let go of the session; a run afterwards raises RunFailed."""
        self._loaded = None
        self._run = None
        self._bindings.clear()
        self._keep.clear()

    def _prepare(self, rows: int) -> Any:
        loaded = self._loaded
        if loaded is None:
            raise RunFailed("the instance is closed")
        if not 1 <= rows <= self.max_rows or (self._fixed and rows != self.max_rows):
            raise RunFailed(f"got {rows} rows, wanted {self.max_rows if self._fixed else f'1 to {self.max_rows}'}")
        binding = loaded.session.io_binding()
        for tensor, array in zip(loaded.spec.inputs, self.inputs, strict=True):
            shape = (rows, *array.shape[1:])
            binding.bind_input(tensor.name, "cpu", 0, _element_type(tensor), shape, array.ctypes.data)
        for tensor, array in zip(loaded.spec.outputs, self.outputs, strict=True):
            shape = (rows, *array.shape[1:])
            binding.bind_output(tensor.name, "cpu", 0, _element_type(tensor), shape, array.ctypes.data)
        self._keep.append(binding)
        self._bindings[rows] = self._handle(binding)
        return self._bindings[rows]


def _native_run(session: Any) -> Any:
    """`run(output_names, feeds, run_options)` of the C session, which skips the wrapper's checks (4.5 -> 3.6 us)."""
    native: Any = getattr(session, "_sess", session)
    return getattr(native, "run", session.run)


def _native_run_bound(session: Any) -> tuple[Any, Callable[[Any], Any]]:
    """`run(binding, run_options)` of the C session and what makes its kind of binding; else the public call."""
    native: Any = getattr(session, "_sess", None)
    if hasattr(native, "run_with_iobinding") and hasattr(session.io_binding(), "_iobinding"):
        return native.run_with_iobinding, lambda binding: binding._iobinding  # noqa: SLF001  looked up above
    return session.run_with_iobinding, lambda binding: binding


def _run_failed(error: Exception) -> RunFailed:
    """The library's words as ours, without its source paths' length."""
    return RunFailed(f"ONNX Runtime: {' '.join(str(error).split())[:600]}")


def _run_closed(*_: object) -> list[Array]:
    raise RunFailed("the instance is closed")


def _element_type(tensor: TensorSpec) -> Any:
    return _ONNX_BFLOAT16 if tensor.datatype == "BF16" else DATATYPES[tensor.datatype].dtype


def _copy_out(value: Any) -> Array:
    """An array of our own from a value of the library; BF16 as its bit pattern."""
    array: Array
    if value.data_type() != "tensor(bfloat16)":
        array = value.numpy()
        return array
    shape = tuple(value.shape())
    count = int(np.prod(shape))
    if count == 0:
        return np.empty(shape, np.uint16)
    memory: Array = np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(value.data_ptr()))
    array = memory.reshape(shape).copy()
    return array


def _to_text(array: Array) -> Array:
    """Elements as str: the library would take `b'x'` for the letters of its repr. Raises RunFailed unless UTF-8."""
    try:
        flat = [item.decode() if isinstance(item, bytes) else str(item) for item in array.reshape(-1).tolist()]
    except UnicodeDecodeError as error:
        raise RunFailed(f"ONNX Runtime takes BYTES as UTF-8 text only: {error}") from error
    text: Array = np.empty(len(flat), dtype=object)
    text[:] = flat
    return text.reshape(array.shape)


def _to_bytes(array: Array) -> Array:
    flat = [item.encode() if isinstance(item, str) else bytes(item) for item in array.reshape(-1).tolist()]
    raw: Array = np.empty(len(flat), dtype=object)
    raw[:] = flat
    return raw.reshape(array.shape)
