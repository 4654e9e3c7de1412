"""Wire v1 frames: header maps to values and back, and the one-frame JSON form. The only user of msgpack.

Pure: bytes in, values out; whatever the bytes, what is raised is an EdgeRuntimeError. Limits of a request: a header is
at most 64 KiB and an id at most 64 bytes (DESIGN 5), because objects take up to 70 times the bytes that make them; the
JSON form has its own. A reply comes from a daemon that the caller chose to trust, and may be larger.

Where a map names a key twice, the last one counts, in both forms.
"""

from __future__ import annotations

import itertools
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgpack
import numpy as np

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, TensorMismatch, Unsupported
from edge_runtime.tensors import (
    Array,
    bf16_from_fp32,
    bf16_to_fp32,
    datatype,
    element_count,
    values_to_bits,
)

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 64 * 1024
MAX_ID_BYTES = 64
MAX_HEADER_ENTRIES = 64
"""Entries of one map in a header; every field that wire v1 knows, and room."""

MAX_HEADER_ITEMS = 4096
"""Entries of one list in a header: inputs, outputs, a shape."""

MAX_REPLY_HEADER_BYTES = 16 << 20
"""A reply's frame 0 as a client reads it: `models` and `stats` of thousands of versions stay under it."""

MAX_JSON_BYTES = 4 << 20
"""A one-frame JSON request: one 224 x 224 x 3 image as text is 3 MB. Larger tensors belong in frames of their own:
parsing text holds up everybody else, and its objects take 20 times its bytes."""

MAX_RANK = 32
"""Axes of one tensor: what every supported numpy can hold."""

MAX_DIMENSION = 1 << 48
MAX_VERSION = (1 << 63) - 1
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
    """Frame 0 of a request. Nothing in it is particular to one request, so equal requests give equal bytes.

    Raises DecodeFailed when a field cannot be put on the wire.
    """
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
    return _pack(fields)


def unpack_request(frame: bytes) -> RequestHeader:
    """Decode frame 0. Raises DecodeFailed (not a wire v1 map) or Unsupported (another protocol version)."""
    fields = _unpack_map(frame, MAX_HEADER_BYTES, MAX_HEADER_ENTRIES, MAX_HEADER_ITEMS)
    _check_protocol(fields.get("v"), "daemon")
    return request_from_fields(fields)


def request_from_fields(fields: Mapping[str, Any]) -> RequestHeader:
    """Check the fields of a header map, whichever form they came in.

    Raises DecodeFailed naming the field, TensorMismatch when an input or output is named twice.
    """
    outputs = _typed(fields, "outputs", list, None)
    if outputs is not None and not all(isinstance(name, str) for name in outputs):
        raise DecodeFailed("outputs: wanted a list of names")
    priority = _typed(fields, "priority", int, 0)
    if not 0 <= priority <= 9:
        raise DecodeFailed(f"priority: got {_short(priority)}, wanted 1 (first) to 9, or 0 for the model's default")
    number = _typed(fields, "version", int, None)
    if number is not None and not 1 <= number <= MAX_VERSION:
        raise DecodeFailed(f"version: got {_short(number)}, wanted a positive integer, or none for the newest")
    header = RequestHeader(
        op=_typed(fields, "op", str, "infer"),
        model=_typed(fields, "model", str, ""),
        version=number,
        inputs=tuple(_tensor_header(item) for item in _typed(fields, "inputs", list, [])),
        outputs=None if outputs is None else tuple(outputs),
        timeout_ms=_timeout_ms(fields.get("timeout_ms")),
        priority=priority,
        timing=_typed(fields, "timing", bool, False),
        parameters=_typed(fields, "parameters", dict, {}),
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
    return _pack(fields)


def pack_result(result: Any) -> bytes:
    """Header of the answer to an op other than infer."""
    return _pack({"v": PROTOCOL_VERSION, "result": result})


def pack_error(error: EdgeRuntimeError) -> bytes:
    """Header of a refusal or failure."""
    return _pack({"v": PROTOCOL_VERSION, "error": error_fields(error)})


def error_fields(error: EdgeRuntimeError) -> dict[str, Any]:
    """The `error` map of both forms: code, message, retryable and, as a forecast, retry_after_ms."""
    fields: dict[str, Any] = {"code": error.code, "message": error.message, "retryable": error.retryable}
    if error.retry_after_ms is not None:
        fields["retry_after_ms"] = round(error.retry_after_ms, 3)
    return fields


def unpack_reply(frame: bytes) -> ReplyHeader:
    """Decode a reply's frame 0 (client side). Raises DecodeFailed or Unsupported when it is not a wire v1 reply."""
    fields = _unpack_map(frame, MAX_REPLY_HEADER_BYTES, MAX_REPLY_HEADER_BYTES, MAX_REPLY_HEADER_BYTES)
    _check_protocol(fields.get("v"), "client")
    if "error" in fields:
        return ReplyHeader(error=_checked_error(_typed(fields, "error", dict, {})))
    if "result" in fields:
        return ReplyHeader(result=fields["result"])
    if "outputs" not in fields:
        raise DecodeFailed("a reply has outputs, a result or an error; got none of them")
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
        return _json_id(_loads(frame).get("id"))
    except DecodeFailed:
        return None


def unpack_json_request(frame: bytes) -> JsonRequest:
    """Decode a one-frame JSON request. Raises DecodeFailed, Unsupported (datatype), TensorMismatch (data ≠ shape)."""
    fields = _loads(frame)
    request_id = _json_id(fields.get("id"))
    _check_protocol(fields.get("v", PROTOCOL_VERSION), "daemon")
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
    return JsonRequest(header, request_id, arrays)


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
            {**_tensor_fields(tensor), "shape": list(array.shape), "data": _array_to_json(tensor.datatype, array)}
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


# ---- private: values and limits that both forms share ---------------------------------------------------------------


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def _short(value: Any) -> str:
    """What was sent, fit for a message: bounded in length and depth, whatever it is."""
    return _repr.repr(value)


def _check_protocol(version: Any, who: str) -> None:
    if version != PROTOCOL_VERSION or isinstance(version, bool):
        raise Unsupported(f"protocol version {_short(version)}; this {who} speaks v {PROTOCOL_VERSION}")


def _refuse_twice(what: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise TensorMismatch(f"{what} {_short(twice)} is named twice")


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
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            timeout_ms = float(value)  # OverflowError: JSON's integers have no bound
            if math.isfinite(timeout_ms) and timeout_ms >= 0:
                return timeout_ms
    except OverflowError:
        pass
    raise DecodeFailed(f"timeout_ms: got {_short(value)}, wanted milliseconds, 0 or more")


def _tensor_fields(tensor: TensorHeader) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _tensor_header(item: Any) -> TensorHeader:
    if not isinstance(item, dict):
        raise DecodeFailed("a tensor is described by a map of name, datatype and shape")
    name, kind, shape = item.get("name"), item.get("datatype"), item.get("shape")
    if not isinstance(name, str) or not isinstance(kind, str) or not isinstance(shape, list) or len(shape) > MAX_RANK:
        wanted = f"name (text), datatype (text), shape (at most {MAX_RANK} integers)"
        raise DecodeFailed(f"tensor {_short(name)}: wanted {wanted}")
    for length in shape:
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= MAX_DIMENSION:
            raise DecodeFailed(f"tensor {_short(name)}: shape {_short(shape)}; wanted integers of 0 or more")
    return TensorHeader(name, kind, tuple(shape))


def _checked_error(error: Mapping[str, Any]) -> Mapping[str, Any]:
    """An error map that a client can rely on: code and message are text, retry_after_ms is a number or absent."""
    retry_after_ms = error.get("retry_after_ms")
    is_number = isinstance(retry_after_ms, int | float) and not isinstance(retry_after_ms, bool)
    if not isinstance(error.get("code"), str) or not isinstance(error.get("message"), str):
        raise DecodeFailed("a reply's error has a code and a message, both text")
    if retry_after_ms is not None and not is_number:
        raise DecodeFailed(f"a reply's retry_after_ms is {_short(retry_after_ms)}, wanted milliseconds")
    return error


# ---- private: msgpack -----------------------------------------------------------------------------------------------


def _pack(fields: Mapping[str, Any]) -> bytes:
    try:
        packed: bytes = msgpack.packb(fields)
    except UnicodeEncodeError:
        # A file name that is not UTF-8, quoted in a message: shown escaped rather than not at all.
        packed = msgpack.packb(fields, unicode_errors="backslashreplace")
    except OverflowError as error:
        raise DecodeFailed(f"a number is too large for the wire, which has 64 bits: {error}") from None
    return packed


def _refuse_extension(code: int, data: bytes) -> NoReturn:  # noqa: ARG001 (the signature is msgpack's)
    raise DecodeFailed(f"msgpack extension type {code} in a header; wire v1 has none")


def _unpack_map(frame: bytes, max_bytes: int, max_entries: int, max_items: int) -> dict[str, Any]:
    if len(frame) > max_bytes:
        raise DecodeFailed(f"the header is {len(frame)} bytes; at most {max_bytes} are read")
    try:
        fields = msgpack.unpackb(
            frame,
            max_map_len=max_entries,
            max_array_len=max_items,
            max_str_len=max_bytes,
            max_bin_len=max_bytes,
            max_ext_len=max_bytes,
            ext_hook=_refuse_extension,
        )
    except DecodeFailed:
        raise
    except Exception as error:  # noqa: BLE001 (see below)
        # msgpack raises ValueError, its own StackError and UnpackException, UnicodeDecodeError: all mean one thing.
        reason = f"{type(error).__name__} {str(error)[:200]}".strip()
        raise DecodeFailed(f"the header is not a msgpack map: {reason}") from None
    if not isinstance(fields, dict):
        raise DecodeFailed(f"the header is a msgpack {type(fields).__name__}, wanted a map")
    return fields


# ---- private: JSON --------------------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> NoReturn:
    raise DecodeFailed(f'{name} is not JSON; write "{name}" as text')


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def _loads(frame: bytes) -> dict[str, Any]:
    if len(frame) > MAX_JSON_BYTES:
        advice = "send large tensors as frames of their own"
        raise DecodeFailed(f"the JSON request is {len(frame)} bytes; at most {MAX_JSON_BYTES} are read; {advice}")
    try:
        fields = _decoder.decode(str(frame, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise DecodeFailed(f"not JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise DecodeFailed(f"the message is a JSON {type(fields).__name__}, wanted an object")
    return fields


def _dumps(fields: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_with_named_floats(fields), allow_nan=False, separators=(",", ":")).encode()


def _with_named_floats(value: Any) -> Any:
    """The same value with non-finite floats as text; only for results of ops, which are shallow."""
    if isinstance(value, float) and not math.isfinite(value):
        return _non_finite_name(value)
    if isinstance(value, Mapping):
        return {key: _with_named_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_named_floats(item) for item in value]
    return value


def _json_id(value: Any) -> str | int | None:
    """An id that can be echoed: text or an integer of at most 64 bytes, or none."""
    if value is None:
        return None
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise DecodeFailed(f"id: got {type(value).__name__}, wanted text or an integer")
    length = len(str(value).encode("utf-8", "surrogatepass"))
    if length > MAX_ID_BYTES:
        raise DecodeFailed(f"the id is {length} bytes; at most {MAX_ID_BYTES} are echoed")
    return value


_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_FLOATS = frozenset(("FP16", "FP32", "FP64", "BF16"))


def _array_from_json(tensor: TensorHeader, data: Any) -> Array:
    """Data as an array of the tensor's shape and dtype (BF16: its bits). Raises TensorMismatch naming the input."""
    name, count = _short(tensor.name), element_count(tensor.shape)
    kind = datatype(tensor.datatype)
    flat = _flatten(name, tensor.shape, data)
    if len(flat) != count:
        raise TensorMismatch(f"input {name}: shape {list(tensor.shape)} holds {count} elements, data has {len(flat)}")
    try:
        if kind.name in _FLOATS:
            array = _floats(flat, kind.name)
        elif kind.name == "BYTES":
            array = _texts(flat)
        else:
            array = _integers(flat, kind.dtype)
        return array.reshape(tensor.shape)
    except (OverflowError, ValueError, TypeError) as error:
        raise TensorMismatch(f"input {name}: data does not fit {kind.name}: {str(error)[:200]}") from None


def _flatten(name: str, shape: Sequence[int], data: Any) -> list[Any]:
    """Flat list of flat or nested lists; nested ones must have the shape, or rows would be taken for columns."""
    if not isinstance(data, list):
        raise DecodeFailed(f"input {name}: data: got {type(data).__name__}, wanted a list, flat or nested")
    if not data or not isinstance(data[0], list):
        return data
    level = [data]
    for axis, length in enumerate(shape):
        if not all(isinstance(item, list) and len(item) == length for item in level):
            raise TensorMismatch(f"input {name}: nested data is not {length} long everywhere on axis {axis}")
        level = list(itertools.chain.from_iterable(level))
    return level


def _floats(flat: list[Any], kind: str) -> Array:
    kinds = set(map(type, flat))
    if not kinds <= {int, float, str}:
        raise ValueError("wanted numbers")
    texts = 0
    if str in kinds:
        texts = sum(isinstance(item, str) for item in flat)
        flat = [_non_finite(item) if isinstance(item, str) else item for item in flat]
    with np.errstate(over="ignore"):
        numbers = np.array(flat, dtype=np.float64)
        narrow: Array = numbers.astype(np.float32 if kind == "BF16" else datatype(kind).dtype)
        bits = bf16_from_fp32(narrow.astype(np.float32)) if kind == "BF16" else None
    stored = narrow if bits is None else bf16_to_fp32(bits)
    if np.count_nonzero(~np.isfinite(stored)) != texts:
        raise OverflowError("a number is too large")
    return narrow if bits is None else bits


def _non_finite(text: str) -> float:
    if text not in _NON_FINITE:
        raise ValueError(f"got text {_short(text)}, wanted numbers or one of {', '.join(_NON_FINITE)}")
    return _NON_FINITE[text]


def _texts(flat: list[Any]) -> Array:
    if not set(map(type, flat)) <= {str}:
        raise ValueError("in JSON, an element is text")
    array: Array = np.empty(len(flat), dtype=object)
    array[:] = [item.encode() for item in flat]
    return array


def _integers(flat: list[Any], dtype: np.dtype[np.generic]) -> Array:
    if not set(map(type, flat)) <= {bool if dtype.kind == "b" else int}:
        raise ValueError("wanted true or false" if dtype.kind == "b" else "wanted integers")
    if flat and dtype.kind != "b":
        # Before numpy 2 an integer that does not fit is wrapped around.
        limits = np.iinfo(dtype.type)  # type: ignore[type-var]
        least, most = int(limits.min), int(limits.max)
        if min(flat) < least or max(flat) > most:
            raise OverflowError(f"wanted {least} to {most}")
    return np.array(flat, dtype=dtype)


def _array_to_json(kind: str, array: Array) -> list[Any]:
    if array.dtype.kind in "OSUT":
        texts = array.reshape(-1).tolist()
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item) for item in texts]
    if kind == "BF16":
        array = bf16_to_fp32(values_to_bits(array).astype(np.uint16, copy=False))
    flat: list[Any] = array.reshape(-1).tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return [item if math.isfinite(item) else _non_finite_name(item) for item in flat]
    return flat


def _non_finite_name(item: float) -> str:
    return "NaN" if math.isnan(item) else ("Infinity" if item > 0 else "-Infinity")
