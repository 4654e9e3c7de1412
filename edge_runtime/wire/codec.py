"""Wire v1 frames: header maps to values and back. The only user of msgpack, and the door to the JSON form beside it.

Over MQTT, which has one payload where ZeroMQ has frames, a request or reply is a msgpack array of the same header and
one `bin` a tensor: `unpack_array` and `pack_array` cut and join, so that a header is the same bytes on both.

Pure: bytes in, values out; whatever the bytes, what is raised is an EdgeRuntimeError. Limits of a request: a header is
at most 64 KiB and an id at most 64 bytes (DESIGN 5), because objects take up to 70 times the bytes that make them; the
JSON form has its own. A reply comes from a daemon that the caller chose to trust, and may be larger.

Where a map names a key twice, the last one counts, in both forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import pack as pack_struct
from typing import Any, NoReturn

import msgpack

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError
from edge_runtime.wire.headers import (
    MAX_DIMENSION,
    MAX_HEADER_BYTES,
    MAX_ID_BYTES,
    MAX_RANK,
    MAX_VERSION,
    PROTOCOL_VERSION,
    ReplyHeader,
    RequestHeader,
    TensorHeader,
    check_id,
    check_protocol,
    error_fields,
    frame_sizes,
    request_from_fields,
    short,
    tensor_fields,
    tensor_header,
    typed,
)
from edge_runtime.wire.json_form import (
    JSON_FIRST_BYTE,
    MAX_JSON_BYTES,
    JsonRequest,
    json_id,
    json_reply_fields,
    pack_json_answer,
    pack_json_error,
    pack_json_result,
    unpack_json_request,
)

__all__ = [
    "ARRAY_FIRST_BYTES",
    "JSON_FIRST_BYTE",
    "MAX_ARRAY_FRAMES",
    "MAX_DIMENSION",
    "MAX_HEADER_BYTES",
    "MAX_HEADER_ENTRIES",
    "MAX_HEADER_ITEMS",
    "MAX_ID_BYTES",
    "MAX_JSON_BYTES",
    "MAX_RANK",
    "MAX_REPLY_HEADER_BYTES",
    "MAX_VERSION",
    "PROTOCOL_VERSION",
    "JsonRequest",
    "ReplyHeader",
    "RequestHeader",
    "TensorHeader",
    "check_id",
    "error_fields",
    "frame_sizes",
    "json_id",
    "json_reply_fields",
    "pack_answer",
    "pack_array",
    "pack_error",
    "pack_json_answer",
    "pack_json_error",
    "pack_json_result",
    "pack_request",
    "pack_result",
    "request_from_fields",
    "short",
    "reply_fields",
    "reply_id",
    "unpack_array",
    "unpack_json_request",
    "unpack_reply",
    "unpack_request",
    "with_id",
    "with_reply_fields",
]

MAX_HEADER_ENTRIES = 64
"""Entries of one map in a header; every field that wire v1 knows, and room."""

MAX_HEADER_ITEMS = 4096
"""Entries of one list in a header: inputs, outputs, a shape."""

MAX_ARRAY_FRAMES = 1 + MAX_HEADER_ITEMS
"""Elements of a request in array form: the header and as many tensors as it can name."""

ARRAY_FIRST_BYTES = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
"""What a msgpack array begins with."""

_BIN_FIRST_BYTES = frozenset((0xC4, 0xC5, 0xC6))

MAX_REPLY_HEADER_BYTES = 16 << 20
"""A reply's frame 0 as a client reads it: `models` and `stats` of thousands of versions stay under it."""


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
    check_protocol(fields.get("v"), "daemon")
    return request_from_fields(fields)


# ---- replies --------------------------------------------------------------------------------------------------------


def pack_answer(
    model: str, version: int, outputs: Sequence[TensorHeader], timing: Mapping[str, float] | None = None
) -> bytes:
    """Header of an answer; its first byte is 0x84 without timing, which generators may count on."""
    fields: dict[str, Any] = {
        "v": PROTOCOL_VERSION,
        "model": model,
        "version": version,
        "outputs": [tensor_fields(tensor) for tensor in outputs],
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
        timing=typed(fields, "timing", dict, None),
    )


# ---- the array form, for transports that carry one payload ----------------------------------------------------------


def unpack_array(payload: bytes, max_header_bytes: int = MAX_HEADER_BYTES) -> tuple[bytes, list[bytes]]:
    """Cut `[header map, bin, …]` into the header's own bytes and the tensors. Raises DecodeFailed.

    The header is not decoded: the same bytes mean the same request, which is what a cache of headers lives on.
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
                raise DecodeFailed(f"tensor {len(frames)} is no msgpack bin")
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

    Raises DecodeFailed: not a map, a reply_to that is no text, an id over 64 bytes.
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
