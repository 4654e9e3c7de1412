"""Wire v1 in msgpack: header maps to values and back, and the checks that JSON headers (json_codec.py) pass too.

The only user of msgpack. Over MQTT, which has one payload where ZeroMQ has frames, a request or reply is a msgpack
array of the same header and one `bin` for each tensor: `unpack_array` and `pack_array` cut and join it, so a header is
the same bytes on both.

Pure: bytes in, values out; any bytes raise an EdgeRuntimeError at most. A request's header has at most 64 KiB and its
id at most 64 bytes, because objects take up to 70 times the bytes that make them; JSON has limits of its own. A reply
comes from a daemon that the caller chose to trust, and may be larger. When a map has a key twice, the last one counts.
"""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from struct import pack as pack_struct
from typing import Any, NamedTuple, NoReturn

import msgpack
from msgspec import Struct

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, TensorMismatch, Unsupported
from edge_runtime.kept_state import MAX_TEXT_BYTES
from edge_runtime.messages import (
    SEQUENCE_END,
    SEQUENCE_ID,
    SEQUENCE_START,
    RegionPlace,
    RequestHeader,
    SequenceStep,
    TensorHeader,
)
from edge_runtime.telemetry.tracing import TRACEPARENT, joined_traceparents
from edge_runtime.tensors import datatype, element_count

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 64 * 1024
MAX_ID_BYTES = 64
KNOWN_EXTRA_BYTES = 256
"""Longer ones are not remembered: an id of text is shorter."""

MAX_EXTRA_BYTES = 4096
"""Of the frame behind the tensors: an id and a trace are smaller."""

MAX_RANK = 32
"""Axes of one tensor: what every supported numpy can hold."""

MAX_DIMENSION = 1 << 48
MAX_VERSION = (1 << 63) - 1

MAX_HEADER_ENTRIES = 64
"""Entries of one map in a header: every field of wire v1, and room for more."""

MAX_HEADER_ITEMS = 4096
"""Entries of one list in a header: inputs, outputs, a shape."""

MAX_ARRAY_FRAMES = 1 + MAX_HEADER_ITEMS
"""Elements of a request as one array: the header and as many tensors as it can name."""

ARRAY_FIRST_BYTES = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
"""First bytes of a msgpack array."""

_BIN_FIRST_BYTES = frozenset((0xC4, 0xC5, 0xC6))

MAX_REPLY_HEADER_BYTES = 16 << 20
"""Limit of a reply's header in a client: `models` and `stats` of thousands of versions stay under it."""


# ---- header maps as values: what msgpack and JSON share --------------------------------------------------------------


class ReplyHeader(Struct, frozen=True):
    """A decoded reply header: an answer's outputs, an op's result, or an error (exactly one of the three).

    answer: what the outputs say where the model declares steps, as answers.answer_fields has it. part: its number in an
    answer that comes in parts; None for one that comes whole. final: it is the last. traceparent: the daemon's own
    span, where the request brought its caller's.
    """

    model: str = ""
    version: int = 0
    outputs: tuple[TensorHeader, ...] = ()
    answer: Mapping[str, Any] | None = None
    timing: Mapping[str, float] | None = None
    result: Any = None
    error: Mapping[str, Any] | None = None
    part: int | None = None
    final: bool = False
    traceparent: str | None = None


def request_from_fields(fields: Mapping[str, Any]) -> RequestHeader:
    """Check the fields of a header map, from msgpack or JSON.

    Raises DecodeFailed naming the field, TensorMismatch when an input or output is named twice.
    """
    outputs, output_places = _outputs(typed(fields, "outputs", list, None))
    priority = typed(fields, "priority", int, 0)
    if not 0 <= priority <= 9:
        raise DecodeFailed(f"priority: got {short(priority)}, wanted 1 (first) to 9, or 0 for the model's default")
    number = typed(fields, "version", int, None)
    if number is not None and not 1 <= number <= MAX_VERSION:
        raise DecodeFailed(f"version: got {short(number)}, wanted a positive integer, or none for the newest")
    step, parameters = cut_sequence(typed(fields, "parameters", dict, {}))
    header = RequestHeader(
        op=typed(fields, "op", str, "infer"),
        model=typed(fields, "model", str, ""),
        version=number,
        inputs=tuple(tensor_header(item) for item in typed(fields, "inputs", list, [])),
        outputs=outputs,
        output_places=output_places,
        timeout_ms=_timeout_ms(fields.get("timeout_ms")),
        priority=priority,
        timing=typed(fields, "timing", bool, False),
        parameters=parameters,
        sequence=step,
        has_extra=typed(fields, "extra", bool, False),
        stream=typed(fields, "stream", bool, False),
    )
    _refuse_twice("input", [tensor.name for tensor in header.inputs])
    _refuse_twice("output", header.outputs or ())
    if header.parameters:
        _refuse_foreign(header.parameters)
    return header


def _outputs(listed: list[Any] | None) -> tuple[tuple[str, ...] | None, tuple[RegionPlace | None, ...]]:
    """Names of the outputs, and their places where any has one."""
    if listed is None:
        return None, ()
    names: list[str] = []
    places: list[RegionPlace | None] = []
    for item in listed:
        name, place = (item.get("name"), _place(item)) if isinstance(item, dict) else (item, None)
        if not isinstance(name, str) or (isinstance(item, dict) and place is None):
            raise DecodeFailed("outputs: wanted a list of names, or of maps with name, region and offset")
        names.append(name)
        places.append(place)
    return tuple(names), tuple(places) if any(places) else ()


def _place(item: Mapping[str, Any]) -> RegionPlace | None:
    """Where a map says that a tensor lies in shared memory; None: in a frame. Raises DecodeFailed."""
    region = item.get("region")
    if region is None and item.get("offset") is None:
        return None
    offset, nbytes = item.get("offset"), item.get("nbytes")
    for field, value in (("region", region), ("offset", offset), ("nbytes", 0 if nbytes is None else nbytes)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_DIMENSION:
            raise DecodeFailed(f"tensor {short(item.get('name'))}: {field}: got {short(value)}, wanted 0 or more")
    assert isinstance(region, int)
    assert isinstance(offset, int)
    return RegionPlace(region, offset, nbytes)


def check_id(frame: bytes) -> None:
    """Raise DecodeFailed when an id is over 64 bytes."""
    if len(frame) > MAX_ID_BYTES:
        raise DecodeFailed(f"the id is {len(frame)} bytes; at most {MAX_ID_BYTES} are echoed")


def frame_sizes(inputs: Sequence[TensorHeader]) -> tuple[int, ...]:
    """Exact length of each tensor as on the wire; -1 for BYTES, whose length is not in the header."""
    return tuple(
        -1 if tensor.datatype == "BYTES" else element_count(tensor.shape) * datatype(tensor.datatype).itemsize
        for tensor in inputs
    )


def error_fields(error: EdgeRuntimeError) -> dict[str, Any]:
    """The `error` map, in msgpack and JSON: code, message, retryable and, as a forecast, retry_after_ms."""
    fields: dict[str, Any] = {"code": error.code, "message": error.message, "retryable": error.retryable}
    if error.retry_after_ms is not None:
        fields["retry_after_ms"] = round(error.retry_after_ms, 3)
    return fields


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def short(value: Any) -> str:
    """Any value as text for a message, bounded in length and depth."""
    return _repr.repr(value)


def check_protocol(version: Any, who: str) -> None:
    """Raise Unsupported for a protocol version other than 1; `who` reads it, daemon or client."""
    if version != PROTOCOL_VERSION or isinstance(version, bool):
        raise Unsupported(f"protocol version {short(version)}; this {who} speaks v {PROTOCOL_VERSION}")


def _refuse_twice(what: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise TensorMismatch(f"{what} {short(twice)} is named twice")


def _refuse_foreign(parameters: Mapping[str, Any]) -> None:
    """Raise DecodeFailed for a value that only msgpack has, such as its timestamp."""
    waiting: list[Any] = [parameters]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
        elif value is not None and not isinstance(value, str | bytes | int | float):
            raise DecodeFailed(f"parameters: a {type(value).__name__} is not a type of wire v1")


def typed(fields: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """Return a field of this very type, or the default if absent or null. Raises DecodeFailed; a bool is not an int."""
    value = fields.get(key, default)
    if value is default or value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DecodeFailed(f"{key}: got {type(value).__name__}, wanted {kind.__name__}")
    return value


def sequence_step(
    fields: Mapping[str, Any], keys: Sequence[str] = (SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END)
) -> SequenceStep | None:
    """Return the sequence that fields name; None: none. keys: of its id, of its first and of its last request.

    Raises DecodeFailed for words that name no sequence.
    """
    of_id, start, end = keys
    named = fields.get(of_id)
    is_first, is_last = typed(fields, start, bool, False), typed(fields, end, bool, False)
    if named is None:
        return None
    if isinstance(named, int) and -(1 << 63) <= named < 0:
        named += 1 << 64  # one with a sign, as Triton takes it over gRPC
    is_number = isinstance(named, int) and not isinstance(named, bool) and 0 <= named < 1 << 64
    if not (is_number or isinstance(named, str)):
        raise DecodeFailed(f"{of_id}: got {short(named)}, wanted a whole number of 64 bits, or text")
    if isinstance(named, str) and len(named.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise DecodeFailed(f"{of_id}: string correlation ID cannot be longer than {MAX_TEXT_BYTES} characters")
    return SequenceStep(named, is_first, is_last)


def cut_sequence(parameters: Mapping[str, Any]) -> tuple[SequenceStep | None, Mapping[str, Any]]:
    """Return the sequence that parameters name, and the others. Raises DecodeFailed."""
    if SEQUENCE_ID not in parameters:
        return None, parameters
    own = (SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END)
    return sequence_step(parameters, own), {key: value for key, value in parameters.items() if key not in own}


class Extra(NamedTuple):
    """The content of the frame behind the tensors of a request whose header says `extra`. Its parts: None where absent.

    traceparent: as it came, which need not be well-formed.
    """

    sequence: SequenceStep | None = None
    traceparent: str | None = None


def pack_extra(sequence: SequenceStep | None, traceparent: str | None = None) -> bytes:
    """The frame behind the tensors of a request whose header says `extra`: what differs from request to request."""
    fields: dict[str, Any] = {}
    if sequence is not None:
        marks = {"id": sequence.id, "start": sequence.start or None, "end": sequence.end or None}
        fields["sequence"] = {name: value for name, value in marks.items() if value is not None}
    if traceparent is not None:
        fields[TRACEPARENT] = traceparent
    return _pack(fields)


def unpack_extra(frame: Any) -> Extra:
    """Decode that frame. Raises DecodeFailed."""
    return _read_extra(bytes(frame)) if len(frame) <= KNOWN_EXTRA_BYTES else _read_extra.__wrapped__(bytes(frame))


@lru_cache(maxsize=4096)
def _read_extra(frame: bytes) -> Extra:
    """Decode it once: from step to step a sequence sends the same bytes."""
    fields = _unpack_map(frame, MAX_EXTRA_BYTES, MAX_HEADER_ENTRIES, MAX_HEADER_ITEMS, _with_one_traceparent)
    sequence: dict[str, Any] | None = typed(fields, "sequence", dict, None)
    step = None if sequence is None else sequence_step(sequence, ("id", "start", "end"))
    return Extra(step, fields.get(TRACEPARENT))


def _with_one_traceparent(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map whose contexts are joined, as at other doors. One that has another type than text counts as none."""
    fields, contexts = dict(pairs), [value for key, value in pairs if key == TRACEPARENT]
    if contexts:
        fields[TRACEPARENT] = joined_traceparents(contexts) if all(isinstance(each, str) for each in contexts) else None
    return fields


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
    fields: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    if tensor.place is not None:
        fields |= _place_fields(tensor.place)
    return fields


def _place_fields(place: RegionPlace) -> dict[str, int]:
    fields = {"region": place.region, "offset": place.offset}
    if place.nbytes is not None:
        fields["nbytes"] = place.nbytes
    return fields


def tensor_header(item: Any) -> TensorHeader:
    """Return the tensor header of a map. Raises DecodeFailed for any but name, datatype and a shape within bounds."""
    if not isinstance(item, dict):
        raise DecodeFailed("a tensor is described by a map of name, datatype and shape")
    name, kind, shape = item.get("name"), item.get("datatype"), item.get("shape")
    if not isinstance(name, str) or not isinstance(kind, str) or not isinstance(shape, list) or len(shape) > MAX_RANK:
        wanted = f"name (text), datatype (text), shape (at most {MAX_RANK} integers)"
        raise DecodeFailed(f"tensor {short(name)}: wanted {wanted}")
    for length in shape:
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= MAX_DIMENSION:
            raise DecodeFailed(_shape_fault(name, shape))
    return TensorHeader(name, kind, tuple(shape), _place(item))


def _shape_fault(name: str, shape: list[Any]) -> str:
    """Why a shape is none; of one that is only too large, Triton's words."""
    if any(isinstance(length, bool) or not isinstance(length, int) or length < 0 for length in shape):
        return f"tensor {short(name)}: shape {short(shape)}; wanted integers of 0 or more"
    most = (1 << 63) - 1
    if math.prod(shape) > most:
        return f"tensor {short(name)}: shape {short(shape)} causes total element count to exceed maximum size of {most}"
    return f"byte size overflow for input {short(name)}: its shape is {short(shape)}"


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
        fields["inputs"] = [tensor_fields(tensor) for tensor in header.inputs]
    if header.outputs is not None:
        places = header.output_places or (None,) * len(header.outputs)
        fields["outputs"] = [
            name if place is None else {"name": name, **_place_fields(place)}
            for name, place in zip(header.outputs, places, strict=True)
        ]
    if header.timeout_ms is not None:
        fields["timeout_ms"] = header.timeout_ms
    if header.priority:
        fields["priority"] = header.priority
    if header.timing:
        fields["timing"] = True
    if header.parameters:
        fields["parameters"] = dict(header.parameters)
    if header.has_extra:
        fields["extra"] = True
    if header.stream:
        fields["stream"] = True
    return _pack(fields)


def unpack_request(frame: bytes) -> RequestHeader:
    """Decode frame 0. Raises DecodeFailed (not a wire v1 map) or Unsupported (another protocol version)."""
    fields = _unpack_map(frame, MAX_HEADER_BYTES, MAX_HEADER_ENTRIES, MAX_HEADER_ITEMS)
    check_protocol(fields.get("v"), "daemon")
    return request_from_fields(fields)


# ---- replies --------------------------------------------------------------------------------------------------------


def pack_answer(
    model: str,
    version: int,
    outputs: Sequence[TensorHeader],
    timing: Mapping[str, float] | None = None,
    answer: Mapping[str, Any] | None = None,
    *,
    marks: Mapping[str, Any] | None = None,
) -> bytes:
    """Header of an answer; its first byte is 0x84 with neither timing nor answer, which generators may count on.

    answer: of a model with declared steps, as answers.answer_fields has it. marks: of a part, see `part_marks`.
    """
    fields: dict[str, Any] = {
        "v": PROTOCOL_VERSION,
        "model": model,
        "version": version,
        "outputs": [tensor_fields(tensor) for tensor in outputs],
    }
    if answer is not None:
        fields["answer"] = answer
    if timing is not None:
        fields["timing"] = dict(timing)
    return _pack(fields if marks is None else {**fields, **marks})


def part_marks(part: int, *, final: bool) -> dict[str, Any]:
    """The fields of a part of an answer beside those of a whole one, in msgpack and JSON. part: its number, from 0."""
    return {"part": part, "final": True} if final else {"part": part}


def pack_result(result: Any) -> bytes:
    """Header of the answer to an op other than infer."""
    return _pack({"v": PROTOCOL_VERSION, "result": result})


def pack_error(error: EdgeRuntimeError) -> bytes:
    """Header of a refusal or failure."""
    return _pack({"v": PROTOCOL_VERSION, "error": error_fields(error)})


def unpack_reply(frame: bytes) -> ReplyHeader:
    """Decode a reply's frame 0 (client side). Raises DecodeFailed or Unsupported when it is not a wire v1 reply."""
    fields = _unpack_map(frame, MAX_REPLY_HEADER_BYTES, MAX_REPLY_HEADER_BYTES, MAX_REPLY_HEADER_BYTES)
    check_protocol(fields.get("v"), "client")
    if "error" in fields:
        return ReplyHeader(error=_checked_error(typed(fields, "error", dict, {})))
    if "result" in fields:
        return ReplyHeader(result=fields["result"])
    if "outputs" not in fields:
        raise DecodeFailed("a reply has outputs, a result or an error; got none of them")
    return ReplyHeader(
        model=typed(fields, "model", str, ""),
        version=typed(fields, "version", int, 0),
        outputs=tuple(tensor_header(item) for item in typed(fields, "outputs", list, [])),
        answer=typed(fields, "answer", dict, None),
        timing=typed(fields, "timing", dict, None),
        part=typed(fields, "part", int, None),
        final=typed(fields, "final", bool, False),
        traceparent=typed(fields, TRACEPARENT, str, None),
    )


# ---- one array, for transports that carry one payload ---------------------------------------------------------------


def unpack_array(payload: bytes, max_header_bytes: int = MAX_HEADER_BYTES) -> tuple[bytes, list[bytes]]:
    """Cut `[header map, bin, …]` into the header's own bytes and the tensors. Raises DecodeFailed.

    The header is not decoded: equal bytes mean equal requests, which the cache of headers relies on.
    """
    unpacker = msgpack.Unpacker(
        max_buffer_size=0, max_array_len=MAX_ARRAY_FRAMES, max_map_len=max_header_bytes, ext_hook=_refuse_extension
    )
    try:
        unpacker.feed(payload)
        count = unpacker.read_array_header()
        begin = unpacker.tell()
        if not count or not _begins_map(payload[begin]):
            raise DecodeFailed("the payload's first element is not a header map")
        if count > MAX_ARRAY_FRAMES:
            raise DecodeFailed(f"the payload has {count} elements; at most {MAX_ARRAY_FRAMES} are read")
        unpacker.skip()
        end = unpacker.tell()
        frames: list[bytes] = []
        for _ in range(count - 1):
            # Looked at before it is unpacked: objects take up to 70 times the bytes that make them.
            if payload[unpacker.tell()] not in _BIN_FIRST_BYTES:
                raise DecodeFailed(f"tensor {len(frames)} is not a msgpack bin")
            frames.append(unpacker.unpack())
        length = unpacker.tell()
    except DecodeFailed:
        raise
    except Exception as error:  # noqa: BLE001 (as in _unpack_map)
        reason = f"{type(error).__name__} {str(error)[:200]}".strip()
        raise DecodeFailed(f"the payload is not a msgpack array of a header and one bin a tensor: {reason}") from None
    if end - begin > max_header_bytes:
        raise DecodeFailed(f"the header is {end - begin} bytes; at most {max_header_bytes} are read")
    if length != len(payload):
        raise DecodeFailed(f"{len(payload) - length} bytes follow the array; wanted one array and nothing else")
    return payload[begin:end], frames


def pack_array(header: bytes, frames: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Join a packed header and tensors to `[header map, bin, …]`."""
    count = 1 + len(frames)
    parts: list[bytes | bytearray | memoryview] = [
        bytes((0x90 | count,)) if count < 16 else pack_struct(">BH", 0xDC, count),
        header,
    ]
    for frame in frames:
        length = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        if length < 1 << 8:
            parts.append(bytes((0xC4, length)))
        elif length < 1 << 16:
            parts.append(pack_struct(">BH", 0xC5, length))
        else:
            parts.append(pack_struct(">BI", 0xC6, length))
        parts.append(frame)
    return b"".join(parts)


def reply_fields(header: bytes) -> tuple[str | None, bytes | str | int | None]:
    """`reply_to` and `id` of a header map, for protocols that have no place for them elsewhere (MQTT 3.1.1).

    Raises DecodeFailed: not a map, a reply_to that is not text, an id over 64 bytes.
    """
    fields = _unpack_map(header, MAX_HEADER_BYTES, MAX_HEADER_ENTRIES, MAX_HEADER_ITEMS)
    request_id = fields.get("id")
    if request_id is not None and (not isinstance(request_id, bytes | str | int) or isinstance(request_id, bool)):
        raise DecodeFailed(f"id: got {type(request_id).__name__}, wanted bytes, text or an integer")
    if isinstance(request_id, bytes | str):
        check_id(request_id if isinstance(request_id, bytes) else request_id.encode("utf-8", "surrogatepass"))
    return typed(fields, "reply_to", str, None), request_id


def with_id(header: bytes, request_id: bytes | str | int) -> bytes:
    """A packed reply header of fewer than 15 entries with an `id` beside them."""
    return _with_entries(header, {"id": request_id})


def with_reply_fields(header: bytes, reply_to: str, request_id: bytes) -> bytes:
    """A packed request header with what `reply_fields` reads, for protocols that have no place for them elsewhere."""
    return _with_entries(header, {"reply_to": reply_to, "id": request_id})


def with_traceparent(header: bytes, traceparent: str) -> bytes:
    """A packed reply header with the daemon's own span beside its entries, for a request that brought its caller's."""
    return _with_entries(header, {TRACEPARENT: traceparent})


def reply_id(header: bytes) -> Any:
    """The `id` in a packed reply header (client side), None without one. Raises DecodeFailed: not a map."""
    return _unpack_map(header, MAX_REPLY_HEADER_BYTES, MAX_REPLY_HEADER_BYTES, MAX_REPLY_HEADER_BYTES).get("id")


# ---- private --------------------------------------------------------------------------------------------------------


def _checked_error(error: Mapping[str, Any]) -> Mapping[str, Any]:
    """An error map that a client can rely on: code and message are text, retry_after_ms is a number or absent."""
    retry_after_ms = error.get("retry_after_ms")
    is_number = isinstance(retry_after_ms, int | float) and not isinstance(retry_after_ms, bool)
    if not isinstance(error.get("code"), str) or not isinstance(error.get("message"), str):
        raise DecodeFailed("a reply's error has a code and a message, both text")
    if retry_after_ms is not None and not is_number:
        raise DecodeFailed(f"a reply's retry_after_ms is {short(retry_after_ms)}, wanted milliseconds")
    return error


def _pack(fields: Mapping[str, Any]) -> bytes:
    try:
        packed: bytes = msgpack.packb(fields)
    except UnicodeEncodeError:
        # A file name that is not UTF-8, quoted in a message: shown escaped rather than not at all.
        packed = msgpack.packb(fields, unicode_errors="backslashreplace")
    except OverflowError as error:
        raise DecodeFailed(f"a number is too large for the wire, which has 64 bits: {error}") from None
    return packed


def _with_entries(header: bytes, fields: Mapping[str, Any]) -> bytes:
    """A packed map with more entries at its end; fewer than 16 in all, so that its length stays in the first byte."""
    count = header[0] + len(fields)
    assert 0x80 <= header[0] <= count <= 0x8F
    packed = (msgpack.packb(item) for pair in fields.items() for item in pair)
    return b"".join((bytes((count,)), header[1:], *packed))


def _begins_map(byte: int) -> bool:
    return 0x80 <= byte <= 0x8F or byte in {0xDE, 0xDF}


def _refuse_extension(code: int, data: bytes) -> NoReturn:  # noqa: ARG001 (the signature is msgpack's)
    raise DecodeFailed(f"msgpack extension type {code} in a header; wire v1 has none")


def _unpack_map(
    frame: bytes,
    max_bytes: int,
    max_entries: int,
    max_items: int,
    of_pairs: Callable[[list[tuple[Any, Any]]], Any] | None = None,
) -> dict[str, Any]:
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
            object_pairs_hook=of_pairs,
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
