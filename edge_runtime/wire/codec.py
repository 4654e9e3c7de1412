"""Wire v1 frames: header maps to values and back, and the one-frame JSON form. The only user of msgpack.

Pure: bytes in, values out. Limits (DESIGN 5): a header is at most 64 KiB, an id at most 64 bytes, a map or array in a
header at most 64 entries (a 1 MB header of empty maps would otherwise become 70 MB of objects).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, TensorMismatch, Unsupported
from edge_runtime.tensors import Array, datatype, element_count

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 64 * 1024
MAX_ID_BYTES = 64
MAX_HEADER_ENTRIES = 64
MAX_RANK = 32
MAX_DIMENSION = 1 << 48
JSON_FIRST_BYTE = 0x7B


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


# ---- requests -------------------------------------------------------------------------------------------------------


def pack_request(header: RequestHeader) -> bytes:
    """Frame 0 of a request. Nothing in it is particular to one request, so equal requests give equal bytes."""
    fields: dict[str, Any] = {"v": PROTOCOL_VERSION, "op": header.op}
    if header.model:
        fields["model"] = header.model
    if header.version is not None:
        fields["version"] = header.version
    if header.op == "infer":
        fields["inputs"] = [_tensor_fields(tensor) for tensor in header.inputs]
    if header.outputs is not None:
        fields["outputs"] = list(header.outputs)
    if header.timeout_ms is not None:
        fields["timeout_ms"] = header.timeout_ms
    if header.priority:
        fields["priority"] = header.priority
    if header.timing:
        fields["timing"] = True
    if header.parameters:
        fields["parameters"] = dict(header.parameters)
    packed: bytes = msgpack.packb(fields)
    return packed


def unpack_request(frame: bytes) -> RequestHeader:
    """Decode frame 0. Raises DecodeFailed (not a wire v1 map) or Unsupported (another protocol version)."""
    fields = _unpack_map(frame)
    version = fields.get("v")
    if version != PROTOCOL_VERSION or isinstance(version, bool):
        raise Unsupported(f"protocol version {version!r}; this daemon speaks v {PROTOCOL_VERSION}")
    return request_from_fields(fields)


def request_from_fields(fields: Mapping[str, Any]) -> RequestHeader:
    """Check the fields of a header map, whichever form they came in. Raises DecodeFailed naming the field."""
    op = _typed(fields, "op", str, "infer")
    inputs = _typed(fields, "inputs", list, [])
    outputs = _typed(fields, "outputs", list, None)
    if outputs is not None and not all(isinstance(name, str) for name in outputs):
        raise DecodeFailed("outputs: wanted a list of names")
    priority = _typed(fields, "priority", int, 0)
    if not 0 <= priority <= 9:
        raise DecodeFailed(f"priority: got {priority}, wanted 1 (first) to 9, or 0 for the model's default")
    number = _typed(fields, "version", int, None)
    if number is not None and number < 1:
        raise DecodeFailed(f"version: got {number}, wanted a positive integer, or none for the newest")
    return RequestHeader(
        op=op,
        model=_typed(fields, "model", str, ""),
        version=number,
        inputs=tuple(_tensor_header(item) for item in inputs),
        outputs=None if outputs is None else tuple(outputs),
        timeout_ms=_timeout_ms(fields.get("timeout_ms")),
        priority=priority,
        timing=_typed(fields, "timing", bool, False),
        parameters=_typed(fields, "parameters", dict, {}),
    )


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


# ---- replies --------------------------------------------------------------------------------------------------------


def pack_answer(
    model: str, version: int, outputs: Sequence[TensorHeader], timing: Mapping[str, float] | None = None
) -> bytes:
    """Header of an answer; its first byte is 0x84 without timing, which generators may count on."""
    fields: dict[str, Any] = {
        "v": PROTOCOL_VERSION,
        "model": model,
        "version": version,
        "outputs": [_tensor_fields(tensor) for tensor in outputs],
    }
    if timing is not None:
        fields["timing"] = dict(timing)
    packed: bytes = msgpack.packb(fields)
    return packed


def pack_result(result: Any) -> bytes:
    """Header of the answer to an op other than infer."""
    packed: bytes = msgpack.packb({"v": PROTOCOL_VERSION, "result": result})
    return packed


def pack_error(error: EdgeRuntimeError) -> bytes:
    """Header of a refusal or failure."""
    packed: bytes = msgpack.packb({"v": PROTOCOL_VERSION, "error": error_fields(error)})
    return packed


def error_fields(error: EdgeRuntimeError) -> dict[str, Any]:
    """The `error` map of both forms: code, message, retryable and, as a forecast, retry_after_ms."""
    fields: dict[str, Any] = {"code": error.code, "message": error.message, "retryable": error.retryable}
    if error.retry_after_ms is not None:
        fields["retry_after_ms"] = round(error.retry_after_ms, 3)
    return fields


def unpack_reply(frame: bytes) -> ReplyHeader:
    """Decode a reply's frame 0 (client side). Raises DecodeFailed when it is not a wire v1 reply."""
    fields = _unpack_map(frame)
    if fields.get("v") != PROTOCOL_VERSION:
        raise Unsupported(f"reply has protocol version {fields.get('v')!r}; this client speaks v {PROTOCOL_VERSION}")
    if "error" in fields:
        return ReplyHeader(error=_typed(fields, "error", dict, {}))
    if "result" in fields:
        return ReplyHeader(result=fields["result"])
    return ReplyHeader(
        model=_typed(fields, "model", str, ""),
        version=_typed(fields, "version", int, 0),
        outputs=tuple(_tensor_header(item) for item in _typed(fields, "outputs", list, [])),
        timing=_typed(fields, "timing", dict, None),
    )


# ---- the one-frame JSON form ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """A decoded JSON request: the same header, the caller's own id, and each input's data as an array."""

    header: RequestHeader
    id: Any
    arrays: tuple[Array, ...]


def json_id(frame: bytes) -> Any:
    """The `id` of a JSON request that could not be decoded otherwise, so that its error can still be matched."""
    try:
        found = json.loads(frame)
    except (ValueError, RecursionError):
        return None
    return found.get("id") if isinstance(found, dict) else None


def unpack_json_request(frame: bytes) -> JsonRequest:
    """Decode a one-frame JSON request. Raises DecodeFailed, Unsupported (datatype), TensorMismatch (data ≠ shape)."""
    try:
        fields = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise DecodeFailed(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise DecodeFailed("wanted a JSON object")
    if fields.get("v", PROTOCOL_VERSION) != PROTOCOL_VERSION:
        raise Unsupported(f"protocol version {fields['v']!r}; this daemon speaks v {PROTOCOL_VERSION}")
    parameters = _typed(fields, "parameters", dict, {})
    merged = {**fields, **{key: parameters[key] for key in ("timeout_ms", "priority", "timing") if key in parameters}}
    outputs = merged.get("outputs")
    if isinstance(outputs, list):
        merged["outputs"] = [item.get("name") if isinstance(item, dict) else item for item in outputs]
    header = request_from_fields(merged)
    items = _typed(fields, "inputs", list, [])
    arrays = tuple(
        _array_from_json(tensor, item.get("data")) for tensor, item in zip(header.inputs, items, strict=True)
    )
    return JsonRequest(header, fields.get("id"), arrays)


def pack_json_answer(
    request_id: Any,
    model: str,
    version: int,
    outputs: Sequence[tuple[TensorHeader, Array]],
    timing: Mapping[str, float] | None = None,
) -> bytes:
    """An answer in OIP's JSON: data flat, non-finite floats as the strings "NaN", "Infinity", "-Infinity"."""
    fields: dict[str, Any] = {
        "id": request_id,
        "model_name": model,
        "model_version": str(version),
        "outputs": [
            {**_tensor_fields(tensor), "shape": list(array.shape), "data": _array_to_json(array)}
            for tensor, array in outputs
        ],
    }
    if timing is not None:
        fields["timing"] = dict(timing)
    return _dumps(fields)


def pack_json_result(request_id: Any, result: Any) -> bytes:
    """The JSON answer to an op other than infer."""
    return _dumps({"id": request_id, "result": result})


def pack_json_error(request_id: Any, error: EdgeRuntimeError) -> bytes:
    """A refusal or failure in JSON."""
    return _dumps({"id": request_id, "error": error_fields(error)})


# ---- private --------------------------------------------------------------------------------------------------------


def _dumps(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()


def _refuse_extension(code: int, data: bytes) -> Any:  # noqa: ARG001 (the signature is msgpack's)
    raise DecodeFailed(f"msgpack extension type {code} in a header; wire v1 has none")


def _unpack_map(frame: bytes) -> dict[str, Any]:
    if len(frame) > MAX_HEADER_BYTES:
        raise DecodeFailed(f"the header is {len(frame)} bytes; at most {MAX_HEADER_BYTES} are read")
    try:
        fields = msgpack.unpackb(
            frame,
            max_map_len=MAX_HEADER_ENTRIES,
            max_array_len=MAX_HEADER_ENTRIES * 64,
            max_str_len=4096,
            max_bin_len=MAX_HEADER_BYTES,
            ext_hook=_refuse_extension,
        )
    except DecodeFailed:
        raise
    except Exception as error:  # noqa: BLE001 (see below)
        # msgpack raises ValueError, its own StackError and UnpackException, UnicodeDecodeError: all mean one thing.
        raise DecodeFailed(f"the header is not a msgpack map: {type(error).__name__} {error}".strip()) from None
    if not isinstance(fields, dict):
        raise DecodeFailed(f"the header is a msgpack {type(fields).__name__}, wanted a map")
    return fields


def _typed(fields: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = fields.get(key, default)
    if value is default or value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DecodeFailed(f"{key}: got {type(value).__name__}, wanted {kind.__name__}")
    return value


def _timeout_ms(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise DecodeFailed(f"timeout_ms: got {value!r}, wanted milliseconds, 0 or more")
    return float(value)


def _tensor_fields(tensor: TensorHeader) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _tensor_header(item: Any) -> TensorHeader:
    if not isinstance(item, dict):
        raise DecodeFailed("a tensor is described by a map of name, datatype and shape")
    name, kind, shape = item.get("name"), item.get("datatype"), item.get("shape")
    if not isinstance(name, str) or not isinstance(kind, str) or not isinstance(shape, list) or len(shape) > MAX_RANK:
        raise DecodeFailed(f"tensor {name!r}: wanted name (text), datatype (text), shape (at most {MAX_RANK} integers)")
    for length in shape:
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= MAX_DIMENSION:
            raise DecodeFailed(f"tensor {name!r}: shape {shape!r}; wanted integers of 0 or more")
    return TensorHeader(name, kind, tuple(shape))


_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _array_from_json(tensor: TensorHeader, data: Any) -> Array:
    kind = datatype(tensor.datatype)
    flat = _flatten(data)
    if len(flat) != element_count(tensor.shape):
        raise TensorMismatch(
            f"input {tensor.name!r}: shape {list(tensor.shape)} holds {element_count(tensor.shape)} elements, "
            f"data has {len(flat)}"
        )
    if kind.name == "BYTES":
        array: Array = np.empty(len(flat), dtype=object)
        array[:] = [item.encode() if isinstance(item, str) else item for item in flat]
        if not all(isinstance(item, bytes) for item in array):
            raise TensorMismatch(f"input {tensor.name!r}: BYTES data in JSON is text")
        return array.reshape(tensor.shape)
    if kind.dtype.kind == "f":
        flat = [_NON_FINITE.get(item, item) if isinstance(item, str) else item for item in flat]
    wanted: type | tuple[type, ...] = (int, float) if kind.dtype.kind == "f" else (bool if kind.name == "BOOL" else int)
    if not all(isinstance(item, wanted) for item in flat):
        raise TensorMismatch(f"input {tensor.name!r}: data does not fit {kind.name}")
    try:
        with np.errstate(over="raise"):
            return np.array(flat, dtype=kind.dtype).reshape(tensor.shape)
    except (OverflowError, FloatingPointError, ValueError, TypeError) as error:
        raise TensorMismatch(f"input {tensor.name!r}: data does not fit {kind.name}: {error}") from None


def _flatten(data: Any) -> list[Any]:
    """Flat list of flat or nested lists, without recursion."""
    if not isinstance(data, list):
        raise DecodeFailed("data: wanted a list, flat or nested")
    flat, stack = [], [iter(data)]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                if len(stack) >= MAX_RANK:
                    raise DecodeFailed(f"data: nested deeper than {MAX_RANK}")
                stack.append(iter(item))
                break
            flat.append(item)
        else:
            stack.pop()
    return flat


def _array_to_json(array: Array) -> list[Any]:
    if array.dtype.kind == "O":
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item) for item in array.reshape(-1)]
    flat: list[Any] = array.reshape(-1).tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return [item if math.isfinite(item) else _non_finite_name(item) for item in flat]
    return flat


def _non_finite_name(item: float) -> str:
    return "NaN" if math.isnan(item) else ("Infinity" if item > 0 else "-Infinity")
