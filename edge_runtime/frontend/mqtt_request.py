"""What one MQTT message asks for: its payload in either form, with what topic, expiry and user properties add.

Pure. Whatever comes, what is raised is an EdgeRuntimeError, or is kept in `Body.error` beside what could be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError
from edge_runtime.frontend.forms import Form, Frames, Json
from edge_runtime.transports.mqtt_packets import Inbound
from edge_runtime.wire import codec
from edge_runtime.wire.topics import Address

JSON_TYPE, MSGPACK_TYPE = "application/json", "application/msgpack"


class Body:
    """What a payload says, or why it could not be read; then `form`, `reply_to` and `body_id` as far as they could."""

    __slots__ = ("body_id", "error", "form", "header", "packed", "reply_to")

    def __init__(self) -> None:
        self.form: Form = Frames(b"")
        self.header = codec.RequestHeader()
        self.packed: bytes | None = None
        self.reply_to: str | None = None
        self.body_id: bytes | str | int | None = None
        self.error: EdgeRuntimeError | None = None


def read_json(payload: bytes) -> Body:
    """A payload in JSON."""
    body = Body()
    try:
        request = codec.unpack_json_request(payload)
    except EdgeRuntimeError as error:
        body.reply_to, request_id = codec.json_reply_fields(payload)
        body.form, body.error = Json(request_id), error
        return body
    body.header, body.reply_to, body.form = request.header, request.reply_to, Json(request.id, request.arrays)
    return body


def read_array(payload: bytes) -> Body:
    """A payload that is a msgpack array."""
    body = Body()
    try:
        body.packed, frames = codec.unpack_array(payload)
        body.form = Frames(b"", frames)
        body.reply_to, body.body_id = codec.reply_fields(body.packed)
        body.header = codec.unpack_request(body.packed)
    except EdgeRuntimeError as error:
        body.error = error
    return body


def is_json(message: Inbound) -> bool:
    """What the Content Type says, else the first byte."""
    kind = (message.content_type or "").split(";")[0].strip().lower()
    if kind in {JSON_TYPE, MSGPACK_TYPE}:
        return kind == JSON_TYPE
    return message.payload[:64].lstrip()[:1] == b"{"  # people's editors and shells put blanks before it


def is_plain(message: Inbound, body: Body) -> bool:
    """Whether the same topic and header mean the same request again, whatever else comes with them."""
    expiry_s = message.expiry_s
    has_own = bool(message.user_properties) or (expiry_s is not None and tightens(expiry_s, body.header))
    return body.packed is not None and not has_own and body.reply_to is None and body.body_id is None


def tightens(expiry_s: int, header: codec.RequestHeader) -> bool:
    """Whether a message's expiry says more than the timeout in its header, which it is rounded up from otherwise."""
    return header.timeout_ms is None or expiry_s * 1e3 < header.timeout_ms


def completed(header: codec.RequestHeader, address: Address, message: Inbound) -> codec.RequestHeader:
    """The header with what topic, expiry and user properties add. Raises DecodeFailed where they contradict it."""
    said = _user_properties(message.user_properties)
    if address.model and header.model not in {"", address.model}:
        raise DecodeFailed(f"the topic says model {address.model!r}, the body {header.model!r}")
    versions = {each for each in (address.version, header.version, said.get("version")) if each is not None}
    if len(versions) > 1:
        raise DecodeFailed(f"topic, body and user properties say different versions: {sorted(versions)}")
    if not address.model and header.op == "infer":
        raise DecodeFailed(f"topic {message.topic} names no model; wanted {message.topic}/<model>[/<version>]")
    timeout_ms = header.timeout_ms if header.timeout_ms is not None else said.get("timeout_ms")
    if message.expiry_s is not None:
        timeout_ms = min(message.expiry_s * 1e3, math.inf if timeout_ms is None else timeout_ms)
    return replace(
        header,
        model=address.model or header.model,
        version=next(iter(versions), None),
        timeout_ms=timeout_ms,
        priority=header.priority or said.get("priority", 0),
    )


_NUMBERS: dict[str, Callable[[str], int | float]] = {"version": int, "priority": int, "timeout_ms": float}


def _user_properties(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Those that wire v1 knows, checked as the same keys of a header; others are their senders' own."""
    if not pairs:
        return {}
    found: dict[str, int | float] = {}
    for name, text in pairs:
        kind = _NUMBERS.get(name)
        if kind is not None:
            try:
                found[name] = kind(text)
            except (ValueError, OverflowError):
                raise DecodeFailed(f"user property {name}: got {codec.short(text)}, wanted a number") from None
    checked = codec.request_from_fields(found)
    return {name: getattr(checked, name) for name in found}
