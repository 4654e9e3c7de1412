"""The one-frame JSON form of wire v1: a request with its data as text, and its answer.

For people and small clients; everything else sends frames. Non-finite floats are the strings "NaN", "Infinity" and
"-Infinity", BF16 are numbers, BYTES are text. Pure, and as strict as the msgpack form: whatever the text, what is
raised is an EdgeRuntimeError.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, TensorMismatch
from edge_runtime.tensors import Array, bf16_from_fp32, bf16_to_fp32, datatype, element_count, values_to_bits
from edge_runtime.wire.headers import (
    MAX_ID_BYTES,
    PROTOCOL_VERSION,
    RequestHeader,
    TensorHeader,
    check_protocol,
    error_fields,
    request_from_fields,
    short,
    tensor_fields,
    typed,
)

JSON_FIRST_BYTE = 0x7B

MAX_JSON_BYTES = 4 << 20
"""A one-frame JSON request: one 224 x 224 x 3 image as text is 3 MB. Larger tensors belong in frames of their own:
parsing text holds up everybody else, and its objects take 20 times its bytes."""


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """A decoded JSON request: the same header, the caller's own id, and each input's data as an array.

    reply_to: where the answer goes, in protocols that say it nowhere else (MQTT 3.1.1).
    """

    header: RequestHeader
    id: Any
    arrays: tuple[Array, ...]
    reply_to: str | None = None


def json_id(frame: bytes) -> Any:
    """The `id` of a JSON request that could not be decoded otherwise, so that its error can still be matched."""
    return json_reply_fields(frame)[1]


def json_reply_fields(frame: bytes) -> tuple[str | None, Any]:
    """`reply_to` and `id` of a JSON request, as far as they can be read, whatever is wrong with the rest."""
    reply_to: str | None = None
    try:
        fields = _loads(frame)
        reply_to = typed(fields, "reply_to", str, None)
        return reply_to, _json_id(fields.get("id"))
    except DecodeFailed:
        return reply_to, None


def unpack_json_request(frame: bytes) -> JsonRequest:
    """Decode a one-frame JSON request. Raises DecodeFailed, Unsupported (datatype), TensorMismatch (data ≠ shape)."""
    fields = _loads(frame)
    request_id = _json_id(fields.get("id"))
    check_protocol(fields.get("v", PROTOCOL_VERSION), "daemon")
    parameters = typed(fields, "parameters", dict, {})
    merged = {**fields, **{key: parameters[key] for key in ("timeout_ms", "priority", "timing") if key in parameters}}
    outputs = merged.get("outputs")
    if isinstance(outputs, list):
        merged["outputs"] = [item.get("name") if isinstance(item, dict) else item for item in outputs]
    header = request_from_fields(merged)
    items = typed(fields, "inputs", list, [])
    arrays = tuple(
        _array_from_json(tensor, item.get("data")) for tensor, item in zip(header.inputs, items, strict=True)
    )
    return JsonRequest(header, request_id, arrays, typed(fields, "reply_to", str, None))


def pack_json_answer(
    request_id: Any,
    model: str,
    version: int,
    outputs: Sequence[tuple[TensorHeader, Array]],
    timing: Mapping[str, float] | None = None,
    *,
    more: Mapping[str, str] | None = None,
) -> bytes:
    """An answer in OIP's JSON: data flat, non-finite floats as the strings "NaN", "Infinity", "-Infinity".

    more: further keys beside OIP's.
    """
    fields: dict[str, Any] = {
        "id": request_id,
        "model_name": model,
        "model_version": str(version),
        "outputs": [
            {**tensor_fields(tensor), "shape": list(array.shape), "data": _array_to_json(tensor.datatype, array)}
            for tensor, array in outputs
        ],
    }
    if timing is not None:
        fields["timing"] = dict(timing)
    return _dumps({**fields, **(more or {})})


def pack_json_result(request_id: Any, result: Any) -> bytes:
    """The JSON answer to an op other than infer."""
    return _dumps({"id": request_id, "result": result})


def pack_json_error(request_id: Any, error: EdgeRuntimeError) -> bytes:
    """A refusal or failure in JSON."""
    return _dumps({"id": request_id, "error": error_fields(error)})


# ---- private --------------------------------------------------------------------------------------------------------


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
    name, count = short(tensor.name), element_count(tensor.shape)
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
        raise ValueError(f"got text {short(text)}, wanted numbers or one of {', '.join(_NON_FINITE)}")
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
