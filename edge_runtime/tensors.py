"""Datatypes of the Open Inference Protocol and numpy arrays as bytes on the wire.

Owns: the table of datatypes, the layout of BYTES. Never looks at a model. Everything is little-endian, C order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import TensorMismatch, Unsupported

Array = npt.NDArray[np.generic]
Tensors = Mapping[str, Array]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Datatype:
    """One OIP datatype: its wire name, the numpy dtype it becomes and the bytes of one element (0: variable)."""

    name: str
    dtype: np.dtype[np.generic]
    itemsize: int


def _bf16_dtype() -> np.dtype[np.generic]:
    """BF16 has no numpy dtype: the bit pattern travels as uint16 (DESIGN 5)."""
    return np.dtype(np.uint16)


DATATYPES: dict[str, Datatype] = {
    name: Datatype(name, np.dtype(dtype), np.dtype(dtype).itemsize)
    for name, dtype in (
        ("BOOL", np.bool_), ("UINT8", np.uint8), ("UINT16", np.uint16), ("UINT32", np.uint32), ("UINT64", np.uint64),
        ("INT8", np.int8), ("INT16", np.int16), ("INT32", np.int32), ("INT64", np.int64),
        ("FP16", np.float16), ("FP32", np.float32), ("FP64", np.float64),
    )
}  # fmt: skip
_BY_DTYPE = {datatype.dtype: datatype.name for datatype in DATATYPES.values()}
DATATYPES["BF16"] = Datatype("BF16", _bf16_dtype(), 2)
DATATYPES["BYTES"] = Datatype("BYTES", np.dtype(object), 0)


def datatype(name: str) -> Datatype:
    """Look a wire name up. Raises Unsupported with the allowed names."""
    found = DATATYPES.get(name)
    if found is None:
        raise Unsupported(f"datatype {name!r} is unknown; wanted one of {', '.join(DATATYPES)}")
    return found


def datatype_name(dtype: np.dtype[np.generic]) -> str:
    """The wire name of a numpy dtype. Raises Unsupported for dtypes with no OIP counterpart (complex, datetime …)."""
    dtype = dtype.newbyteorder("=")
    name = _BY_DTYPE.get(dtype)
    if name is not None:
        return name
    if dtype.name == "bfloat16":
        return "BF16"
    if dtype.kind in "OSUT":
        return "BYTES"
    raise Unsupported(f"numpy dtype {dtype} has no OIP datatype; convert the array to one of {', '.join(DATATYPES)}")


def element_count(shape: Sequence[int]) -> int:
    """Product of a shape as a Python int, so that it cannot overflow."""
    return math.prod(shape)


def array_from_wire(name: str, shape: Sequence[int], data: Buffer) -> Array:
    """View a frame as an array; no copy except for BYTES and BOOL checks.

    Shapes: `shape` is the whole shape, batch axis included. The array is read-only when `data` is.
    Raises TensorMismatch when the frame's length is not the shape's, Unsupported for an unknown datatype.
    """
    kind = datatype(name)
    if kind.itemsize == 0:
        return unpack_bytes(data, shape)
    wanted = element_count(shape) * kind.itemsize
    got = memoryview(data).nbytes
    if got != wanted:
        raise TensorMismatch(f"a {name} tensor of shape {list(shape)} is {wanted} bytes, got {got}")
    return np.frombuffer(data, dtype=kind.dtype).reshape(shape)


def array_to_wire(array: Array) -> Buffer:
    """The bytes of an array in wire layout; a view of a contiguous little-endian array, otherwise a copy."""
    if array.dtype.kind in "OSUT":
        return pack_bytes(array)
    array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data


_LENGTH = struct.Struct("<I")


def pack_bytes(array: Array) -> bytes:
    """BYTES layout: each element a uint32 little-endian length and the bytes; str elements are UTF-8."""
    parts: list[bytes] = []
    for element in array.reshape(-1).tolist():
        raw = element.encode() if isinstance(element, str) else bytes(element)
        parts.append(_LENGTH.pack(len(raw)))
        parts.append(raw)
    return b"".join(parts)


def unpack_bytes(data: Buffer, shape: Sequence[int]) -> Array:
    """Inverse of `pack_bytes`: an object array of `bytes`. Raises TensorMismatch when lengths do not add up."""
    view, offset = memoryview(data).cast("B"), 0
    count = element_count(shape)
    if count * _LENGTH.size > view.nbytes:
        raise TensorMismatch(f"a BYTES tensor of shape {list(shape)} needs {count} lengths, got {view.nbytes} bytes")
    elements: list[bytes] = []
    for index in range(count):
        if offset + _LENGTH.size > view.nbytes:
            raise TensorMismatch(f"BYTES element {index} of {count} has no length: the frame ends at byte {offset}")
        (length,) = _LENGTH.unpack_from(view, offset)
        offset += _LENGTH.size
        if offset + length > view.nbytes:
            raise TensorMismatch(f"BYTES element {index} says {length} bytes, {view.nbytes - offset} are left")
        elements.append(bytes(view[offset : offset + length]))
        offset += length
    if offset != view.nbytes:
        raise TensorMismatch(f"a BYTES tensor of {count} elements ends at byte {offset}, the frame has {view.nbytes}")
    array: Array = np.empty(count, dtype=object)
    array[:] = elements
    return array.reshape(shape)
