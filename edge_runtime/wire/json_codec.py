"""Wire v1 in JSON: a request in one frame with its data as text, and its answer.

For people and small clients; everything else sends frames. `picture` or `sound` (base64), lists of them, or `text` are
in place of `inputs`, and are answered in words that a person understands. Non-finite floats are "NaN", "Infinity" and
"-Infinity", BF16 are numbers, BYTES are text. Pure, and as strict as msgpack: any text raises an EdgeRuntimeError at
most.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import orjson
from msgspec import Struct

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, TensorMismatch
from edge_runtime.messages import TEXT, UNNAMED, RequestHeader, TensorHeader
from edge_runtime.tensors import Array, bf16_from_fp32, bf16_to_fp32, datatype, element_count, values_to_bits
from edge_runtime.wire.codec import (
    MAX_HEADER_ITEMS,
    MAX_ID_BYTES,
    PROTOCOL_VERSION,
    check_protocol,
    error_fields,
    request_from_fields,
    short,
    tensor_fields,
    typed,
)

MAX_JSON_BYTES = 4 << 20
"""A one-frame JSON request: one 224 x 224 x 3 image as text is 3 MB. Larger tensors belong in frames of their own:
parsing text blocks all other requests, and its objects take 20 times its bytes."""


FEW_KEYS = 16
"""So many keys are looked for one by one; text with more is read a second time."""


class JsonRequest(Struct, frozen=True):
    """A decoded JSON request: the same header, the caller's own id, and each input's data as an array.

    reply_to: where the answer goes, in protocols that say it nowhere else (MQTT 3.1.1). elements: where it has pictures
    or texts in place of inputs.
    """

    header: RequestHeader
    id: Any
    arrays: tuple[Array, ...]
    reply_to: str | None = None
    elements: Elements | None = None


class Elements(NamedTuple):
    """Pictures or texts that came in place of inputs. as_list: whether they are answered by a list, however many.

    name: of the tensor that they are; inner: its lengths behind the rows.
    """

    rows: tuple[bytes | memoryview, ...]
    as_list: bool
    name: str = UNNAMED
    inner: tuple[int, ...] = ()

    def inputs(self) -> list[dict[str, Any]]:
        """The inputs that they stand for."""
        return [{"name": self.name, "datatype": "BYTES", "shape": self._shape}]

    def array(self) -> Array:
        """The tensor that they stand for: BYTES [rows], or [rows, *inner]."""
        array: Array = np.empty(len(self.rows), dtype=object)
        for index, data in enumerate(self.rows):
            array[index] = data
        return array.reshape(self._shape)

    @property
    def _shape(self) -> list[int]:
        return [len(self.rows) // math.prod(self.inner), *self.inner]


FILE_KEYS = {
    **dict.fromkeys(("picture", "pictures"), "a JPEG, PNG, WebP, BMP or GIF"),
    **dict.fromkeys(("sound", "sounds"), "a WAV, FLAC, or bare samples of 16 bits"),
}
"""Keys of files in base64, one or a list, and what they are: the input that takes them reads either alike."""


def elements_of(fields: Mapping[str, Any]) -> Elements | None:
    """The pictures, sounds or texts of a request; None where it has inputs. Raises DecodeFailed."""
    given = [key for key in ("inputs", *FILE_KEYS) if fields.get(key) is not None]
    if not given and fields.get(TEXT) is not None:
        return _texts_of(fields[TEXT])
    if given in ([], ["inputs"]):
        return None
    if len(given) > 1:
        raise DecodeFailed(f"got {' and '.join(given)}; wanted one of inputs, picture and pictures, sound and sounds")
    (key,) = given
    as_list = key.endswith("s")
    texts = typed(fields, key, list, []) if as_list else [fields[key]]
    if not texts:
        raise DecodeFailed(f"{key}: got an empty list, wanted base64 text of each {key.removesuffix('s')}")
    if len(texts) > MAX_HEADER_ITEMS:
        raise DecodeFailed(f"{key}: got {len(texts)}, wanted at most {MAX_HEADER_ITEMS}")
    return Elements(tuple(_encoded(key, text) for text in texts), as_list)


def json_id(frame: bytes) -> Any:
    """The `id` of a JSON request that could not be decoded otherwise, so that its error can still be matched."""
    return json_reply_fields(frame)[1]


def json_reply_fields(frame: bytes) -> tuple[str | None, Any]:
    """`reply_to` and `id` of a JSON request, as far as they can be read, whatever is wrong with the rest."""
    reply_to: str | None = None
    try:
        fields = loads(frame)
        reply_to = typed(fields, "reply_to", str, None)
        return reply_to, _exact_id(frame, fields)
    except DecodeFailed:
        return reply_to, None


def unpack_json_request(frame: bytes, fields: dict[str, Any] | None = None) -> JsonRequest:
    """Decode a one-frame JSON request. Raises DecodeFailed, Unsupported (datatype), TensorMismatch (data ≠ shape).

    fields: of the frame, where it is read already.
    """
    fields = loads(frame) if fields is None else fields
    request_id = _exact_id(frame, fields)
    check_protocol(fields.get("v", PROTOCOL_VERSION), "daemon")
    parameters = typed(fields, "parameters", dict, {})
    elements = elements_of(fields)
    if elements is not None:
        fields = {**fields, "inputs": elements.inputs()}
    merged = {**fields, **{key: parameters[key] for key in ("timeout_ms", "priority", "timing") if key in parameters}}
    outputs = merged.get("outputs")
    _refuse_places(merged.get("inputs"), outputs)
    if isinstance(outputs, list):
        merged["outputs"] = [item.get("name") if isinstance(item, dict) else item for item in outputs]
    header = request_from_fields(merged)
    reply_to = typed(fields, "reply_to", str, None)
    if elements is not None:
        return JsonRequest(header, request_id, (elements.array(),), reply_to, elements)
    items = typed(fields, "inputs", list, [])
    may_have_booleans = has_booleans(frame)
    arrays = tuple(
        array_from_json(tensor, item.get("data"), may_have_booleans=may_have_booleans)
        for tensor, item in zip(header.inputs, items, strict=True)
    )
    return JsonRequest(header, request_id, arrays, reply_to)


def pack_json_answer(
    request_id: Any,
    model: str,
    version: int,
    outputs: Sequence[tuple[TensorHeader, Array]],
    timing: Mapping[str, float] | None = None,
    *,
    more: Mapping[str, Any] | None = None,
) -> bytes:
    """An answer in OIP's JSON: data flat, non-finite floats as the strings "NaN", "Infinity", "-Infinity".

    more: further keys beside OIP's.
    """
    fields: dict[str, Any] = {
        "id": request_id,
        "model_name": model,
        "model_version": str(version),
        "outputs": outputs_to_json(outputs),
    }
    if timing is not None:
        fields["timing"] = dict(timing)
    return dumps({**fields, **(more or {})})


def outputs_to_json(outputs: Sequence[tuple[TensorHeader, Array]]) -> list[dict[str, Any]]:
    """Outputs in OIP's JSON, for `dumps`."""
    return [
        {**tensor_fields(tensor), "shape": list(array.shape), "data": array_to_json(tensor.datatype, array)}
        for tensor, array in outputs
    ]


def pack_json_result(request_id: Any, result: Any) -> bytes:
    """The JSON answer to an op other than infer."""
    return dumps({"id": request_id, "result": result})


def pack_json_error(request_id: Any, error: EdgeRuntimeError) -> bytes:
    """A refusal or failure in JSON."""
    return dumps({"id": request_id, "error": error_fields(error)})


def loads(frame: bytes, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """An object of JSON text. Raises DecodeFailed for anything else, and for more than `max_bytes`.

    An integer beyond 64 bits is a float, as no datatype has one; of a key that is named twice the last one counts.
    """
    fields = load_value(frame, max_bytes)
    if not isinstance(fields, dict):
        raise DecodeFailed(f"the message is a JSON {type(fields).__name__}, wanted an object")
    return fields


def refuse_doubled_keys(frame: bytes, fields: Mapping[str, Any]) -> None:
    """Raise DecodeFailed for an object whose text names a key twice, of which `loads` keeps the last. fields: of it."""
    few = len(fields) <= FEW_KEYS
    if few and all(frame.count(b'"%s"' % key.encode("utf-8", "surrogatepass")) == 1 for key in fields):
        return
    seen: set[str] = set()
    for key, _ in json.loads(frame, object_pairs_hook=list):
        if key in seen:
            raise DecodeFailed(f"input {short(key)} already exists in request: its key is there twice")
        seen.add(key)


def too_long(nbytes: int, max_bytes: int) -> DecodeFailed:
    """Return the error for JSON of more than `max_bytes`."""
    advice = "send large tensors in binary form, outside the JSON"
    return DecodeFailed(f"the JSON request is {nbytes} bytes; at most {max_bytes} are read; {advice}")


def load_value(frame: bytes, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Any value of JSON text, as `loads` reads it. Raises DecodeFailed."""
    if len(frame) > max_bytes:
        raise too_long(len(frame), max_bytes)
    try:
        return orjson.loads(frame)
    except orjson.JSONDecodeError:
        return _slow_loads(frame)


def dumps(value: Any) -> bytes:
    """JSON text without spaces; floats that are not finite as text. `array_to_json` gives tensors that it takes."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        if b"null" in text:  # what orjson writes for a float that is not finite
            text = orjson.dumps(_with_named_floats(value), option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # text with half a surrogate pair, an integer of more than 64 bits
        named = _with_named_floats(value)
        text = json.dumps(named, allow_nan=False, separators=(",", ":"), default=_shortest).encode()
    return text


def has_booleans(frame: bytes) -> bool:
    """Whether JSON text may hold `true` or `false`."""
    return b"true" in frame or b"false" in frame


class KnownJson(NamedTuple):
    """A request that may be known. text: equal for requests that differ in id and data only. data: of each input.

    The data has no booleans, which struct would take for numbers.
    """

    text: str
    id: str | int | None
    data: list[Any]


def cut_known(frame: bytes, fields: dict[str, Any]) -> KnownJson | None:
    """Cut a request into what may be known, and the rest; None where the long way is due. fields: of the frame."""
    request_id, inputs = fields.get("id"), fields.get("inputs")
    if not isinstance(inputs, list) or not isinstance(request_id, str | int | None) or isinstance(request_id, bool):
        return None
    data = [item.pop("data", None) if isinstance(item, dict) else None for item in inputs]
    try:
        known = orjson.dumps({**fields, "id": None})
    except TypeError:  # text with half a surrogate pair
        return None
    finally:
        for item, items in zip(inputs, data, strict=True):
            if items is not None:
                item["data"] = items
    if (b"true" in frame or b"false" in frame) and (b"\\" in frame or _booleans(frame) != _booleans(known)):
        return None
    if request_id is not None and len(str(request_id).encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        return None
    return KnownJson(known.decode(), request_id, data)


def known_elements(fields: Mapping[str, Any], elements: Elements) -> str:
    """Text that is equal for requests which differ in id, pictures and texts only, and which no `KnownJson` has."""
    others = {name: value for name, value in fields.items() if name not in {"id", *FILE_KEYS, TEXT}}
    shape = f"{len(elements.rows)} {elements.inner}"
    return f"{elements.name} {shape} {elements.as_list} {dumps(others).decode()}"


def _booleans(text: bytes) -> int:
    """How many of JSON text's words may be booleans; where a text has no escapes, so much is as it stands."""
    return text.count(b"true") + text.count(b"false")


_CODES = {
    "FP16": "e", "FP32": "f", "FP64": "d", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B",
    "UINT16": "H", "UINT32": "I", "UINT64": "Q",
}  # fmt: skip
"""How struct names the datatypes that it packs."""


def pack_data(tensor: TensorHeader, data: Any) -> bytes | None:
    """The bytes of flat `data` as on the wire; None where a closer look is due, which says what is wrong, if anything.

    data: without booleans, which struct would take for numbers.
    """
    code = _CODES.get(tensor.datatype)
    if code is None or type(data) is not list or len(data) != element_count(tensor.shape):
        return None
    try:
        packed = struct.pack(f"<{len(data)}{code}", *data)
        # The slow decoder takes a number beyond FP64 for infinity.
        return packed if tensor.datatype not in _FLOATS or math.isfinite(sum(data)) else None
    except (struct.error, OverflowError):
        return None


def pack_tensors(inputs: Sequence[TensorHeader], data: Sequence[Any]) -> tuple[bytes, ...] | None:
    """The bytes of each input, see `pack_data`; None where a closer look is due at one of them."""
    packed = []
    for tensor, items in zip(inputs, data, strict=True):
        each = pack_data(tensor, items)
        if each is None:
            return None
        packed.append(each)
    return tuple(packed)


class JsonAnswers:
    """Writes the answers to requests of one known header, whose outputs differ in their data only.

    outputs: in the order of the answer's. says_no_id: an answer to a request without an id has `"id":null`.
    """

    __slots__ = ("_head", "_kinds", "_outputs", "_without_id")

    def __init__(self, model: str, version: int, outputs: Sequence[TensorHeader], *, says_no_id: bool = True) -> None:
        named = dumps({"model_name": model, "model_version": str(version)})[1:-1] + b',"outputs":['
        self._head = b"," + named
        self._without_id = b'{"id":null,' + named if says_no_id else b"{" + named
        self._outputs = [
            dumps({**tensor_fields(each), "shape": list(each.shape)})[:-1] + b',"data":' for each in outputs
        ]
        self._kinds = [each.datatype for each in outputs]

    def pack(self, request_id: str | int | None, frames: Sequence[bytes]) -> bytes:
        """One answer. frames: of outputs whose datatypes have a fixed size."""
        arrays = [np.frombuffer(frame, datatype(kind).dtype) for kind, frame in zip(self._kinds, frames, strict=True)]
        return self.pack_arrays(request_id, arrays)

    def pack_arrays(self, request_id: str | int | None, arrays: Sequence[Array]) -> bytes:
        """One answer, with the same text as `pack_json_answer`."""
        parts = [self._without_id] if request_id is None else [b'{"id":', dumps(request_id), self._head]
        between = b""
        for output, kind, array in zip(self._outputs, self._kinds, arrays, strict=True):
            text = b"null"
            if array.dtype.kind in "fiub" and kind != "BF16" and array.dtype.isnative and array.flags.c_contiguous:
                text = orjson.dumps(array.reshape(-1), option=orjson.OPT_SERIALIZE_NUMPY)
            if b"null" in text:
                text = dumps(array_to_json(kind, array))
            parts += (between, output, text)
            between = b"},"
        parts.append(b"}]}" if arrays else b"]}")
        return b"".join(parts)


# ---- private --------------------------------------------------------------------------------------------------------


def _texts_of(value: Any) -> Elements:
    """A text, a list of texts, or a list of lists of texts, such as pairs, all of one length. Raises DecodeFailed."""
    rows = value if isinstance(value, list) else [value]
    wanted = "wanted a text, a list of texts, or a list of pairs of texts"
    if not rows:
        raise DecodeFailed(f"text: got an empty list, {wanted}")
    lists = [row if isinstance(row, list) else [row] for row in rows]
    inner = (len(lists[0]),) if isinstance(rows[0], list) else ()
    is_even = all(
        isinstance(row, list) == bool(inner) and len(each) == len(lists[0])
        for row, each in zip(rows, lists, strict=True)
    )
    texts = [each for row in lists for each in row]
    if not is_even or not texts or not all(isinstance(each, str) for each in texts):
        raise DecodeFailed(f"text: got {short(value)}, {wanted}")
    if len(texts) > MAX_HEADER_ITEMS:
        raise DecodeFailed(f"text: got {len(texts)}, wanted at most {MAX_HEADER_ITEMS}")
    return Elements(
        tuple(each.encode("utf-8", "surrogatepass") for each in texts), isinstance(value, list), TEXT, inner
    )


def _encoded(key: str, text: Any) -> bytes:
    """The bytes of a file in base64. Raises DecodeFailed."""
    if not isinstance(text, str):
        raise DecodeFailed(f"{key}: got {type(text).__name__}, wanted base64 text of {FILE_KEYS[key]}")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise DecodeFailed(f"{key}: got {short(text)}, wanted base64 on one line (base64 -w0 FILE): {error}") from None


def _refuse_places(*lists: Any) -> None:
    """Raise DecodeFailed where a tensor lies in shared memory: a client that has it can pack a msgpack header."""
    items = (item for each in lists if isinstance(each, list) for item in each)
    if any(isinstance(item, dict) and ("region" in item or "offset" in item) for item in items):
        raise DecodeFailed("region, offset: shared memory is named in msgpack headers only; send data here")


def _refuse_constant(name: str) -> NoReturn:
    raise DecodeFailed(f'{name} is not JSON; write "{name}" as text')


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def _slow_loads(frame: bytes) -> Any:
    """Read JSON that orjson does not: half a surrogate pair, numbers beyond FP64. Raises DecodeFailed: it cannot."""
    try:
        return _decoder.decode(str(frame, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise DecodeFailed(f"not JSON: {str(error)[:200]}") from None


def _with_named_floats(value: Any) -> Any:
    """The same value with non-finite floats as text; only for results of ops, which are shallow."""
    if isinstance(value, float) and not math.isfinite(value):
        return _non_finite_name(value)
    if isinstance(value, Mapping):
        return {key: _with_named_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_named_floats(item) for item in value]
    return value


def _exact_id(frame: bytes, fields: Mapping[str, Any]) -> str | int | None:
    """The id of a request, an integer beyond 64 bits included."""
    value = fields.get("id")
    return _json_id(_slow_loads(frame)["id"] if isinstance(value, float) else value)


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


def nested(name: str, value: Any) -> tuple[tuple[int, ...], list[Any]]:
    """The shape of nested lists, () of one value, and their elements. Raises TensorMismatch: lists differ in length."""
    shape: list[int] = []
    level = [value]
    while level and isinstance(level[0], list):
        length = len(level[0])
        if not all(isinstance(item, list) and len(item) == length for item in level):
            raise TensorMismatch(f"input {short(name)}: lists beside one another differ in length or depth")
        shape.append(length)
        level = list(itertools.chain.from_iterable(level))
    return tuple(shape), level


def array_from_json(tensor: TensorHeader, data: Any, *, may_have_booleans: bool = True) -> Array:
    """Data as an array of the tensor's shape and dtype (BF16: its bits). Raises TensorMismatch naming the input.

    may_have_booleans: False where the text has neither `true` nor `false`, so that numbers need no look at each.
    """
    kind = datatype(tensor.datatype)
    packed = pack_data(tensor, data) if not may_have_booleans else None
    if packed:
        return np.frombuffer(packed, kind.dtype).reshape(tensor.shape)
    name, count = short(tensor.name), element_count(tensor.shape)
    flat = _flatten(name, data)
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


def _flatten(name: str, data: Any) -> list[Any]:
    """Flat list of flat or nested lists; as with Triton, any nesting will do whose elements are as many as the shape's.

    Raises DecodeFailed, TensorMismatch.
    """
    if not isinstance(data, list):
        raise DecodeFailed(f"input {name}: data: got {type(data).__name__}, wanted a list, flat or nested")
    level: list[Any] = data
    while level and isinstance(level[0], list):
        if not all(isinstance(item, list) for item in level):
            raise TensorMismatch(f"input {name}: data has lists beside elements; wanted elements all at one depth")
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
        raise ValueError("attempt to access JSON non-string as string: in JSON, an element is text")
    array: Array = np.empty(len(flat), dtype=object)
    array[:] = [item.encode() for item in flat]
    return array


def _integers(flat: list[Any], dtype: np.dtype[np.generic]) -> Array:
    if not set(map(type, flat)) <= {bool if dtype.kind == "b" else int}:
        of_bool = "attempt to access JSON non-boolean as boolean: wanted true or false"
        raise ValueError(of_bool if dtype.kind == "b" else "wanted integers")
    if flat and dtype.kind != "b":
        # Before numpy 2 an integer that does not fit is wrapped around.
        limits = np.iinfo(dtype.type)  # type: ignore[type-var]
        least, most = int(limits.min), int(limits.max)
        if min(flat) < least or max(flat) > most:
            raise OverflowError(f"wanted {least} to {most}")
    return np.array(flat, dtype=dtype)


def array_to_json(kind: str, array: Array) -> Array | list[Any]:
    """The flat `data` of a tensor, for `dumps`: FP32 and FP16 are then written in their shortest form."""
    if array.dtype.kind in "OSUT":
        texts = array.reshape(-1).tolist()
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item) for item in texts]
    if kind == "BF16":
        array = bf16_to_fp32(values_to_bits(array).astype(np.uint16, copy=False))
    flat: Array = np.ascontiguousarray(array.reshape(-1), array.dtype.newbyteorder("="))
    if flat.dtype.kind != "f" or np.isfinite(flat).all():
        return flat
    items = _shortest(flat)
    for index in np.flatnonzero(~np.isfinite(flat)).tolist():
        items[index] = _non_finite_name(float(flat[index]))
    return items


def _shortest(flat: Array) -> list[Any]:
    """Numbers that are written in the shortest form of their datatype; None for floats that are not finite."""
    items: list[Any] = orjson.loads(orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY))
    return items


def _non_finite_name(item: float) -> str:
    return "NaN" if math.isnan(item) else ("Infinity" if item > 0 else "-Infinity")
