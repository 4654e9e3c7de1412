"""What wire v1 headers say, as values, and the checks that hold whichever form they came in (msgpack or JSON).

Pure: no bytes here, no model. What is refused is refused with a message that is short whatever was sent.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, TensorMismatch, Unsupported
from edge_runtime.tensors import datatype, element_count

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 64 * 1024
MAX_ID_BYTES = 64
MAX_RANK = 32
"""Axes of one tensor: what every supported numpy can hold."""

MAX_DIMENSION = 1 << 48
MAX_VERSION = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a header says of one tensor; `shape` is the whole shape, batch axis included."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """A decoded request header. `op` "infer" uses all fields; other ops use `model`, `version` and `parameters`."""

    op: str = "infer"
    model: str = ""
    version: int | None = None
    inputs: tuple[TensorHeader, ...] = ()
    outputs: tuple[str, ...] | None = None
    timeout_ms: float | None = None
    priority: int = 0
    timing: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplyHeader:
    """A decoded reply header: an answer's outputs, an op's result, or an error (exactly one of the three)."""

    model: str = ""
    version: int = 0
    outputs: tuple[TensorHeader, ...] = ()
    timing: Mapping[str, float] | None = None
    result: Any = None
    error: Mapping[str, Any] | None = None


def request_from_fields(fields: Mapping[str, Any]) -> RequestHeader:
    """Check the fields of a header map, whichever form they came in.

    Raises DecodeFailed naming the field, TensorMismatch when an input or output is named twice.
    """
    outputs = typed(fields, "outputs", list, None)
    if outputs is not None and not all(isinstance(name, str) for name in outputs):
        raise DecodeFailed("outputs: wanted a list of names")
    priority = typed(fields, "priority", int, 0)
    if not 0 <= priority <= 9:
        raise DecodeFailed(f"priority: got {short(priority)}, wanted 1 (first) to 9, or 0 for the model's default")
    number = typed(fields, "version", int, None)
    if number is not None and not 1 <= number <= MAX_VERSION:
        raise DecodeFailed(f"version: got {short(number)}, wanted a positive integer, or none for the newest")
    header = RequestHeader(
        op=typed(fields, "op", str, "infer"),
        model=typed(fields, "model", str, ""),
        version=number,
        inputs=tuple(tensor_header(item) for item in typed(fields, "inputs", list, [])),
        outputs=None if outputs is None else tuple(outputs),
        timeout_ms=_timeout_ms(fields.get("timeout_ms")),
        priority=priority,
        timing=typed(fields, "timing", bool, False),
        parameters=typed(fields, "parameters", dict, {}),
    )
    _refuse_twice("input", [tensor.name for tensor in header.inputs])
    _refuse_twice("output", header.outputs or ())
    if header.parameters:
        _refuse_foreign(header.parameters)
    return header


def check_id(frame: bytes) -> None:
    """Raise DecodeFailed when an id is over 64 bytes."""
    if len(frame) > MAX_ID_BYTES:
        raise DecodeFailed(f"the id is {len(frame)} bytes; at most {MAX_ID_BYTES} are echoed")


def frame_sizes(inputs: Sequence[TensorHeader]) -> tuple[int, ...]:
    """Exact length of each tensor frame; -1 for BYTES, whose length is not in the header."""
    return tuple(
        -1 if tensor.datatype == "BYTES" else element_count(tensor.shape) * datatype(tensor.datatype).itemsize
        for tensor in inputs
    )


def error_fields(error: EdgeRuntimeError) -> dict[str, Any]:
    """The `error` map of both forms: code, message, retryable and, as a forecast, retry_after_ms."""
    fields: dict[str, Any] = {"code": error.code, "message": error.message, "retryable": error.retryable}
    if error.retry_after_ms is not None:
        fields["retry_after_ms"] = round(error.retry_after_ms, 3)
    return fields


# ---- pieces that both forms are read and written with ---------------------------------------------------------------


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def short(value: Any) -> str:
    """What was sent, fit for a message: bounded in length and depth, whatever it is."""
    return _repr.repr(value)


def check_protocol(version: Any, who: str) -> None:
    """Raise Unsupported for a protocol version other than 1; `who` reads it, daemon or client."""
    if version != PROTOCOL_VERSION or isinstance(version, bool):
        raise Unsupported(f"protocol version {short(version)}; this {who} speaks v {PROTOCOL_VERSION}")


def _refuse_twice(what: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise TensorMismatch(f"{what} {short(twice)} is named twice")


def _refuse_foreign(parameters: Mapping[str, Any]) -> None:
    """Raise DecodeFailed for a value that JSON and msgpack do not share, such as msgpack's own timestamp."""
    waiting: list[Any] = [parameters]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
        elif value is not None and not isinstance(value, str | bytes | int | float):
            raise DecodeFailed(f"parameters: a {type(value).__name__} is nothing that wire v1 has")


def typed(fields: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """A field of this very type, or the default when it is absent or null. Raises DecodeFailed; a bool is no int."""
    value = fields.get(key, default)
    if value is default or value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DecodeFailed(f"{key}: got {type(value).__name__}, wanted {kind.__name__}")
    return value


def _timeout_ms(value: Any) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            timeout_ms = float(value)  # OverflowError: JSON's integers have no bound
            if math.isfinite(timeout_ms) and timeout_ms >= 0:
                return timeout_ms
    except OverflowError:
        pass
    raise DecodeFailed(f"timeout_ms: got {short(value)}, wanted milliseconds, 0 or more")


def tensor_fields(tensor: TensorHeader) -> dict[str, Any]:
    """The map that describes one tensor on the wire."""
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def tensor_header(item: Any) -> TensorHeader:
    """What a map says of one tensor. Raises DecodeFailed for anything but name, datatype and a shape within bounds."""
    if not isinstance(item, dict):
        raise DecodeFailed("a tensor is described by a map of name, datatype and shape")
    name, kind, shape = item.get("name"), item.get("datatype"), item.get("shape")
    if not isinstance(name, str) or not isinstance(kind, str) or not isinstance(shape, list) or len(shape) > MAX_RANK:
        wanted = f"name (text), datatype (text), shape (at most {MAX_RANK} integers)"
        raise DecodeFailed(f"tensor {short(name)}: wanted {wanted}")
    for length in shape:
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= MAX_DIMENSION:
            raise DecodeFailed(f"tensor {short(name)}: shape {short(shape)}; wanted integers of 0 or more")
    return TensorHeader(name, kind, tuple(shape))
