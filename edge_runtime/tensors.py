"""Datatypes of the Open Inference Protocol and numpy arrays as bytes on the wire.

Owns: the table of datatypes, the layout of BYTES and of BF16. Never looks at a model. Everything is little-endian, C
order, as every host that this package supports is.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from edge_runtime.errors import TensorMismatch, Unsupported

Array = npt.NDArray[np.generic]
Tensors = Mapping[str, Array]
Buffer = bytes | bytearray | memoryview


class Datatype(Struct, frozen=True):
    """One OIP datatype: its wire name, the numpy dtype of its bits and the bytes of one element (0: variable)."""

    name: str
    dtype: np.dtype[np.generic]
    itemsize: int


DATATYPES: dict[str, Datatype] = {
    name: Datatype(name, np.dtype(dtype), np.dtype(dtype).itemsize)
    for name, dtype in (
        ("BOOL", np.bool_), ("UINT8", np.uint8), ("UINT16", np.uint16), ("UINT32", np.uint32), ("UINT64", np.uint64),
        ("INT8", np.int8), ("INT16", np.int16), ("INT32", np.int32), ("INT64", np.int64),
        ("FP16", np.float16), ("FP32", np.float32), ("FP64", np.float64),
    )
}  # fmt: skip
_BY_DTYPE = {datatype.dtype: datatype.name for datatype in DATATYPES.values()}
# numpy has no bfloat16: inside, a BF16 array is its bit pattern; `bits_to_values` converts it for users.
DATATYPES["BF16"] = Datatype("BF16", np.dtype(np.uint16), 2)
DATATYPES["BYTES"] = Datatype("BYTES", np.dtype(object), 0)


def datatype(name: str) -> Datatype:
    """Look a wire name up. Raises Unsupported with the allowed names."""
    found = DATATYPES.get(name)
    if found is None:
        raise Unsupported(f"datatype {name[:40]!r} is unknown; wanted one of {', '.join(DATATYPES)}")
    return found


def datatype_name(dtype: np.dtype[np.generic]) -> str:
    """The wire name of a numpy dtype. Raises Unsupported for dtypes with no OIP counterpart (complex, datetime …)."""
    name = _BY_DTYPE.get(dtype)
    if name is None and dtype.byteorder == ">":
        name = _BY_DTYPE.get(dtype.newbyteorder("<"))
    if name is not None:
        return name
    if dtype.name == "bfloat16":
        return "BF16"
    if dtype.kind in "OSUT":
        return "BYTES"
    raise Unsupported(f"numpy dtype {dtype} has no OIP datatype; convert the array to one of {', '.join(DATATYPES)}")


def fits_datatype(dtype: np.dtype[np.generic], name: str) -> bool:
    """Whether arrays of this dtype are tensors of this datatype; BF16 may be given as its bit pattern, uint16."""
    try:
        return datatype_name(dtype) == name or (name == "BF16" and dtype == np.uint16)
    except Unsupported:
        return False


def element_count(shape: Sequence[int]) -> int:
    """Product of a shape as a Python int, so that it cannot overflow."""
    return math.prod(shape)


def as_empty_datatype(name: str, array: Array) -> Array:
    """An array without elements as one of this datatype, where numpy chose FP64 because nothing was in it."""
    return array.astype(DATATYPES[name].dtype) if not array.size and array.dtype == np.float64 else array


def array_from_wire(name: str, shape: Sequence[int], data: Buffer, what: str = "a tensor") -> Array:
    """View a frame as an array; a copy only for BYTES, and where the frame's memory is not aligned for the dtype.

    Shapes: `shape` is the whole shape, batch axis included. The array is read-only when `data` is. BF16: its bits.
    what: names the tensor in errors.
    Raises TensorMismatch when the frame's length is not the shape's or a BOOL is neither 0 nor 1, Unsupported for an
    unknown datatype.
    """
    kind = datatype(name)
    if kind.itemsize == 0:
        return unpack_bytes(data, shape, what)
    wanted = element_count(shape) * kind.itemsize
    got = memoryview(data).nbytes
    if got != wanted:
        raise TensorMismatch(f"a {name} tensor of shape {list(shape)} is {wanted} bytes, got {got}")
    if kind.dtype.kind == "b" and got and np.frombuffer(data, np.uint8).max() > 1:
        # A bool that is neither 0 nor 1 is undefined behaviour in the libraries that run models.
        raise TensorMismatch("a BOOL tensor holds bytes other than 0 and 1")
    array: Array = np.frombuffer(data, dtype=kind.dtype)
    return _shaped(array if array.flags.aligned else array.copy(), shape)


def as_tensors(inputs: Mapping[str, object]) -> dict[str, Array]:
    """Convert a caller's inputs to arrays of native byte order, C-contiguous; lists and scalars become arrays.

    A caller that changes an array before its answer changes the run's input.
    """
    arrays: dict[str, Array] = {}
    for name, value in inputs.items():
        array: Array = np.asarray(value)
        if array.dtype.kind in "US":
            array = array.astype(object)
        arrays[name] = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)
    return arrays


def array_to_wire(array: Array) -> Buffer:
    """The bytes of an array in wire layout; a view of a contiguous little-endian array, otherwise a copy.

    Raises TensorMismatch for an object array that holds anything but bytes and text.
    """
    if array.dtype.kind in "OSUT":
        return pack_bytes(array)
    array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data


def _shaped(array: Array, shape: Sequence[int]) -> Array:
    """Reshape a flat array of the right length; numpy refuses negative lengths and empty arrays of absurd strides."""
    try:
        if shape and min(shape) < 0:
            raise ValueError("a length is negative")
        return array.reshape(shape)
    except ValueError as error:
        raise TensorMismatch(f"no array has the shape {list(shape)}: {error}") from None


# ---- BF16 -----------------------------------------------------------------------------------------------------------


def bits_to_values(name: str, array: Array) -> Array:
    """Return the array that a user sees: BF16 bits as `ml_dtypes.bfloat16` where it is installed. No copy."""
    if name != "BF16" or array.dtype != np.uint16:
        return array
    dtype = _bfloat16()
    return array if dtype is None else array.view(dtype)


def values_to_bits(array: Array) -> Array:
    """Inverse of `bits_to_values`: a bfloat16 array as its bit pattern, uint16; others stay. No copy."""
    # A dtype's name is made anew for each who asks: 3 us. NumPy's own have other kinds than V.
    is_bfloat16 = array.dtype.kind == "V" and array.dtype.name == "bfloat16"
    return array.view(np.uint16) if is_bfloat16 else array


def bf16_from_fp32(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round floats to BF16 bits, to nearest and ties to even; NaN stays NaN, too large becomes infinite."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    # Rounding may carry a NaN's payload into infinity: keep its upper half and force a payload bit.
    return np.where(np.isnan(array), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def bf16_to_fp32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The floats that BF16 bits stand for, exactly."""
    return (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


@cache
def _bfloat16() -> np.dtype[np.generic] | None:
    # Imported with the first BF16 tensor of a user: it takes 13 ms, and most devices never need it.
    try:
        import ml_dtypes
    except ImportError:
        return None
    dtype: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
    return dtype


# ---- BYTES ----------------------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("<I")


MAX_ELEMENT_BYTES = (1 << 32) - 1
"""Largest length that a BYTES element's uint32 holds."""


def pack_bytes(array: Array) -> bytes:
    """BYTES layout: each element a uint32 little-endian length and the bytes; str elements are UTF-8.

    Raises TensorMismatch for an element that is neither, or too long for its uint32 length.
    """
    parts: list[bytes] = []
    for element in array.reshape(-1).tolist():
        raw = _element_bytes(element)
        parts.append(_LENGTH.pack(len(raw)))
        parts.append(raw)
    return b"".join(parts)


def _element_bytes(element: object) -> bytes:
    try:
        if isinstance(element, str):
            raw = element.encode()
        elif isinstance(element, bytes | bytearray | memoryview):
            raw = bytes(element)
        else:
            # Never bytes(5), which is five zeros.
            raise TensorMismatch(f"a BYTES element is a {type(element).__name__}; wanted bytes or text")
    except UnicodeEncodeError as error:
        raise TensorMismatch(f"a BYTES element is text that has no UTF-8: {error.reason}") from None
    if len(raw) > MAX_ELEMENT_BYTES:
        raise TensorMismatch(f"a BYTES element is {len(raw)} bytes; at most {MAX_ELEMENT_BYTES} fit")
    return raw


def unpack_bytes(data: Buffer, shape: Sequence[int], what: str = "a tensor") -> Array:
    """Inverse of `pack_bytes`: an object array of `bytes`. Raises TensorMismatch when lengths do not add up.

    what: names the tensor in errors, whose beginnings are Triton's.
    """
    view, offset = memoryview(data).cast("B"), 0
    count = element_count(shape)
    if count < 0:
        raise TensorMismatch(f"no array has the shape {list(shape)}: a length is negative")
    layout = "each element of BYTES is a uint32 length and its bytes"
    if count * _LENGTH.size > view.nbytes:
        wanted = f"expected {count} string elements for {what}, got {view.nbytes} bytes"
        raise TensorMismatch(f"{wanted}, which hold {view.nbytes // _LENGTH.size} at most; {layout}")
    elements: list[bytes] = []
    for index in range(count):
        left = view.nbytes - offset
        if not left:
            raise TensorMismatch(f"expected {count} string elements for {what}, got {index}; {layout}")
        if left < _LENGTH.size:
            raise TensorMismatch(
                f"incomplete string length indicator for {what}, expecting {_LENGTH.size} bytes but only {left} bytes "
                f"available for element {index}; {layout}"
            )
        (length,) = _LENGTH.unpack_from(view, offset)
        offset += _LENGTH.size
        if offset + length > view.nbytes:
            raise TensorMismatch(
                f"incomplete string data for {what}, expecting string of length {length} but only "
                f"{view.nbytes - offset} bytes available for element {index}; {layout}"
            )
        elements.append(bytes(view[offset : offset + length]))
        offset += length
    if offset != view.nbytes:
        raise TensorMismatch(
            f"unexpected number of string elements {count + 1} for {what}, expecting {count}: "
            f"{view.nbytes - offset} bytes follow them"
        )
    array: Array = np.empty(count, dtype=object)
    array[:] = elements
    return _shaped(array, shape)
