"""Buffers for a whole batch, and whether a model's tensors fit such buffers.

Owns: the decision that a model can be bound, and aligned memory. Called by the backends' `bind`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from edge_runtime.errors import RunFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.tensors import DATATYPES, Array, Tensors

_ALIGNMENT_BYTES = 64
"""A cache line, and the widest vector register of x86 (AVX-512)."""

_MAX_BUFFER_BYTES = 1 << 30
"""One tensor's buffer; a model with larger batches takes the general path, which allocates only when it runs."""


class RowLayout(Struct, frozen=True):
    """Inner shapes of a model whose axis 0 is rows everywhere. fixed_rows: the only number of rows that it takes."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    fixed_rows: int | None

    def rows_allowed(self, max_rows: int) -> int:
        """Return the rows of buffers for at most `max_rows`; 0: the model takes no such batch."""
        if self.fixed_rows is None:
            return max(max_rows, 0)
        return self.fixed_rows if self.fixed_rows <= max_rows else 0


def row_layout(spec: ModelSpec, run: Callable[[Tensors], list[Array]]) -> RowLayout | None:
    """Return the inner shapes; None where a row has no fixed size or axis 0 is not the same rows everywhere.

    One `run` on one row of zeros finds the inner shapes of outputs that the model leaves open.
    """
    tensors = (*spec.inputs, *spec.outputs)
    if not spec.inputs or any(not tensor.shape or tensor.datatype == "BYTES" for tensor in tensors):
        return None
    rows = {tensor.shape[0] for tensor in tensors}
    if len(rows) != 1 or 0 in rows or not all(tensor.has_fixed_inner_shape for tensor in spec.inputs):
        return None
    (rows_of_all,) = rows
    outputs: Sequence[tuple[int, ...]] | None = [tensor.shape[1:] for tensor in spec.outputs]
    if not all(tensor.has_fixed_inner_shape for tensor in spec.outputs):
        outputs = _learn_outputs(spec, run)
    if outputs is None:
        return None
    inputs = tuple(tensor.shape[1:] for tensor in spec.inputs)
    return RowLayout(inputs, tuple(outputs), None if rows_of_all == DYNAMIC else rows_of_all)


def bound_buffers(
    spec: ModelSpec, run: Callable[[Tensors], list[Array]], max_rows: int
) -> tuple[list[Array], list[Array]] | None:
    """Make the input and output buffers for batches of at most `max_rows`; None where the model allows none."""
    layout = row_layout(spec, run)
    rows = layout.rows_allowed(max_rows) if layout is not None else 0
    if layout is None or rows == 0:
        return None
    inputs = _row_buffers(spec.inputs, layout.inputs, rows)
    outputs = _row_buffers(spec.outputs, layout.outputs, rows)
    return None if inputs is None or outputs is None else (inputs, outputs)


def _row_buffers(tensors: Sequence[TensorSpec], inner: Sequence[tuple[int, ...]], rows: int) -> list[Array] | None:
    """Make a zeroed, aligned, C-contiguous array [rows, *inner] for each tensor; None where one exceeds a gigabyte."""
    buffers: list[Array] = []
    for tensor, shape in zip(tensors, inner, strict=True):
        dtype = DATATYPES[tensor.datatype].dtype
        size = rows * math.prod(shape) * dtype.itemsize
        if size > _MAX_BUFFER_BYTES:
            return None
        memory = np.zeros(size + _ALIGNMENT_BYTES, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT_BYTES
        buffers.append(memory[start : start + size].view(dtype).reshape(rows, *shape))
    return buffers


def _learn_outputs(spec: ModelSpec, run: Callable[[Tensors], list[Array]]) -> list[tuple[int, ...]] | None:
    rows = 1 if spec.inputs[0].shape[0] == DYNAMIC else spec.inputs[0].shape[0]
    zeros = {
        tensor.name: np.zeros((rows, *tensor.shape[1:]), DATATYPES[tensor.datatype].dtype) for tensor in spec.inputs
    }
    try:
        arrays = run(zeros)
    except RunFailed:
        return None
    if any(array.ndim == 0 or array.shape[0] != rows for array in arrays):
        return None
    return [array.shape[1:] for array in arrays]
