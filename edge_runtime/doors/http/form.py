"""Bodies of HTTP that are pictures: one by its Content-Type, and forms (multipart/form-data, RFC 7578).

Owns: cutting a form into its fields, and their meaning for inference. Strict and bounded: a form that is not what it
says is a DecodeFailed. The body is whole already, so cutting it is a search for its boundary and takes no library;
Python's email package would copy each byte several times. Pure. Thread: any.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from edge_runtime.doors.http.head import BadMessage
from edge_runtime.errors import DecodeFailed
from edge_runtime.wire.codec import short
from edge_runtime.wire.json_codec import Elements

PICTURE_TYPES = ("image/jpeg", "image/png", "image/webp", "image/bmp", "image/gif")
OTHER_PICTURE_TYPES = ("image/jpg", "image/x-ms-bmp", "image/*")
"""Other names of the same. The picture's own bytes decide its kind."""

FORM_TYPE = "multipart/form-data"
PICTURE_FIELD = "picture"

MAX_FIELDS = 512
"""Most fields of one form: more pictures than a request may have rows, and some parameters."""

MAX_FIELD_HEAD_BYTES = 4096
"""Headers of one field; curl and browsers send 150 bytes, and the name of a file."""

MAX_PARAMETER_BYTES = 1024

_PARAMETER = r';\s*([\w*-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s";]*))\s*'
_VALUE = re.compile(rf"([\w/*+.-]+)\s*(?:{_PARAMETER})*", re.ASCII)
_PARAMETERS = re.compile(_PARAMETER, re.ASCII)
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]", re.ASCII)
"""RFC 2046, 5.1.1."""


class Field(NamedTuple):
    """One field of a form. file_name: None where it is not a file. kind: its Content-Type, "" without."""

    name: str
    file_name: str | None
    kind: str
    data: memoryview


def boundary_of(content_type: str) -> bytes:
    """The boundary that a form's Content-Type names. Raises DecodeFailed."""
    found = _value_of(content_type)
    boundary = found[1].get("boundary", "") if found is not None else ""
    if not _BOUNDARY.fullmatch(boundary):
        raise DecodeFailed(
            f"Content-Type: got {content_type[:120]!r}, wanted {FORM_TYPE}; boundary=… of 1 to 70 characters; "
            "leave this header to your HTTP client"
        )
    return boundary.encode("ascii")


def check_picture_type(kind: str) -> None:
    """Raise BadMessage (415) for a type of picture that is not read."""
    if kind not in PICTURE_TYPES and kind not in OTHER_PICTURE_TYPES:
        raise BadMessage(f"Content-Type: got {kind[:60]!r}, wanted one of {', '.join(PICTURE_TYPES)}", 415)


def read_form(body: bytes | memoryview, boundary: bytes) -> tuple[Elements, dict[str, Any]]:
    """The pictures of a form, and its other fields as parameters (`id` as the request's).

    Raises DecodeFailed.
    """
    pictures: list[memoryview] = []
    parameters: dict[str, Any] = {}
    for each in cut_form(body, boundary):
        if each.name == PICTURE_FIELD:
            pictures.append(each.data)
        elif each.file_name is not None:
            raise DecodeFailed(
                f"the form has a file in the field {short(each.name)}; wanted it in {PICTURE_FIELD!r}: "
                f"curl -F {PICTURE_FIELD}=@photo.jpg"
            )
        elif each.name in parameters:
            raise DecodeFailed(f"the form has the field {short(each.name)} twice; only {PICTURE_FIELD!r} may repeat")
        else:
            parameters[each.name] = _parameter(each)
    if not pictures:
        raise DecodeFailed(f"the form has no field {PICTURE_FIELD!r}; send: curl -F {PICTURE_FIELD}=@photo.jpg")
    fields: dict[str, Any] = {"parameters": parameters}
    if "id" in parameters:
        fields["id"] = str(parameters.pop("id"))
    return Elements(tuple(pictures), as_list=len(pictures) > 1), fields


def cut_form(body: bytes | memoryview, boundary: bytes) -> list[Field]:
    """Cut a form into its fields, whose data are views of it. Raises DecodeFailed."""
    data = bytes(body)  # a copy where it came as a view, which has no `find`
    view = memoryview(data)
    delimiter = b"\r\n--" + boundary
    if not data.startswith(delimiter[2:]):
        raise DecodeFailed(f"the form does not begin with --{boundary.decode()}, the boundary of its Content-Type")
    fields: list[Field] = []
    at = len(delimiter) - 2
    while data[at : at + 2] != b"--":
        if data[at : at + 2] != b"\r\n":
            raise DecodeFailed("the form has bytes behind a boundary; wanted a new line, or -- at the end")
        if len(fields) == MAX_FIELDS:
            raise DecodeFailed(f"the form has more than {MAX_FIELDS} fields; send fewer pictures a request")
        at += 2
        begin = data.find(b"\r\n\r\n", at, at + MAX_FIELD_HEAD_BYTES)
        if begin < 0:
            raise DecodeFailed(
                f"field {len(fields)} of the form has no end of its headers within {MAX_FIELD_HEAD_BYTES} bytes"
            )
        name, file_name, kind = _read_head(data[at:begin].decode("utf-8", "replace"), len(fields))
        begin += 4
        end = data.find(delimiter, begin)
        if end < 0:
            raise DecodeFailed(f"the form ends within its field {short(name)}: its last boundary is missing")
        fields.append(Field(name, file_name, kind, view[begin:end]))
        at = end + len(delimiter)
    return fields


# ---- private --------------------------------------------------------------------------------------------------------


def _read_head(text: str, number: int) -> tuple[str, str | None, str]:
    """Name, file name and Content-Type of a field. Raises DecodeFailed."""
    headers: dict[str, str] = {}
    for line in text.split("\r\n"):
        name, colon, value = line.partition(":")
        if not colon or name.lower() in headers:
            raise DecodeFailed(
                f"field {number} of the form has the header {short(line)}; wanted each once, name: value"
            )
        headers[name.lower()] = value.strip()
    found = _value_of(headers.get("content-disposition", ""))
    if found is None or found[0].lower() != "form-data" or "name" not in found[1]:
        raise DecodeFailed(f'field {number} of the form: wanted the header Content-Disposition: form-data; name="…"')
    kind = headers.get("content-type", "")
    if kind.lower().startswith("multipart/"):
        raise DecodeFailed(f"field {number} of the form is a form itself; wanted each picture in a field of its own")
    coding = headers.get("content-transfer-encoding", "binary").lower()
    if coding not in {"binary", "7bit", "8bit"}:
        raise DecodeFailed(f"field {number} of the form has Content-Transfer-Encoding {short(coding)}; wanted none")
    return found[1]["name"], found[1].get("filename", found[1].get("filename*")), kind


def _value_of(text: str) -> tuple[str, dict[str, str]] | None:
    """A header's value and its parameters; None where it is none."""
    found = _VALUE.fullmatch(text)
    if found is None:
        return None
    parameters = {
        name.lower(): re.sub(r"\\(.)", r"\1", quoted) or plain
        for name, quoted, plain in _PARAMETERS.findall(text, len(found[1]))
    }
    return found[1], parameters


def _parameter(each: Field) -> bool | int | float | str:
    """A parameter as JSON would have it: true, false, a number, or text. Raises DecodeFailed."""
    if len(each.data) > MAX_PARAMETER_BYTES:
        raise DecodeFailed(
            f"the form's field {short(each.name)} has {len(each.data)} bytes, wanted a parameter's value"
        )
    text = bytes(each.data).decode("utf-8", "replace").strip()
    if text in {"true", "false"}:
        return text == "true"
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text
