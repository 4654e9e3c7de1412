"""Wire v1 frames: header maps to values and back. The only user of msgpack, and the door to the JSON form beside it.

Pure: bytes in, values out; whatever the bytes, what is raised is an EdgeRuntimeError. Limits of a request: a header is
at most 64 KiB and an id at most 64 bytes (DESIGN 5), because objects take up to 70 times the bytes that make them; the
JSON form has its own. A reply comes from a daemon that the caller chose to trust, and may be larger.

Where a map names a key twice, the last one counts, in both forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    pack_json_answer,
    pack_json_error,
    pack_json_result,
    unpack_json_request,
)

__all__ = [
    "JSON_FIRST_BYTE",
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
    "pack_answer",
    "pack_error",
    "pack_json_answer",
    "pack_json_error",
    "pack_json_result",
    "pack_request",
    "pack_result",
    "request_from_fields",
    "unpack_json_request",
    "unpack_reply",
    "unpack_request",
]

MAX_HEADER_ENTRIES = 64
"""Entries of one map in a header; every field that wire v1 knows, and room."""

MAX_HEADER_ITEMS = 4096
"""Entries of one list in a header: inputs, outputs, a shape."""

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
